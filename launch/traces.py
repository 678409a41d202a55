"""Traces: those of all ranks made one, and what it says.

A rank writes `PREFIX.rank-R.json` (see `fuel_parallel.runtime.trace`). `merge` puts them on one clock, that of rank 0,
and marks in each collective how long a rank waited in it for the last one to come. `read` reads the result, `summarize`
adds it up. The files are Chrome's trace format with one field more, `fuel_parallel`, by which we know our own.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fuel_parallel.drafts import can_take, take_place
from fuel_parallel.errors import DataError

FORMAT = 1
SUFFIX = ".rank-"
POINT_TO_POINT = ("send", "recv", "send_differentiable", "recv_differentiable")

_REALIZE_TRACK, _KERNELS, _COLLECTIVES = 0, 1, 2


class Event(msgspec.Struct, omit_defaults=True):
    """One line of a trace; times in microseconds."""

    name: str
    ph: str
    pid: int
    tid: int = -1
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        """When it was over."""
        return self.ts + self.dur


class Pipeline(msgspec.Struct):
    """A pipeline that a rank was part of. `comm` names its communicator, `schedule` is a CSV, of all its ranks."""

    comm: str
    rank: int
    name: str
    schedule: str


class RankInfo(msgspec.Struct, omit_defaults=True):
    """Whose events, how its clock is known, and its pipelines: actions say theirs by its place."""

    rank: int
    world_size: int
    host: str
    origin_ns: int
    accuracy_ns: int
    dropped: int
    pipelines: list[Pipeline] = []


class About(msgspec.Struct):
    """What makes a trace ours."""

    version: int
    ranks: list[RankInfo]


class Trace(msgspec.Struct):
    """A whole file."""

    displayTimeUnit: str
    fuel_parallel: About
    traceEvents: list[Event]


Interval = tuple[float, float]
"""From when to when."""

# Arguments of events that are read here: what they are, and the categories that must have them.
_KINDS: dict[str, type] = {"flops": int, "bytes": int, "comm": str, "turn": int, "for_rank": int, "ops": str}
_NEEDED = {"collective": ("comm", "turn"), "wait": ("for_rank",), "memory": ("bytes",)}

_decode = msgspec.json.Decoder(Trace).decode


def rank_files(path: Path) -> list[Path]:
    """The files that ranks left for `path`."""
    return sorted(path.parent.glob(f"{_escaped(path.name)}{SUFFIX}*.json"))


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def is_replaceable(path: Path) -> bool:
    """Whether a new trace may take the place of what is there: nothing, an empty file, or JSON as a trace begins.

    `fuelrun --trace train.py ...` would delete the script, and `--trace /dev/null` the device.
    """
    if not can_take(path):
        return False
    try:
        with path.open("rb") as file:
            return file.read(1) in (b"", b"{")
    except FileNotFoundError:
        return True
    except OSError:
        return False


def read(path: Path) -> Trace:
    """The trace in a file, checked. Where only the ranks' files lie, they are put together."""
    if not path.exists() and rank_files(path):
        return merged([_read(part) for part in rank_files(path)])
    return _read(path)


def _read(path: Path) -> Trace:
    try:
        text = path.read_bytes()
    except OSError as reason:
        raise DataError(f"cannot read the trace {path}: {reason.strerror}") from None
    try:
        found = _decode(text)
    except msgspec.ValidationError as reason:
        raise DataError(
            f"{path} is no trace of fuelrun: {reason}; `fuelrun --trace {path.name} train.py` writes one"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as reason:
        raise DataError(f"{path} is cut off or no JSON: {reason}") from None
    if found.fuel_parallel.version != FORMAT:
        version = found.fuel_parallel.version
        raise DataError(f"{path} is a trace of version {version}; this fuelrun reads version {FORMAT}")
    for number, event in enumerate(found.traceEvents):
        for name in _NEEDED.get(event.cat, ()):
            event.args.setdefault(name, None)
        for name, value in event.args.items():
            if name in _KINDS and not isinstance(value, _KINDS[name]):
                place = f"event {number}, {event.name!r}, has {name} {value!r}"
                raise DataError(f"{path} is no trace of fuelrun: {place}, expected {_KINDS[name].__name__}")
    return found


def gather(path: Path) -> list[int]:
    """Puts the files of all ranks together at `path` and removes them. Returns the ranks that it has.

    A file that cannot be read is left where it is: a rank that was killed may have left half of one.
    """
    parts, used = [], []
    for part in rank_files(path):
        try:
            parts.append(_read(part))
        except DataError:
            continue
        used.append(part)
    if not parts:
        return []
    whole = merged(parts)
    try:
        draft = path.with_name(f"{path.name}.draft")
        draft.write_bytes(_encoded(whole))
        take_place(draft, path)
        for part in used:
            part.unlink()
    except OSError as reason:
        raise DataError(f"cannot write the trace {path}: {reason.strerror}; the ranks' files are kept") from None
    return [info.rank for info in whole.fuel_parallel.ranks]


def _encoded(trace: Trace) -> bytes:
    """An event a line."""
    head = msgspec.json.encode(trace.fuel_parallel)
    events = b",\n".join(msgspec.json.encode(event) for event in trace.traceEvents)
    return b'{"displayTimeUnit":"ms","fuel_parallel":' + head + b',"traceEvents":[\n' + events + b"\n]}\n"


def merged(parts: Sequence[Trace]) -> Trace:
    """One trace on one clock, with waits."""
    infos = sorted((info for part in parts for info in part.fuel_parallel.ranks), key=lambda info: info.rank)
    start = min(info.origin_ns for info in infos)
    events: list[Event] = []
    for part in parts:
        shift = (part.fuel_parallel.ranks[0].origin_ns - start) / 1000
        for event in part.traceEvents:
            if event.ph != "M":
                event.ts = round(event.ts + shift, 3)
            events.append(event)
    for info in infos:
        info.origin_ns = start
    return Trace("ms", About(FORMAT, infos), [*events, *_waits(events)])


def _waits(events: Iterable[Event]) -> list[Event]:
    """From the moment a rank comes to a collective until the last one does. A guess where ranks come at other times.

    While a rank computes it does not wait, even with a collective under way: its wait begins after its last kernel.
    """
    meetings: dict[tuple[str, int], list[Event]] = defaultdict(list)
    kernels: dict[int, list[Interval]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.ts):
        if event.cat == "kernel":
            kernels[event.pid].append((event.ts, event.end))
        elif event.cat == "collective" and event.name not in POINT_TO_POINT:
            meetings[event.args["comm"], event.args["turn"]].append(event)
    busy = {rank: _union(intervals) for rank, intervals in kernels.items()}
    waits = []
    for together in meetings.values():
        last = max(together, key=lambda event: event.ts)
        for event in together:
            until = min(last.ts, event.end)
            begin = max(event.ts, _end_of_last(busy.get(event.pid, []), until))
            if until > begin:
                args = {"for_rank": last.pid, "collective": event.name, "since": event.ts}
                took = round(until - begin, 3)
                waits.append(Event(f"wait for rank {last.pid}", "X", event.pid, event.tid, "wait", begin, took, args))
    return waits


def _end_of_last(kernels: list[Interval], until: float) -> float:
    """When the last kernel ended that began before a moment; those of several devices that overlap are one."""
    before = bisect.bisect_left(kernels, until, key=lambda interval: interval[0])
    return kernels[before - 1][1] if before else 0.0


# The summary.


class OpTime(msgspec.Struct):
    """All runs of one kernel or fused region, on all ranks."""

    name: str
    runs: int = 0
    ms: float = 0.0
    share: float = 0.0
    gflop_s: float | None = None


class CollectiveTime(msgspec.Struct):
    """All runs of one collective on one communicator, on all ranks; `ms` includes the wait for the last rank."""

    name: str
    comm: str
    runs: int = 0
    mib: float = 0.0
    ms: float = 0.0
    wait_ms: float = 0.0


class RankTime(msgspec.Struct):
    """Where one rank's time went, from its first realize to the end of its last one.

    `kernel_ms`, `exposed_ms` (communication that no kernel runs beside), `runtime_ms` (graph, plan, results, and what
    the executor needs between kernels) and `script_ms` (building nodes, reading data) add up to `total_ms`.
    """

    rank: int
    host: str
    total_ms: float
    kernel_ms: float
    gemm_ms: float
    gemm_share: float
    gflop_s: float | None
    communication_ms: float
    hidden_ms: float
    exposed_ms: float
    wait_ms: float
    caused_wait_ms: float
    runtime_ms: float
    script_ms: float
    peak_live_mib: float
    arena_mib: float
    resident_mib: float
    dropped: int


class Summary(msgspec.Struct):
    """What `fuelrun trace` prints."""

    ranks: list[RankTime]
    ops: list[OpTime]
    collectives: list[CollectiveTime]
    slowest_rank: int | None
    """The rank for which the others waited longest; None where nobody waited."""
    missing: list[int]
    clock_accuracy_us: float


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments, in order and without overlap."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _overlap(intervals: list[Interval], others: list[Interval]) -> float:
    """How long both hold; both are unions."""
    total = 0.0
    ends = [end for _, end in others]
    for begin, end in intervals:
        at = bisect.bisect_right(ends, begin)
        while at < len(others) and others[at][0] < end:
            total += min(end, others[at][1]) - max(begin, others[at][0])
            at += 1
    return total


def summarize(trace: Trace) -> Summary:
    """Adds a trace up."""
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in trace.traceEvents:
        by_rank[event.pid].append(event)
    waits = [event for event in trace.traceEvents if event.cat == "wait"]
    caused: dict[int, float] = defaultdict(float)
    for event in waits:
        caused[event.args["for_rank"]] += event.dur
    infos = trace.fuel_parallel.ranks
    size = max((info.world_size for info in infos), default=0)
    slowest = max(caused, key=lambda rank: caused[rank]) if caused else None
    return Summary(
        ranks=[_rank_time(info, by_rank[info.rank], caused[info.rank]) for info in infos],
        ops=_op_times(trace.traceEvents),
        collectives=_collective_times(trace.traceEvents),
        slowest_rank=slowest,
        missing=sorted(set(range(size)) - {info.rank for info in infos}),
        clock_accuracy_us=max((info.accuracy_ns for info in infos), default=0) / 1000,
    )


def _rank_time(info: RankInfo, events: list[Event], caused: float) -> RankTime:
    # The actions of a pipeline lie over what they are made of.
    spans = [event for event in events if event.ph == "X" and event.cat != "action"]
    total = max((e.end for e in spans), default=0.0) - min((e.ts for e in spans), default=0.0)
    kernels = _union((e.ts, e.end) for e in spans if e.cat == "kernel")
    collectives = _union((e.ts, e.end) for e in spans if e.cat == "collective")
    gemms = [e for e in spans if "flops" in e.args]
    gemm = _length(_union((e.ts, e.end) for e in gemms))
    flops = sum(e.args["flops"] for e in gemms)
    communication, hidden = _length(collectives), _overlap(collectives, kernels)
    script = sum(e.dur for e in spans if e.cat == "script")
    kernel = _length(kernels)

    def highest(name: str) -> float:
        return max((e.args["bytes"] for e in events if e.ph == "C" and e.name == name), default=0) / 2**20

    return RankTime(
        rank=info.rank,
        host=info.host,
        total_ms=total / 1000,
        kernel_ms=kernel / 1000,
        gemm_ms=gemm / 1000,
        gemm_share=gemm / total if total else 0.0,
        gflop_s=flops / gemm / 1000 if gemm else None,
        communication_ms=communication / 1000,
        hidden_ms=hidden / 1000,
        exposed_ms=(communication - hidden) / 1000,
        wait_ms=sum(e.dur for e in spans if e.cat == "wait") / 1000,
        caused_wait_ms=caused / 1000,
        runtime_ms=(total - kernel - (communication - hidden) - script) / 1000,
        script_ms=script / 1000,
        peak_live_mib=highest("live results"),
        arena_mib=highest("arena"),
        resident_mib=highest("resident"),
        dropped=info.dropped,
    )


def _op_times(events: Iterable[Event]) -> list[OpTime]:
    ops: dict[str, OpTime] = {}
    flops: dict[str, int] = defaultdict(int)
    for event in events:
        if event.cat == "kernel":
            op = ops.setdefault(event.name, OpTime(event.name))
            op.runs += 1
            op.ms += event.dur / 1000
            flops[event.name] += event.args.get("flops", 0)
    total = sum(op.ms for op in ops.values())
    for op in ops.values():
        op.share = op.ms / total if total else 0.0
        op.gflop_s = flops[op.name] / op.ms / 1e6 if flops[op.name] and op.ms else None
    return sorted(ops.values(), key=lambda op: -op.ms)


def _collective_times(events: Iterable[Event]) -> list[CollectiveTime]:
    found: dict[tuple[str, str], CollectiveTime] = {}
    inside: dict[tuple[int, float], CollectiveTime] = {}
    waits = []
    for event in events:
        if event.cat == "wait":
            waits.append(event)
        elif event.cat == "collective":
            key = (event.name, event.args["comm"])
            entry = found.setdefault(key, CollectiveTime(*key))
            entry.runs += 1
            entry.ms += event.dur / 1000
            entry.mib += event.args.get("bytes", 0) / 2**20
            inside[event.pid, event.ts] = entry
    for event in waits:
        if (met := inside.get((event.pid, event.args.get("since", event.ts)))) is not None:
            met.wait_ms += event.dur / 1000
    return sorted(found.values(), key=lambda entry: -entry.ms)

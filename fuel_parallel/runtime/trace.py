"""The trace: when each kernel and each collective of this rank ran, for `fuelrun --trace`.

With FUEL_TRACE=PREFIX in the environment the executor notes three numbers a step (which, from, to), 24 bytes and some
tenths of a microsecond; without it `recorder` is None and the executor does nothing more. At the end of the process,
after a failure too, the notes become `PREFIX.rank-R.json`, or `PREFIX` itself where there is one rank: Chrome's trace
format, which Perfetto and chrome://tracing show and `fuelrun trace` sums up.

Clocks: the time of an event is that of the rank's own clock plus its measured distance from rank 0's, see `comm.clock`.
On a GPU a kernel's time is that of its launch. Each device besides the CPU has a track of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

from fuel_parallel import environment, failure
from fuel_parallel.comm import clock
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.drafts import take_place
from fuel_parallel.lazy.node import Node, describe_line
from fuel_parallel.lazy.ops.contraction import MATMUL
from fuel_parallel.runtime.buckets import JOIN
from fuel_parallel.runtime.lanes import HOST
from fuel_parallel.runtime.laps import Laps
from fuel_parallel.runtime.plan import Plan, Step
from fuel_parallel.runtime.region import ITEM, REGION

VARIABLE = "FUEL_TRACE"
FORMAT = 1
MOST_EVENTS = 500_000
"""Steps that are noted at most; a rank that runs longer goes on without notes, and the file says so."""

PHASES = ("graph", "plan", "run", "keep")
"""What realizing is made of: reading the graph, finding or making its plan, running it, storing the results."""

_NAMES_SHOWN = 5
_REALIZE, _KERNELS, _COLLECTIVES = 0, 1, 2
_DEVICES = 500  # one for each besides the CPU
_PIPELINE = 1000  # behind every track of collectives
_TRACKS = {_REALIZE: "realize", _KERNELS: "kernels", _COLLECTIVES: "collectives"}
Compute = Callable[[Step, Any, list[Any]], Any]


class Recorder:
    """Notes of this process. Events are (step, begin, end) in nanoseconds; negative steps are phases."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.process = os.getpid()
        self.events = array("q")
        self.memory = array("q")
        self.dropped = 0
        self.plans: list[Plan] = []
        self.pipelines: list[Laps] = []
        self.threads: dict[str, array[int]] = {}
        """The same, of the threads of devices that compute beside the one that realizes."""
        self._lock = threading.Lock()
        self._bases: dict[int, int] = {}
        self._starts: list[int] = []
        self._described: dict[int, tuple[str, dict[str, Any]]] = {}
        self._open: dict[int, int] = {}
        self._next = 0
        self._phase = (0, 0)
        self._written = False

    def phase(self, name: str) -> None:
        """The phase before ends and `name` begins; the empty name begins none."""
        now = time.perf_counter_ns()
        number, began = self._phase
        if began:
            self.events.extend((number, began, now))
        self._phase = (~PHASES.index(name), now) if name else (0, 0)

    def begin(self) -> None:
        """A realize begins. What an earlier one left open when it failed is dropped."""
        self._phase = (0, 0)
        self.phase("graph")

    def timed(self, plan: Plan, computed: list[Node], compute: Compute, thread: str = HOST) -> Compute:
        """`compute` that notes when it ran, on one of the threads of a run, and of a step that is new what it is."""
        events = self.events if thread == HOST else self._events_of(thread)
        if thread == HOST:
            self._open.clear()
        if len(events) >= 3 * MOST_EVENTS:
            if thread == HOST:
                self.dropped += len(plan.steps)
            return compute
        base = self._base_of(plan)
        note, now, opened, described = events.extend, time.perf_counter_ns, self._open, self._described

        def timed(step: Step, xp: Any, arguments: list[Any]) -> Any:
            number = base + step.output
            if number not in described:
                described[number] = step_name(step), _facts_and_line(step, arguments, computed)
            began = now()
            result = compute(step, xp, arguments)
            if step.goes_on:
                opened[step.output] = len(events)
            note((number, began, now()))
            return result

        return timed

    def _base_of(self, plan: Plan) -> int:
        with self._lock:
            base = self._bases.get(id(plan))
            if base is None:
                base = self._bases[id(plan)] = self._next
                self._next += plan.leaves + len(plan.constants) + len(plan.steps)
                self._starts.append(base)
                self.plans.append(plan)
            return base

    def _events_of(self, thread: str) -> array[int]:
        with self._lock:
            return self.threads.setdefault(thread, array("q"))

    def went_on(self, step: Step) -> None:
        """A step that had been started is over now. Noted where it began: that is its turn among the collectives."""
        at = self._open.pop(step.output, None)
        if at is not None:
            self.events[at + 2] = time.perf_counter_ns()

    def ran(self, arena: int) -> None:
        """A plan has run, with an arena of so many bytes."""
        if not self.dropped:
            self.memory.extend((time.perf_counter_ns(), arena, _resident()))

    def pipeline(self, about: dict[str, Any]) -> Laps:
        """Where a pipeline notes its actions; `about` goes into the file, and says what is known of it."""
        laps = Laps(about)
        self.pipelines.append(laps)
        return laps

    def write(self) -> None:
        """Writes the file, once, in the process that was traced."""
        if self._written or os.getpid() != self.process:
            return
        self._written = True
        rank, size = _who()
        path = self.target if size == 1 else self.target.with_name(f"{self.target.name}.rank-{rank}.json")
        try:
            draft = path.with_name(f"{path.name}.{self.process}")
            with draft.open("w") as file:
                for part in self._text(rank, size):
                    file.write(part)
            take_place(draft, path)
        except OSError as reason:
            os.write(2, f"fuel-parallel: the trace cannot be written to {path}: {reason.strerror}\n".encode())

    def _text(self, rank: int, size: int) -> Iterator[str]:
        begins = [*self.events[1::3], *self.memory[0::3], *filter(None, (laps.first() for laps in self.pipelines))]
        first = min(begins, default=0)
        about = {
            "rank": rank,
            "world_size": size,
            "host": socket.gethostname(),
            "origin_ns": first + clock.mine.offset_ns,
            "accuracy_ns": clock.mine.accuracy_ns,
            "dropped": self.dropped + sum(laps.dropped for laps in self.pipelines),
        }
        if self.pipelines:
            about["pipelines"] = [laps.about for laps in self.pipelines]
        header = json.dumps({"version": FORMAT, "ranks": [about]})
        yield f'{{"displayTimeUnit":"ms","fuel_parallel":{header},"traceEvents":['
        yield json.dumps(
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}, {about['host']}"}}
        )
        for track, title in _TRACKS.items():
            yield f",\n{_track(rank, track, title)}"
        if self.pipelines:
            yield f",\n{_track(rank, _PIPELINE, 'pipeline')}"
        for event in chain(self._rows(rank, first), self._actions(rank, first)):
            yield ",\n" + event
        yield "\n]}\n"

    def _rows(self, rank: int, first: int) -> Iterator[str]:
        live = [live_bytes(plan) for plan in self.plans]
        texts = {n: (json.dumps(name), json.dumps(facts)[1:-1]) for n, (name, facts) in self._described.items()}
        turns: Counter[str] = Counter()
        busy_until: list[int] = []  # each track of collectives: on one, Chrome's format cannot show two at a time
        ended = 0
        level = -1
        devices: list[str] = []  # those that have a track
        threads = {HOST: self.events, **self.threads}
        for thread, events, at in ((name, e, at) for name, e in threads.items() for at in range(0, len(e), 3)):
            number, began, end = events[at : at + 3]
            times = f'"ts":{(began - first) / 1000:.3f},"dur":{(end - began) / 1000:.3f}'
            if number < 0:
                name = PHASES[~number]
                if name == "graph" and ended:
                    script = f'"ts":{(ended - first) / 1000:.3f},"dur":{(began - ended) / 1000:.3f}'
                    yield f'{{"name":"script","cat":"script","ph":"X","pid":{rank},"tid":{_REALIZE},{script}}}'
                ended = end
                yield f'{{"name":"{name}","cat":"{name}","ph":"X","pid":{rank},"tid":{_REALIZE},{times}}}'
                continue
            title, text = texts[number]
            facts = self._described[number][1]
            comm = facts.get("comm")
            device = facts.get("device", HOST) if thread == HOST else thread
            if comm is None and device == HOST:
                category, track = "kernel", _KERNELS
            elif comm is None:
                if device not in devices:
                    devices.append(device)
                    yield _track(rank, _DEVICES + len(devices) - 1, f"kernels on {device}")
                category, track = "kernel", _DEVICES + devices.index(device)
            else:
                lane = next((n for n, until in enumerate(busy_until) if until <= began), len(busy_until))
                busy_until[lane : lane + 1] = [end]
                category, track = "collective", _COLLECTIVES + lane
                if lane and lane == len(busy_until) - 1:
                    yield _track(rank, track, "collectives, at the same time")
                text += f',"turn":{turns[comm]}'
                turns[comm] += 1
            where = f'"cat":"{category}","ph":"X","pid":{rank},"tid":{track}'
            yield f'{{"name":{title},{where},{times},"args":{{{text}}}}}'
            if thread != HOST:
                continue  # what lives is told by the thread that realizes
            plan = bisect_right(self._starts, number) - 1
            now = live[plan][number - self._starts[plan]]
            if now != level:
                level = now
                yield _counter(rank, "live results", (end - first) / 1000, level)
        for at in range(0, len(self.memory), 3):
            moment, arena, resident = self.memory[at : at + 3]
            yield _counter(rank, "arena", (moment - first) / 1000, arena)
            yield _counter(rank, "resident", (moment - first) / 1000, resident)

    def _actions(self, rank: int, first: int) -> Iterator[str]:
        where = f'"cat":"action","ph":"X","pid":{rank},"tid":{_PIPELINE}'
        for number, laps in enumerate(self.pipelines):
            for step, name, began, end in laps.spans():
                times = f'"ts":{(began - first) / 1000:.3f},"dur":{(end - began) / 1000:.3f}'
                about = f'"args":{{"pipeline":{number},"step":{step}}}'
                yield f'{{"name":{json.dumps(name)},{where},{times},{about}}}'


def _track(rank: int, track: int, title: str) -> str:
    named = {"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": title}}
    order = {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": track, "args": {"sort_index": track}}
    return f"{json.dumps(named)},\n{json.dumps(order)}"


def _counter(rank: int, name: str, at: float, value: int) -> str:
    return f'{{"name":"{name}","cat":"memory","ph":"C","pid":{rank},"ts":{at:.3f},"args":{{"bytes":{value}}}}}'


def step_name(step: Step) -> str:
    """The op; for a region its first operations."""
    if step.op is not REGION:
        return step.op.name
    names = [operation.op.name for operation in step.attrs[0].operations]
    more = f" +{len(names) - _NAMES_SHOWN}" if len(names) > _NAMES_SHOWN else ""
    return f"region: {' '.join(names[:_NAMES_SHOWN])}{more}"


def step_facts(step: Step, arguments: list[Any]) -> dict[str, Any]:
    """What is worth knowing of a step besides its name; `comm` only for collectives."""
    facts: dict[str, Any] = {"result": repr(step.spec)}
    if step.spec.device != HOST:
        facts["device"] = step.spec.device
    if step.op is REGION:
        facts["ops"] = " ".join(operation.op.name for operation in step.attrs[0].operations)
        facts["result"] = ", ".join(repr(place.spec) for place in step.places) or facts["result"]
    elif step.op is MATMUL:
        facts["flops"] = 2 * step.spec.size * arguments[0].shape[-1]
    if step.op.crosses_ranks:
        for name, value in zip(step.op.attr_names, step.attrs, strict=False):
            if isinstance(value, Communicator):
                facts["comm"], facts["ranks"] = value.name, value.world_size
                facts["transport"] = type(value.transport).__name__
            elif isinstance(value, Enum):
                facts[name] = value.name.lower()
            elif isinstance(value, bool | int):
                facts[name] = value
        given = sum(a.nbytes for a in arguments if hasattr(a, "nbytes"))
        facts["bytes"] = given or step.spec.nbytes
    return facts


def _facts_and_line(step: Step, arguments: list[Any], computed: list[Node]) -> dict[str, Any]:
    line = computed[step.origin].line
    return step_facts(step, arguments) | ({} if line is None else {"line": describe_line(line)})


def live_bytes(plan: Plan) -> list[int]:
    """For each slot of a plan: the bytes of results that live once the slot is filled. Views live in their inputs."""
    first = plan.leaves + len(plan.constants)
    sizes: list[int] = []
    span: list[list[int]] = []
    owners: list[set[int]] = [set() for _ in range(first)]
    results: dict[int, list[int]] = {}
    parts: set[int] = set()
    for position, step in enumerate(plan.steps):
        for slot in step.inputs:
            for made in owners[slot]:
                # A part of a bucket lives on in the whole.
                span[made][1] = position - 1 if step.op is JOIN and made in parts else position
        if step.places:
            results[step.output] = [len(sizes) + n for n in range(len(step.places))]
            # What takes over a leaf adds nothing.
            sizes += [0 if place.leaf >= 0 else place.spec.nbytes for place in step.places]
            span += [[position, position] for _ in step.places]
            parts |= {made for made, place in zip(results[step.output], step.places, strict=True) if place.bucket >= 0}
            owners.append(set(results[step.output]))
        elif step.op is ITEM and step.inputs[0] in results:
            owners.append({results[step.inputs[0]][step.attrs[0]]})
        else:
            owners.append(set().union(*(owners[slot] for slot in step.inputs)) if step.op.aliases else set())
    for slot in plan.outputs:
        for made in owners[slot]:
            span[made][1] = len(plan.steps)
    change = [0] * (len(plan.steps) + 2)
    for size, (begin, end) in zip(sizes, span, strict=True):
        change[begin] += size
        change[end + 1 if end < len(plan.steps) else -1] -= size
    levels = [0] * first
    for difference in change[: len(plan.steps)]:
        levels.append((levels[-1] if levels else 0) + difference)
    return levels


def _resident() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _who() -> tuple[int, int]:
    """Rank and number of ranks: what MPI says once it was asked, else what the launcher claims."""
    if clock.mine.world_size:
        return clock.mine.rank, clock.mine.world_size
    claim = environment.detect()
    if claim is None or not claim.parallel:
        return 0, 1
    return claim.rank, claim.world_size or 0


def _start() -> Recorder | None:
    prefix = os.environ.get(VARIABLE)
    if not prefix:
        return None
    found = Recorder(Path(prefix).absolute())
    atexit.register(found.write)
    failure.before_the_end.append(found.write)
    return found


recorder = _start()
"""The one of this process; None without FUEL_TRACE."""

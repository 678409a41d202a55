"""The pipelines in a trace, as `fuelrun --trace FILE` writes it: their schedules, and when each action ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from fuel_parallel.errors import DataError, ScheduleError
from fuel_parallel.pipeline_parallel.actions import RECEIVES, parse_action
from fuel_parallel.pipeline_parallel.measured import Measurement
from fuel_parallel.pipeline_parallel.schedule import Schedule
from fuel_parallel.pipeline_parallel.schedule_file import from_csv
from fuel_parallel.pipeline_parallel.simulate import Span, Timeline

_SECONDS = 1e-6  # of the file's unit


class _Pipeline(msgspec.Struct):
    comm: str
    rank: int
    name: str
    schedule: str


class _Rank(msgspec.Struct):
    rank: int
    pipelines: list[_Pipeline] = []


class _About(msgspec.Struct):
    ranks: list[_Rank]


class _Event(msgspec.Struct):
    name: str
    pid: int
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Place(msgspec.Struct):
    """Which of its rank's pipelines an action is of."""

    pipeline: int
    step: int


class _Trace(msgspec.Struct):
    fuel_parallel: _About
    traceEvents: list[_Event]


_Steps = dict[int, dict[int, list[Span]]]  # by number and rank of the pipeline


def read_trace(path: Path) -> list[Measurement]:
    """The pipelines of a trace of all ranks, in the order in which ranks made them; replicas are one each.

    Those that ran no whole step are left out. Raises `DataError` when the file is no trace, or has no pipeline.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Trace)
        places = {
            number: msgspec.json.decode(event.args, type=_Place)
            for number, event in enumerate(found.traceEvents)
            if event.cat == "action"
        }
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as reason:
        said = reason.strerror if isinstance(reason, OSError) else str(reason)
        raise DataError(f"cannot read pipelines from the trace {path}: {said}") from None
    keys: dict[tuple[int, int], tuple[str, int]] = {}  # of a rank's pipeline: the same on all of its ranks
    schedules: dict[tuple[str, int], Schedule] = {}
    ranks: dict[tuple[int, int], int] = {}
    for about in found.fuel_parallel.ranks:
        turns: Counter[str] = Counter()
        for number, one in enumerate(about.pipelines):
            key = one.comm, turns[one.comm]
            turns[one.comm] += 1
            keys[about.rank, number], ranks[about.rank, number] = key, one.rank
            schedules.setdefault(key, from_csv(one.schedule, one.name, str(path)))
    steps: dict[tuple[str, int], _Steps] = {key: defaultdict(lambda: defaultdict(list)) for key in schedules}
    for number, place in places.items():
        event = found.traceEvents[number]
        mine = event.pid, place.pipeline
        if mine not in keys:
            raise DataError(f"{path}: {event.name} of rank {event.pid} is of a pipeline that the file does not have")
        try:
            action = parse_action(event.name)
        except ScheduleError as reason:
            raise DataError(f"{path}: event {number}: {reason}") from None
        span = Span(action, event.ts * _SECONDS, (event.ts + event.dur) * _SECONDS)
        steps[keys[mine]][place.step][ranks[mine]].append(span)
    measured = []
    for key, schedule in schedules.items():
        whole = {number: _timeline(schedule, step) for number, step in steps[key].items() if _is_whole(schedule, step)}
        if whole:
            measured.append(Measurement(schedule, whole))
    if not measured:
        raise DataError(
            f"{path}: there is no whole step of a pipeline in it; a `PipelineRunner` that runs under "
            f"`fuelrun --trace {path.name}` leaves one"
        )
    return measured


def _is_whole(schedule: Schedule, step: dict[int, list[Span]]) -> bool:
    """Whether every rank has come to the end of its order."""
    return all(
        sum(span.action.kind not in RECEIVES for span in step.get(rank, ())) == len(order)
        for rank, order in enumerate(schedule.orders)
    )


def _timeline(schedule: Schedule, step: dict[int, list[Span]]) -> Timeline:
    """Times count from the first action that is no wait; to wait before it is not of the step."""
    rows = [sorted(step[rank], key=lambda span: (span.start, span.end)) for rank in range(schedule.num_ranks)]
    first = min(span.start for row in rows for span in row if span.action.kind not in RECEIVES)
    ranks = (tuple(Span(s.action, max(s.start - first, 0.0), max(s.end - first, 0.0)) for s in row) for row in rows)
    return Timeline(tuple(ranks), tuple(map(float, schedule.held())))

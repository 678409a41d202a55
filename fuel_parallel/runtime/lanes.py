"""Lanes: which steps of a plan over several devices may run side by side, and what each must wait for.

The work of a device is a *lane*; its steps keep the plan's order. A device whose work is only queued is fed by the
thread that realizes, which also does the host's own steps and all that crosses ranks; any other device has a thread.
What a queued device copies to the host is a lane of its own: it goes on while the device computes and the host does
other things.

Between lanes a task waits for what it reads, for memory that it writes and an earlier one still reads or writes (a
place in an arena or a bucket, a value that is changed in place), and for nothing that these waits already imply. So
every order that respects lanes and waits gives the values of the plan's own order. A collective waits for all that
other threads do before it, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from fuel_parallel.lazy.node import Spec
from fuel_parallel.lazy.ops.creation import COPY
from fuel_parallel.runtime.accesses import needs_of

if TYPE_CHECKING:
    from fuel_parallel.runtime.plan import Step

HOST = "cpu"
_WAY_OUT = " to cpu"


class Way(Enum):
    """How the work of a device is done: by the thread that realizes, in queues that this one fills, by a thread."""

    HERE = "here"
    QUEUED = "queued"
    THREAD = "thread"


@dataclass(frozen=True, slots=True)
class Task:
    """What a lane does in one go: the step at the place `step`, or (not `runs`) only the end of collectives.

    Before it begins, the tasks `waits` of other lanes have ended, of which `joins` are done by other threads. Copies of
    a queued device to the host end in its own time: the host waits until those of the slots `arrivals` are there, the
    stream of the device itself waits for those of the slots `behind`. Then the collectives `finishes` are ended.
    Afterwards its thread is done with the slots `dies`.
    """

    step: int
    lane: str
    runs: bool = True
    finishes: tuple[int, ...] = ()
    waits: tuple[int, ...] = ()
    joins: tuple[int, ...] = ()
    arrivals: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    dies: tuple[int, ...] = ()

    @property
    def goes_out(self) -> bool:
        """Whether it is a copy to the host that goes on while the thread does other things."""
        return self.lane.endswith(_WAY_OUT)


@dataclass(frozen=True, slots=True)
class Lanes:
    """The tasks of a plan, in its order. `threads` are their numbers by thread; `cpu` is the one that realizes.

    `awaited` are the tasks that another thread waits for. A slot of `sharers` is read by so many threads, of which the
    last to be done with it lets it go.
    """

    tasks: tuple[Task, ...]
    threads: dict[str, tuple[int, ...]]
    awaited: frozenset[int]
    sharers: dict[int, int]

    def __str__(self) -> str:
        lines = []
        for number, task in enumerate(self.tasks):
            waits = f"   after {', '.join(f'#{n}' for n in task.waits)}" if task.waits else ""
            what = f"step {task.step}" if task.runs else f"end of {', '.join(f'%{slot}' for slot in task.finishes)}"
            lines.append(f"  #{number} {task.lane}: {what}{waits}")
        return "\n".join([f"lanes on {len(self.threads)} threads", *lines])


def lanes_of(
    steps: Sequence[Step], specs: Sequence[Spec], outputs: Sequence[int], way: Callable[[str], Way]
) -> Lanes | None:
    """The lanes of steps in order; None where no two steps could run side by side, or nothing would be won.

    `specs` are those of the slots before the first step's, `outputs` are never let go, `way` is asked for each device.
    """
    devices = [*(spec.device for spec in specs), *(step.spec.device for step in steps)]
    ways = {device: way(device) for device in dict.fromkeys(devices)}
    of = [_lane_of(step, devices[step.inputs[0]] if step.inputs else HOST, ways) for step in steps]
    if len(set(of)) < 2 or all(ways.get(lane) is Way.QUEUED for lane in of):
        return None  # queues overlap whoever fills them
    tasks = _tasks(steps, of)
    needs = needs_of(steps, tasks, len(specs))
    tasks, side_by_side = _with_waits(tasks, needs, steps, ways)
    if not side_by_side:
        return None
    threads = {HOST: _order_of_the_caller(tasks, steps, ways)}
    for number, task in enumerate(tasks):
        if ways.get(task.lane) is Way.THREAD:
            threads.setdefault(task.lane, []).append(number)
    dies, sharers = _deaths(tasks, steps, threads, set(outputs))
    return Lanes(
        tuple(replace(task, dies=tuple(sorted(dies[number]))) for number, task in enumerate(tasks)),
        {name: tuple(order) for name, order in threads.items()},
        frozenset(n for task in tasks for n in task.joins),
        sharers,
    )


def _lane_of(step: Step, source: str, ways: dict[str, Way]) -> str:
    if step.op.crosses_ranks:
        return HOST
    device = step.spec.device
    if step.op is COPY and device == HOST:
        if ways[source] is Way.QUEUED:
            return source + _WAY_OUT
        device = source
    return HOST if ways[device] is Way.HERE else device


def _tasks(steps: Sequence[Step], of: Sequence[str]) -> list[Task]:
    tasks = []
    for place, (step, lane) in enumerate(zip(steps, of, strict=True)):
        if step.finishes and lane != HOST:
            # Collectives end in the thread in which they began.
            tasks.append(Task(place, HOST, False, step.finishes))
            tasks.append(Task(place, lane))
        else:
            tasks.append(Task(place, lane, True, step.finishes))
    return tasks


def _with_waits(
    tasks: list[Task], needs: Sequence[set[int]], steps: Sequence[Step], ways: dict[str, Way]
) -> tuple[list[Task], bool]:
    """The tasks with their waits, and whether two of them may run side by side.

    A clock says for each lane which of its tasks is known to have ended, and so all before it.
    """
    clocks: list[dict[str, int]] = []
    latest: dict[str, int] = {}
    result: list[Task] = []
    side_by_side = False
    for number, task in enumerate(tasks):
        known = {}
        if task.lane in latest:
            before = latest[task.lane]
            known = {**clocks[before], task.lane: before}
        newest: dict[str, int] = {}
        required = needs[number]
        if task.runs and steps[task.step].op.crosses_ranks:
            # Where a step fails on all ranks, all have begun the same collectives: those before it.
            required = required | {n for lane, n in latest.items() if ways.get(lane) is Way.THREAD}
        for n in required:
            lane = tasks[n].lane
            if lane != task.lane:
                newest[lane] = max(newest.get(lane, -1), n)
        kept = [
            n
            for lane, n in newest.items()
            # That something was queued after a copy does not tell the host that the copy has arrived.
            if _host_waits(task, tasks[n])
            or n > max(known.get(lane, -1), *(clocks[m].get(lane, -1) for m in newest.values()))
        ]
        for lane, n in newest.items():
            for other, m in (*clocks[n].items(), (lane, n)):
                known[other] = max(known.get(other, -1), m)
        clocks.append(known)
        side_by_side = side_by_side or any(n > known.get(lane, -1) for lane, n in latest.items() if lane != task.lane)
        latest[task.lane] = number
        waits = tuple(sorted(kept))
        out = [n for n in waits if tasks[n].goes_out]
        result.append(
            replace(
                task,
                waits=waits,
                joins=tuple(n for n in waits if _thread(tasks[n], ways) != _thread(task, ways)),
                arrivals=tuple(steps[tasks[n].step].output for n in out if _host_waits(task, tasks[n])),
                behind=tuple(steps[tasks[n].step].output for n in out if not _host_waits(task, tasks[n])),
            )
        )
    return result, side_by_side


def _host_waits(task: Task, copy: Task) -> bool:
    """Whether the host must see the end of a copy of a queued device, and not only that device."""
    return copy.goes_out and copy.lane != task.lane + _WAY_OUT


def _thread(task: Task, ways: dict[str, Way]) -> str:
    return task.lane if ways.get(task.lane) is Way.THREAD else HOST


def _order_of_the_caller(tasks: Sequence[Task], steps: Sequence[Step], ways: dict[str, Way]) -> list[int]:
    """The order in which the realizing thread does its tasks: it fills queues before it computes, or waits for others.

    Lanes keep their order, and so do collectives among all steps of the host.
    """
    mine = [number for number, task in enumerate(tasks) if _thread(task, ways) == HOST]
    queued: dict[str, list[int]] = defaultdict(list)
    for number in reversed(mine):
        if tasks[number].lane != HOST:
            queued[tasks[number].lane].append(number)
    done: dict[int, None] = {}

    def is_ready(number: int) -> bool:
        return not tasks[number].joins and all(n in done for n in tasks[number].waits)

    def fill() -> None:
        moved = True
        while moved:
            moved = False
            for line in queued.values():
                while line and (line[-1] in done or is_ready(line[-1])):
                    moved = moved or line[-1] not in done
                    done.setdefault(line.pop())

    for number in mine:
        task = tasks[number]
        step = steps[task.step]
        # A collective between devices is queued as well: what comes after it shall not come before it.
        if task.joins or (task.lane == HOST and not (step.op.crosses_ranks and step.spec.device != HOST)):
            fill()
        done.setdefault(number)
    return list(done)


def _deaths(
    tasks: Sequence[Task], steps: Sequence[Step], threads: dict[str, list[int]], outputs: set[int]
) -> tuple[dict[int, set[int]], dict[int, int]]:
    """For each task the slots that its thread is done with afterwards, and how many threads read a slot, if several."""
    last: dict[int, dict[str, int]] = defaultdict(dict)
    for name, order in threads.items():
        for number in order:
            if tasks[number].runs:
                for slot in steps[tasks[number].step].inputs:
                    last[slot][name] = number
    for number, task in enumerate(tasks):
        if task.runs and not last[steps[task.step].output]:
            last[steps[task.step].output][""] = number
    dies: dict[int, set[int]] = defaultdict(set)
    for slot, readers in last.items():
        if slot not in outputs:
            for number in readers.values():
                dies[number].add(slot)
    return dies, {slot: len(readers) for slot, readers in last.items() if len(readers) > 1 and slot not in outputs}

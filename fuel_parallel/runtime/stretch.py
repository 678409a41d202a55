"""A stretch of a plan, the graph that was captured of it, and the graphs of all plans. `capture` says when and why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from fuel_parallel.backends.backend import Backend, Recording
from fuel_parallel.runtime.arena import arena_of
from fuel_parallel.runtime.inside import Inside, find_inside

if TYPE_CHECKING:
    from fuel_parallel.runtime.plan import Step

STEADY = 8
"""After so many runs in one place, what has been copied is read there; and never again if it moves once more."""
MOST_GRAPHS = 64
"""Graphs of all plans; the one that was not launched for the longest time is dropped for another."""

_VIEWS = frozenset({"item", "reshape", "permute_dims", "broadcast_to", "slice", "stop_gradient"})
"""Ops that mostly queue nothing."""


class Run(Protocol):
    """A run of a plan, as far as a capture takes part in it."""

    values: list[Any]
    spare: frozenset[int]
    taken: set[int]
    new_bytes: int

    def do(self, step: Step, xp: Any) -> None:
        """Runs one step; a failure names the line of the script."""


@dataclass(eq=False)
class Stretch:
    """Steps that are captured together, and their graph.

    `reads` are the slots that it reads and `leaving` those that others read; `over` are the leaves whose memory its
    results may take over. Slots below `leaves` are leaves. `now` is how the last run found things, `streaks` for how
    many runs each slot has been in one place before that. Those in `roaming` have moved away from a graph, those in
    `returned` were in one place for long since.
    """

    first: int
    steps: tuple[Step, ...]
    reads: tuple[int, ...]
    leaving: tuple[int, ...]
    over: frozenset[int]
    leaves: int
    graph: Graph | None = None
    given_up: bool = False
    now: Situation | None = None
    has_settled: bool = False
    streaks: dict[int, int] = field(default_factory=dict)
    roaming: set[int] = field(default_factory=set)
    returned: set[int] = field(default_factory=set)
    tries: int = 0
    unsettled: int = 0

    @property
    def device(self) -> str:
        """The device of all steps."""
        return self.steps[0].spec.device

    @property
    def work(self) -> int:
        """How many of the steps queue work, roughly."""
        return kernels(self.steps)

    def situation(self, run: Run, backend: Backend) -> Situation:
        """How a run finds things."""
        values, address = run.values, backend.address

        def place(slot: int) -> Any:
            value = values[slot]
            if slot < self.leaves:
                return address(value)  # dense: leaves are
            return [(address(one), one.strides) for one in (value if isinstance(value, tuple) else (value,))]

        places = {slot: place(slot) for slot in self.reads}
        return Situation(places, self.over & run.spare, arena_of(self.device).address)

    def note(self, now: Situation) -> None:
        """A run finds things so."""
        before, self.now = self.now, now
        # What has moved can be copied; the rest must be as it was in the run before.
        self.has_settled = before is not None and (before.arena, before.spare) == (now.arena, now.spare)
        for slot, place in now.places.items():
            stays = before is not None and before.places[slot] == place
            self.streaks[slot] = self.streaks.get(slot, 0) + 1 if stays else 0
        if self.graph is not None:
            where = self.graph.situation.places
            self.roaming |= {slot for slot in where.keys() - now.spare if where[slot] != now.places[slot]}

    def moving(self) -> frozenset[int]:
        """The slots that are to be copied in, in a graph that is captured now."""
        return frozenset(slot for slot in self.reads if not self.streaks[slot]) | self.roaming

    def steady(self) -> bool:
        """Whether something that the graph copies in has been in one place for long; then that is read there."""
        if self.graph is None:
            return False
        found = {s for s in self.graph.buffers if self.streaks[s] >= STEADY} - self.returned
        self.returned |= found
        self.roaming -= found
        return bool(found)

    def __str__(self) -> str:
        slots = f"%{self.steps[0].output} to %{self.steps[-1].output} on {self.device}"
        if self.graph is None:
            return f"to be captured: {slots}" if not self.given_up else f"left alone: {slots}"
        return f"one graph: {slots}; {len(self.graph.buffers)} of {len(self.reads)} inputs are copied"


@dataclass(frozen=True, slots=True)
class Situation:
    """Where the run finds what a stretch reads, by slot, which leaves it may take over, and where the arena is."""

    places: dict[int, Any]
    spare: frozenset[int]
    arena: int

    def without(self, moving: frozenset[int]) -> Situation:
        """The same, but for some slots."""
        places = {slot: place for slot, place in self.places.items() if slot not in moving}
        return Situation(places, self.spare - moving, self.arena)


@dataclass(frozen=True, slots=True)
class Made:
    """A result that leaves a stretch: parts that lie in what it reads, and arrays of the graph."""

    slot: int
    is_tuple: bool
    parts: tuple[Any, ...]
    escapes: bool

    def room(self, xp: Any) -> list[Any]:
        """New memory for the parts that are to be copied, since they may be seen when the graph is launched again."""
        if not self.escapes:
            return []
        return [xp.empty(p.shape, dtype=p.dtype) for p in self.parts if not isinstance(p, Inside)]

    def value(self, values: list[Any], room: list[Any], xp: Any) -> Any:
        """The result of the last launch: in `room`, or where it is until the next one."""
        copies = iter(room)
        found = []
        for part in self.parts:
            if isinstance(part, Inside):
                part = part.look(values, xp)
            elif self.escapes:
                copied = next(copies)
                copied[...] = part
                part = copied
            found.append(part)
        return tuple(found) if self.is_tuple else found[0]


def made_of(slot: int, value: Any, fixed: dict[int, Any], backend: Backend, arena: range, escapes: bool) -> Made:
    """What a capture left in a slot; `fixed` is what it read in place."""
    parts = value if isinstance(value, tuple) else (value,)
    found = tuple(find_inside(part, fixed, backend, arena) or part for part in parts)
    return Made(slot, isinstance(value, tuple), found, escapes)


@dataclass(eq=False)
class Graph:
    """What was captured, and what a launch needs: `buffers` for what is copied in, `made` for what comes out.

    `taken` are the leaves that it writes over. It fits wherever things are as in `situation`.
    """

    recording: Recording
    situation: Situation
    buffers: dict[int, Any]
    made: list[Made]
    taken: frozenset[int]
    used: int = 0

    def fits(self, now: Situation) -> bool:
        """Whether all is where it was when the graph was captured, but for what is copied in."""
        mine = self.situation
        return (
            now.arena == mine.arena
            and now.spare - self.buffers.keys() == mine.spare
            and all(now.places[slot] == place for slot, place in mine.places.items())
        )

    def launch(self, run: Run, xp: Any) -> None:
        """Copies in what moves, launches, and puts the results where they are read."""
        taken = self.taken - run.taken
        try:
            rooms = [made.room(xp) for made in self.made]
            for slot, buffer in self.buffers.items():
                buffer[...] = run.values[slot]
            run.taken.update(taken)  # before the launch: an interrupt may come right after it
            self.recording.launch()
        except Exception as reason:
            run.taken -= taken
            raise NotLaunched(f"{type(reason).__name__}: {reason}") from reason
        self.used = next(_clock)
        for made, room in zip(self.made, rooms, strict=True):
            run.values[made.slot] = made.value(run.values, room, xp)
            run.new_bytes += sum(array.nbytes for array in room)


class NotLaunched(Exception):
    """Nothing was done, so that the kernels can do it."""


def kernels(steps: Sequence[Step]) -> int:
    """How many of the steps queue work, roughly."""
    return sum(step.op.name not in _VIEWS for step in steps)


# Graphs of all plans.

_clock = itertools.count(1)
_with_graphs: WeakSet[Stretch] = WeakSet()


def keep_few(stretch: Stretch) -> None:
    """Drops graphs of others, if this one makes them too many."""
    _with_graphs.add(stretch)
    held = [(one.graph.used, one) for one in _with_graphs if one.graph is not None and one is not stretch]
    for _, one in sorted(held, key=lambda pair: pair[0])[: max(0, len(held) + 1 - MOST_GRAPHS)]:
        one.graph = None


def release_graphs(device: str) -> bool:
    """Drops all graphs of a device, with their memory; whether there were any. They are captured again when needed."""
    held = [one for one in _with_graphs if one.graph is not None and one.device == device]
    for one in held:
        one.graph = None
    return bool(held)


def graph_bytes() -> int:
    """Memory that graphs hold, on all devices."""
    return sum(one.graph.recording.nbytes for one in _with_graphs if one.graph is not None)

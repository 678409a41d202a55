"""What a schedule takes: a list scheduler that starts each action when its rank is free and what it waits for is there.

The *bubble ratio* is idle time by total time: of the time of all ranks, from the first action of any to the last of
any, the share in which they do not compute. With a backward twice a forward that is exactly (S-1)/(M+S-1) for GPipe and
1F1B. Papers on zero-bubble schedules count from the first action to the last *of a rank*, for the next step can follow
at once on it; that is `span`, and `bubble_ratio_of_span`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuel_parallel.errors import ArgumentError, ScheduleError
from fuel_parallel.pipeline_parallel.actions import COMPUTE, RECEIVES, RELEASES, SENDS, Action, ActionKind
from fuel_parallel.pipeline_parallel.dependencies import Dependencies, known_as, partner, walk, why_stalled

if TYPE_CHECKING:
    from fuel_parallel.pipeline_parallel.schedule import Schedule

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """What actions cost, in any one unit of time: a number for all stages, or one for each.

    Args:
        forward: A forward of one micro-batch.
        backward_input: The part of a backward that makes the gradient of the stage's input; None is 1, or not known
            where `backward` is given.
        backward_weight: The part that makes the gradients of its weights; None likewise.
        message: A message between two ranks: the activations of one micro-batch, or their gradients. For all
            neighbouring stages, or one for each two of them, one less than there are stages.
        reduce: Averaging the gradients of a stage over its replicas.
        activations: What a stage holds of one micro-batch until its backward has ended, in any unit of memory.
        backward: A whole backward; None is both parts together.

    >>> Costs(forward=1, backward=2.5)  # good for 1F1B; for ZB-H1 the parts would be needed
    Costs(forward=1, backward_input=None, backward_weight=None, message=0.0, reduce=0.0, activations=1.0, backward=2.5)
    """

    forward: PerStage = 1.0
    backward_input: PerStage | None = None
    backward_weight: PerStage | None = None
    message: PerStage = 0.0
    reduce: PerStage = 0.0
    activations: PerStage = 1.0
    backward: PerStage | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """An action and its time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank does what, and what follows from that."""

    ranks: tuple[tuple[Span, ...], ...]
    peak_memory: tuple[float, ...]
    """Of each rank: the most that activations take at once, in the unit of `Costs.activations`."""

    @property
    def total(self) -> float:
        """From the first action of any rank, at 0, to the end of the last of any."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def span(self) -> float:
        """From the first action of a rank to the end of its last; of the rank for which that is longest.

        To stand still for its first message is no action of a rank yet.
        """
        firsts = (next((one.start for one in spans if one.action.kind not in RECEIVES), None) for spans in self.ranks)
        lasts = (spans[-1].end if spans else 0.0 for spans in self.ranks)
        return max((last - first for first, last in zip(firsts, lasts, strict=True) if first is not None), default=0.0)

    def scaled(self, factor: float) -> Timeline:
        """In another unit of time."""
        ranks = (tuple(Span(s.action, s.start * factor, s.end * factor) for s in spans) for spans in self.ranks)
        return Timeline(tuple(ranks), self.peak_memory)

    def busy(self, rank: int) -> float:
        """The time in which a rank computes."""
        return sum(span.end - span.start for span in self.ranks[rank] if span.action.kind in COMPUTE)

    def bubble_ratio(self) -> float:
        """Idle time by `total`, over all ranks."""
        return self._idle_share(self.total)

    def bubble_ratio_of_span(self) -> float:
        """Idle time by `span`, over all ranks: what is lost when steps follow each other rank by rank."""
        return self._idle_share(self.span)

    def _idle_share(self, time: float) -> float:
        busy = sum(self.busy(rank) for rank in range(len(self.ranks)))
        return 1 - busy / (time * len(self.ranks)) if time else 0.0


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The time line of a schedule.

    Where sends and receives are in it (see `lower`), they are blocking: both ranks stand still for each message. Where
    none are, messages travel while ranks compute, those from one rank to another one after the other.

    Raises `ScheduleError` when the schedule cannot run, `ArgumentError` when costs are not of its stages.

    >>> from fuel_parallel.pipeline_parallel import build, lower
    >>> schedule = build("1f1b", num_ranks=4, num_microbatches=8)
    >>> timeline = simulate(schedule)
    >>> timeline.total, round(timeline.bubble_ratio(), 3), timeline.peak_memory
    (33.0, 0.273, (4.0, 3.0, 2.0, 1.0))
    >>> messages = Costs(message=0.1)
    >>> round(simulate(schedule, messages).total, 3), round(simulate(lower(schedule), messages).total, 3)
    (34.6, 36.5)
    """
    costs = Costs() if costs is None else costs
    durations = _durations(schedule, costs)
    held = _per_stage("activations", costs.activations, schedule)
    messages = _per_stage("message", costs.message, schedule, between=True)
    found = walk(schedule)
    if not found.complete:
        raise ScheduleError(why_stalled(schedule, found))
    clock = _Clock(schedule, durations, messages)
    for rank, position in found.sequence:
        clock.run(rank, schedule.orders[rank][position])
    memory = tuple(_peak_memory(order, held) if schedule.has_backward else 0.0 for order in schedule.orders)
    return Timeline(tuple(map(tuple, clock.spans)), memory)


class _Clock:
    """Gives actions their times, in an order in which they can happen."""

    def __init__(self, schedule: Schedule, durations: dict[ActionKind, list[float]], messages: list[float]) -> None:
        self.placement, self.durations, self.messages = schedule.placement, durations, messages
        self.dependencies = Dependencies(schedule)
        self.spans: list[list[Span]] = [[] for _ in schedule.orders]
        self.free = [0.0] * schedule.num_ranks
        self.ends: dict[Action, float] = {}
        self.arrivals: dict[Action, float] = {}  # of what has gone to another rank by itself
        self.link_free: dict[tuple[int, int], float] = {}

    def run(self, rank: int, action: Action) -> None:
        if action.kind in RECEIVES:
            return  # its send has seen to it
        start = max([self.free[rank], *(self._there(need, rank) for need in self.dependencies.needs(action))])
        if action.kind in SENDS:
            receive = partner(action)
            other = self.placement[receive.stage]
            start = max(start, self.free[other])
            end = start + self.messages[min(action.stage, receive.stage)]
            self._note(rank, action, start, end)
            self._note(other, receive, start, end)
            return
        self._note(rank, action, start, start + self.durations[action.kind][action.stage])
        if not self.dependencies.messages:
            self._dispatch(rank, action)

    def _note(self, rank: int, action: Action, start: float, end: float) -> None:
        self.spans[rank].append(Span(action, start, end))
        self.free[rank] = self.ends[known_as(action)] = end

    def _dispatch(self, rank: int, action: Action) -> None:
        """Lets the result of an action go to the rank that needs it, behind what is on its way there."""
        product = known_as(action)
        step = {ActionKind.FORWARD: 1, ActionKind.BACKWARD_INPUT: -1}.get(product.kind, 0)
        stage = action.stage + step
        if step and 0 <= stage < len(self.placement) and self.placement[stage] != rank:
            link = rank, self.placement[stage]
            arrival = max(self.ends[product], self.link_free.get(link, 0.0))
            arrival += self.messages[min(action.stage, stage)]
            self.link_free[link] = self.arrivals[product] = arrival

    def _there(self, need: Action, rank: int) -> float:
        return self.ends[need] if self.placement[need.stage] == rank else self.arrivals[need]


def _durations(schedule: Schedule, costs: Costs) -> dict[ActionKind, list[float]]:
    """Of the kinds that are in the schedule."""
    usual = 1.0 if costs.backward is None else None
    of_input, of_weight = (usual if one is None else one for one in (costs.backward_input, costs.backward_weight))
    given: dict[ActionKind, tuple[str, PerStage | None]] = {
        ActionKind.FORWARD: ("forward", costs.forward),
        ActionKind.BACKWARD_INPUT: ("backward_input", of_input),
        ActionKind.BACKWARD_WEIGHT: ("backward_weight", of_weight),
        ActionKind.BACKWARD: ("backward", costs.backward),
        ActionKind.REDUCE_GRAD: ("reduce", costs.reduce),
    }
    known = {kind: _per_stage(name, cost, schedule) for kind, (name, cost) in given.items() if cost is not None}
    if costs.backward is None:
        parts = known[ActionKind.BACKWARD_INPUT], known[ActionKind.BACKWARD_WEIGHT]
        known[ActionKind.BACKWARD] = [sum(both) for both in zip(*parts, strict=True)]
    for action in (action for order in schedule.orders for action in order):
        if action.kind in COMPUTE and action.kind not in known:
            raise ArgumentError(
                f"Costs: {given[action.kind][0]} is not known, only the whole backward is, and {schedule.name} has "
                f"{action}; give it, or measure a schedule that has both parts, such as zb-h1"
            )
    return known


def _per_stage(name: str, cost: PerStage, schedule: Schedule, between: bool = False) -> list[float]:
    """A cost for each stage, or `between` each two neighbours."""
    expected = schedule.num_stages - between
    values = [float(cost)] * expected if isinstance(cost, int | float) else [float(value) for value in cost]
    known = [float(cost)] if isinstance(cost, int | float) else values
    if len(values) != expected or not all(0 <= value < float("inf") for value in known):
        what = "pairs of neighbouring stages" if between else "stages"
        raise ArgumentError(
            f"Costs({name}={cost!r}): expected a number of 0 or more, or one for each of the {expected} {what} of "
            f"{schedule.name}"
        )
    return values


def _peak_memory(order: Sequence[Action], activations: Sequence[float]) -> float:
    now = most = 0.0
    for action in order:
        if action.kind is ActionKind.FORWARD:
            now += activations[action.stage]
        elif action.kind in RELEASES:
            now -= activations[action.stage]
        most = max(most, now)
    return most

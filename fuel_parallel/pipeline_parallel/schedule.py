"""`Schedule`: which rank does what in which order. That is all it is; times come from `simulate`, proofs from `check`.

A pipeline has as many *ranks* as its depth. Each holds one stage of the model or more, called virtual stages then, and
`placement` says which: stage s on rank s mod R (`loop`), or down and up again (`v_shape`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from fuel_parallel.errors import ArgumentError
from fuel_parallel.pipeline_parallel.actions import (
    BACKWARDS,
    COMPUTE,
    RECEIVES,
    RELEASES,
    SENDS,
    Action,
    ActionKind,
    text_of,
)
from fuel_parallel.pipeline_parallel.simulate import Timeline, simulate


class StageOp(enum.Enum):
    """What a stage does in a step of a schedule."""

    FORWARD = "forward"
    BACKWARD = "backward"
    IDLE = "idle"


@dataclass(frozen=True)
class ScheduleStep:
    """What a rank does from `time` on, for `duration` units of time, each as long as one forward.

    `stage` and `microbatch` are None when it is idle. `action` tells the parts of a backward apart.
    """

    time: int
    duration: int
    rank: int
    op: StageOp
    stage: int | None = None
    microbatch: int | None = None
    action: Action | None = None


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in order.

    Args:
        name: What it is called in texts and pictures.
        num_microbatches: Micro-batches of a step.
        placement: The rank of each stage.
        orders: For each rank its actions, in order.
        most_held: For each rank, of how many forwards it holds the activations at most; () promises nothing.

    Times below are those of unit costs: a forward takes 1, a whole backward 2, each part of a backward 1, a message 0.
    Raises `ArgumentError` when placement and orders are of different ranks.

    >>> from fuel_parallel.pipeline_parallel import parse_actions
    >>> schedule = Schedule("mine", 1, (0, 1), (parse_actions("0F0 0B0"), parse_actions("1F0 1B0")))
    >>> schedule.total_steps(), schedule.bubble_steps(), schedule.bubble_ratio()
    (6, 6, 0.5)
    >>> print(schedule)
    mine: 1 micro-batch, 2 stages on 2 ranks
    rank 0: 0F0 0B0
    rank 1: 1F0 1B0
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    most_held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ranks = len(self.orders)
        if not self.placement or set(self.placement) != set(range(ranks)):
            raise ArgumentError(
                f"Schedule {self.name!r}: placement gives each stage one of {ranks} ranks, and each rank a stage; "
                f"got {list(self.placement)} and the orders of {ranks} ranks"
            )
        if self.most_held and len(self.most_held) != ranks:
            raise ArgumentError(
                f"Schedule {self.name!r}: most_held has a number for each of {ranks} ranks; got {list(self.most_held)}"
            )

    @property
    def num_ranks(self) -> int:
        """The depth of the pipeline."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """The stages of all ranks together."""
        return len(self.placement)

    @cached_property
    def has_backward(self) -> bool:
        """Whether it trains."""
        return any(action.kind in BACKWARDS for order in self.orders for action in order)

    @cached_property
    def has_messages(self) -> bool:
        """Whether sends and receives are in it (see `lower`)."""
        return any(action.kind in SENDS | RECEIVES for order in self.orders for action in order)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds."""
        return [stage for stage, of in enumerate(self.placement) if of == rank]

    def computation(self) -> Schedule:
        """The forwards and backwards alone."""
        orders = tuple(tuple(action for action in order if action.kind in COMPUTE) for order in self.orders)
        return replace(self, orders=orders)

    def held(self) -> list[int]:
        """Of how many forwards each rank holds the activations, where it holds most; 0 without a backward.

        Held they are from the forward on until the end of the backward, or of its part for the weights.
        """
        return [_most_held(order) if self.has_backward else 0 for order in self.orders]

    @cached_property
    def steps(self) -> tuple[ScheduleStep, ...]:
        """The time line of each rank without gaps, idle steps and all, in the order of rank and time.

        Raises `ScheduleError` when the schedule cannot run.
        """
        return tuple(step for rank in range(self.num_ranks) for step in _steps(self._timeline, rank))

    def total_steps(self) -> int:
        """Units of time from the first action to the last. Raises `ScheduleError` when the schedule cannot run."""
        return round(self._timeline.total)

    def bubble_steps(self) -> int:
        """Units of time in which a rank is idle, summed over the ranks. Raises like `total_steps`."""
        return sum(step.duration for step in self.steps if step.op is StageOp.IDLE)

    def bubble_ratio(self) -> float:
        """The share of all ranks' time, from the first action to the last, in which they are idle.

        (S-1)/(M+S-1) for M micro-batches on S ranks with GPipe or 1F1B. Raises like `total_steps`.
        """
        return self.bubble_steps() / (self.total_steps() * self.num_ranks)

    def at_time(self, time: int) -> tuple[ScheduleStep, ...]:
        """What each rank does at a time. Raises `ArgumentError` outside of the schedule, else like `total_steps`."""
        if not 0 <= time < self.total_steps():
            raise ArgumentError(f"at_time({time}): the schedule lasts from 0 to {self.total_steps() - 1}")
        return tuple(step for step in self.steps if step.time <= time < step.time + step.duration)

    @cached_property
    def _timeline(self) -> Timeline:
        return simulate(self.computation())

    def __str__(self) -> str:
        count, stages = self.num_microbatches, self.num_stages
        title = (
            f"{self.name}: {count} micro-batch{'' if count == 1 else 'es'}, "
            f"{stages} stage{'' if stages == 1 else 's'} on {self.num_ranks} rank{'' if self.num_ranks == 1 else 's'}"
        )
        return "\n".join([title, *(f"rank {rank}: {text_of(order)}" for rank, order in enumerate(self.orders))])


def loop(num_ranks: int, per_rank: int = 1) -> tuple[int, ...]:
    """The placement in which stage s lies on rank s mod `num_ranks` (Narayanan et al., 2021, arXiv:2104.04473).

    >>> loop(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_ranks)) * per_rank


def v_shape(num_ranks: int) -> tuple[int, ...]:
    """The placement down the ranks and up again: two stages a rank, first and last on rank 0 (arXiv:2401.10241).

    >>> v_shape(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))


def _most_held(order: Iterable[Action]) -> int:
    now = most = 0
    for action in order:
        now += (action.kind is ActionKind.FORWARD) - (action.kind in RELEASES)
        most = max(most, now)
    return most


def _steps(timeline: Timeline, rank: int) -> Iterable[ScheduleStep]:
    time, end = 0, round(timeline.total)
    for span in timeline.ranks[rank]:
        start, stop = round(span.start), round(span.end)
        if start > time:
            yield ScheduleStep(time, start - time, rank, StageOp.IDLE)
        action = span.action
        op = StageOp.FORWARD if action.kind is ActionKind.FORWARD else StageOp.BACKWARD
        yield ScheduleStep(start, stop - start, rank, op, action.stage, action.microbatch, action)
        time = stop
    if time < end:
        yield ScheduleStep(time, end - time, rank, StageOp.IDLE)

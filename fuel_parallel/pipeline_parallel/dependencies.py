"""What an action waits for, and the order in which the actions of all ranks can happen: one walk behind every proof,
time line and lowering.

Sends are *rendezvous*: a send ends when its receive has taken the message, whatever the MPI library might buffer. What
can run in this way can run in any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fuel_parallel.errors import ScheduleError
from fuel_parallel.pipeline_parallel.actions import ALL_MICROBATCHES, RECEIVES, SENDS, Action, ActionKind

if TYPE_CHECKING:
    from fuel_parallel.pipeline_parallel.schedule import Schedule


@dataclass(frozen=True)
class Walk:
    """An order in which actions can happen, and where each rank stands when no more can.

    `sequence` holds (rank, position in the rank's order); a send and its receive stand next to each other, the send
    first. `stand` is for each rank the position that it has come to: the length of its order when it has ended;
    `complete` when all have.
    """

    sequence: list[tuple[int, int]]
    stand: list[int]
    complete: bool


class Dependencies:
    """Of the actions of a schedule. A whole backward also counts as its part for the input, under that name."""

    def __init__(self, schedule: Schedule) -> None:
        self.placement: Sequence[int] = schedule.placement
        self.messages = schedule.has_messages

    def needs(self, action: Action) -> Iterator[Action]:
        """The actions that must have ended before `action` begins."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        last = len(self.placement) - 1
        if kind is ActionKind.FORWARD and stage > 0:
            yield self._over(ActionKind.RECV_F, ActionKind.FORWARD, action, stage - 1)
        elif kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
            yield Action(ActionKind.FORWARD, stage, microbatch)
            if stage < last:
                yield self._over(ActionKind.RECV_B, ActionKind.BACKWARD_INPUT, action, stage + 1)
        elif kind is ActionKind.BACKWARD_WEIGHT:
            yield Action(ActionKind.BACKWARD_INPUT, stage, microbatch)
        elif kind is ActionKind.SEND_F:
            yield Action(ActionKind.FORWARD, stage, microbatch)
        elif kind is ActionKind.SEND_B:
            yield Action(ActionKind.BACKWARD_INPUT, stage, microbatch)

    def _over(self, receive: ActionKind, produce: ActionKind, action: Action, other: int) -> Action:
        """The receive of what stage `other` made, or its making where no message is said."""
        if self.messages and self.placement[other] != self.placement[action.stage]:
            return Action(receive, action.stage, action.microbatch)
        return Action(produce, other, action.microbatch)


def known_as(action: Action) -> Action:
    """The name by which others wait for an action."""
    if action.kind is ActionKind.BACKWARD:
        return Action(ActionKind.BACKWARD_INPUT, action.stage, action.microbatch)
    return action


def partner(action: Action) -> Action:
    """The receive of a send, or the send of a receive."""
    forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
    step = 1 if (action.kind in SENDS) == forward else -1
    pairs = (ActionKind.SEND_F, ActionKind.RECV_F) if forward else (ActionKind.SEND_B, ActionKind.RECV_B)
    return Action(pairs[action.kind is pairs[0]], action.stage + step, action.microbatch)


def walk(schedule: Schedule) -> Walk:
    """Takes every rank as far as it can go. Any order of steps comes equally far.

    Raises `ScheduleError` when an action is on a rank that does not hold its stage, or of a stage that is not there.
    """
    wrong = next(misplaced(schedule), None)
    if wrong is not None:
        raise ScheduleError(f"{schedule.name}: {wrong}")
    needs_of = Dependencies(schedule).needs
    orders, stand = schedule.orders, [0] * schedule.num_ranks
    done: set[Action] = set()
    sequence: list[tuple[int, int]] = []

    def head(rank: int) -> Action | None:
        return orders[rank][stand[rank]] if stand[rank] < len(orders[rank]) else None

    def end(rank: int) -> None:
        done.add(known_as(orders[rank][stand[rank]]))
        sequence.append((rank, stand[rank]))
        stand[rank] += 1

    def step(rank: int, action: Action) -> bool:
        if action.kind in RECEIVES:
            return False  # its sender takes it along
        if not done.issuperset(needs_of(action)):
            return False
        if action.kind in SENDS:
            receive = partner(action)
            if not 0 <= receive.stage < schedule.num_stages:
                return False
            other = schedule.placement[receive.stage]
            if other == rank or head(other) != receive:
                return False
            end(rank)
            end(other)
        else:
            end(rank)
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(schedule.num_ranks):
            while (action := head(rank)) is not None and step(rank, action):
                moved = True
    complete = all(at == len(order) for at, order in zip(stand, orders, strict=True))
    return Walk(sequence, stand, complete)


def misplaced(schedule: Schedule) -> Iterator[str]:
    """What is wrong with actions by themselves: a stage or micro-batch that is not there, or another rank's stage."""
    for rank, order in enumerate(schedule.orders):
        for at, action in enumerate(order):
            place = f"{action}, action {at} of rank {rank},"
            if not 0 <= action.stage < schedule.num_stages:
                yield f"{place} is of a stage that is not there; the stages are 0 to {schedule.num_stages - 1}"
            elif schedule.placement[action.stage] != rank:
                yield f"{place} is of stage {action.stage}, which rank {schedule.placement[action.stage]} holds"
            elif action.kind is ActionKind.REDUCE_GRAD:
                if action.microbatch != ALL_MICROBATCHES:
                    yield f"{place} is a reduction, which is of no micro-batch"
            elif not 0 <= action.microbatch < schedule.num_microbatches:
                yield f"{place} is of a micro-batch that is not there; they are 0 to {schedule.num_microbatches - 1}"


def why_stalled(schedule: Schedule, found: Walk) -> str:
    """Why a walk came to no end: ranks that wait for each other in a circle, or for what no rank does."""
    waits: dict[int, tuple[str, int]] = {}
    done = {known_as(schedule.orders[rank][position]) for rank, position in found.sequence}
    where = {
        known_as(action): (rank, at) for rank, order in enumerate(schedule.orders) for at, action in enumerate(order)
    }
    blocked = [rank for rank, order in enumerate(schedule.orders) if found.stand[rank] < len(order)]
    for rank in blocked:
        action = schedule.orders[rank][found.stand[rank]]
        need = _awaited(action, schedule, done)
        if need not in where:
            return f"{schedule.name}: {action} on rank {rank} waits for {need}, which no rank does; add it"
        other, at = where[need]
        actual = schedule.orders[other][at]
        later = f", which comes later on rank {other}" if other == rank else f" of rank {other}"
        waits[rank] = (f"rank {rank} is at {action} and waits for {actual}{later}", other)
    circle, rank = [], blocked[0]
    while rank not in circle:
        circle.append(rank)
        rank = waits[rank][1]
    circle = circle[circle.index(rank) :]
    said = "; ".join(waits[rank][0] for rank in circle)
    what = "the ranks wait for each other" if len(circle) > 1 else "the order cannot be kept"
    return f"{schedule.name}: {what}: {said}. Change the order of the actions, or let `lower` place the messages"


def _awaited(action: Action, schedule: Schedule, done: set[Action]) -> Action:
    if action.kind in RECEIVES:
        return partner(action)
    needs = Dependencies(schedule).needs(action)
    # A send whose own stage is done waits for its receive.
    return next((need for need in needs if need not in done), partner(action) if action.kind in SENDS else action)

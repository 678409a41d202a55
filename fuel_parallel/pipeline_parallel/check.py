"""Proofs about a schedule before anything runs; a schedule that fails one is refused with the counter-example.

What `check` proves:

- Every action is on the rank that holds its stage, and every micro-batch passes every stage exactly once each way.
- If messages are said, each that is needed has one send and one receive, none is between stages of one rank, and from
  one rank to another they are sent in the order in which they are received.
- If gradients are reduced, then once for each stage, after its last backward.
- The ranks come to the end, even if a send ends only when it is received, and no action runs before what it needs.
- A rank holds the activations of no more forwards than is promised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fuel_parallel.errors import ScheduleError
from fuel_parallel.pipeline_parallel.actions import (
    BACKWARDS,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
)
from fuel_parallel.pipeline_parallel.dependencies import misplaced, partner, walk, why_stalled
from fuel_parallel.pipeline_parallel.schedule import Schedule


def check(schedule: Schedule, most_held: Sequence[int] | None = None) -> None:
    """Proves that a schedule can run. Raises `ScheduleError` with what is wrong, on which rank.

    Args:
        schedule: With or without messages and reductions.
        most_held: For each rank, of how many forwards it may hold the activations; None: `schedule.most_held`.

    >>> from fuel_parallel.pipeline_parallel import Schedule, parse_actions
    >>> check(Schedule("mine", 1, (0, 1), (parse_actions("0F0 0B0"), parse_actions("1B0 1F0"))))
    Traceback (most recent call last):
    ...
    fuel_parallel.errors.ScheduleError: mine: the order cannot be kept: rank 1 is at 1B0 and waits for 1F0, which comes
    later on rank 1. Change the order of the actions, or let `lower` place the messages
    """
    wrong = next(_wrong(schedule, schedule.most_held if most_held is None else most_held), None)
    if wrong is not None:
        raise ScheduleError(wrong if wrong.startswith(f"{schedule.name}: ") else f"{schedule.name}: {wrong}")


def _wrong(schedule: Schedule, most_held: Sequence[int]) -> Iterator[str]:
    """What is wrong; each part relies on that those before it found nothing."""
    yield from misplaced(schedule)
    yield from _counts(schedule)
    if schedule.has_messages:
        yield from _disordered(schedule)
    yield from _early_reductions(schedule)
    found = walk(schedule)
    if not found.complete:
        yield why_stalled(schedule, found)
    yield from _too_much_held(schedule, most_held)


def _counts(schedule: Schedule) -> Iterator[str]:
    """Each action that is needed is there once, and no other."""
    there = Counter(action for order in schedule.orders for action in order)
    twice = next((action for action, count in there.items() if count > 1), None)
    if twice is not None:
        yield f"{twice} is on rank {schedule.placement[twice.stage]} {there[twice]} times, expected once"
    needed: set[Action] = set()
    for options in _needed(schedule, there):
        present = [[action for action in option if action in there] for option in options]
        begun = next((n for n, found in enumerate(present) if found), 0)
        missing = next((action for action in options[begun] if action not in there), None)
        if missing is not None:
            other = "".join(f", or {' and '.join(map(str, option))} in its place" for option in options[1:])
            yield f"{missing} is missing on rank {schedule.placement[missing.stage]}{other if not begun else ''}"
        needed.update(options[begun])
    strange = next((action for action in there if action not in needed), None)
    if strange is not None:
        yield f"{strange} on rank {schedule.placement[strange.stage]} is one too many: {_why_strange(strange)}"


def _needed(schedule: Schedule, there: Iterable[Action]) -> Iterator[list[list[Action]]]:
    """For each thing that must happen, the ways to do it."""
    last = schedule.num_stages - 1
    reduces = any(action.kind is ActionKind.REDUCE_GRAD for action in there)
    for stage in range(schedule.num_stages):
        if reduces:
            yield [[Action(ActionKind.REDUCE_GRAD, stage)]]
        for microbatch in range(schedule.num_microbatches):
            yield [[Action(ActionKind.FORWARD, stage, microbatch)]]
            if schedule.has_backward:
                parts = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
                whole = [Action(ActionKind.BACKWARD, stage, microbatch)]
                yield [whole, [Action(part, stage, microbatch) for part in parts]]
            if not schedule.has_messages or stage == last:
                continue
            if schedule.placement[stage] != schedule.placement[stage + 1]:
                sends = [Action(ActionKind.SEND_F, stage, microbatch)]
                if schedule.has_backward:
                    sends.append(Action(ActionKind.SEND_B, stage + 1, microbatch))
                yield from ([[end]] for send in sends for end in (send, partner(send)))


def _why_strange(action: Action) -> str:
    if action.kind in SENDS | RECEIVES:
        return (
            "there is no message between stages of one rank, before the first stage or after the last, and none "
            "of gradients without a backward"
        )
    return "a backward is whole (B) or in two parts (I and W), not both"


def _disordered(schedule: Schedule) -> Iterator[str]:
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[Action]] = {}
    for rank, order in enumerate(schedule.orders):
        for action in order:
            if action.kind in SENDS:
                sent.setdefault((rank, schedule.placement[partner(action).stage]), []).append(partner(action))
            elif action.kind in RECEIVES:
                received.setdefault((schedule.placement[partner(action).stage], rank), []).append(action)
    for (source, target), expected in sent.items():
        for at, (one, other) in enumerate(zip(expected, received[source, target], strict=True)):
            if one != other:
                yield (
                    f"messages from rank {source} to rank {target}: number {at} is sent as {partner(one)} and received "
                    f"as {other}; both ranks must have their messages in one order"
                )


def _early_reductions(schedule: Schedule) -> Iterator[str]:
    for rank, order in enumerate(schedule.orders):
        last = {action.stage: at for at, action in enumerate(order) if action.kind in BACKWARDS}
        for at, action in enumerate(order):
            if action.kind is ActionKind.REDUCE_GRAD and action.stage not in last:
                yield f"{action} on rank {rank}: there is no backward that makes gradients"
            elif action.kind is ActionKind.REDUCE_GRAD and at < last[action.stage]:
                yield f"{action} on rank {rank} comes before {order[last[action.stage]]}, which adds to those gradients"


def _too_much_held(schedule: Schedule, most_held: Sequence[int]) -> Iterator[str]:
    if most_held and len(most_held) != schedule.num_ranks:
        yield f"most_held={list(most_held)}: expected a number for each of {schedule.num_ranks} ranks"
        return
    for rank, (held, most) in enumerate(zip(schedule.held(), most_held, strict=False)):
        if held > most:
            yield (
                f"rank {rank} holds the activations of {held} forwards at once, more than the {most} that are "
                "promised; put backwards earlier"
            )

"""From an order of forwards and backwards to one in which every message is said, and every gradient reduced.

A send and its receive are put into the orders of their two ranks as *one* event of a single time line, that of unit
costs. All ranks therefore meet their messages in one and the same order, and none waits in a circle, even with sends
that end only when they are received (`check` proves it for any schedule, whoever made it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fuel_parallel.pipeline_parallel.actions import BACKWARDS, Action, ActionKind
from fuel_parallel.pipeline_parallel.check import check
from fuel_parallel.pipeline_parallel.dependencies import partner
from fuel_parallel.pipeline_parallel.schedule import Schedule
from fuel_parallel.pipeline_parallel.simulate import simulate


def lower(schedule: Schedule) -> Schedule:
    """The schedule with sends, receives and reductions; those that it had are put anew.

    There is a message wherever two neighbouring stages lie on different ranks, and a `REDUCE_GRAD` after the last
    backward of each stage and its message. Raises `ScheduleError` when the schedule cannot run.

    >>> from fuel_parallel.pipeline_parallel import build
    >>> print(lower(build("1f1b", num_ranks=2, num_microbatches=2)))
    1f1b: 2 micro-batches, 2 stages on 2 ranks
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD
    rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD
    """
    plain = schedule.computation()
    check(plain)
    return with_reductions(_with_messages(plain))


def with_reductions(schedule: Schedule) -> Schedule:
    """The schedule with a `REDUCE_GRAD` after the last backward of each stage and its message.

    >>> from fuel_parallel.pipeline_parallel import build
    >>> print(with_reductions(build("gpipe", num_ranks=1, num_microbatches=1)).orders[0][-1])
    0REDUCE_GRAD
    """
    return replace(schedule, orders=tuple(tuple(_reduced(order)) for order in schedule.orders))


def _reduced(order: tuple[Action, ...]) -> Iterator[Action]:
    order = tuple(action for action in order if action.kind is not ActionKind.REDUCE_GRAD)
    # After its send, too: the stage before must not wait for a reduction.
    ends = BACKWARDS | {ActionKind.SEND_B}
    last = {action.stage: at for at, action in enumerate(order) if action.kind in ends}
    for at, action in enumerate(order):
        yield action
        if last.get(action.stage) == at:
            yield Action(ActionKind.REDUCE_GRAD, action.stage)


def _with_messages(schedule: Schedule) -> Schedule:
    events: list[tuple[float, int, int, Action]] = []
    for rank, spans in enumerate(simulate(schedule).ranks):
        for span in spans:
            events.append((span.start, 1, rank, span.action))
            send = _send_after(span.action, schedule)
            if send is not None:
                events.append((span.end, 0, rank, send))  # before what begins at that time
    orders: list[list[Action]] = [[] for _ in schedule.orders]
    for _, _, rank, action in sorted(events, key=lambda event: event[:3]):
        orders[rank].append(action)
        if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
            receive = partner(action)
            orders[schedule.placement[receive.stage]].append(receive)
    return replace(schedule, orders=tuple(map(tuple, orders)))


def _send_after(action: Action, schedule: Schedule) -> Action | None:
    """The send of what an action made, if another rank needs it."""
    if action.kind is ActionKind.FORWARD:
        kind, neighbour = ActionKind.SEND_F, action.stage + 1
    elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
        kind, neighbour = ActionKind.SEND_B, action.stage - 1
    else:
        return None
    if not 0 <= neighbour < schedule.num_stages:
        return None
    here, there = schedule.placement[action.stage], schedule.placement[neighbour]
    return None if here == there else Action(kind, action.stage, action.microbatch)

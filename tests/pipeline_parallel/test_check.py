"""Whatever can run is let through, and whatever cannot is refused, with the reason.

What can run is told here in another way than in the library: the actions, with a send and its receive as one, and what
they wait for, are a graph, which must have no cycle.
"""

from __future__ import annotations

import graphlib
import itertools
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import ScheduleError
from fuel_parallel.pipeline_parallel import (
    Action,
    ActionKind,
    Schedule,
    ScheduleKind,
    build,
    check,
    lower,
    parse_actions,
    simulate,
)

EXAMPLES = 1000 if os.environ.get("FUEL_STRESS") else 250
K = ActionKind


def can_run(schedule: Schedule) -> bool:
    """By a topological sort."""
    reduced = tuple(tuple(a for a in order if a.kind is not K.REDUCE_GRAD) for order in schedule.orders)
    where = {action: rank for rank, order in enumerate(reduced) for action in order}
    graph: dict[object, set[object]] = {}
    edge_of = {K.SEND_F: 1, K.RECV_F: 0, K.SEND_B: -1, K.RECV_B: 0}

    def node(action: Action) -> object:
        if action.kind in edge_of:
            return action.kind.value[-1], action.stage + edge_of[action.kind], action.microbatch
        return action

    for order in reduced:
        for before, after in itertools.pairwise(order):
            graph.setdefault(node(after), set()).add(node(before))
        for a in order:
            s, m = a.stage, a.microbatch
            backward = next((Action(k, s, m) for k in (K.BACKWARD, K.BACKWARD_INPUT) if Action(k, s, m) in where), None)
            needs: list[object] = []
            if a.kind is K.FORWARD and s:
                crosses = schedule.has_messages and schedule.placement[s - 1] != schedule.placement[s]
                needs = [node(Action(K.RECV_F, s, m)) if crosses else Action(K.FORWARD, s - 1, m)]
            elif a.kind in (K.BACKWARD, K.BACKWARD_INPUT):
                needs = [Action(K.FORWARD, s, m)]
                if s + 1 < schedule.num_stages:
                    crosses = schedule.has_messages and schedule.placement[s + 1] != schedule.placement[s]
                    kinds = (K.BACKWARD, K.BACKWARD_INPUT)
                    made = [Action(k, s + 1, m) for k in kinds if Action(k, s + 1, m) in where]
                    needs += [node(Action(K.RECV_B, s, m))] if crosses else made
            elif a.kind is K.SEND_F:
                needs = [Action(K.FORWARD, s, m)]
            elif a.kind in (K.BACKWARD_WEIGHT, K.SEND_B) and backward is not None:
                needs = [backward]
            graph.setdefault(node(a), set()).update(needs)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return False
    return True


def late_reductions(schedule: Schedule) -> bool:
    for order in schedule.orders:
        for at, action in enumerate(order):
            if action.kind is K.REDUCE_GRAD and any(
                a.stage == action.stage and a.kind in (K.BACKWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT)
                for a in order[at:]
            ):
                return False
    return True


def refused(schedule: Schedule) -> bool:
    try:
        check(schedule, most_held=())
    except ScheduleError as reason:
        return str(reason).startswith(schedule.name)
    return False


SCHEDULES = st.builds(
    lambda kind, s, m, lowered: lower(build(kind, s, m)) if lowered else build(kind, s, m),
    st.sampled_from([kind for kind in ScheduleKind if kind is not ScheduleKind.INFERENCE]),
    st.integers(2, 4),
    st.integers(1, 5),
    st.booleans(),
)


@settings(max_examples=EXAMPLES)
@given(SCHEDULES, st.data())
def test_other_orders_are_let_through_if_and_only_if_they_can_run(schedule: Schedule, data: st.DataObject) -> None:
    """Actions of a rank in another order: that may do no harm."""
    orders = [list(order) for order in schedule.orders]
    for _ in range(data.draw(st.integers(1, 3))):
        order = orders[data.draw(st.integers(0, len(orders) - 1))]
        source, target = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
        order.insert(target, order.pop(source))
    moved = replace(schedule, orders=tuple(map(tuple, orders)))
    assert refused(moved) == (not can_run(moved) or not late_reductions(moved))


@settings(max_examples=EXAMPLES)
@given(SCHEDULES, st.data())
def test_missing_doubled_and_strange_actions_are_refused(schedule: Schedule, data: st.DataObject) -> None:
    orders = [list(order) for order in schedule.orders]
    rank = data.draw(st.integers(0, len(orders) - 1))
    order = orders[rank]
    at = data.draw(st.integers(0, len(order) - 1))
    what = data.draw(st.sampled_from(["drop", "double", "elsewhere", "other micro-batch", "other stage", "other kind"]))
    action = order[at]
    if what == "drop":
        del order[at]
    elif what == "double":
        order.insert(data.draw(st.integers(0, len(order))), action)
    elif what == "elsewhere":
        others = [other for other in range(len(orders)) if other != rank]
        orders[data.draw(st.sampled_from(others))].append(order.pop(at))
    elif what == "other micro-batch":
        order[at] = replace(action, microbatch=action.microbatch + data.draw(st.sampled_from([-1, 1, 100])))
    elif what == "other stage":
        order[at] = replace(action, stage=action.stage + data.draw(st.sampled_from([-1, 1, 100])))
    else:
        order[at] = replace(action, kind=data.draw(st.sampled_from([k for k in ActionKind if k is not action.kind])))
    broken = replace(schedule, orders=tuple(map(tuple, orders)))
    assert refused(broken)


@settings(max_examples=60)
@given(SCHEDULES)
def test_what_is_built_is_let_through(schedule: Schedule) -> None:
    assert can_run(schedule)
    check(schedule)


def two_ranks(first: str, second: str, microbatches: int = 1) -> Schedule:
    return Schedule("mine", microbatches, (0, 1), (parse_actions(first), parse_actions(second)))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (two_ranks("0F0", "1F0 1B0"), r"mine: 0B0 is missing on rank 0, or 0I0 and 0W0 in its place"),
        (two_ranks("0F0 0I0", "1F0 1B0"), r"mine: 0W0 is missing on rank 0$"),
        (two_ranks("0F0 0B0 0F0", "1F0 1B0"), "mine: 0F0 is on rank 0 2 times, expected once"),
        (two_ranks("0F0 0B0 0W0", "1F0 1B0"), r"0W0 on rank 0 is one too many: a backward is whole \(B\) or in two"),
        (two_ranks("0F0 0B0", "1F0 1B0 0F1"), r"0F1, action 2 of rank 1, is of stage 0, which rank 0 holds"),
        (two_ranks("0F0 0B0 0F1", "1F0 1B0"), "is of a micro-batch that is not there; they are 0 to 0"),
        (two_ranks("0F0 0B0 7F0", "1F0 1B0"), "is of a stage that is not there; the stages are 0 to 1"),
        (
            two_ranks("0F0 0B0", "1B0 1F0"),
            "the order cannot be kept: rank 1 is at 1B0 and waits for 1F0, which comes later on rank 1",
        ),
        (
            two_ranks("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", 2),
            "the ranks wait for each other: rank 0 is at 0B0 and waits for 1B0 of rank 1; "
            "rank 1 is at 1F1 and waits for 0F1 of rank 0",
        ),
        (
            two_ranks(
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
                "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
                2,
            ),
            "the ranks wait for each other: rank 0 is at 0SEND_F1 and waits for 1RECV_F1 of rank 1; "
            "rank 1 is at 1SEND_B0 and waits for 0RECV_B0 of rank 0",
        ),
        (
            two_ranks("0F0 0F1 0SEND_F1 0SEND_F0", "1RECV_F0 1F0 1RECV_F1 1F1", 2),
            "messages from rank 0 to rank 1: number 0 is sent as 0SEND_F1 and received as 1RECV_F0",
        ),
        (two_ranks("0F0 0SEND_F0", "1F0"), "1RECV_F0 is missing on rank 1"),
        (
            two_ranks("0F0 0REDUCE_GRAD 0B0", "1F0 1B0 1REDUCE_GRAD"),
            "0REDUCE_GRAD on rank 0 comes before 0B0, which adds to those gradients",
        ),
        (two_ranks("0F0 0B0 0REDUCE_GRAD", "1F0 1B0"), "1REDUCE_GRAD is missing on rank 1"),
        (two_ranks("0F0 0REDUCE_GRAD", "1F0 1REDUCE_GRAD"), "there is no backward that makes gradients"),
    ],
)
def test_the_reason_is_said(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(schedule)


def test_a_message_within_a_rank_is_refused() -> None:
    order = parse_actions("0F0 0SEND_F0 1RECV_F0 1F0")
    with pytest.raises(ScheduleError, match="is one too many: there is no message between stages of one rank"):
        check(Schedule("mine", 1, (0, 0), (order,)))


def test_more_activations_than_promised_are_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 0 holds the activations of 4 forwards at once, more than the 3"):
        check(build("gpipe", 2, 4), most_held=[3, 4])
    with pytest.raises(ScheduleError, match="expected a number for each of 2 ranks"):
        check(build("gpipe", 2, 4), most_held=[3])


def test_a_schedule_that_cannot_run_has_no_times() -> None:
    with pytest.raises(ScheduleError, match="wait for each other"):
        simulate(two_ranks("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", 2))


def test_actions_of_stages_that_are_not_there_have_no_times() -> None:
    with pytest.raises(ScheduleError, match="7B0, action 1 of rank 0, is of a stage that is not there"):
        simulate(two_ranks("0F0 7B0", "1F0 1B0"))

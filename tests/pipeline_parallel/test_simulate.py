"""Costs: what is said of stages and of pairs of stages is what actions take, and what is not known is not guessed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import ArgumentError
from fuel_parallel.pipeline_parallel import Costs, ScheduleKind, build, lower, simulate

numbers = st.integers(1, 9)


@settings(max_examples=40)
@given(st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]), st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_whole_backward_is_as_good_as_its_two_parts(kind: str, s: int, m: int, data) -> None:
    schedule = build(kind, s, m)
    stages = schedule.num_stages
    f, i, w = (data.draw(st.lists(numbers, min_size=stages, max_size=stages)) for _ in range(3))
    parts = Costs(forward=f, backward_input=i, backward_weight=w, message=1)
    whole = Costs(forward=f, backward=[a + b for a, b in zip(i, w, strict=True)], message=1)
    assert simulate(schedule, parts) == simulate(schedule, whole)
    assert simulate(lower(schedule), parts) == simulate(lower(schedule), whole)


@settings(max_examples=40)
@given(st.sampled_from(ScheduleKind), st.integers(1, 4), st.integers(1, 6), st.booleans(), st.integers(0, 5))
def test_one_message_time_is_that_of_every_pair(kind: ScheduleKind, s: int, m: int, blocking: bool, time: int) -> None:
    schedule = build(kind, s, m)
    schedule = lower(schedule) if blocking else schedule
    pairs = [time] * (schedule.num_stages - 1)
    assert simulate(schedule, Costs(message=time)) == simulate(schedule, Costs(message=pairs))


def test_a_slow_pair_is_slow_both_ways() -> None:
    schedule = build("gpipe", 3, 1)
    assert simulate(schedule, Costs(message=[0.5, 2])).total == 9 + 2 * 2.5
    assert simulate(lower(schedule), Costs(message=[0.5, 2])).total == 9 + 2 * 2.5


def test_parts_that_are_not_known_are_not_guessed() -> None:
    costs = Costs(forward=1, backward=3)
    assert simulate(build("1f1b", 2, 2), costs).total == 12
    with pytest.raises(ArgumentError, match="backward_input is not known, only the whole backward is, and zb-h1 has"):
        simulate(build("zb-h1", 2, 2), costs)
    assert simulate(build("zb-h1", 2, 2), Costs(backward=2, backward_input=1, backward_weight=1)).total == 7


@pytest.mark.parametrize(
    ("costs", "of"),
    [
        (Costs(forward=-1), "2 stages"),
        (Costs(forward=[1, 2, 3]), "2 stages"),
        (Costs(backward=[1]), "2 stages"),
        (Costs(message=float("nan")), "1 pairs of neighbouring stages"),
        (Costs(message=[1, 2]), "1 pairs of neighbouring stages"),
    ],
)
def test_costs_of_other_stages_are_refused(costs: Costs, of: str) -> None:
    with pytest.raises(ArgumentError, match=f"a number of 0 or more, or one for each of the {of} of gpipe"):
        simulate(build("gpipe", 2, 2), costs)


def test_a_pipeline_of_one_stage_has_no_pairs() -> None:
    assert simulate(build("gpipe", 1, 1), Costs(message=[])).total == 3
    with pytest.raises(ArgumentError, match="0 pairs"):
        simulate(build("gpipe", 1, 1), Costs(message=-1))

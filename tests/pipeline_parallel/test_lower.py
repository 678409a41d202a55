"""Messages and reductions are put in where they are needed, and nowhere else; no rank waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import random_schedule

from fuel_parallel.errors import ScheduleError
from fuel_parallel.pipeline_parallel import (
    ActionKind,
    Costs,
    Schedule,
    ScheduleKind,
    build,
    check,
    lower,
    simulate,
)


@settings(max_examples=80)
@given(st.sampled_from(ScheduleKind), st.integers(1, 6), st.integers(1, 10))
def test_lowered_schedules_are_proven(kind: ScheduleKind, s: int, m: int) -> None:
    plain = build(kind, s, m)
    lowered = lower(plain)
    check(lowered)
    assert lowered.computation() == plain
    assert lower(lowered) == lowered
    crossings = sum(a != b for a, b in zip(plain.placement, plain.placement[1:], strict=False))
    sent = sum(a.kind in (ActionKind.SEND_F, ActionKind.SEND_B) for order in lowered.orders for a in order)
    assert sent == crossings * m * (2 if plain.has_backward else 1)
    reduced = [a.stage for order in lowered.orders for a in order if a.kind is ActionKind.REDUCE_GRAD]
    assert sorted(reduced) == (list(range(plain.num_stages)) if plain.has_backward else [])


@settings(max_examples=80)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.randoms(use_true_random=False))
def test_random_valid_schedules_are_lowered_and_proven(s: int, v: int, m: int, random) -> None:
    """Actions in a random order that can happen."""
    schedule = random_schedule(s, v, m, random)
    check(schedule)
    check(lower(schedule))


def test_blocking_messages_take_the_time_of_both_ends() -> None:
    schedule = build("gpipe", 2, 1)
    assert simulate(schedule, Costs(message=0.5)).total == 7
    blocking = simulate(lower(schedule), Costs(message=0.5, reduce=2))
    assert blocking.total == 9
    assert blocking.busy(0) == 3


def test_messages_from_one_rank_to_another_follow_each_other() -> None:
    """Three forwards of one unit, whose messages take ten each."""
    assert simulate(build("inference", 2, 3), Costs(message=10)).total == 1 + 30 + 1


def test_a_broken_schedule_is_not_lowered() -> None:
    first, second = build("gpipe", 2, 1).orders
    with pytest.raises(ScheduleError, match="0B0 is missing"):
        lower(Schedule("mine", 1, (0, 1), (first[:1], second)))

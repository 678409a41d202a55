"""Schedules are functions of the step: where they begin and end, that they are smooth, and that they are composed."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.errors import ArgumentError
from fuel_parallel.optim import schedules

RATE = st.floats(1e-6, 10.0)
COUNT = st.integers(1, 500)


@pytest.mark.parametrize("make", [schedules.linear, schedules.cosine])
@given(start=RATE, end=RATE, steps=COUNT)
def test_a_fall_or_rise_goes_from_end_to_end_and_stays(make: Any, start: float, end: float, steps: int) -> None:
    rates = [make(start, end, steps)(step) for step in range(steps + 3)]
    assert rates[0] == pytest.approx(start)
    assert rates[steps:] == pytest.approx([end] * 3)
    falls = [a - b for a, b in pairwise(rates)]
    assert all(fall * (start - end) >= -1e-12 for fall in falls)
    assert rates[steps // 2] + rates[steps - steps // 2] == pytest.approx(start + end)  # both are odd about the middle


@given(peak=RATE, rise=COUNT, stable=COUNT, decay=COUNT)
def test_wsd_rises_stays_and_falls(peak: float, rise: int, stable: int, decay: int) -> None:
    schedule = schedules.wsd(peak, rise=rise, stable=stable, decay=decay, end=peak / 8)
    assert schedule(0) == pytest.approx(peak / rise)
    assert {schedule(step) for step in range(rise, rise + stable)} == {peak}
    assert schedule(rise + stable + decay) == pytest.approx(peak / 8)
    assert schedule(rise + stable + decay - 1) == pytest.approx(peak / 8 + (peak - peak / 8) / decay)


@given(peak=RATE, warm_up=COUNT)
def test_inverse_sqrt_is_at_its_peak_after_the_warm_up(peak: float, warm_up: int) -> None:
    schedule = schedules.inverse_sqrt(peak, warm_up)
    assert max(schedule(step) for step in range(2 * warm_up)) == schedule(warm_up - 1) == pytest.approx(peak)
    assert schedule(4 * warm_up - 1) == pytest.approx(peak / 2)


def test_they_are_made_of_each_other_and_of_any_function() -> None:
    schedule = schedules.warm_up(4, schedules.joined((schedules.constant(1.0), 2), lambda step: 1 / (step + 1)))
    assert [schedule(step) for step in range(9)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.5, 1 / 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.constant(-1.0), "constant: a learning rate must be 0 or more, but is -1.0"),
        (lambda: schedules.cosine(1.0, math.nan, 3), "cosine: a learning rate must be 0 or more, but is nan"),
        (lambda: schedules.linear(1.0, 0.0, 0), "linear: steps is a whole number of at least 1, not 0"),
        (lambda: schedules.warm_up(2.5, schedules.constant(1.0)), "warm_up: steps is a whole number, not 2.5"),  # type: ignore[arg-type]
        (lambda: schedules.wsd(1.0, rise=1, stable=0, decay=1), "wsd: stable is a whole number"),
        (lambda: schedules.joined(), "joined: expected pairs of a schedule and its number of steps"),
        (lambda: schedules.joined((schedules.constant(1.0), 3)), "at last a schedule by itself"),
        (lambda: schedules.joined((schedules.constant(1.0), -1), schedules.constant(1.0)), "joined: steps is a whole"),
    ],
)
def test_mistakes_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()

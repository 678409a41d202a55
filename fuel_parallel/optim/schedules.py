"""Schedules of the learning rate: functions of the number of the step, counted from 0, and nothing else.

    schedule = schedules.warm_up(200, schedules.cosine(3e-4, 3e-5, 10_000))
    for step in range(steps):
        optimizer.lr = schedule(step)

They keep no state, so that a run that goes on from a checkpoint needs the number of the step only. Any function of a
step will do in their place, and they are made of each other: `warm_up` and `joined` take schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fuel_parallel.arguments import checked
from fuel_parallel.errors import ArgumentError

Schedule = Callable[[int], float]


@checked
def constant(rate: float) -> Schedule:
    """The same rate at every step.

    >>> constant(0.5)(1000)
    0.5
    """
    _check_rates("constant", rate)
    return lambda step: rate


@checked
def linear(start: float, end: float, steps: int) -> Schedule:
    """From `start` at step 0 straight to `end` at step `steps`, and `end` from then on.

    >>> [linear(1.0, 0.0, 4)(step) for step in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    _check_rates("linear", start, end)
    _check_steps("linear", steps=steps)
    return lambda step: start + (end - start) * min(step / steps, 1.0)


@checked
def cosine(start: float, end: float, steps: int) -> Schedule:
    """From `start` to `end` along half a cosine (Loshchilov and Hutter, 2016, arXiv:1608.03983), then `end`.

    >>> [round(cosine(1.0, 0.0, 4)(step), 3) for step in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    _check_rates("cosine", start, end)
    _check_steps("cosine", steps=steps)
    return lambda step: end + (start - end) * (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2


@checked
def inverse_sqrt(peak: float, warm_up_steps: int) -> Schedule:
    """A linear warm-up, then peak * sqrt(warm_up_steps / step) (Vaswani et al., 2017, arXiv:1706.03762, section 5.3).

    >>> [inverse_sqrt(1.0, 4)(step) for step in (0, 3, 4, 15)]
    [0.25, 1.0, 0.8944271909999159, 0.5]
    """
    _check_rates("inverse_sqrt", peak)
    _check_steps("inverse_sqrt", warm_up_steps=warm_up_steps)
    return lambda step: peak * min((step + 1) / warm_up_steps, math.sqrt(warm_up_steps / (step + 1)))


@checked
def wsd(peak: float, *, rise: int, stable: int, decay: int, end: float = 0.0) -> Schedule:
    """Warm-up, stable, decay: a linear rise, `peak` for `stable` steps, and a linear fall (arXiv:2404.06395).

    A run can be made longer while it is stable.

    >>> [wsd(1.0, rise=2, stable=2, decay=2)(step) for step in range(7)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    _check_rates("wsd", peak, end)
    _check_steps("wsd", rise=rise, stable=stable, decay=decay)
    return warm_up(rise, joined((constant(peak), stable), linear(peak, end, decay)))


@checked
def warm_up(steps: int, then: Schedule) -> Schedule:
    """`steps` steps that rise linearly to what `then` begins with, and then `then` from its step 0 on.

    The first step is not lost: its rate is a `steps`-th of that, not 0.

    >>> [warm_up(2, linear(1.0, 0.0, 2))(step) for step in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    _check_steps("warm_up", steps=steps)
    return lambda step: then(0) * (step + 1) / steps if step < steps else then(step - steps)


def joined(*parts: tuple[Schedule, int] | Schedule) -> Schedule:
    """Schedules one after the other: pairs of one and its number of steps, and the last by itself, for ever.

    Each begins at its step 0.

    >>> [joined((constant(1.0), 2), linear(0.5, 0.0, 2))(step) for step in range(5)]
    [1.0, 1.0, 0.5, 0.25, 0.0]
    """
    *before, last = parts or (None,)
    if not callable(last) or not all(isinstance(part, tuple) and len(part) == 2 for part in before):
        raise ArgumentError(
            "joined: expected pairs of a schedule and its number of steps, and at last a schedule by itself, as in "
            f"joined((constant(0.1), 100), linear(0.1, 0.0, 50)); got {parts!r}"
        )
    pairs = [part for part in before if isinstance(part, tuple)]
    for _, steps in pairs:
        _check_steps("joined", steps=steps)
    final = last

    def at(step: int) -> float:
        for schedule, steps in pairs:
            if step < steps:
                return schedule(step)
            step -= steps
        return final(step)

    return at


def _check_rates(schedule: str, *rates: float) -> None:
    for rate in rates:
        if not 0 <= rate < math.inf:
            raise ArgumentError(f"{schedule}: a learning rate must be 0 or more, but is {rate!r}")


def _check_steps(schedule: str, **counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ArgumentError(f"{schedule}: {name} is a whole number of at least 1, not {count!r}")

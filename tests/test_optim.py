"""Optimizers against plain numpy in float64, written from the papers and not from the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, ShapeError

Array = np.ndarray[Any, np.dtype[np.float64]]

SHAPES = [(3, 4), (5,), ()]
STEPS = 20


def gradients_of(step: int) -> list[Array]:
    """Gradients of very different sizes, some of them zero."""
    draw = np.random.default_rng(step)
    return [draw.normal(size=shape) * 10.0 ** (index - 1) * (step % 5 != 0) for index, shape in enumerate(SHAPES)]


def start() -> list[Array]:
    return [np.random.default_rng(99).normal(size=shape) for shape in SHAPES]


def rate_of(step: int) -> float:
    return 0.1 / (1 + step)


def run(make: Callable[[list[fp.Parameter]], Any], *, change_rate: bool = False) -> Iterator[list[Array]]:
    """The parameters after each step of the library's optimizer."""
    parameters = [fp.Parameter(ft.asarray(value)) for value in start()]
    optimizer = make(parameters)
    for step in range(STEPS):
        if change_rate:
            optimizer.lr = rate_of(step)
        optimizer.update([ft.asarray(g) for g in gradients_of(step)])
        fp.realize(optimizer)
        yield [parameter.numpy() for parameter in parameters]


def sgd(momentum: float, rate: Callable[[int], float]) -> Iterator[list[Array]]:
    values, velocities = start(), [np.zeros(shape) for shape in SHAPES]
    for step in range(STEPS):
        velocities = [momentum * v + g for v, g in zip(velocities, gradients_of(step), strict=True)]
        values = [p - rate(step) * v for p, v in zip(values, velocities, strict=True)]
        yield values


def adamw(
    betas: tuple[float, float], eps: float, weight_decay: float, rate: Callable[[int], float]
) -> Iterator[list[Array]]:
    """Algorithm 2 of Loshchilov and Hutter, line by line, with the schedule multiplier in the rate."""
    values = start()
    first, second = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for t in range(1, STEPS + 1):
        for i, g in enumerate(gradients_of(t - 1)):
            first[i] = betas[0] * first[i] + (1 - betas[0]) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g**2
            m_hat = first[i] / (1 - betas[0] ** t)
            v_hat = second[i] / (1 - betas[1] ** t)
            values[i] = values[i] - rate(t - 1) * (m_hat / (np.sqrt(v_hat) + eps) + weight_decay * values[i])
        yield list(values)


def assert_same_path(ours: Iterator[list[Array]], theirs: Iterator[list[Array]]) -> None:
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        for a, b in zip(mine, expected, strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=f"after step {step}")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_takes_the_steps_of_plain_numpy(momentum: float) -> None:
    ours = run(lambda p: fp.optim.SGD(p, lr=0.05, momentum=momentum))
    assert_same_path(ours, sgd(momentum, lambda _: 0.05))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_follows_a_changing_rate(momentum: float) -> None:
    ours = run(lambda p: fp.optim.SGD(p, momentum=momentum), change_rate=True)
    assert_same_path(ours, sgd(momentum, rate_of))


@pytest.mark.parametrize(
    ("betas", "eps", "weight_decay"),
    [((0.9, 0.999), 1e-8, 0.01), ((0.8, 0.95), 1e-3, 0.5), ((0.0, 0.0), 1e-8, 0.0)],
)
def test_adamw_takes_the_steps_of_plain_numpy(betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    ours = run(lambda p: fp.optim.AdamW(p, lr=0.02, betas=betas, eps=eps, weight_decay=weight_decay))
    assert_same_path(ours, adamw(betas, eps, weight_decay, lambda _: 0.02))


def test_adamw_follows_a_changing_rate() -> None:
    ours = run(lambda p: fp.optim.AdamW(p), change_rate=True)
    assert_same_path(ours, adamw((0.9, 0.999), 1e-8, 0.01, rate_of))


def test_several_updates_may_be_computed_at_once() -> None:
    parameters = [fp.Parameter(ft.asarray(value)) for value in start()]
    optimizer = fp.optim.AdamW(parameters, lr=0.02)
    for step in range(STEPS):
        optimizer.lr = rate_of(step)
        optimizer.update([ft.asarray(g) for g in gradients_of(step)])
    fp.realize(optimizer)
    *_, expected = adamw((0.9, 0.999), 1e-8, 0.01, rate_of)
    for parameter, value in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(parameter.numpy(), value, rtol=1e-12, atol=1e-12)


def test_state_and_parameters_keep_their_dtype() -> None:
    parameter = fp.Parameter(ft.ones(3, dtype=ft.bfloat16))
    optimizer = fp.optim.AdamW([parameter])
    optimizer.update([ft.ones(3)])
    fp.realize(optimizer)
    assert {x.dtype.name for x in (parameter, optimizer.means[0], optimizer.squares[0])} == {"bfloat16"}


def test_realizing_the_optimizer_realizes_all_of_its_state() -> None:
    parameter = fp.Parameter(ft.ones(3))
    optimizer = fp.optim.AdamW([parameter])
    optimizer.update([ft.ones(3)])
    fp.realize(optimizer)
    assert all(v.is_realized for v in (parameter, optimizer.step, *optimizer.means, *optimizer.squares))


def test_the_rate_can_be_read_back() -> None:
    optimizer = fp.optim.SGD([fp.Parameter(ft.ones(3))], lr=0.5)
    assert optimizer.lr == 0.5
    optimizer.lr = 0.25
    assert optimizer.lr == 0.25


@pytest.mark.parametrize("rate", [-0.1, float("nan")])
def test_a_rate_is_not_negative(rate: float) -> None:
    with pytest.raises(ArgumentError, match="lr must not be negative"):
        fp.optim.AdamW([fp.Parameter(ft.ones(3))], lr=rate)


def test_betas_lie_below_one() -> None:
    with pytest.raises(ArgumentError, match=r"betas must lie in \[0, 1\), but are \(0.9, 1.0\)"):
        fp.optim.AdamW([fp.Parameter(ft.ones(3))], betas=(0.9, 1.0))


@pytest.mark.parametrize("optimizer", [fp.optim.SGD, fp.optim.AdamW])
def test_there_is_something_to_optimize(optimizer: type[fp.optim.SGD] | type[fp.optim.AdamW]) -> None:
    with pytest.raises(ArgumentError, match="expected at least one parameter, got none"):
        optimizer([])


def test_each_parameter_needs_its_gradient() -> None:
    optimizer = fp.optim.SGD([fp.Parameter(ft.ones(3)), fp.Parameter(ft.ones(2))])
    with pytest.raises(ArgumentError, match="update: 2 parameters, but 1 gradients"):
        optimizer.update([ft.ones(3)])


def test_a_gradient_has_the_shape_of_its_parameter() -> None:
    optimizer = fp.optim.SGD([fp.Parameter(ft.ones(3)), fp.Parameter(ft.ones(2))])
    with pytest.raises(ShapeError, match=r"parameter 1 has shape \(2,\), its gradient \(3,\)"):
        optimizer.update([ft.ones(3), ft.ones(3)])

"""Optimizers against plain numpy in float64, written from the papers and not from the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.lazy.node import topological
from fuel_parallel.optim.muon import newton_schulz
from fuel_parallel.runtime.plan import plans

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


def sgd(
    momentum: float, rate: Callable[[int], float], *, nesterov: bool = False, weight_decay: float = 0.0
) -> Iterator[list[Array]]:
    values, velocities = start(), [np.zeros(shape) for shape in SHAPES]
    for step in range(STEPS):
        gradients = [g + weight_decay * p for g, p in zip(gradients_of(step), values, strict=True)]
        velocities = [momentum * v + g for v, g in zip(velocities, gradients, strict=True)]
        steps = velocities
        if nesterov:
            steps = [g + momentum * v for v, g in zip(velocities, gradients, strict=True)]
        values = [p - rate(step) * s for p, s in zip(values, steps, strict=True)]
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


def adam(betas: tuple[float, float], eps: float, weight_decay: float, rate: float) -> Iterator[list[Array]]:
    """Algorithm 1 of Kingma and Ba, with the decay in the gradient."""
    values = start()
    first, second = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for t in range(1, STEPS + 1):
        for i, g in enumerate(gradients_of(t - 1)):
            g = g + weight_decay * values[i]
            first[i] = betas[0] * first[i] + (1 - betas[0]) * g
            second[i] = betas[1] * second[i] + (1 - betas[1]) * g**2
            m_hat, v_hat = first[i] / (1 - betas[0] ** t), second[i] / (1 - betas[1] ** t)
            values[i] = values[i] - rate * m_hat / (np.sqrt(v_hat) + eps)
        yield list(values)


def lion(betas: tuple[float, float], weight_decay: float, rate: float) -> Iterator[list[Array]]:
    """Algorithm 2 of Chen et al."""
    values, means = start(), [np.zeros(shape) for shape in SHAPES]
    for t in range(STEPS):
        for i, g in enumerate(gradients_of(t)):
            update = np.sign(betas[0] * means[i] + (1 - betas[0]) * g)
            values[i] = values[i] - rate * (update + weight_decay * values[i])
            means[i] = betas[1] * means[i] + (1 - betas[1]) * g
        yield list(values)


def muon(nesterov: bool, scaling: str, weight_decay: float, rate: float) -> Iterator[list[Array]]:
    """Jordan's post, by the singular values: x = U S V, and each iteration is the polynomial of S."""
    others = adamw((0.9, 0.95), 1e-8, weight_decay, lambda _: rate)
    matrix, momentum = start()[0], np.zeros(SHAPES[0])
    for t in range(STEPS):
        momentum = 0.95 * momentum + gradients_of(t)[0]
        u, s, v = np.linalg.svd(gradients_of(t)[0] + 0.95 * momentum if nesterov else momentum, full_matrices=False)
        s = s / (np.sqrt(np.sum(s**2)) + 1e-7)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        scale = 0.2 * np.sqrt(4) if scaling == "rms" else np.sqrt(4 / 3)
        matrix = matrix - rate * (scale * (u * s) @ v + weight_decay * matrix)
        yield [matrix, *next(others)[1:]]


def assert_same_path(ours: Iterator[list[Array]], theirs: Iterator[list[Array]]) -> None:
    for step, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        for a, b in zip(mine, expected, strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=f"after step {step}")


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_sgd_takes_the_steps_of_plain_numpy(momentum: float, nesterov: bool, weight_decay: float) -> None:
    ours = run(lambda p: fp.optim.SGD(p, lr=0.05, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay))
    assert_same_path(ours, sgd(momentum, lambda _: 0.05, nesterov=nesterov, weight_decay=weight_decay))


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


@pytest.mark.parametrize(("eps", "weight_decay"), [(1e-8, 0.0), (1e-3, 0.5)])
def test_adam_takes_the_steps_of_plain_numpy(eps: float, weight_decay: float) -> None:
    ours = run(lambda p: fp.optim.Adam(p, lr=0.02, betas=(0.8, 0.95), eps=eps, weight_decay=weight_decay))
    assert_same_path(ours, adam((0.8, 0.95), eps, weight_decay, 0.02))


@pytest.mark.parametrize(("betas", "weight_decay"), [((0.9, 0.99), 0.0), ((0.95, 0.98), 0.5)])
def test_lion_takes_the_steps_of_plain_numpy(betas: tuple[float, float], weight_decay: float) -> None:
    ours = run(lambda p: fp.optim.Lion(p, lr=0.02, betas=betas, weight_decay=weight_decay))
    assert_same_path(ours, lion(betas, weight_decay, 0.02))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scaling", "weight_decay"), [("rms", 0.1), ("spectral", 0.0)])
def test_muon_takes_the_steps_of_plain_numpy(nesterov: bool, scaling: str, weight_decay: float) -> None:
    ours = run(lambda p: fp.optim.Muon(p, lr=0.02, nesterov=nesterov, scaling=scaling, weight_decay=weight_decay))
    for mine, expected in zip(ours, muon(nesterov, scaling, weight_decay, 0.02), strict=True):
        for a, b in zip(mine, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)  # the reference is by singular values


@settings(max_examples=15)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_newton_and_schulz_keep_singular_vectors_and_bring_values_near_1(rows: int, columns: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(rows, columns))
    found = newton_schulz(ft.asarray(x)).numpy()
    u, s, v = np.linalg.svd(x, full_matrices=False)
    inner = u.T @ found @ v.T
    np.testing.assert_allclose(inner, np.diag(np.diag(inner)), atol=1e-9 / s.min())
    large = s > 0.02 * np.sqrt(np.sum(s**2))
    assert ((np.diag(inner) > 0.5) & (np.diag(inner) < 1.3))[large].all()


def test_a_matrix_may_be_left_to_adamw() -> None:
    ours = run(lambda p: fp.optim.Muon(p, lr=0.02, matrices=[False] * 3, weight_decay=0.01))
    assert_same_path(ours, adamw((0.9, 0.95), 1e-8, 0.01, lambda _: 0.02))


OPTIMIZERS = [
    fp.optim.SGD,
    partial(fp.optim.SGD, momentum=0.9, nesterov=True),
    fp.optim.Adam,
    fp.optim.AdamW,
    fp.optim.Lion,
    fp.optim.Muon,
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_rates_and_decays_may_be_each_parameters_own(make: Callable[..., Any]) -> None:
    together = run(lambda p: make(p, lr=0.02, weight_decay=[0.5, 0.0, 0.1], lr_scale=[1.0, 0.5, 0.0]))
    own = [(0.5, 0.02), (0.0, 0.01), (0.1, 0.0)]
    alone = [run(lambda p, w=w, lr=lr: make(p, lr=lr, weight_decay=w)) for w, lr in own]
    for found, *each in zip(together, *alone, strict=True):
        for index, values in enumerate(each):
            np.testing.assert_allclose(found[index], values[index], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(found[2], start()[2])  # at a rate of 0 nothing moves


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_new_rate_makes_no_new_plan(make: Callable[..., Any]) -> None:
    schedule = fp.optim.schedules.cosine(0.1, 0.0, STEPS)
    parameters = [fp.Parameter(ft.asarray(value)) for value in start()]
    optimizer = make(parameters)
    for step in range(STEPS):
        optimizer.lr = schedule(step)
        optimizer.update([ft.asarray(g) for g in gradients_of(step)])
        fp.realize(optimizer)
        if step == 1:
            made = plans.made
    assert plans.made == made


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_state_is_kept_and_comes_back(make: Callable[..., Any], tmp_path: Path) -> None:
    *_, expected = run(make)
    parameters = [fp.Parameter(ft.asarray(value)) for value in start()]
    optimizer = make(parameters)
    for step in range(STEPS):
        if step == 7:
            fp.checkpoint.save(tmp_path, {"parameters": parameters, "optimizer": optimizer}, step=step)
            parameters = [fp.Parameter(ft.zeros(shape, dtype="float64")) for shape in SHAPES]
            optimizer = make(parameters, lr=9.0)
            fp.checkpoint.load(tmp_path, {"parameters": parameters, "optimizer": optimizer})
        optimizer.update([ft.asarray(g) for g in gradients_of(step)])
        fp.realize(optimizer)
    for parameter, value in zip(parameters, expected, strict=True):
        np.testing.assert_array_equal(parameter.numpy(), value)


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


@pytest.mark.parametrize(
    ("make", "nodes"),
    [
        (partial(fp.optim.SGD, weight_decay=0.1), 1),
        (partial(fp.optim.SGD, momentum=0.9, nesterov=True), 2),
        (partial(fp.optim.Adam, weight_decay=0.1), 3),
        (fp.optim.AdamW, 3),
        (fp.optim.Lion, 2),
    ],
)
def test_an_update_builds_a_node_for_each_variable(make: Callable[..., Any], nodes: int) -> None:
    def built(count: int) -> int:
        parameters = [fp.Parameter(ft.ones((2, 3))) for _ in range(count)]
        optimizer = make(parameters)
        fp.realize(optimizer)
        optimizer.update([ft.asarray(np.ones((2, 3), np.float32)) for _ in parameters])
        return sum(node.value is None for node in topological([t.node for t in optimizer.__tensors__()]))

    assert built(5) - built(2) == 3 * nodes


@pytest.mark.parametrize("make", [partial(fp.optim.SGD, momentum=0.5), partial(fp.optim.AdamW, eps=1.0)])
def test_a_gradient_passes_through_updates(make: Callable[..., Any]) -> None:
    """As in learning to learn: how the loss after two steps depends on what the gradients of these depend on."""

    def after(x: ft.Tensor) -> ft.Tensor:
        weight = fp.Parameter(ft.asarray(np.array([1.0, -2.0])))
        optimizer = make([weight], lr=0.1)
        for _ in range(2):
            optimizer.update([ft.grad(ft.sum(ft.square(weight * x)), weight)])
        return ft.sum(ft.square(weight) * weight)

    x, step = np.array([0.7, 1.3]), 1e-6
    slope = ft.grad(after(at := ft.asarray(x)), at).numpy()
    for i, e in enumerate(np.eye(2) * step):
        difference = (after(ft.asarray(x + e)).numpy() - after(ft.asarray(x - e)).numpy()) / (2 * step)
        assert slope[i] == pytest.approx(difference, rel=1e-5)


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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_there_is_something_to_optimize(optimizer: Callable[..., Any]) -> None:
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: fp.optim.SGD(p, momentum=1.0), r"SGD: momentum must lie in \[0, 1\), but is 1.0"),
        (lambda p: fp.optim.SGD(p, nesterov=True), "looks ahead along the momentum, which is 0; give one"),
        (lambda p: fp.optim.Adam(p, eps=-1.0), "Adam: eps must be 0 or more, but is -1.0"),
        (lambda p: fp.optim.AdamW(p, weight_decay=[0.1]), "AdamW: weight_decay has 1 values for 3 parameters; give"),
        (lambda p: fp.optim.Lion(p, lr_scale=-1.0), "Lion: lr_scale must be 0 or more, but is -1.0 for parameter 0"),
        (lambda p: fp.optim.Lion(p, betas=(0.9, 1.0)), r"Lion: betas must lie in \[0, 1\)"),
        (lambda p: fp.optim.Muon(p, momentum=-0.1), r"Muon: momentum must lie in \[0, 1\), but is -0.1"),
        (lambda p: fp.optim.Muon(p, scaling="adam"), "Muon: scaling is one of 'rms', 'spectral', not 'adam'"),
        (lambda p: fp.optim.Muon(p, iterations=0), "Muon: iterations is a whole number of at least 1, not 0"),
        (lambda p: fp.optim.Muon(p, matrices=[True]), "Muon: matrices has 1 values for 3 parameters"),
        (lambda p: fp.optim.Muon(p, matrices=[True, True, False]), r"parameter 1 has shape \(5,\), which is no matrix"),
    ],
)
def test_mistakes_are_named(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make([fp.Parameter(ft.asarray(value)) for value in start()])


def test_a_part_of_a_matrix_needs_the_ranks_of_the_others() -> None:
    part = fp.Parameter(ft.zeros((2, 3)), shard=fp.Shard((4, 3), (2, 0)))
    with pytest.raises(ArgumentError, match=r"a part of a matrix of shape \(4, 3\); give the communicator"):
        fp.optim.Muon([part])

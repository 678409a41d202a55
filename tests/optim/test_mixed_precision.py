"""Masters in float32 keep what 16 bits lose; steps that overflow are skipped, and the scale follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.optim import SGD, Adam, AdamW, Lion, MixedPrecision, Muon, Optimizer
from fuel_parallel.runtime.plan import plans

STEPS = 60


def network(dtype: str) -> tuple[fp.Linear, fp.Linear]:
    """Weights that are numbers of bfloat16 and of float16, so that all begin alike."""
    layers = (
        fp.Linear(8, 16, ft.random.Generator(0), dtype=dtype),
        fp.Linear(16, 1, ft.random.Generator(1), dtype=dtype),
    )
    for index, layer in enumerate(layers):
        draw = np.random.default_rng(index)
        layer.weight.assign(ft.astype(ft.asarray(draw.integers(-8, 9, layer.weight.shape) / 16.0), dtype))
    return layers


def loss_of(layers: tuple[fp.Linear, fp.Linear], dtype: str) -> ft.Tensor:
    draw = np.random.default_rng(9)
    x = draw.normal(size=(64, 8))
    y = np.sin(x @ draw.normal(size=(8, 1)))
    found = layers[1](ft.tanh(layers[0](ft.astype(ft.asarray(x), dtype))))
    return ft.mean(ft.square(ft.astype(found, "float32") - ft.asarray(y.astype(np.float32))))


def train(dtype: str, make: Callable[[list[fp.Parameter]], Optimizer], steps: int = STEPS) -> tuple[list[float], Any]:
    layers = network(dtype)
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = make(parameters)
    losses = []
    for _ in range(steps):
        loss = loss_of(layers, dtype)
        scaled = optimizer.scaled(loss) if isinstance(optimizer, MixedPrecision) else loss
        optimizer.update(ft.grad(scaled, parameters))
        fp.realize(loss, layers, optimizer)
        losses.append(loss.item())
    return losses, optimizer


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("inner", [SGD, AdamW, Muon])
def test_training_in_16_bits_with_masters_follows_float32(dtype: str, inner: Callable[..., Optimizer]) -> None:
    rate = 2e-3 if inner is not SGD else 2e-2
    wanted, _ = train("float32", lambda p: inner(p, lr=rate))
    found, optimizer = train(dtype, lambda p: MixedPrecision(p, lambda masters: inner(masters, lr=rate)))
    assert wanted[-1] < 0.9 * wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=0.02)
    assert {p.dtype.name for p in optimizer.parameters} == {dtype}
    assert {m.dtype.name for m in optimizer.masters} == {"float32"}
    for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
        np.testing.assert_array_equal(parameter.numpy(), master.numpy().astype(parameter.dtype))


def test_without_masters_small_steps_are_lost() -> None:
    """Else the test above would prove little."""
    for masters, moved in ((False, 0.0), (True, 100 * 2.0**-12)):
        weight = fp.Parameter(ft.ones((), dtype=ft.bfloat16))

        def make(p: list[fp.Parameter]) -> Optimizer:
            return SGD(p, lr=2.0**-12)

        optimizer = MixedPrecision([weight], make) if masters else make([weight])
        for _ in range(100):
            optimizer.update([ft.ones((), dtype=ft.bfloat16)])
        assert 1 - weight.item() == pytest.approx(moved, rel=0.1)


@pytest.mark.parametrize("inner", [SGD, Adam, AdamW, Lion, Muon])
def test_in_float32_it_is_the_optimizer_itself(inner: Callable[..., Optimizer]) -> None:
    wanted, _ = train("float32", lambda p: inner(p, lr=1e-2), 10)
    found, _ = train("float32", lambda p: MixedPrecision(p, lambda masters: inner(masters, lr=1e-2)), 10)
    assert found == wanted


def test_an_overflow_changes_nothing_but_the_scale_and_reads_nothing() -> None:
    weights = [fp.Parameter(ft.ones((2, 3), dtype=ft.float16)), fp.Parameter(ft.ones(4, dtype=ft.float16))]
    optimizer = MixedPrecision(weights, lambda m: AdamW(m, lr=0.1), loss_scale=2.0**10, growth_interval=3)
    scales, kept = [], []
    for step in range(10):
        bad = {2: np.inf, 3: np.nan}.get(step, 1.0)
        optimizer.update([ft.ones((2, 3), dtype=ft.float16), ft.asarray(np.array([1.0, bad, 1.0, 1.0], np.float16))])
        assert not weights[0].is_realized
        fp.realize(optimizer)
        scales.append(optimizer.loss_scale.item())
        kept.append([np.array(t.numpy()) for t in (*weights, *optimizer.masters, *optimizer.optimizer.means)])
        if step == 5:
            made = plans.made
    assert [scale / 2**10 for scale in scales] == [1, 1, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5, 0.5, 1]
    assert optimizer.skipped_steps.item() == 2
    assert optimizer.optimizer.step.item() == 8
    assert plans.made == made
    for before, after in zip(kept[1], kept[3], strict=True):
        np.testing.assert_array_equal(before, after)
    assert all((a != b).all() for a, b in zip(kept[3], kept[4], strict=True))


def test_the_scale_stays_within_its_bounds_and_where_it_is_told_to() -> None:
    weight = fp.Parameter(ft.ones((), dtype=ft.float16))
    high = MixedPrecision([weight], lambda m: SGD(m), loss_scale=2.0**24, growth_interval=1)
    low = MixedPrecision([weight], lambda m: SGD(m), loss_scale=1.0, growth_interval=1)
    still = MixedPrecision([weight], lambda m: SGD(m), loss_scale=8.0, growth_interval=None)
    bfloat16 = MixedPrecision([fp.Parameter(ft.ones((), dtype=ft.bfloat16))], lambda m: SGD(m), growth_interval=1)
    for optimizer, gradient in ((high, 1.0), (low, np.inf), (still, 1.0), (still, np.inf), (bfloat16, 1.0)):
        optimizer.update([ft.astype(ft.asarray(gradient), optimizer.parameters[0].dtype)])
    assert [o.loss_scale.item() for o in (high, low, still, bfloat16)] == [2.0**24, 1.0, 8.0, 1.0]
    assert MixedPrecision([weight], lambda m: SGD(m)).loss_scale.item() == 2.0**15


def test_small_gradients_of_float16_survive_by_the_scale() -> None:
    def moved(loss_scale: float) -> float:
        weight = fp.Parameter(ft.ones((), dtype=ft.float16))
        optimizer = MixedPrecision([weight], lambda m: SGD(m, lr=1e6), loss_scale=loss_scale)
        loss = ft.astype(weight * ft.asarray(np.float16(1e-4)) * ft.asarray(np.float16(1e-4)), "float32")
        optimizer.update(ft.grad(optimizer.scaled(loss), [weight]))
        return float(1 - optimizer.masters[0].item())

    assert moved(1.0) == 0.0
    assert moved(2.0**12) == pytest.approx(1e-2, rel=0.01)


@pytest.mark.parametrize("inner", [AdamW, Muon])
def test_all_of_it_is_kept_and_comes_back(inner: Callable[..., Optimizer], tmp_path: Path) -> None:
    def fresh(rate: float) -> tuple[Any, list[fp.Parameter], MixedPrecision]:
        layers = network("bfloat16")
        parameters = [p for layer in layers for p in layer.parameters()]
        make = lambda m: inner(m, lr=rate)  # noqa: E731
        return layers, parameters, MixedPrecision(parameters, make, loss_scale=4.0, growth_interval=3)

    def step(layers: Any, parameters: list[fp.Parameter], optimizer: MixedPrecision) -> None:
        optimizer.update(ft.grad(optimizer.scaled(loss_of(layers, "bfloat16")), parameters))
        fp.realize(layers, optimizer)

    one = fresh(1e-2)
    for _ in range(4):
        step(*one)
    other = fresh(9.0)
    step(*other)
    fp.checkpoint.save(tmp_path, {"model": one[0], "optimizer": one[2]}, step=4)
    fp.checkpoint.load(tmp_path, {"model": other[0], "optimizer": other[2]})
    assert other[2].lr == 1e-2
    for run in (one, other):
        step(*run)
    for a, b in zip(one[2].masters, other[2].masters, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert one[2].loss_scale.item() == other[2].loss_scale.item() == 8.0


def test_the_rate_is_that_of_the_inner_optimizer() -> None:
    weight = fp.Parameter(ft.ones((), dtype=ft.bfloat16))
    optimizer = MixedPrecision([weight], lambda m: SGD(m, lr=0.5))
    optimizer.lr = 0.25
    assert (optimizer.lr, optimizer.optimizer.lr) == (0.25, 0.25)
    optimizer.update([ft.ones((), dtype=ft.bfloat16)])
    assert weight.item() == 0.75


def test_mistakes_are_named() -> None:
    weights = [fp.Parameter(ft.ones(3, dtype=ft.bfloat16)), fp.Parameter(ft.ones(2))]
    with pytest.raises(ArgumentError, match="an optimizer of all the parameters that it is given, in their order"):
        MixedPrecision(weights, lambda masters: AdamW(masters[::-1]))
    with pytest.raises(ArgumentError, match=r"loss_scale lies between 1 and 2\*\*24, but is 0.5"):
        MixedPrecision(weights, AdamW, loss_scale=0.5)
    with pytest.raises(ArgumentError, match="growth_interval is at least 1, or None, not 0"):
        MixedPrecision(weights, AdamW, growth_interval=0)
    with pytest.raises(ArgumentError, match="expected at least one parameter, got none"):
        MixedPrecision([], AdamW)
    with pytest.raises(ShapeError, match=r"parameter 1 has shape \(2,\), its gradient \(3,\)"):
        MixedPrecision(weights, AdamW).update([ft.ones(3), ft.ones(3)])

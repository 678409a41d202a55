"""Clipping on one rank: against numpy, for every dtype, and what becomes of NaNs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.optim import clip_by_global_norm, clip_by_value
from fuel_parallel.runtime.plan import plans

SHAPES = [(3, 4), (5,), (), (0, 2)]


def drawn(seed: int, size: float = 1.0) -> list[np.ndarray[Any, Any]]:
    draw = np.random.default_rng(seed)
    return [np.asarray(draw.normal(size=shape) * size) for shape in SHAPES]


def parameters(dtype: str = "float64") -> list[fp.Parameter]:
    return [fp.Parameter(ft.zeros(shape, dtype=dtype)) for shape in SHAPES]


@given(seed=st.integers(0, 99), size=st.floats(1e-3, 1e3), max_norm=st.floats(0.1, 10.0))
def test_the_norm_is_that_of_all_and_becomes_max_norm_where_it_was_more(
    seed: int, size: float, max_norm: float
) -> None:
    gradients = drawn(seed, size)
    clipped, norm = clip_by_global_norm([ft.asarray(g) for g in gradients], max_norm, parameters=parameters())
    expected = np.linalg.norm(np.concatenate([g.ravel() for g in gradients]))
    np.testing.assert_allclose(norm.item(), expected, rtol=1e-12)
    for found, g in zip(clipped, gradients, strict=True):
        np.testing.assert_allclose(found.numpy(), g * min(1.0, max_norm / expected), rtol=1e-12)


def test_short_gradients_stay_to_the_bit_and_a_zero_is_no_division() -> None:
    gradients = [ft.asarray(g) for g in drawn(1, 0.01)]
    clipped, _ = clip_by_global_norm(gradients, 1.0, parameters=parameters())
    for found, g in zip(clipped, gradients, strict=True):
        np.testing.assert_array_equal(found.numpy(), g.numpy())
    clipped, norm = clip_by_global_norm([p * 0.0 for p in parameters()], 1.0, parameters=parameters())
    assert norm.item() == 0.0
    assert all((g.numpy() == 0.0).all() for g in clipped)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_does_not_pass_as_small(value: float) -> None:
    gradients = drawn(2)
    gradients[1][3] = value
    clipped, norm = clip_by_global_norm([ft.asarray(g) for g in gradients], 1.0, parameters=parameters())
    assert not np.isfinite(norm.item())
    assert np.isnan(clipped[1].numpy()[3])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_keep_their_dtype_and_their_squares_do_not_overflow(dtype: str) -> None:
    gradients = [ft.full(shape, 600.0, dtype=dtype) for shape in SHAPES]
    clipped, norm = clip_by_global_norm(gradients, 1.0, parameters=parameters(dtype))
    value = gradients[0].numpy().astype(np.float64).item(0)
    np.testing.assert_allclose(norm.item(), value * np.sqrt(18), rtol=1e-6)
    assert {g.dtype.name for g in clipped} == {dtype}
    np.testing.assert_allclose(clipped[0].numpy().astype(np.float64), np.full((3, 4), 1 / np.sqrt(18)), rtol=4e-3)


def test_a_scaled_loss_is_seen_through() -> None:
    gradients = [ft.asarray(g) for g in drawn(3)]
    plain, norm = clip_by_global_norm(gradients, 0.5, parameters=parameters())
    scaled, same = clip_by_global_norm([g * 1024.0 for g in gradients], 0.5, parameters=parameters(), loss_scale=1024.0)
    assert norm.item() == same.item()
    np.testing.assert_allclose(scaled[0].numpy() / 1024.0, plain[0].numpy(), rtol=1e-12)


def test_another_limit_makes_no_new_plan_and_the_nest_stays() -> None:
    made = []
    for step in range(3):
        gradients = [ft.asarray(g) for g in drawn(step)]
        nest, _ = clip_by_global_norm(dict(zip("abcd", gradients, strict=True)), 0.5 + step, parameters=parameters())
        fp.realize(nest, clip_by_value(gradients, 0.1 + step))
        made.append(plans.made)
        assert list(nest) == ["a", "b", "c", "d"]
    assert made[0] == made[2]


def test_by_value_each_element_is_held_between_the_limits() -> None:
    gradients = [*drawn(4), np.array([np.nan, np.inf, -np.inf])]
    for found, g in zip(clip_by_value([ft.asarray(g) for g in gradients], 0.5), gradients, strict=True):
        np.testing.assert_array_equal(found.numpy(), np.clip(g, -0.5, 0.5))
    assert clip_by_value([ft.ones(3, dtype=ft.bfloat16)], ft.asarray(0.5))[0].dtype is ft.bfloat16


def test_mistakes_are_named() -> None:
    gradients = [ft.asarray(g) for g in drawn(5)]
    with pytest.raises(ArgumentError, match="clip_by_global_norm: 4 parameters, but 3 gradients"):
        clip_by_global_norm(gradients[1:], 1.0, parameters=parameters())
    with pytest.raises(ShapeError, match=r"parameter 0 has shape \(3, 4\), its gradient \(4, 3\)"):
        clip_by_global_norm([gradients[0].mT, *gradients[1:]], 1.0, parameters=parameters())
    with pytest.raises(ArgumentError, match=r"max_norm must be above 0, but is 0"):
        clip_by_global_norm(gradients, 0.0, parameters=parameters())
    with pytest.raises(ArgumentError, match=r"limit must be above 0, but is nan"):
        clip_by_value(gradients, float("nan"))
    with pytest.raises(ShapeError, match=r"limit is one number, not a tensor of shape \(2,\)"):
        clip_by_value(gradients, ft.ones(2))
    part = fp.Parameter(ft.zeros((2, 3)), shard=fp.Shard((4, 3), (2, 0)))
    with pytest.raises(ArgumentError, match=r"a part of a tensor of shape \(4, 3\), .* tp=mesh\[\"tp\"\]"):
        clip_by_global_norm([ft.ones((2, 3))], 1.0, parameters=[part])

"""Sorting, searching and running totals along any axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DTypeError, FuelError, ShapeError
from fuel_parallel.lazy import dtypes

Array = np.ndarray[Any, Any]
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
SORTABLE = st.sampled_from([ft.bool, *dtypes.SIGNED, *dtypes.UNSIGNED, *dtypes.FLOATING])


def repeated(dtype: Any, shape: tuple[int, ...]) -> Array:
    """Values with many ties."""
    return np.random.default_rng(sum(shape)).integers(0, 4, shape).astype(dtype)


def same(found: ft.Tensor, wanted: Any) -> None:
    assert found.shape == np.shape(wanted)
    np.testing.assert_array_equal(found.numpy(), wanted)


@given(SHAPES, SORTABLE, st.booleans(), st.data())
def test_sorting_keeps_the_order_of_equals(shape: Any, dtype: Any, descending: bool, data: st.DataObject) -> None:
    x = repeated(dtype, shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    keys = x.astype(np.float64)
    order = np.argsort(-keys if descending else keys, axis=axis, kind="stable")
    tensor = ft.asarray(x)
    positions = ft.argsort(tensor, axis=axis, descending=descending)
    assert positions.dtype == ft.int64
    same(positions, order)
    sorted_x = ft.sort(tensor, axis=axis, descending=descending)
    assert sorted_x.dtype == dtype
    same(sorted_x, np.take_along_axis(x, order, axis))


@given(SHAPES, SORTABLE, st.booleans(), st.data())
def test_topk_is_the_head_of_the_sorted(shape: Any, dtype: Any, largest: bool, data: st.DataObject) -> None:
    x = ft.asarray(repeated(dtype, shape))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    k = data.draw(st.integers(0, shape[axis]))
    values, positions = ft.topk(x, k, axis=axis, largest=largest)
    head = (slice(None),) * (axis % len(shape)) + (slice(k),)
    same(values, ft.sort(x, axis=axis, descending=largest)[head].numpy())
    same(ft.take_along_axis(x, positions, axis=axis), values.numpy())


def test_nan_is_the_largest() -> None:
    x = ft.asarray([2.0, ft.nan, 1.0])
    assert ft.argsort(x).tolist() == [2, 0, 1]
    assert ft.argsort(x, descending=True).tolist() == [1, 0, 2]
    assert ft.argsort(x.astype(ft.bfloat16)).tolist() == [2, 0, 1]


@pytest.mark.parametrize("side", ["left", "right"])
@given(st.lists(st.integers(0, 5), max_size=6), st.lists(st.integers(-1, 6), max_size=4))
def test_searchsorted(side: Any, values: list[int], wanted: list[int]) -> None:
    x1, x2 = np.sort(np.array(values, dtype=np.float32)), np.array(wanted, dtype=np.float32)
    same(ft.searchsorted(ft.asarray(x1), ft.asarray(x2), side=side), np.searchsorted(x1, x2, side))
    mixed = np.array(values, dtype=np.float32)
    sorter = ft.argsort(ft.asarray(mixed))
    same(ft.searchsorted(ft.asarray(mixed), ft.asarray(x2), side=side, sorter=sorter), np.searchsorted(x1, x2, side))


@pytest.mark.parametrize(("function", "oracle"), [(ft.cumulative_sum, np.cumsum), (ft.cumulative_prod, np.cumprod)])
@given(SHAPES, st.sampled_from(dtypes.ALL), st.booleans(), st.data())
def test_running_totals(function: Any, oracle: Any, shape: Any, dtype: Any, initial: bool, data: st.DataObject) -> None:
    x = repeated(dtype, shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    wanted = oracle(x.astype(np.float64) if dtypes.is_half(dtype) else x, axis=axis)
    if initial:
        before = np.full_like(np.take(wanted, [0] if shape[axis] else [], axis), 0 if oracle is np.cumsum else 1)
        if not shape[axis]:
            place = axis % len(shape)
            one = (*shape[:place], 1, *shape[place + 1 :])
            before = np.full(one, 0 if oracle is np.cumsum else 1, dtype=wanted.dtype)
        wanted = np.concatenate([before, wanted], axis)
    found = function(ft.asarray(x), axis=axis, include_initial=initial)
    assert found.dtype == ft.sum(ft.asarray(x)).dtype
    same(found, wanted)


def test_the_gradient_of_a_running_product_is_right_with_zeros() -> None:
    x = ft.asarray([2.0, 0.0, 3.0], dtype=ft.float64)
    assert ft.grad(ft.sum(ft.cumulative_prod(x)), x).tolist() == [1.0, 8.0, 0.0]


MISTAKES: list[tuple[Any, type[FuelError], str]] = [
    (lambda: ft.argsort(ft.zeros(())), ShapeError, "argsort: expected at least 1 dimension, but x is 0-d"),
    (lambda: ft.sort(ft.zeros(2, dtype=ft.complex64)), DTypeError, "argsort: expected one of .*dtype is complex64"),
    (lambda: ft.sort(ft.zeros((2, 3)), axis=2), ShapeError, "argsort: axis 2 is out of bounds"),
    (lambda: ft.topk(ft.zeros(3), 4), ArgumentError, "k must lie between 0 and the extent 3 of axis -1, but is 4"),
    (lambda: ft.searchsorted(ft.zeros((2, 3)), 1.0), ShapeError, r"x1 must be 1-d, but has shape \(2, 3\)"),
    (lambda: ft.searchsorted(ft.zeros(2), 1.0, side="up"), ArgumentError, "side is 'left' or 'right', not 'up'"),
    (lambda: ft.cumulative_sum(ft.zeros((2, 3))), ShapeError, r"axis is needed for a tensor of shape \(2, 3\)"),
]


@pytest.mark.parametrize(("make", "error", "text"), MISTAKES)
def test_mistakes_are_named(make: Any, error: type[FuelError], text: str) -> None:
    with pytest.raises(error, match=text):
        make()

"""Reductions over any axes of any shape, also without elements, are those of the standard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

import fuel_parallel.lazy as ft
from fuel_parallel.errors import DTypeError, ShapeError
from fuel_parallel.lazy import dtypes

Array = np.ndarray[Any, Any]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
WIDENED = dict.fromkeys((ft.bool, *dtypes.SIGNED), ft.int64) | dict.fromkeys(dtypes.UNSIGNED, ft.uint64)


@st.composite
def shapes_and_axes(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    shape = draw(SHAPES)
    ndim = len(shape)
    axes = st.lists(st.integers(-ndim, ndim - 1), unique_by=lambda a: a % ndim).map(tuple) if ndim else st.just(())
    single = st.integers(-ndim, ndim - 1) if ndim else st.none()
    return shape, draw(st.one_of(st.none(), single, axes))


def data(dtype: Any, shape: tuple[int, ...]) -> Array:
    drawn = np.random.default_rng(sum(shape)).integers(0, 5, shape)
    return (drawn * (1 + 0.5j) if dtype in dtypes.COMPLEX else drawn).astype(dtype)


def close(found: ft.Tensor, wanted: Any, dtype: Any) -> None:
    got = found.numpy()
    assert found.dtype == got.dtype == dtype
    assert found.shape == got.shape == np.shape(wanted)
    wide = np.complex128 if dtype in dtypes.COMPLEX else np.float64
    tolerance = 4 * ft.finfo(dtype).eps if dtypes.is_inexact(dtype) else 0
    np.testing.assert_allclose(got.astype(wide), np.asarray(wanted).astype(wide), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["sum", "prod", "any", "all", "count_nonzero"])
@given(shapes_and_axes(), st.booleans(), st.sampled_from(dtypes.ALL))
def test_totals(name: str, where: Any, keepdims: bool, dtype: Any) -> None:
    shape, axis = where
    x = data(dtype, shape)
    result = {"any": ft.bool, "all": ft.bool, "count_nonzero": ft.int64}.get(name, WIDENED.get(dtype, dtype))
    wide = x.astype(np.float64) if dtypes.is_half(dtype) else x
    if name == "count_nonzero" and axis == ():
        wanted: Any = (x != 0).astype(np.int64)
    else:
        wanted = getattr(np, name)(wide, axis=axis, keepdims=keepdims)
    close(getattr(ft, name)(ft.asarray(x), axis=axis, keepdims=keepdims), wanted, result)


@pytest.mark.parametrize("name", ["mean", "var", "std"])
@given(shapes_and_axes(), st.booleans(), st.sampled_from(dtypes.FLOATING))
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:Degrees of freedom", "ignore:invalid value")
def test_statistics_are_nan_of_nothing(name: str, where: Any, keepdims: bool, dtype: Any) -> None:
    shape, axis = where
    x = data(dtype, shape)
    wanted = getattr(np, name)(x.astype(np.float64), axis=axis, keepdims=keepdims)
    close(getattr(ft, name)(ft.asarray(x), axis=axis, keepdims=keepdims), wanted, dtype)


def test_correction_is_taken_from_the_divisor() -> None:
    x = ft.asarray([1.0, 2.0, 4.0, 9.0])
    assert ft.var(x, correction=1).item() == pytest.approx(np.var(x.numpy(), ddof=1))
    assert np.isnan(ft.var(x[:1], correction=1).item())


def test_integers_are_averaged_as_floats() -> None:
    assert (ft.mean(ft.asarray([1, 2])).item(), ft.mean(ft.asarray([1, 2])).dtype) == (1.5, ft.float32)


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
@given(shapes_and_axes(), st.booleans(), st.sampled_from([ft.bool, ft.int8, ft.uint64, *dtypes.FLOATING]))
def test_extremes(name: str, where: Any, keepdims: bool, dtype: Any) -> None:
    shape, axis = where
    if name.startswith("arg") and isinstance(axis, tuple):
        axis = None
    x = data(dtype, shape)
    tensor = ft.asarray(x)
    try:
        wanted = getattr(np, name)(x.astype(np.float64), axis=axis, keepdims=keepdims)
    except ValueError:
        with pytest.raises(ShapeError, match=rf"{name}: cannot .* \(shape \({', '.join(map(str, shape))}"):
            getattr(ft, name)(tensor, axis=axis, keepdims=keepdims)
        return
    result = ft.int64 if name.startswith("arg") else dtype
    close(getattr(ft, name)(tensor, axis=axis, keepdims=keepdims), wanted, result)


@pytest.mark.parametrize("dtype", dtypes.FLOATING, ids=lambda d: d.name)
def test_nan_wins_in_max_and_min(dtype: Any) -> None:
    x = ft.asarray(np.array([1.0, np.nan, 3.0]).astype(dtype))
    assert np.isnan(float(ft.max(x)))
    assert np.isnan(float(ft.min(x)))
    assert ft.argmax(x).item() == 1


@given(shapes_and_axes(), st.booleans())
def test_logsumexp(where: Any, keepdims: bool) -> None:
    shape, axis = where
    if 0 in shape or axis == ():
        return
    x = np.random.default_rng(1).normal(0, 300, shape)
    wanted = np.reshape(
        special.logsumexp(x, axis=axis, keepdims=keepdims), np.sum(x, axis=axis, keepdims=keepdims).shape
    )
    close(ft.logsumexp(ft.asarray(x), axis=axis, keepdims=keepdims), wanted, ft.float64)


def test_logsumexp_of_infinities() -> None:
    assert ft.logsumexp(ft.asarray([-ft.inf, -ft.inf])).item() == -ft.inf
    assert ft.logsumexp(ft.asarray([ft.inf, 0.0])).item() == ft.inf


@pytest.mark.parametrize("name", ["sum", "prod", "cumulative_sum", "cumulative_prod"])
@pytest.mark.parametrize("dtype", [ft.int8, ft.uint16, ft.float16, ft.float64, ft.complex64], ids=lambda d: d.name)
def test_a_dtype_that_is_asked_for_is_given(name: str, dtype: Any) -> None:
    x = ft.asarray([100, 27, 2], dtype=ft.int8)
    found = getattr(ft, name)(x, dtype=dtype)
    assert found.dtype == dtype
    with np.errstate(all="ignore"):
        wanted = getattr(np, name)(np.array([100, 27, 2]), **({} if name in ("sum", "prod") else {"axis": 0}))
        np.testing.assert_array_equal(found.numpy(), wanted.astype(dtype))


def test_halves_are_summed_in_single_precision() -> None:
    x = ft.ones(5000, dtype=ft.float16)
    assert ft.sum(x).item() == 5000.0
    assert ft.mean(x * 20).item() == 20.0


AXES: list[tuple[Any, str]] = [
    (2, r"sum: axis 2 is out of bounds for a tensor of 2 dimensions"),
    (-3, r"sum: axis -3 is out of bounds for a tensor of 2 dimensions"),
    ((0, -2), r"sum: an axis appears twice in \(0, -2\)"),
    (0.5, r"sum: an axis is an int, not 0.5"),
]


@pytest.mark.parametrize(("axis", "text"), AXES)
def test_wrong_axes_are_named(axis: Any, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        ft.sum(ft.zeros((2, 3)), axis=axis)


def test_dtypes_without_an_order_have_no_extremes() -> None:
    with pytest.raises(DTypeError, match=r"max: expected one of .* but the dtype is complex64"):
        ft.max(ft.zeros(3, dtype=ft.complex64))

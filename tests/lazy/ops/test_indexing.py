"""Indexing: any key that numpy takes and that leaves the shape known reads and writes what numpy's does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fuel_parallel.lazy as ft
from fuel_parallel.errors import DTypeError, FuelError, IndexingError, RealizeError, ShapeError
from fuel_parallel.lazy import dtypes

Array = np.ndarray[Any, Any]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
INTEGERS = [*dtypes.SIGNED, *dtypes.UNSIGNED]


def numbered(shape: tuple[int, ...]) -> Array:
    return np.arange(1, math.prod(shape) + 1).reshape(shape)


def same(found: ft.Tensor, wanted: Any) -> None:
    assert found.shape == np.shape(wanted)
    np.testing.assert_array_equal(found.numpy(), wanted)


@st.composite
def advanced_keys(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Index arrays for some of the dimensions, and slices, integers, None and an Ellipsis between them."""
    common = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
    key: list[Any] = []
    for extent in shape[: draw(st.integers(0, len(shape)))]:
        kind = draw(st.sampled_from("asi" if extent else "s"))
        if kind == "a":
            index_shape = tuple(draw(st.sampled_from((n, 1))) for n in common)[draw(st.integers(0, len(common))) :]
            dtype = draw(st.sampled_from(INTEGERS))
            lowest = 0 if dtype.kind == "u" else -extent
            count = math.prod(index_shape)
            drawn = draw(st.lists(st.integers(lowest, extent - 1), min_size=count, max_size=count))
            key.append(np.array(drawn, dtype=dtype).reshape(index_shape))
        elif kind == "s":
            key.append(draw(st.slices(extent)))
        else:
            key.append(draw(st.integers(-extent, extent - 1)))
    for _ in range(draw(st.integers(0, 2))):
        key.insert(draw(st.integers(0, len(key))), None)
    if draw(st.booleans()):
        key.append(...)
    return tuple(key)


def on_tensors(key: Any) -> Any:
    """The same key with tensors for arrays."""
    if isinstance(key, tuple):
        return tuple(ft.asarray(part) if isinstance(part, np.ndarray) else part for part in key)
    return ft.asarray(key) if isinstance(key, np.ndarray) else key


@given(SHAPES, st.data())
def test_basic_keys_read_as_in_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = numbered(shape)
    key = data.draw(hnp.basic_indices(shape, allow_newaxis=True, max_dims=6))
    same(ft.asarray(x)[key], x[key])


@given(SHAPES, st.data())
def test_advanced_keys_read_as_in_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = numbered(shape)
    key = data.draw(advanced_keys(shape))
    same(ft.asarray(x)[on_tensors(key)], x[key])
    same(ft.asarray(x)[key], x[key])


@given(SHAPES, st.data())
def test_keys_write_as_in_numpy(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = numbered(shape)
    key = data.draw(st.one_of(hnp.basic_indices(shape, allow_newaxis=True, max_dims=6), advanced_keys(shape)))
    before = ft.asarray(x)
    tensor = ft.Tensor(before.node)
    value = -numbered(x[key].shape[1:])
    tensor[on_tensors(key)] = ft.asarray(value)
    wanted = x.copy()
    wanted[key] = value
    same(tensor, wanted)
    same(before, x)


@given(SHAPES, st.data())
def test_gradient_of_reading_is_accumulation(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = ft.asarray(numbered(shape), dtype=ft.float64)
    key = data.draw(st.one_of(hnp.basic_indices(shape, allow_newaxis=True, max_dims=6), advanced_keys(shape)))
    read = x[on_tensors(key)]
    cotangent = np.random.default_rng(1).normal(size=read.shape)
    wanted = np.zeros(shape)
    np.add.at(wanted, key, cotangent)
    found = ft.grad(read, x, cotangent=ft.asarray(cotangent))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", dtypes.FLOATING, ids=lambda d: d.name)
@pytest.mark.parametrize("axis", [0, 1])
def test_many_hits_of_one_row_are_summed_exactly_in_single_precision(dtype: Any, axis: int) -> None:
    table = ft.zeros((3, 3), dtype=dtype)
    rows = ft.asarray(np.repeat([-1, 1], 200))
    taken = ft.take(table, rows, axis=axis)
    found = ft.grad(ft.sum(taken), table).numpy().astype(np.float64)
    wanted = np.array([0.0, 200.0, 200.0])
    np.testing.assert_array_equal(found, np.broadcast_to(wanted[:, None] if axis == 0 else wanted, (3, 3)))


@given(SHAPES.filter(lambda shape: len(shape) > 0), st.data())
def test_take(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = numbered(shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    extent = shape[axis]
    index_shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)) if extent else (0,)
    indices = np.random.default_rng(0).integers(-extent, max(extent, 1), index_shape)
    same(ft.take(ft.asarray(x), ft.asarray(indices), axis=axis), np.take(x, indices, axis))


def test_take_accepts_lists_and_numbers() -> None:
    x = ft.asarray([10.0, 20.0, 30.0])
    assert ft.take(x, [2, 0]).tolist() == [30.0, 10.0]
    assert ft.take(x, 1).item() == 20.0
    assert ft.take(x, np.array([[1]])).tolist() == [[20.0]]


@given(SHAPES.filter(lambda shape: len(shape) > 0), st.data())
def test_take_along_axis(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = numbered(shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    place, extent = axis % len(shape), shape[axis]
    count = data.draw(st.integers(0, 4)) if extent else 0
    indices = np.random.default_rng(0).integers(-extent, max(extent, 1), (*shape[:place], count, *shape[place + 1 :]))
    found = ft.take_along_axis(ft.asarray(x), ft.asarray(indices), axis=axis)
    same(found, np.take_along_axis(x, indices, axis))


def test_one_hot() -> None:
    assert ft.one_hot(ft.asarray([1, 0]), 3).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert ft.one_hot(ft.asarray(5), 3, dtype=ft.int8).tolist() == [0, 0, 0]


@given(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3), st.data())
def test_a_mask_writes_where_it_is_true(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = numbered(shape)
    mask = data.draw(hnp.arrays(bool, shape[: data.draw(st.integers(1, len(shape)))]))
    tensor = ft.asarray(x)
    tensor[ft.asarray(mask)] = 0
    wanted = x.copy()
    wanted[mask] = 0
    same(tensor, wanted)


def test_an_index_may_be_a_tensor_that_is_not_computed_yet() -> None:
    x = ft.asarray([10.0, 20.0, 30.0])
    assert x[ft.argmax(x)].item() == 30.0
    assert x[ft.argsort(x, descending=True)][0].item() == 30.0


def test_iteration_and_length() -> None:
    x = ft.asarray([[1, 2], [3, 4]])
    assert [row.tolist() for row in x] == [[1, 2], [3, 4]]
    assert len(x) == 2
    assert [0, 1, 2][ft.asarray(1)] == 1


X = ft.zeros((2, 3))
MISTAKES: list[tuple[Any, type[FuelError], str]] = [
    (lambda: X[2], IndexingError, r"index 2 is out of bounds for extent 2 \(shape \(2, 3\)\)"),
    (lambda: X[:, -4], IndexingError, r"index -4 is out of bounds for extent 3 \(shape \(2, 3\)\)"),
    (lambda: X[0, 0, 0], IndexingError, r"3 indices for a tensor of shape \(2, 3\) \(2 dimensions\)"),
    (lambda: X[..., ...], IndexingError, r"only one Ellipsis"),
    (lambda: X[1.0], IndexingError, "an int, a slice, None, ..., a tensor of integers or a mask, not float 1.0"),
    (lambda: X["a"], IndexingError, "not str 'a'"),
    (lambda: X[:, True], IndexingError, "a mask without dimensions must be the only index"),
    (lambda: X[:, ft.ones(2, dtype=ft.bool)], IndexingError, r"shape \(2,\) does not fit x .* at dimension 1"),
    (lambda: X[np.ones((2, 3, 1), bool)], IndexingError, r"3 indices for a tensor of shape \(2, 3\)"),
    (lambda: ft.take(X, ft.ones(2, dtype=ft.bool), axis=0), IndexingError, "not bool; a mask reads as"),
    (lambda: X[X[0]], IndexingError, "an index tensor must have an integer dtype, not float32"),
    (lambda: X[ft.arange(2), ft.arange(3)], ShapeError, r"indexing: shapes \(2,\) and \(3,\) do not broadcast"),
    (lambda: X[::0], IndexingError, "slice step cannot be zero"),
    (lambda: X["a":], IndexingError, "is not a slice of ints"),
    (lambda: ft.take(X, ft.arange(2)), ShapeError, r"take: axis is needed for a tensor of shape \(2, 3\)"),
    (lambda: ft.take(X, ft.zeros(2), axis=0), IndexingError, "must have an integer dtype, not float32"),
    (lambda: ft.take_along_axis(X, ft.arange(2)), ShapeError, r"x has shape \(2, 3\) and indices \(2,\)"),
    (
        lambda: ft.take_along_axis(X, ft.zeros((4, 3), dtype=ft.int64)),
        ShapeError,
        r"\(2, 3\) and indices \(4, 3\), axis 1",
    ),
    (lambda: X.__setitem__(0, ft.zeros(2)), ShapeError, r"shapes \(2,\) and \(3,\) do not broadcast"),
    (lambda: X.__setitem__(0, 1j), DTypeError, "cannot write complex64 into float32; cast the value with astype"),
    (lambda: ft.arange(3).__setitem__(0, 1.5), DTypeError, "cannot write float32 into int64"),
    (
        lambda: X.__setitem__(ft.asarray([True]), 1.0),
        IndexingError,
        r"mask of shape \(1,\) does not fit x of shape \(2, 3\)",
    ),
    (lambda: X.__setitem__(X == 0, ft.zeros((2, 3))), ShapeError, r"\(2, 3\) and \(6,\) do not broadcast"),
]


@pytest.mark.parametrize(("make", "error", "text"), MISTAKES)
def test_mistakes_are_named(make: Any, error: type[FuelError], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("key", [ft.asarray([5]), (slice(None), ft.asarray([-4])), (ft.asarray([2]), ft.asarray([0]))])
def test_an_index_tensor_out_of_bounds_is_found_when_it_runs(key: Any) -> None:
    with pytest.raises(RealizeError, match=r"index\(.*failed: IndexError: .*out of bounds(.|\n)*test_indexing.py:\d+"):
        X[key].numpy()

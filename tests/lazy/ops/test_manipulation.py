"""Shapes rearranged: each function moves elements to where numpy moves them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, FuelError, ShapeError

Array = np.ndarray[Any, Any]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
SOLID = hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=3)


def numbered(shape: tuple[int, ...]) -> Array:
    return np.arange(math.prod(shape)).reshape(shape)


def same(found: ft.Tensor, wanted: Any) -> None:
    assert found.shape == np.shape(wanted)
    np.testing.assert_array_equal(found.numpy(), wanted)


@given(SHAPES, st.randoms(use_true_random=False))
def test_reshape(shape: tuple[int, ...], random: Any) -> None:
    x = numbered(shape)
    target = list(shape)
    random.shuffle(target)
    target.insert(random.randint(0, len(target)), 1)
    same(ft.reshape(ft.asarray(x), target), x.reshape(target))
    if x.size:
        target[random.randrange(len(target))] = -1
        same(ft.asarray(x).reshape(*target), x.reshape(target))
        same(ft.asarray(x).reshape(target), x.reshape(target))


@given(SHAPES, st.data())
def test_permutations(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = numbered(shape)
    axes = data.draw(st.permutations(range(len(shape))))
    same(ft.permute_dims(ft.asarray(x), axes), x.transpose(axes))
    if len(shape) >= 2:
        same(ft.asarray(x).mT, np.matrix_transpose(x))
    count = data.draw(st.integers(0, len(shape)))
    source, destination = axes[:count], data.draw(st.permutations(range(len(shape))))[:count]
    same(ft.moveaxis(ft.asarray(x), source, destination), np.moveaxis(x, source, destination))


@given(hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_dims=3, max_side=3))
def test_broadcasting(shapes: Any) -> None:
    arrays = [numbered(shape) for shape in shapes.input_shapes]
    for found, wanted in zip(ft.broadcast_arrays(*map(ft.asarray, arrays)), np.broadcast_arrays(*arrays), strict=True):
        same(found, wanted)
    same(ft.broadcast_to(ft.asarray(arrays[0]), shapes.result_shape), np.broadcast_to(arrays[0], shapes.result_shape))


@given(SHAPES, st.data())
def test_new_and_dropped_dimensions(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = numbered(shape)
    ndim = len(shape) + 2
    axes = tuple(
        data.draw(st.lists(st.integers(-ndim, ndim - 1), min_size=2, max_size=2, unique_by=lambda a: a % ndim))
    )
    wide = ft.expand_dims(ft.asarray(x), axis=axes)
    same(wide, np.expand_dims(x, axes))
    same(ft.squeeze(wide, axes), x)
    same(ft.expand_dims(ft.asarray(x), axis=-1), x[..., None])


@given(SOLID, st.data())
def test_joining(shape: tuple[int, ...], data: st.DataObject) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    extents = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    place = axis % len(shape)
    arrays = [numbered((*shape[:place], extent, *shape[place + 1 :])) for extent in extents]
    same(ft.concat([ft.asarray(a) for a in arrays], axis=axis), np.concatenate(arrays, axis))
    same(ft.concat([ft.asarray(a) for a in arrays], axis=None), np.concatenate(arrays, None))
    equal = [numbered(shape) + i for i in range(len(extents))]
    stacked = ft.stack([ft.asarray(a) for a in equal], axis=axis)
    same(stacked, np.stack(equal, axis))
    for found, wanted in zip(ft.unstack(stacked, axis=axis), equal, strict=True):
        same(found, wanted)


@given(SOLID, st.integers(1, 4), st.data())
def test_split_parts_differ_by_one_at_most(shape: tuple[int, ...], sections: int, data: st.DataObject) -> None:
    x = numbered(shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    for found, wanted in zip(
        ft.split(ft.asarray(x), sections, axis=axis), np.array_split(x, sections, axis), strict=True
    ):
        same(found, wanted)


@given(SOLID, st.data())
def test_flip_and_roll(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = numbered(shape)
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1).map(tuple))
    same(ft.flip(ft.asarray(x), axis=axes), np.flip(x, axes))
    same(ft.flip(ft.asarray(x)), np.flip(x))
    shifts = data.draw(st.tuples(*[st.integers(-7, 7)] * len(axes)))
    same(ft.roll(ft.asarray(x), shifts, axis=axes), np.roll(x, shifts, axes))
    same(ft.roll(ft.asarray(x), shifts[0]), np.roll(x, shifts[0]))


@given(SOLID, st.integers(0, 3), st.data())
def test_repetition(shape: tuple[int, ...], count: int, data: st.DataObject) -> None:
    x = numbered(shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    same(ft.repeat(ft.asarray(x), count, axis=axis), np.repeat(x, count, axis))
    same(ft.repeat(ft.asarray(x), count), np.repeat(x, count))
    each = data.draw(st.lists(st.integers(0, 2), min_size=shape[axis], max_size=shape[axis]))
    same(ft.repeat(ft.asarray(x), ft.asarray(each, dtype=ft.int64), axis=axis), np.repeat(x, np.array(each, int), axis))
    counts = data.draw(st.lists(st.integers(0, 2), max_size=5).map(tuple))
    same(ft.tile(ft.asarray(x), counts), np.tile(x, counts))


@given(SHAPES, st.data())
def test_padding(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = numbered(shape)
    widths = [data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) for _ in shape]
    wanted = np.pad(x, widths, constant_values=7) if shape else x
    same(ft.pad(ft.asarray(x), widths, value=7), wanted)


@given(SOLID, st.integers(0, 4), st.data())
def test_differences(shape: tuple[int, ...], n: int, data: st.DataObject) -> None:
    x = numbered(shape) ** 2
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    same(ft.diff(ft.asarray(x), axis=axis, n=n), np.diff(x, n, axis))
    same(ft.diff(ft.asarray(x > 3), axis=axis, n=n), np.diff(x > 3, n, axis))
    more = ft.asarray(x)
    same(ft.diff(more, axis=axis, prepend=more, append=more), np.diff(x, 1, axis, prepend=x, append=x))


def test_dtypes_of_joined_tensors_promote() -> None:
    assert ft.concat([ft.zeros(1), ft.asarray([1])]).dtype == ft.float32
    assert ft.stack([ft.asarray([1], dtype=ft.int8), ft.asarray([1], dtype=ft.uint8)]).dtype == ft.int16


X = ft.zeros((2, 3))
MISTAKES: list[tuple[Any, type[FuelError], str]] = [
    (lambda: ft.reshape(X, (4, 2)), ShapeError, r"cannot give 6 elements of shape \(2, 3\) the shape \(4, 2\)"),
    (lambda: ft.reshape(X, (-1, -1)), ShapeError, r"only one extent may be -1 and none below, .* \(-1, -1\)"),
    (lambda: ft.reshape(X, (4, -1)), ShapeError, r"shape \(2, 3\) the shape \(4, -1\)"),
    (lambda: ft.reshape(ft.zeros(0), (0, -1)), ShapeError, r"0 elements of shape \(0,\) the shape \(0, -1\)"),
    (lambda: ft.reshape(X, (2.0, 3)), ShapeError, r"a shape is a tuple of ints, not \(2.0, 3\)"),
    (lambda: ft.permute_dims(X, (0, 0)), ShapeError, r"axes \(0, 0\) is not an order of the 2 dimensions of \(2, 3\)"),
    (lambda: ft.permute_dims(X, (0, 1, 2)), ShapeError, "axis 2 is out of bounds for a tensor of 2 dimensions"),
    (lambda: X[0].mT, ShapeError, r"at least 2 dimensions, but x has shape \(3,\)"),
    (lambda: ft.zeros((1, 2, 3)).T, ShapeError, r"x.T needs 2 dimensions, but x has shape \(1, 2, 3\); use x.mT"),
    (lambda: ft.moveaxis(X, (0, 1), 0), ShapeError, r"\(0, 1\) and 0 must have the same number of axes"),
    (lambda: ft.broadcast_to(X, (2, 2)), ShapeError, r"shapes \(2, 3\) and \(2, 2\) do not broadcast"),
    (lambda: ft.broadcast_to(X, (3,)), ShapeError, r"shape \(2, 3\) does not broadcast to \(3,\)"),
    (lambda: ft.squeeze(X, 0), ShapeError, r"every dimension of 0 must have extent 1, but x has shape \(2, 3\)"),
    (
        lambda: ft.concat([X, ft.zeros((3, 3))], axis=1),
        ShapeError,
        r"\(2, 3\) and \(3, 3\) may differ along axis 1 only",
    ),
    (lambda: ft.concat([X, ft.zeros(3)]), ShapeError, r"shapes \(2, 3\) and \(3,\) may differ along axis 0 only"),
    (lambda: ft.concat([]), ArgumentError, "concat: expected at least one tensor, got none"),
    (lambda: ft.stack([]), ArgumentError, "stack: expected at least one tensor, got none"),
    (lambda: ft.stack([X, X[0]]), ShapeError, r"all shapes must be equal, but they are \(2, 3\) and \(3,\)"),
    (lambda: ft.roll(X, (1, 2)), ArgumentError, "shift must be an int when no axis is given"),
    (lambda: ft.roll(X, (1, 2), axis=0), ArgumentError, r"shift \(1, 2\) and axis \(0,\) must have the same length"),
    (lambda: ft.repeat(X, -1), ArgumentError, "repeats must not be negative, but is -1"),
    (lambda: ft.tile(X, (-1,)), ShapeError, r"tile: extents must not be negative, but the shape is \(-1,\)"),
    (
        lambda: ft.pad(X, [(1, 1)]),
        ArgumentError,
        r"expected 2 pairs of non-negative widths for shape \(2, 3\), got \[\(1",
    ),
    (lambda: ft.pad(X, [(1, -1), (0, 0)]), ArgumentError, "expected 2 pairs of non-negative widths"),
    (lambda: ft.split(X, 0), ArgumentError, "0"),
]


@pytest.mark.parametrize(("make", "error", "text"), MISTAKES)
def test_mistakes_are_named(make: Any, error: type[FuelError], text: str) -> None:
    with pytest.raises(error, match=text):
        make()

"""The standard's manipulation functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lazy.array_api.agreement import NAMES, SHAPES, SOLID, agree, arrays, axes_of, axis_of, values


@settings(max_examples=30)
@given(arrays(), st.data())
def test_moves(x: Any, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(x.ndim)))
    agree("permute_dims", x, tuple(order))
    agree("flip", x, axis=data.draw(axes_of(x)))
    if x.ndim:
        source, destination = data.draw(axis_of(x)), data.draw(axis_of(x))
        agree("moveaxis", x, source, destination)
        agree("roll", x, data.draw(st.integers(-4, 4)), axis=source)
        agree("unstack", x, axis=source)
    agree("roll", x, data.draw(st.integers(-4, 4)))


@settings(max_examples=30)
@given(arrays(), st.data())
def test_shapes(x: Any, data: st.DataObject) -> None:
    agree("expand_dims", x, axis=data.draw(st.integers(-x.ndim - 2, x.ndim + 1)))
    agree("reshape", x, (-1,) if x.size else (0,))
    agree("reshape", x, tuple(data.draw(st.permutations((*x.shape, 1)))))
    agree("reshape", x, (7,))
    if x.ndim:
        agree("squeeze", x, data.draw(axis_of(x)))


@settings(max_examples=30)
@given(SOLID, st.lists(st.sampled_from(NAMES[1:9]), min_size=1, max_size=3), st.data())
def test_joins(shape: Any, dtypes: Any, data: st.DataObject) -> None:
    parts = [values(dtype, shape, i) for i, dtype in enumerate(dtypes)]
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    agree("concat", parts, axis=axis)
    agree("concat", parts, axis=None)
    agree("stack", parts, axis=axis)
    agree("concat", [*parts, values("int8", (5, *shape))], axis=axis)


@settings(max_examples=30)
@given(arrays(), st.data())
def test_repetitions(x: Any, data: st.DataObject) -> None:
    agree("tile", x, tuple(data.draw(st.lists(st.integers(0, 2), max_size=3))))
    agree("repeat", x, 2)
    if x.ndim:
        axis = data.draw(axis_of(x))
        agree("repeat", x, 2, axis=axis)
        agree("repeat", x, np.arange(x.shape[axis]), axis=axis)


@pytest.mark.parametrize("axis", [2, -3])
def test_wrong_axes(axis: int) -> None:
    x = values("int8", (2, 3))
    for name in ("flip", "unstack", "expand_dims"):
        agree(name, x, axis=2 * axis)
    for name in ("stack", "concat"):
        agree(name, [x, x], axis=2 * axis)
    agree("roll", x, 1, axis=axis)
    agree("squeeze", x, axis)


@settings(max_examples=10)
@given(hnp.mutually_broadcastable_shapes(num_shapes=1, max_dims=3, max_side=3), SHAPES)
def test_shapes_that_do_not_broadcast(shapes: Any, shape: Any) -> None:
    agree("broadcast_to", values("bool", shapes.result_shape), shape)

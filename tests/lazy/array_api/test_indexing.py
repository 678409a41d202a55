"""The standard's indexing functions and keys, for reading and writing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lazy.array_api.agreement import NAMES, SHAPES, SOLID, agree, arrays, axis_of, values


def read(xp: Any, x: Any, key: Any) -> Any:
    return x[key]


def written(xp: Any, x: Any, key: Any, value: Any) -> Any:
    x = xp.asarray(x, copy=True)
    x[key] = value
    return x


@settings(max_examples=50)
@given(SHAPES, st.data())
def test_basic_keys(shape: Any, data: st.DataObject) -> None:
    x = values("int32", shape)
    key = data.draw(hnp.basic_indices(shape, allow_newaxis=True, max_dims=5))
    parts = key if isinstance(key, tuple) else (key,)
    if Ellipsis in parts or sum(part is not None for part in parts) == x.ndim:  # others the reference leaves out
        agree(read, x, key)
        if None not in parts:
            agree(written, x, key, values("int32", np.asarray(x[key]).shape, 1))


@settings(max_examples=30)
@given(SOLID, st.sampled_from(["int64", "uint8"]), st.data())
def test_index_arrays(shape: Any, dtype: str, data: st.DataObject) -> None:
    x = values("float32", shape)
    index = data.draw(
        hnp.arrays(dtype, hnp.array_shapes(max_dims=2, max_side=3), elements=st.integers(0, shape[0] - 1))
    )
    agree("take", x, index.reshape(-1), axis=0)
    agree(read, x, (index, *[0] * (x.ndim - 1)))


@settings(max_examples=30)
@given(SHAPES, st.data())
def test_masks(shape: Any, data: st.DataObject) -> None:
    x = values("float64", shape)
    mask = values("bool", shape[: data.draw(st.integers(0, len(shape)))], data.draw(st.integers(0, 9)))
    agree(read, x, mask)
    agree(written, x, mask, 7.0)
    agree(written, x, mask, values("float64", x[mask].shape, 1))


@settings(max_examples=20)
@given(arrays(shapes=SOLID), st.data())
def test_take_along_axis(x: Any, data: st.DataObject) -> None:
    axis = data.draw(axis_of(x))
    shape = tuple(2 if a == axis % x.ndim else extent for a, extent in enumerate(x.shape))
    indices = np.random.default_rng(0).integers(0, x.shape[axis], shape)
    agree("take_along_axis", x, indices, axis=axis)


@pytest.mark.parametrize("key", [3, (0, 0, 0), 1.5, "a", (..., ...)])
def test_wrong_keys(key: Any) -> None:
    agree(read, values("int8", (2, 3)), key)


@pytest.mark.parametrize("dtype", NAMES[1:])  # bools are taken beyond the standard
def test_what_is_written_must_promote_to_the_dtype(dtype: str) -> None:
    agree(written, values("int32", (2, 3)), (0, ...), values(dtype, (3,)))

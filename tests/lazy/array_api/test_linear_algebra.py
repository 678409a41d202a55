"""The standard's linear algebra functions outside of its extension."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lazy.array_api.agreement import COMPLEX, FLOATS, INTEGERS, NAMES, SHAPES, agree, values

NUMBERS = st.sampled_from([*INTEGERS, *FLOATS, *COMPLEX])


@settings(max_examples=40)
@given(hnp.mutually_broadcastable_shapes(signature=np.matmul.signature, max_dims=2, min_side=0, max_side=3), NUMBERS)
def test_matmul(shapes: Any, dtype: str) -> None:
    a, b = (values(dtype, shape, i) for i, shape in enumerate(shapes.input_shapes))
    agree("matmul", a, b)
    agree("linalg.matmul", a, b)
    agree(lambda xp, a, b: a @ b, a, b)


@settings(max_examples=30)
@given(SHAPES, SHAPES, st.sampled_from(NAMES))
def test_shapes_that_do_not_fit(first: Any, second: Any, dtype: str) -> None:
    if dtype != "bool":
        agree("matmul", values(dtype, first), values(dtype, second))


@settings(max_examples=30)
@given(SHAPES, st.integers(0, 3), NUMBERS, st.data())
def test_tensordot(shape: Any, count: int, dtype: str, data: st.DataObject) -> None:
    count = min(count, len(shape))
    a, b = values(dtype, shape), values(dtype, (*shape[len(shape) - count :], 2), 1)
    agree("tensordot", a, b, axes=count)
    pairs = data.draw(st.permutations(range(len(shape) - count, len(shape))))
    agree("tensordot", a, b, axes=(tuple(pairs), tuple(p - (len(shape) - count) for p in pairs)))


@settings(max_examples=30)
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, min_dims=1, max_dims=3, max_side=3), NUMBERS)
def test_vecdot(shapes: Any, dtype: str) -> None:
    a, b = (values(dtype, (*shape, 3), i) for i, shape in enumerate(shapes.input_shapes))
    agree("vecdot", a, b, tolerance=1e-6)
    agree("vecdot", a, b[..., :2])


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2, 3)])
def test_matrix_transpose(shape: Any) -> None:
    agree("matrix_transpose", values("int8", shape))
    agree(lambda xp, x: x.mT, values("int8", shape))

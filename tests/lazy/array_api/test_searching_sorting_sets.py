"""The standard's searching, sorting and set functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy.array_api.agreement import FLOATS, INTEGERS, SHAPES, SOLID, agree, arrays, axis_of, values

REAL = (*INTEGERS, *FLOATS)


@settings(max_examples=30)
@given(arrays(REAL, SOLID), st.booleans(), st.data())
def test_positions(x: Any, keepdims: bool, data: st.DataObject) -> None:
    axis = data.draw(st.one_of(st.none(), axis_of(x)))
    for name in ("argmax", "argmin", "count_nonzero"):
        agree(name, x, axis=axis, keepdims=keepdims)


@settings(max_examples=25)
@given(arrays())
def test_nonzero(x: Any) -> None:
    agree("nonzero", x)


@settings(max_examples=25)
@given(arrays(REAL, st.integers(0, 5)), arrays(REAL), st.sampled_from(["left", "right"]))
def test_searchsorted(x1: Any, x2: Any, side: str) -> None:
    x2 = x2.astype(x1.dtype)
    agree("searchsorted", np.sort(x1), x2, side=side)
    agree("searchsorted", x1, x2, side=side, sorter=np.argsort(x1))


@settings(max_examples=25)
@given(SHAPES, st.sampled_from(REAL))
def test_where(shape: Any, dtype: str) -> None:
    agree("where", values("bool", shape), values(dtype, shape), values(dtype, shape, 1))
    agree("where", values("int8", shape), values(dtype, shape), values(dtype, shape, 1))


@settings(max_examples=40)
@given(arrays(REAL, SOLID, special=True), st.booleans(), st.data())
def test_sorting(x: Any, descending: bool, data: st.DataObject) -> None:
    axis = data.draw(axis_of(x))
    agree("sort", x, axis=axis, descending=descending)
    if not np.isnan(x).any():
        agree("argsort", x, axis=axis, descending=descending)


@settings(max_examples=30)
@given(arrays(special=True))
def test_distinct_values(x: Any) -> None:
    for name in ("unique_all", "unique_counts", "unique_inverse", "unique_values"):
        agree(name, x)


@pytest.mark.parametrize("name", ["argmax", "argmin", "sort", "argsort"])
def test_complex_numbers_have_no_order(name: str) -> None:
    agree(name, values("complex64", (2, 3)))


def test_a_number_has_no_positions() -> None:
    agree("nonzero", values("float32", ()))

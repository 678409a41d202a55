"""The standard's creation functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy.array_api.agreement import COMPLEX, FLOATS, INTEGERS, NAMES, SHAPES, agree, arrays, values

import fuel_parallel.lazy as ft

# The default of real numbers differs: float32 here, float64 in the reference.
DTYPES = st.sampled_from([*map(np.dtype, NAMES)])


@settings(max_examples=25)
@given(SHAPES, DTYPES)
def test_filled(shape: Any, dtype: Any) -> None:
    for name in ("zeros", "ones"):
        agree(name, shape, dtype=dtype)
        agree(f"{name}_like", values("int16", shape), dtype=dtype)


@settings(max_examples=60)
@given(SHAPES, st.sampled_from([3, 2.5, 1 + 2j]), DTYPES)
def test_full(shape: Any, value: Any, dtype: Any) -> None:
    if np.result_type(dtype, type(value)) == dtype and dtype.kind != "b":
        agree("full", shape, value, dtype=dtype)
        agree("full_like", values("complex64", shape), value, dtype=dtype)


@settings(max_examples=40)
@given(
    st.integers(-9, 9), st.integers(-9, 9), st.integers(-3, 3), st.sampled_from([None, "int16", "float32", "float64"])
)
def test_arange(start: int, stop: int, step: int, dtype: Any) -> None:
    dtype = None if dtype is None else np.dtype(dtype)
    agree("arange", stop, dtype=dtype)
    if step:
        agree("arange", start, stop, step, dtype=dtype)
        if dtype is None or dtype.kind == "f":
            agree(lambda xp: xp.astype(xp.arange(start / 2, stop, step / 4, dtype=xp.float64), xp.float32))


@settings(max_examples=25)
@given(st.floats(-5, 5), st.floats(-5, 5), st.integers(0, 6), st.sampled_from(["float64", "complex128"]), st.booleans())
def test_linspace(start: float, stop: float, num: int, dtype: str, endpoint: bool) -> None:
    agree("linspace", start, stop, num, dtype=np.dtype(dtype), endpoint=endpoint, tolerance=1e-15)


@settings(max_examples=25)
@given(st.integers(0, 4), st.one_of(st.none(), st.integers(0, 4)), st.integers(-5, 5), DTYPES)
def test_eye(rows: int, columns: Any, k: int, dtype: Any) -> None:
    agree("eye", rows, columns, k=k, dtype=dtype)


@settings(max_examples=25)
@given(arrays(), st.integers(-4, 4))
def test_triangles(x: Any, k: int) -> None:
    agree("tril", x, k=k)
    agree("triu", x, k=k)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(["xy", "ij"]), st.sampled_from([*INTEGERS, *FLOATS]))
def test_meshgrid(extents: Any, indexing: str, dtype: str) -> None:
    agree("meshgrid", *(values(dtype, n) for n in extents), indexing=indexing)


@pytest.mark.parametrize("data", [True, 3, 2.5, 1j, [1, 2.5], [[True], [False]], [1, 1j], []])
def test_asarray_of_python_numbers_has_the_default_dtype_of_their_kind(data: Any) -> None:
    wanted = np.asarray(data)
    default = {"f": "float32", "c": "complex64"}.get(wanted.dtype.kind, wanted.dtype.name)
    agree(lambda xp: xp.asarray(data, dtype=None if xp is ft else getattr(xp, default)))


@settings(max_examples=25)
@given(arrays(), DTYPES, st.booleans())
def test_asarray(x: Any, dtype: Any, copy: bool) -> None:
    if x.dtype.name not in COMPLEX or dtype.name in COMPLEX:
        agree("asarray", x, dtype=dtype, copy=True if copy else None)

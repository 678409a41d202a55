"""The standard's statistical and utility functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lazy.array_api.agreement import FLOATS, NAMES, SHAPES, SOLID, agree, arrays, axes_of, axis_of, values

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "mean", "all", "any"])
@settings(max_examples=12)
@given(arrays(NAMES, SOLID), st.booleans(), st.data())
def test_reductions(name: str, x: Any, keepdims: bool, data: st.DataObject) -> None:
    more = {"sum": "b", "prod": "b", "max": "b", "min": "b", "mean": "biu"}.get(name, "")
    if x.dtype.kind not in more:
        agree(name, x, axis=data.draw(axes_of(x)), keepdims=keepdims, tolerance=TOLERANCE)


@pytest.mark.parametrize("name", ["sum", "prod"])
@settings(max_examples=12)
@given(SHAPES, st.sampled_from(NAMES[1:]), st.sampled_from(NAMES[1:]))
def test_totals_in_another_dtype(name: str, shape: Any, dtype: str, wanted: str) -> None:
    if np.can_cast(dtype, wanted):
        agree(name, values(dtype, shape), dtype=np.dtype(wanted), tolerance=TOLERANCE)


@settings(max_examples=25)
@given(arrays(FLOATS, SOLID), st.booleans(), st.data())
def test_spread(x: Any, keepdims: bool, data: st.DataObject) -> None:
    axis = data.draw(axes_of(x))
    for name in ("var", "std"):
        agree(name, x, axis=axis, keepdims=keepdims, tolerance=TOLERANCE)


@settings(max_examples=30)
@given(arrays(NAMES[1:], SOLID), st.booleans(), st.data())
def test_running_totals(x: Any, initial: bool, data: st.DataObject) -> None:
    axis = data.draw(axis_of(x))
    for name in ("cumulative_sum", "cumulative_prod"):
        agree(name, x, axis=axis, include_initial=initial, tolerance=TOLERANCE)
        agree(name, x, include_initial=initial, tolerance=TOLERANCE)


@settings(max_examples=30)
@given(arrays(NAMES[1:], SOLID), st.integers(0, 2), st.data())
def test_diff(x: Any, n: int, data: st.DataObject) -> None:
    axis = data.draw(axis_of(x))
    if n <= x.shape[axis]:
        agree("diff", x, axis=axis, n=n)
        agree("diff", x, axis=axis, prepend=x, append=x)


@settings(max_examples=5)
@given(hnp.array_shapes(max_dims=2))
def test_there_is_no_extreme_of_nothing(shape: Any) -> None:
    for name in ("max", "min"):
        agree(name, values("float32", (0, *shape)))

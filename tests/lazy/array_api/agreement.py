"""One call on our namespace and on the reference implementation of the standard, and whether both say the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import array_api_strict
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fuel_parallel.lazy as ft
from fuel_parallel.errors import FuelError

Array = np.ndarray[Any, Any]
strict: Any = array_api_strict
strict.set_array_api_strict_flags(api_version="2024.12")

BOOL = ("bool",)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float32", "float64")
COMPLEX = ("complex64", "complex128")
NAMES = (*BOOL, *INTEGERS, *FLOATS, *COMPLEX)
"""The dtypes of the standard; float16 and bfloat16 are tested in tests/lazy/ops."""

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
SOLID = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=3)


def values(dtype: str, shape: Any, seed: int = 0, special: bool = False) -> Array:
    """Small numbers of a dtype with many ties; for real floats also infinities, NaN and signed zeros if `special`."""
    draw = np.random.default_rng(seed)
    if dtype in COMPLEX:
        return np.asarray(draw.integers(-3, 4, shape) + 1j * draw.integers(-3, 4, shape) / 2, dtype)
    if dtype in FLOATS:
        pool = [-2.5, -1.0, -0.5, 0.0, 0.25, 1.0, 3.0] + ([-0.0, np.inf, -np.inf, np.nan] if special else [])
        return np.asarray(draw.choice(np.array(pool), shape), dtype)
    return np.asarray(draw.integers(0 if dtype[0] in "ub" else -3, 2 if dtype == "bool" else 5, shape), dtype)


@st.composite
def arrays(draw: st.DrawFn, dtypes: Any = NAMES, shapes: Any = SHAPES, special: bool = False) -> Array:
    return values(draw(st.sampled_from(dtypes)), draw(shapes), draw(st.integers(0, 50)), special)


def axis_of(x: Array) -> st.SearchStrategy[int]:
    return st.integers(-x.ndim, x.ndim - 1)


def axes_of(x: Array) -> st.SearchStrategy[Any]:
    """None, one axis or several."""
    if not x.ndim:
        return st.sampled_from([None, ()])
    several = st.lists(axis_of(x), min_size=1, unique_by=lambda a: a % x.ndim).map(tuple)
    return st.one_of(st.none(), axis_of(x), several)


def _given_to(namespace: Any, argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return namespace.asarray(argument, copy=True)
    if isinstance(argument, np.dtype):
        return getattr(namespace, argument.name)
    if isinstance(argument, list | tuple):
        return type(argument)(_given_to(namespace, part) for part in argument)
    return argument


def agree(function: str | Callable[..., Any], *arguments: Any, tolerance: float = 0.0, **options: Any) -> None:
    """Both namespaces give the same values, dtypes and shapes, or both refuse.

    `function` is a name of the namespace such as `linalg.inv`, or a function of a namespace and the arguments. Arrays
    and dtypes are those of numpy, and are converted for each.
    """

    def call(namespace: Any) -> Any:
        found = function
        if isinstance(found, str):
            found = reduce(getattr, found.split("."), namespace)
            given = []
        else:
            given = [namespace]
        named = {name: _given_to(namespace, option) for name, option in options.items()}
        return found(*given, *(_given_to(namespace, argument) for argument in arguments), **named)

    with np.errstate(all="ignore"):
        try:
            wanted = call(strict)
        except (TypeError, ValueError, IndexError) as refusal:
            try:
                _realized(call(ft))
            except (FuelError, TypeError):
                return
            pytest.fail(f"the reference refuses: {refusal}")
    same(call(ft), wanted, tolerance)


def refuses(function: str, *arguments: Any, **options: Any) -> bool:
    """Whether the reference refuses the call."""
    try:
        reduce(getattr, function.split("."), strict)(*(_given_to(strict, a) for a in arguments), **options)
    except (TypeError, ValueError, IndexError):
        return True
    return False


def _realized(found: Any) -> None:
    for part in found if isinstance(found, list | tuple) else [found]:
        if isinstance(part, ft.Tensor):
            part.realize()


def same(found: Any, wanted: Any, tolerance: float = 0.0) -> None:
    if isinstance(wanted, list | tuple):
        assert isinstance(found, list | tuple)
        assert getattr(found, "_fields", ()) == getattr(wanted, "_fields", ())
        for one, other in zip(found, wanted, strict=True):
            same(one, other, tolerance)
    elif hasattr(wanted, "__array_namespace__"):
        expected = np.asarray(wanted)
        assert isinstance(found, ft.Tensor)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        got = found.numpy()
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        if tolerance:
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(got, expected)
    elif isinstance(wanted, type(strict.int8)):
        assert found == wanted._np_dtype
    else:
        assert found == wanted

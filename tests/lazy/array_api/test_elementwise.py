"""The standard's elementwise functions and operators on all its dtypes, with what they refuse."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lazy.array_api.agreement import BOOL, COMPLEX, FLOATS, INTEGERS, NAMES, SHAPES, agree, refuses, strict, values

import fuel_parallel.lazy as ft

UNARY = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "bitwise_invert",
    "ceil",
    "conj",
    "cos",
    "cosh",
    "exp",
    "expm1",
    "floor",
    "imag",
    "isfinite",
    "isinf",
    "isnan",
    "log",
    "log1p",
    "log2",
    "log10",
    "logical_not",
    "negative",
    "positive",
    "real",
    "reciprocal",
    "round",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
]
BINARY = [
    "add",
    "atan2",
    "bitwise_and",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "copysign",
    "divide",
    "equal",
    "floor_divide",
    "greater",
    "greater_equal",
    "hypot",
    "less",
    "less_equal",
    "logaddexp",
    "logical_and",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "nextafter",
    "not_equal",
    "pow",
    "remainder",
    "subtract",
]
MORE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("add", "multiply", "maximum", "minimum", "less", "less_equal", "greater", "greater_equal"), BOOL),
    "divide": (*BOOL, *INTEGERS),
    "logical_not": (*INTEGERS, *FLOATS),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), (*INTEGERS, *FLOATS, *COMPLEX)),
}
"""What is taken beyond the standard."""


@pytest.mark.parametrize("name", UNARY)
@settings(max_examples=4)
@given(SHAPES, st.integers(0, 50))
def test_one_operand(name: str, shape: Any, seed: int) -> None:
    for dtype in NAMES:
        x = values(dtype, shape, seed, special=True)
        if dtype not in MORE.get(name, ()):
            agree(name, x, tolerance=1e-6 if dtype in COMPLEX else 0)


@pytest.mark.parametrize("name", BINARY)
@settings(max_examples=4)
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_dims=3, max_side=3), st.integers(0, 50))
def test_two_operands(name: str, shapes: Any, seed: int) -> None:
    for dtype in NAMES:
        # Quotients of infinities are numpy's in the reference, not the standard's.
        special = name != "floor_divide"
        a, b = (values(dtype, shape, seed + i, special) for i, shape in enumerate(shapes.input_shapes))
        if name in ("pow", "bitwise_left_shift", "bitwise_right_shift") and dtype in INTEGERS:
            b = np.asarray(abs(b))
        if dtype not in MORE.get(name, ()):
            agree(name, a, b, tolerance=1e-6 if dtype in COMPLEX else 0)


@settings(max_examples=60)
@given(
    st.sampled_from(["add", "multiply", "maximum", "equal", "where"]), st.sampled_from(NAMES), st.sampled_from(NAMES)
)
def test_dtypes_that_promote(name: str, first: str, second: str) -> None:
    a, b = values(first, (2, 3)), values(second, (3,), 1)
    operands = (values("bool", (2, 3), 2), a, b) if name == "where" else (a, b)
    if not refuses(name, *operands):
        agree(name, *operands)


def test_more_is_taken_than_the_standard_asks() -> None:
    for name, dtypes in MORE.items():
        for dtype in dtypes:
            x = values(dtype, (3,))
            assert refuses(name, *[x] * (1 if name in UNARY else 2))
            assert getattr(ft, name)(*[ft.asarray(x)] * (1 if name in UNARY else 2)).numpy().shape == (3,)


OPERATORS = [
    getattr(operator, name)
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"]
]
IN_PLACE = [
    getattr(operator, f"i{name}")
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
]
SCALARS = {"bool": True, "int": 2, "float": 0.5, "complex": 1 + 2j}


@pytest.mark.parametrize("operation", OPERATORS, ids=lambda o: o.__name__)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float32", "complex128"])
def test_scalars_on_either_side(operation: Any, dtype: str) -> None:
    x = np.asarray(abs(values(dtype, (2, 3))) + (dtype != "bool"), dtype)
    for scalar in SCALARS.values():
        for call in (lambda xp, x, s=scalar: operation(x, s), lambda xp, x, s=scalar: operation(s, x)):
            try:
                call(None, strict.asarray(x))
            except (TypeError, ValueError, OverflowError):
                continue  # mixed kinds, which the standard leaves open
            agree(call, x, tolerance=1e-6 if dtype == "complex128" else 0)


@pytest.mark.parametrize("operation", IN_PLACE, ids=lambda o: o.__name__)
@pytest.mark.parametrize("dtype", ["bool", "int8", "float32"])
def test_in_place(operation: Any, dtype: str) -> None:
    def rebound(xp: Any, x: Any, y: Any) -> Any:
        same = x
        x = operation(x, y)
        assert x is same
        return x

    x, y = values(dtype, (2, 3)), np.asarray(abs(values(dtype, (3,), 1)) + (dtype != "bool"), dtype)
    if dtype == "bool" and operation not in (operator.iand, operator.ior, operator.ixor):
        return  # sums and products of bools are beyond the standard
    agree(rebound, x, y)
    agree(rebound, x, values(dtype, (2, 2, 3)))  # a shape that x does not have


@settings(max_examples=30)
@given(st.sampled_from([*INTEGERS, *FLOATS]), SHAPES, st.sampled_from([None, -1, 1]), st.sampled_from([None, 2, 3]))
def test_clip(dtype: str, shape: Any, low: Any, high: Any) -> None:
    if low is None or low >= 0 or dtype[0] != "u":
        agree("clip", values(dtype, shape), low, high)
        agree("clip", values(dtype, shape), None if low is None else np.asarray(low, dtype), high)

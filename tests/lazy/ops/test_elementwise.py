"""Functions of one or two tensors, on all dtypes and all their special values, with broadcasting: as numpy has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

import fuel_parallel.lazy as ft
from fuel_parallel.errors import DTypeError, ShapeError
from fuel_parallel.lazy import dtypes

Array = np.ndarray[Any, Any]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
BOOL, INT, UINT = (ft.bool,), dtypes.SIGNED, dtypes.UNSIGNED
FLOAT, COMPLEX = dtypes.FLOATING, dtypes.COMPLEX
REAL = (*INT, *UINT, *FLOAT)
INEXACT = (*FLOAT, *COMPLEX)
NUMERIC = (*REAL, *COMPLEX)

# Name, numpy's function, dtypes that are taken.
UNARY: list[tuple[str, Any, tuple[Any, ...]]] = [
    *((name, getattr(np, name), NUMERIC) for name in ("positive", "negative", "abs", "sign", "square", "conj")),
    *((name, getattr(np, name), NUMERIC) for name in ("isfinite", "isinf", "isnan")),
    *((name, getattr(np, name), INEXACT) for name in ("reciprocal", "sqrt", "exp", "expm1", "log", "log1p", "log2")),
    *((name, getattr(np, name), INEXACT) for name in ("log10", "sin", "cos", "tan", "sinh", "cosh", "tanh")),
    *((f"a{name}", getattr(np, f"arc{name}"), INEXACT) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")),
    *((name, getattr(np, name), REAL) for name in ("floor", "ceil", "trunc")),
    ("round", np.round, NUMERIC),
    ("real", np.real, NUMERIC),
    ("imag", np.imag, COMPLEX),
    ("signbit", np.signbit, FLOAT),
    ("logical_not", np.logical_not, (*BOOL, *REAL)),
    ("bitwise_invert", np.invert, (*BOOL, *INT, *UINT)),
    ("rsqrt", lambda x: 1 / np.sqrt(x), FLOAT),
    ("erf", special.erf, FLOAT),
    ("relu", lambda x: np.maximum(x, x.dtype.type(0)), REAL),
    ("sigmoid", special.expit, FLOAT),
]
BINARY: list[tuple[str, Any, tuple[Any, ...]]] = [
    *((name, getattr(np, name), (*BOOL, *NUMERIC)) for name in ("add", "multiply", "equal", "not_equal")),
    *((name, getattr(np, name), (*BOOL, *NUMERIC)) for name in ("logical_and", "logical_or", "logical_xor")),
    *((name, getattr(np, name), (*BOOL, *REAL)) for name in ("less", "less_equal", "greater", "greater_equal")),
    *((name, getattr(np, name), (*BOOL, *REAL)) for name in ("maximum", "minimum")),
    ("floor_divide", lambda a, b: floor_divide(a, b), REAL),
    ("remainder", np.remainder, REAL),
    *((name, getattr(np, name), FLOAT) for name in ("hypot", "logaddexp", "copysign")),
    *((name, getattr(np, name), (*BOOL, *INT, *UINT)) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")),
    ("atan2", np.arctan2, FLOAT),
    ("subtract", np.subtract, NUMERIC),
    ("pow", np.power, NUMERIC),
    ("nextafter", np.nextafter, (ft.float32, ft.float64)),
    ("bitwise_left_shift", np.left_shift, (*INT, *UINT)),
    ("bitwise_right_shift", np.right_shift, (*INT, *UINT)),
]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -1.5, 2.5, 3.0, 100.0, 1e-3, np.inf, -np.inf, np.nan]
SMALL = [0, 1, 2, 3, 7]  # what shifts and powers of every integer dtype can bear


def floor_divide(a: Array, b: Array) -> Array:
    """numpy's, but for infinite operands, where the standard asks for the floor of the quotient."""
    whole = np.asarray(np.floor_divide(a, b))
    np.floor(np.true_divide(a, b), out=whole, where=np.isinf(a) | np.isinf(b), casting="unsafe")
    return whole


def values(dtype: Any, seed: int, shape: tuple[int, ...]) -> Array:
    """Values of the dtype in a shape; every special value, the limits of integers."""
    rng = np.random.default_rng(seed)
    if dtype == ft.bool:
        pool: Any = [False, True]
    elif dtypes.kind(dtype) == "integral":
        limits = np.iinfo(dtype)
        pool = np.array([*SMALL, limits.max, limits.min], dtype=dtype)
    elif dtype in COMPLEX:
        parts = np.array(SPECIAL[:10])
        pool = (parts[:, None] + 1j * parts[None, ::-1]).ravel()
    else:
        pool = SPECIAL
    return rng.choice(np.asarray(pool), shape).astype(dtype)


def same(found: ft.Tensor, wanted: Any, rounded: Any = None) -> None:
    """Bit for bit; or as near as numbers of the magnitude `rounded` (of each element) are rounded on the way."""
    got, wanted = found.numpy(), np.asarray(wanted)
    assert found.shape == got.shape == wanted.shape
    if got.dtype in (ft.float16, ft.bfloat16):
        # The oracle was computed in float32, so it is rounded as the result was.
        with np.errstate(all="ignore"):
            wanted = wanted.astype(got.dtype)
        rounded = None
    assert found.dtype == got.dtype == wanted.dtype
    if wanted.dtype.kind not in "fcV":
        np.testing.assert_array_equal(got, wanted)
        return
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    got, wanted = got.astype(wide), wanted.astype(wide)
    if rounded is None:
        np.testing.assert_array_equal(got, wanted)
        return
    near = np.abs(got - wanted) <= 8 * ft.finfo(found.dtype).eps * np.asarray(rounded, dtype=np.float64)
    np.testing.assert_array_equal(np.where(near, wanted, got), wanted)


def magnitude(a: Array, b: Array) -> Array | None:
    """Of the parts of a complex product, of which little may be left: numpy rounds those of vectors and of single
    numbers in two ways. None where a product is rounded once."""
    return np.abs(a.astype(np.complex128)) * np.abs(b.astype(np.complex128)) if a.dtype in COMPLEX else None


def widen(x: Array) -> Array:
    return x.astype(np.float32) if x.dtype in (ft.float16, ft.bfloat16) else x


@pytest.mark.parametrize(("name", "oracle", "domain"), UNARY, ids=[entry[0] for entry in UNARY])
@settings(max_examples=12)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_unary(name: str, oracle: Any, domain: tuple[Any, ...], shape: tuple[int, ...], seed: int) -> None:
    for dtype in dtypes.ALL:
        x = values(dtype, seed, shape)
        if dtype not in domain:
            with pytest.raises(DTypeError, match=f"{name}: expected one of .*but the dtype is {dtype.name}; cast it"):
                getattr(ft, name)(ft.asarray(x))
            continue
        with np.errstate(all="ignore"):
            wanted = oracle(widen(x))
        if name in ("floor", "ceil", "trunc", "round") and dtypes.kind(dtype) == "integral":
            wanted = x
        rounded = np.ones(shape) if name == "sigmoid" else magnitude(x, x) if name == "square" else None
        same(getattr(ft, name)(ft.asarray(x)), wanted, rounded)


@pytest.mark.parametrize(("name", "oracle", "domain"), BINARY, ids=[entry[0] for entry in BINARY])
@settings(max_examples=12)
@given(
    shapes=hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_dims=3, max_side=3), seed=st.integers(0, 99)
)
def test_binary(name: str, oracle: Any, domain: tuple[Any, ...], shapes: Any, seed: int) -> None:
    for dtype in dtypes.ALL:
        a, b = (values(dtype, seed + i, shape) for i, shape in enumerate(shapes.input_shapes))
        if dtype not in domain:
            with pytest.raises(DTypeError, match=f"{name}: expected one of .*but the dtype is {dtype.name}; cast it"):
                getattr(ft, name)(ft.asarray(a), ft.asarray(b))
            continue
        if name in ("pow", "bitwise_left_shift", "bitwise_right_shift") and dtypes.kind(dtype) == "integral":
            b = np.clip(b, 0, 7)
        with np.errstate(all="ignore"):
            wanted = oracle(widen(a), widen(b))
        same(getattr(ft, name)(ft.asarray(a), ft.asarray(b)), wanted, magnitude(a, b) if name == "multiply" else None)


@given(st.sampled_from(dtypes.ALL), st.sampled_from(dtypes.ALL), st.integers(0, 99))
def test_mixed_dtypes_are_cast_to_their_promotion_first(first: Any, second: Any, seed: int) -> None:
    try:
        common = dtypes.promote(first, second)
    except DTypeError:
        return
    a, b = values(first, seed, (2, 3)), values(second, seed + 1, (3,))
    with np.errstate(all="ignore"):
        x, y = a.astype(common), b.astype(common)
        same(ft.asarray(a) + ft.asarray(b), widen(x) + widen(y))
        same(
            ft.where(ft.asarray(True), ft.asarray(a), ft.asarray(b)),
            np.where(True, x, np.broadcast_to(y, x.shape)),
        )


@pytest.mark.parametrize("dtype", FLOAT, ids=lambda d: d.name)
def test_activations_do_not_overflow(dtype: Any) -> None:
    x = ft.asarray(np.array([-np.inf, -1e4, -90.0, 0.0, 90.0, 1e4, np.inf]).astype(dtype))
    assert ft.sigmoid(x).tolist() == [0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]
    for function in (ft.silu, ft.gelu, lambda x: ft.gelu(x, approximate=True)):
        found = function(x).numpy().astype(np.float64)
        np.testing.assert_allclose(found[1:6], np.maximum(x.numpy()[1:6].astype(np.float64), 0), atol=1e-30)


def test_division_of_integers_is_floating() -> None:
    same(ft.asarray([1, 2]) / ft.asarray([4, 0]), np.array([0.25, np.inf], dtype=np.float32))
    assert (ft.asarray([True]) / 2).dtype == ft.float32


def test_scalars_stand_on_either_side() -> None:
    x = ft.asarray([1.0, 4.0])
    assert (10 - x).tolist() == [9.0, 6.0]
    assert (2 / x).tolist() == [2.0, 0.5]
    assert (2**x).tolist() == [2.0, 16.0]
    assert (7 // x).tolist() == [7.0, 1.0]
    assert (7 % x).tolist() == [0.0, 3.0]
    assert (np.array([[1.0], [2.0]]) * x).shape == (2, 2)
    assert (1 << ft.asarray([1, 2])).tolist() == [2, 4]
    assert (ft.asarray([1, 2]) >> 1).tolist() == [0, 1]
    assert (6 & ft.asarray([3]) | 8 ^ ft.asarray([1])).tolist() == [11]
    assert [(~ft.asarray([True])).item(), (-x)[0].item(), (+x)[0].item(), abs(-x)[1].item()] == [False, -1.0, 1.0, 4.0]


@given(hnp.mutually_broadcastable_shapes(num_shapes=3, min_side=0, max_dims=3, max_side=3))
def test_where_broadcasts_all_three(shapes: Any) -> None:
    condition, a, b = (np.random.default_rng(i).integers(0, 9, s) for i, s in enumerate(shapes.input_shapes))
    same(ft.where(ft.asarray(condition > 4), ft.asarray(a), ft.asarray(b)), np.where(condition > 4, a, b))


def test_clip_keeps_the_dtype_and_takes_either_end() -> None:
    x = ft.asarray([1, 5, 9], dtype=ft.int8)
    assert ft.clip(x, 2, 7).tolist() == [2, 5, 7]
    assert ft.clip(x, max=4).dtype == ft.int8
    assert ft.clip(x, ft.asarray([6, 6, 6]), None).tolist() == [6, 6, 9]
    assert ft.clip(x).tolist() == [1, 5, 9]


@given(SHAPES, SHAPES)
def test_shapes_that_do_not_broadcast_are_both_shown(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    try:
        wanted = np.broadcast_shapes(a, b)
    except ValueError:
        with pytest.raises(ShapeError) as caught:
            ft.zeros(a) + ft.zeros(b)
        assert f"add: shapes {a} and {b} do not broadcast" in str(caught.value)
    else:
        assert (ft.zeros(a) + ft.zeros(b)).shape == wanted

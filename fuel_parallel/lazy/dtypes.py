"""The dtypes of lazy tensors, and how they promote.

A dtype is a `numpy.dtype`: hashable, comparable, with a name. Within one kind the array API standard's promotion table
holds. Between kinds, which the standard leaves open, the higher kind wins with its own precision
(bool < integer < floating < complex), so that `int64 * float32` is float32. Python scalars are weak: they take the
dtype of the tensor that they meet wherever that dtype's kind can hold them.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from fuel_parallel.errors import ArgumentError, DTypeError

DType = np.dtype[Any]

bool_: DType = np.dtype(np.bool_)
int8: DType = np.dtype(np.int8)
int16: DType = np.dtype(np.int16)
int32: DType = np.dtype(np.int32)
int64: DType = np.dtype(np.int64)
uint8: DType = np.dtype(np.uint8)
uint16: DType = np.dtype(np.uint16)
uint32: DType = np.dtype(np.uint32)
uint64: DType = np.dtype(np.uint64)
float16: DType = np.dtype(np.float16)
bfloat16: DType = np.dtype(ml_dtypes.bfloat16)
float32: DType = np.dtype(np.float32)
float64: DType = np.dtype(np.float64)
complex64: DType = np.dtype(np.complex64)
complex128: DType = np.dtype(np.complex128)

SIGNED = (int8, int16, int32, int64)
UNSIGNED = (uint8, uint16, uint32, uint64)
FLOATING = (float16, bfloat16, float32, float64)
COMPLEX = (complex64, complex128)
ALL = (bool_, *SIGNED, *UNSIGNED, *FLOATING, *COMPLEX)

default_float: DType = float32
default_int: DType = int64
default_complex: DType = complex64

_BY_NAME = {d.name: d for d in ALL}
_SAME = {d: d for d in ALL}
_RANK_OF_KIND = {"bool": 0, "integral": 1, "real floating": 2, "complex floating": 3}
_KIND_OF: dict[DType, str] = (
    {bool_: "bool"}
    | dict.fromkeys((*SIGNED, *UNSIGNED), "integral")
    | dict.fromkeys(FLOATING, "real floating")
    | dict.fromkeys(COMPLEX, "complex floating")
)
_promotions: dict[tuple[DType, DType], DType] = {}


def dtype(of: Any) -> DType:
    """The library's dtype for a name, a numpy dtype or scalar type, or a Python type.

    >>> dtype("bfloat16").name, dtype(float).name, dtype(np.int32).name
    ('bfloat16', 'float32', 'int32')
    """
    if type(of) in _PYTHON_TYPES and of in _PYTHON_TYPES[type(of)]:
        return _PYTHON_TYPES[type(of)][of]
    if isinstance(of, str) and of in _BY_NAME:
        return _BY_NAME[of]
    try:
        # One object for each dtype: numpy has equal ones (`longlong`, `int64`), and other byte orders by the same name.
        named: DType = np.dtype(of)
        found = _SAME.get(named) or _BY_NAME.get(named.name)
    except TypeError:
        found = None
    if found is not None:
        return found
    raise DTypeError(f"{of!r} is not a dtype of this library; expected one of {', '.join(_BY_NAME)}")


_named = dtype  # for functions that have an argument of that name
_PYTHON_TYPES: dict[type, dict[Any, DType]] = {
    type: {bool: bool_, int: default_int, float: default_float, complex: default_complex}
}


def kind(d: DType) -> str:
    """'bool', 'integral', 'real floating' or 'complex floating'."""
    return _KIND_OF[d]


def is_inexact(d: DType) -> bool:
    """Whether `d` is real or complex floating: what a gradient can flow through."""
    return _RANK_OF_KIND[_KIND_OF[d]] >= 2


def isdtype(dtype: Any, kind: Any) -> bool:
    """Whether `dtype` is of a kind (or of any of a tuple of kinds or dtypes), as the array API standard names them.

    >>> isdtype(float32, "real floating"), isdtype(int8, ("bool", "unsigned integer"))
    (True, False)
    """
    d = _named(dtype)
    if isinstance(kind, tuple):
        return any(isdtype(d, k) for k in kind)
    if isinstance(kind, str) and kind in _KINDS:
        return d in _KINDS[kind]
    if isinstance(kind, str) and kind not in _BY_NAME:
        raise ArgumentError(
            f"isdtype: unknown kind {kind!r}; expected a dtype or one of {', '.join(map(repr, _KINDS))}"
        )
    return d is _named(kind)


_KINDS: dict[str, tuple[DType, ...]] = {
    "bool": (bool_,),
    "signed integer": SIGNED,
    "unsigned integer": UNSIGNED,
    "integral": (*SIGNED, *UNSIGNED),
    "real floating": FLOATING,
    "complex floating": COMPLEX,
    "numeric": ALL[1:],
}


def promote(a: DType, b: DType) -> DType:
    """The dtype that an operation on `a` and `b` computes in.

    >>> promote(int8, uint8).name, promote(float16, bfloat16).name, promote(int64, float32).name
    ('int16', 'float32', 'float32')
    """
    if a is b:
        return a
    found = _promotions.get((a, b))
    if found is None:
        found = _promotions[a, b] = _promote(a, b)
    return found


def _promote(a: DType, b: DType) -> DType:
    kind_a, kind_b = _KIND_OF[a], _KIND_OF[b]
    if kind_a == kind_b:
        if {a, b} == {float16, bfloat16}:
            return float32
        if uint64 in (a, b) and (a in SIGNED or b in SIGNED):
            raise DTypeError(f"{a.name} and {b.name} have no common integer dtype; cast one of them with astype first")
        return np.promote_types(a, b)
    low, high = (a, b) if _RANK_OF_KIND[kind_a] < _RANK_OF_KIND[kind_b] else (b, a)
    if _KIND_OF[high] == "complex floating" and low == float64:
        return complex128
    return high


_OF_SCALARS: dict[type, DType] = {kind: dtype(kind) for kind in (bool, int, float, complex)}


def of_scalar(value: complex, like: DType | None = None) -> DType:
    """The dtype of a Python scalar, next to a tensor of dtype `like` if there is one (scalars are weak)."""
    scalar = _OF_SCALARS.get(type(value))
    if scalar is None:
        scalar = next(d for kind, d in _OF_SCALARS.items() if isinstance(value, kind))
    if like is None:
        return scalar
    if _RANK_OF_KIND[_KIND_OF[like]] >= _RANK_OF_KIND[_KIND_OF[scalar]]:
        return like
    if _KIND_OF[scalar] == "complex floating" and like == float64:
        return complex128
    return scalar


def real_of(d: DType) -> DType:
    """The dtype of the real part of `d`."""
    return {complex64: float32, complex128: float64}.get(d, d)


def is_half(d: DType) -> bool:
    """Whether `d` has 16 bits and so is accumulated in float32."""
    return d in (float16, bfloat16)


def accumulated_in(d: DType) -> DType:
    """The dtype in which values of `d` are added up."""
    return float32 if is_half(d) else d

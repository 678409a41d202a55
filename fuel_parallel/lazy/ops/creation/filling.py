"""Tensors of a formula: constants, progressions, identities and triangles."""

from __future__ import annotations

import builtins
import math
from functools import lru_cache
from typing import Any

import numpy as np

from fuel_parallel.arguments import whole
from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import ZERO, Node, Op, Shape, Spec, apply, define
from fuel_parallel.lazy.ops.creation.casting import astype, to_device
from fuel_parallel.lazy.tensor import Scalar, Tensor


class Literal:
    """A constant in the attributes of a node: compared by bits, so that -0.0, 0.0, 0 and False are four things."""

    __slots__ = ("bits", "value")

    def __init__(self, value: Scalar, dtype: DType) -> None:
        self.value = value
        # 0.0 and -0.0 are equal, and one key: they are not kept.
        self.bits = (dtype, _bytes_of(value, dtype) if value else _bytes_of.__wrapped__(value, dtype))

    def __hash__(self) -> int:
        return hash(self.bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and self.bits == other.bits

    def __repr__(self) -> str:
        return repr(self.value)


@lru_cache(maxsize=4096, typed=True)
def _bytes_of(value: Scalar, dtype: DType) -> bytes:
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(dtype).tobytes()


def check_shape(function: str, shape: Any) -> Shape:
    """The shape as a tuple of ints, or the user's error."""
    try:
        extents = (int(shape.__index__()),) if hasattr(shape, "__index__") else tuple(int(s.__index__()) for s in shape)
    except (TypeError, AttributeError):
        raise ShapeError(f"{function}: a shape is an int or a tuple of ints, not {shape!r}") from None
    if any(extent < 0 for extent in extents):
        raise ShapeError(f"{function}: extents must not be negative, but the shape is {extents}")
    return extents


def check_bounds(value: Scalar, wanted: DType) -> None:
    """Raises the user's error when a Python number is not one of an integer dtype."""
    limits = np.iinfo(wanted)
    if isinstance(value, int) and not limits.min <= value <= limits.max:
        raise ArgumentError(f"{value} is out of bounds for {wanted.name} ({limits.min} to {limits.max})")


FULL = define(
    Op(
        "full",
        infer=lambda shape, literal, dtype: Spec(shape, dtype),
        kernel=lambda xp, shape, literal, dtype: xp.full(shape, literal.value, dtype=dtype),
        vjp=ZERO,
        attr_names=("shape", "value", "dtype"),
        shapes="-> shape",
    )
)


def scalar_node(value: Scalar, dtype: DType) -> Node:
    """A 0-d constant."""
    return apply(FULL, (), (), Literal(value, dtype), dtype)


def full(shape: Any, fill_value: Scalar | Tensor, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """A tensor of one value everywhere.

    >>> full((2, 2), 0.5).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    extents = check_shape("full", shape)
    if isinstance(fill_value, Tensor):
        from fuel_parallel.lazy.ops.manipulation import broadcast_to

        return broadcast_to(fill_value if dtype is None else astype(fill_value, dtype), extents)
    if not isinstance(fill_value, bool | int | float | complex | np.generic):
        raise DTypeError(f"full: fill_value is a Python scalar or a tensor, not {fill_value!r}")
    wanted = dtypes.of_scalar(fill_value) if dtype is None else dtypes.dtype(dtype)
    value = fill_value.item() if isinstance(fill_value, np.generic) else fill_value
    if dtypes.kind(wanted) == "integral":
        check_bounds(value, wanted)
    if wanted != dtypes.bool_ and dtypes.of_scalar(value, wanted) != wanted:
        raise DTypeError(
            f"full: fill_value {value!r} does not fit {wanted.name}; choose another dtype or cast the value"
        )
    return to_device(Tensor(apply(FULL, (), extents, Literal(value, wanted), wanted)), device)


def zeros(shape: Any, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """A tensor of zeros, float32 unless told otherwise."""
    return full(shape, 0, dtype=dtypes.default_float if dtype is None else dtype, device=device)


def ones(shape: Any, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """A tensor of ones, float32 unless told otherwise."""
    return full(shape, 1, dtype=dtypes.default_float if dtype is None else dtype, device=device)


def empty(shape: Any, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """The same as `zeros`: a lazy graph has no uninitialised values."""
    return zeros(shape, dtype=dtype, device=device)


def full_like(x: Tensor, /, fill_value: Scalar, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """`full` with the shape and dtype of `x`."""
    return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype, device=device or x.device)


def zeros_like(x: Tensor, /, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """`zeros` with the shape and dtype of `x`."""
    return full_like(x, 0, dtype=dtype, device=device)


def ones_like(x: Tensor, /, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """`ones` with the shape and dtype of `x`."""
    return full_like(x, 1, dtype=dtype, device=device)


def empty_like(x: Tensor, /, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """The same as `zeros_like`."""
    return zeros_like(x, dtype=dtype, device=device)


ARANGE = define(
    Op(
        "arange",
        infer=lambda start, step, count, dtype: Spec((count,), dtype),
        kernel=lambda xp, start, step, count, dtype: (
            xp.arange(count, dtype=_wide(dtype)) * step.value + start.value
        ).astype(dtype),
        vjp=ZERO,
        attr_names=("start", "step", "count", "dtype"),
        shapes="-> [count]",
    )
)


def _wide(dtype: DType) -> DType:
    """The dtype to compute a progression in before it is rounded once."""
    return dtypes.int64 if dtypes.kind(dtype) == "integral" else dtypes.float64


def arange(
    start: int | float,
    /,
    stop: int | float | None = None,
    step: int | float = 1,
    *,
    dtype: Any = None,
    device: str | None = None,
) -> Tensor:
    """Evenly spaced values of the half-open interval [start, stop).

    >>> arange(5).tolist(), arange(1, 2, 0.25).tolist()
    ([0, 1, 2, 3, 4], [1.0, 1.25, 1.5, 1.75])
    """
    if stop is None:
        start, stop = 0, start
    if step == 0:
        raise ArgumentError("arange: step must not be 0")
    floating = any(isinstance(v, float) for v in (start, stop, step))
    wanted = dtypes.dtype(dtype) if dtype is not None else dtypes.default_float if floating else dtypes.default_int
    if floating and dtypes.kind(wanted) == "integral":
        raise DTypeError(f"arange: start, stop and step are floats, so dtype must be floating, not {wanted.name}")
    if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
        count = len(range(start, stop, step))
    else:
        count = builtins.max(0, math.ceil((stop - start) / step))
    wide = _wide(wanted)
    return to_device(Tensor(apply(ARANGE, (), Literal(start, wide), Literal(step, wide), count, wanted)), device)


LINSPACE = define(
    Op(
        "linspace",
        infer=lambda start, stop, count, endpoint, dtype: Spec((count,), dtype),
        kernel=lambda xp, start, stop, count, endpoint, dtype: xp.linspace(
            start.value, stop.value, count, endpoint=endpoint
        ).astype(dtype),
        vjp=ZERO,
        attr_names=("start", "stop", "count", "endpoint", "dtype"),
        shapes="-> [count]",
    )
)


def linspace(
    start: complex,
    stop: complex,
    /,
    num: int,
    *,
    dtype: Any = None,
    device: str | None = None,
    endpoint: builtins.bool = True,
) -> Tensor:
    """`num` evenly spaced values from `start` to `stop`."""
    count = whole(num)
    if count is None or count < 0:
        raise ArgumentError(f"linspace: num is a whole number of at least 0, not {num!r}")
    is_complex = isinstance(start, complex) or isinstance(stop, complex)
    default = dtypes.default_complex if is_complex else dtypes.default_float
    wanted = default if dtype is None else dtypes.dtype(dtype)
    wide = dtypes.complex128 if is_complex else dtypes.float64
    node = apply(LINSPACE, (), Literal(start, wide), Literal(stop, wide), count, endpoint, wanted)
    return to_device(Tensor(node), device)


EYE = define(
    Op(
        "eye",
        infer=lambda rows, columns, diagonal, dtype: Spec((rows, columns), dtype),
        kernel=lambda xp, rows, columns, diagonal, dtype: xp.eye(rows, columns, k=diagonal, dtype=dtype),
        vjp=ZERO,
        attr_names=("rows", "columns", "diagonal", "dtype"),
        shapes="-> [rows, columns]",
    )
)


def eye(
    n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: str | None = None
) -> Tensor:
    """A matrix with ones on its `k`-th diagonal."""
    rows, columns = check_shape("eye", (n_rows, n_rows if n_cols is None else n_cols))
    wanted = dtypes.default_float if dtype is None else dtypes.dtype(dtype)
    return to_device(Tensor(apply(EYE, (), rows, columns, k, wanted)), device)


def meshgrid(*arrays: Tensor, indexing: str = "xy") -> list[Tensor]:
    """Coordinate tensors of 1-d coordinate vectors, `xy` (columns first) or `ij`."""
    from fuel_parallel.lazy.ops.manipulation import broadcast_to, reshape

    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"meshgrid: indexing is 'xy' or 'ij', not {indexing!r}")
    if any(a.ndim != 1 for a in arrays):
        raise ShapeError(f"meshgrid: expected 1-d tensors, but the shapes are {[a.shape for a in arrays]}")
    place = list(range(len(arrays)))
    if indexing == "xy" and len(arrays) > 1:
        place[0], place[1] = 1, 0
    extents = [0] * len(arrays)
    for a, p in zip(arrays, place, strict=True):
        extents[p] = a.size
    return [
        broadcast_to(reshape(a, tuple(a.size if d == p else 1 for d in range(len(arrays)))), tuple(extents))
        for a, p in zip(arrays, place, strict=True)
    ]


def _triangle(name: str) -> Op:
    def infer(x: Spec, diagonal: int) -> Spec:
        if len(x.shape) < 2:
            raise ShapeError(f"{name}: expected at least 2 dimensions, but x has shape {x.shape}")
        return x

    op: Op = define(
        Op(
            name,
            infer,
            kernel=lambda xp, x, diagonal: getattr(xp, name)(x, diagonal),
            vjp=(lambda g, y, x, diagonal: Tensor(apply(op, (g.node,), diagonal)),),
            attr_names=("diagonal",),
            shapes="[..., m, n] -> [..., m, n]",
        )
    )
    return op


TRIL, TRIU = _triangle("tril"), _triangle("triu")


def tril(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The elements on and below the `k`-th diagonal, zero elsewhere."""
    return Tensor(apply(TRIL, (x.node,), k))


def triu(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The elements on and above the `k`-th diagonal, zero elsewhere."""
    return Tensor(apply(TRIU, (x.node,), k))

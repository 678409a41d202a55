"""Order along an axis: sorting, searching in sorted values, running sums and products."""

from __future__ import annotations

import builtins
from typing import Any

from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import ZERO, Op, Spec, apply, define
from fuel_parallel.lazy.ops import binary, creation, elementwise, indexing, manipulation, reductions
from fuel_parallel.lazy.ops.elementwise import BOOL, NUMERIC, REAL, in_float32
from fuel_parallel.lazy.ops.reductions import normalize_axis
from fuel_parallel.lazy.tensor import Tensor


def _infer_argsort(x: Spec, axis: int, descending: builtins.bool, stable: builtins.bool) -> Spec:
    elementwise.check_domain("argsort", x.dtype, REAL + BOOL)
    return Spec(x.shape, dtypes.int64, x.device)


def _argsort_kernel(xp: Any, x: Any, axis: int, descending: builtins.bool, stable: builtins.bool) -> Any:
    if not descending:
        return xp.argsort(x, axis=axis, kind="stable")
    # Reversed before and after, so that equal elements keep their order.
    order = xp.flip(xp.argsort(xp.flip(x, axis), axis=axis, kind="stable"), axis)
    return x.shape[axis] - 1 - order


ARGSORT = define(
    Op(
        "argsort",
        _infer_argsort,
        in_float32(_argsort_kernel),
        ZERO,
        attr_names=("axis", "descending", "stable"),
        shapes="[...] -> [...]",
        domain=REAL + BOOL,
    )
)


def argsort(x: Tensor, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True) -> Tensor:
    """The positions that sort `x` along `axis`; equal elements keep their order. NaNs are the largest."""
    if x.ndim == 0:
        raise ShapeError("argsort: expected at least 1 dimension, but x is 0-d")
    return Tensor(apply(ARGSORT, (x.node,), normalize_axis("argsort", axis, x.ndim), descending, stable))


def sort(x: Tensor, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True) -> Tensor:
    """`x` sorted along `axis`.

    >>> sort(creation.asarray([3, 1, 2]), descending=True).tolist()
    [3, 2, 1]
    """
    return indexing.take_along_axis(x, argsort(x, axis=axis, descending=descending, stable=stable), axis=axis)


def topk(x: Tensor, k: int, /, *, axis: int = -1, largest: builtins.bool = True) -> tuple[Tensor, Tensor]:
    """The `k` largest (or smallest) elements along `axis`, in order, and their positions.

    >>> values, positions = topk(creation.asarray([1.0, 5.0, 3.0]), 2)
    >>> values.tolist(), positions.tolist()
    ([5.0, 3.0], [1, 2])
    """
    place = normalize_axis("topk", axis, x.ndim)
    if not 0 <= k <= x.shape[place]:
        raise ArgumentError(f"topk: k must lie between 0 and the extent {x.shape[place]} of axis {axis}, but is {k}")
    order = argsort(x, axis=place, descending=largest)
    positions = order[(slice(None),) * place + (slice(k),)]
    return indexing.take_along_axis(x, positions, axis=place), positions


SEARCHSORTED = define(
    Op(
        "searchsorted",
        infer=lambda x1, x2, side: Spec(x2.shape, dtypes.int64, x2.device),
        kernel=in_float32(lambda xp, x1, x2, side: xp.searchsorted(x1, x2, side=side).astype(dtypes.int64)),
        vjp=ZERO,
        attr_names=("side",),
        shapes="[n], [...] -> [...]",
    )
)


def searchsorted(x1: Tensor, x2: Any, /, *, side: str = "left", sorter: Tensor | None = None) -> Tensor:
    """Where each element of `x2` would be inserted into the sorted vector `x1` to keep it sorted."""
    if side not in ("left", "right"):
        raise ArgumentError(f"searchsorted: side is 'left' or 'right', not {side!r}")
    if x1.ndim != 1:
        raise ShapeError(f"searchsorted: x1 must be 1-d, but has shape {x1.shape}")
    a, b = binary.operands("searchsorted", x1 if sorter is None else indexing.take(x1, sorter), x2)
    return Tensor(apply(SEARCHSORTED, (a, b), side))


# Running sums and products.


def _infer_cumulative(name: str) -> Any:
    def infer(x: Spec, axis: int) -> Spec:
        elementwise.check_domain(name, x.dtype, NUMERIC + BOOL)
        return Spec(x.shape, reductions._widened(x.dtype), x.device)

    return infer


CUMSUM = define(
    Op(
        "cumulative_sum",
        _infer_cumulative("cumulative_sum"),
        in_float32(lambda xp, x, axis: xp.cumsum(x, axis=axis)),
        (lambda g, y, x, axis: _reversed_sum(g, axis),),
        attr_names=("axis",),
        shapes="[...] -> [...]",
        domain=NUMERIC + BOOL,
    )
)
CUMPROD = define(
    Op(
        "cumulative_prod",
        _infer_cumulative("cumulative_prod"),
        in_float32(lambda xp, x, axis: xp.cumprod(x, axis=axis)),
        (lambda g, y, x, axis: _cumprod_vjp(g, x, axis),),
        attr_names=("axis",),
        shapes="[...] -> [...]",
        domain=NUMERIC + BOOL,
    )
)


def _reversed_sum(g: Tensor, axis: int) -> Tensor:
    return manipulation.flip(cumulative_sum(manipulation.flip(g, axis=axis), axis=axis), axis=axis)


def _cumprod_vjp(g: Tensor, x: Tensor, axis: int) -> Tensor:
    """d/dx_i of all products that hold x_i: products with x_i left out, so that zeros are no special case."""
    last = manipulation.moveaxis(x, axis, -1)
    cotangent = manipulation.expand_dims(manipulation.moveaxis(g, axis, -1), axis=-2)
    n = last.shape[-1]
    diagonal = creation.eye(n, dtype=dtypes.bool_, device=x.device)
    rows = manipulation.broadcast_to(manipulation.expand_dims(last, axis=-2), (*last.shape, n))
    without = cumulative_prod(binary.where(diagonal, creation.ones_like(rows), rows), axis=-1)
    later = creation.triu(creation.ones((n, n), dtype=x.dtype, device=x.device))
    return manipulation.moveaxis(reductions.sum(without * later * cotangent, axis=-1), -1, axis)


def _cumulative(op: Op, x: Tensor, axis: int | None, dtype: Any, initial: int | None) -> Tensor:
    if axis is None and x.ndim != 1:
        raise ShapeError(f"{op.name}: axis is needed for a tensor of shape {x.shape}")
    place = normalize_axis(op.name, 0 if axis is None else axis, x.ndim)
    result = Tensor(apply(op, ((x if dtype is None else creation.astype(x, dtype)).node,), place))
    result = result if dtype is None else creation.astype(result, dtype)
    if initial is None:
        return result
    first = creation.full((*x.shape[:place], 1, *x.shape[place + 1 :]), initial, dtype=result.dtype, device=x.device)
    return manipulation.concat([first, result], axis=place)


def cumulative_sum(
    x: Tensor, /, *, axis: int | None = None, dtype: Any = None, include_initial: builtins.bool = False
) -> Tensor:
    """Running sums along `axis`, from 0 if `include_initial`."""
    return _cumulative(CUMSUM, x, axis, dtype, 0 if include_initial else None)


def cumulative_prod(
    x: Tensor, /, *, axis: int | None = None, dtype: Any = None, include_initial: builtins.bool = False
) -> Tensor:
    """Running products along `axis`, from 1 if `include_initial`."""
    return _cumulative(CUMPROD, x, axis, dtype, 1 if include_initial else None)

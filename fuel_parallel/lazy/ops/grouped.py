"""Products of groups of rows, each with a matrix of its own. Where the groups end is data, so shapes do not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fuel_parallel.errors import DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Spec, apply, define
from fuel_parallel.lazy.ops import creation, elementwise
from fuel_parallel.lazy.ops.elementwise import product_in_float32
from fuel_parallel.lazy.tensor import Tensor


def grouped_matmul(x: Tensor, matrices: Tensor, ends: Tensor, /) -> Tensor:
    """The rows of `x` [rows, in], each times the one of `matrices` [groups, in, out] whose group it is in.

    Group g are the rows from `ends[g - 1]` up to `ends[g]` (integers, in order); rows after the last group give zeros.

    >>> x, matrices = creation.ones((3, 2)), creation.asarray([[[1.0], [1.0]], [[5.0], [5.0]]])
    >>> grouped_matmul(x, matrices, creation.asarray([2, 3])).tolist()
    [[2.0], [2.0], [10.0]]
    """
    common = creation.result_type(x, matrices)
    x, matrices = creation.astype(x, common), creation.astype(matrices, common)
    return Tensor(apply(GROUPED_MATMUL, (x.node, matrices.node, ends.node)))


def _grouped_outer(x: Tensor, g: Tensor, ends: Tensor) -> Tensor:
    """[groups, in, out]: of each group the product of its rows of `x`, transposed, and its rows of `g`."""
    return Tensor(apply(GROUPED_OUTER, (x.node, g.node, ends.node)))


def _groups(ends: Any, rows: int) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(ends.tolist()):
        stop = min(end, rows)
        if stop > start:
            yield group, slice(start, stop)
            start = stop


def _check_ends(ends: Spec) -> None:
    if len(ends.shape) != 1 or dtypes.kind(ends.dtype) != "integral":
        raise DTypeError(f"grouped_matmul: ends is a vector of integers, not {ends}")


def _infer_matmul(x: Spec, matrices: Spec, ends: Spec) -> Spec:
    _check_ends(ends)
    elementwise.check_domain("grouped_matmul", x.dtype, dtypes.FLOATING)
    if len(x.shape) != 2 or matrices.shape != (ends.shape[0], x.shape[1], *matrices.shape[2:]):
        raise ShapeError(
            "grouped_matmul: expected x [rows, in], matrices [groups, in, out] and ends [groups]; got "
            f"{x.shape}, {matrices.shape} and {ends.shape}"
        )
    return Spec((x.shape[0], matrices.shape[2]), x.dtype, x.device)


def _infer_outer(x: Spec, g: Spec, ends: Spec) -> Spec:
    _check_ends(ends)
    return Spec((ends.shape[0], x.shape[1], g.shape[1]), x.dtype, x.device)


def _matmul_kernel(xp: Any, x: Any, matrices: Any, ends: Any) -> Any:
    out = xp.zeros((x.shape[0], matrices.shape[2]), dtype=x.dtype)
    for group, rows in _groups(ends, x.shape[0]):
        xp.matmul(x[rows], matrices[group], out=out[rows])
    return out


def _outer_kernel(xp: Any, x: Any, g: Any, ends: Any) -> Any:
    out = xp.zeros((ends.shape[0], x.shape[1], g.shape[1]), dtype=x.dtype)
    for group, rows in _groups(ends, x.shape[0]):
        xp.matmul(x[rows].T, g[rows], out=out[group])
    return out


GROUPED_MATMUL = define(
    Op(
        "grouped_matmul",
        _infer_matmul,
        product_in_float32(_matmul_kernel),
        (
            lambda g, y, x, matrices, ends: grouped_matmul(g, matrices.mT, ends),
            lambda g, y, x, matrices, ends: _grouped_outer(x, g, ends),
            None,
        ),
        aliases=False,
        shapes="[rows, in], [groups, in, out], [groups] -> [rows, out]",
        domain=dtypes.FLOATING,
    )
)
GROUPED_OUTER = define(
    Op(
        "grouped_outer",
        _infer_outer,
        product_in_float32(_outer_kernel),
        (
            lambda h, y, x, g, ends: grouped_matmul(g, h.mT, ends),
            lambda h, y, x, g, ends: grouped_matmul(x, h, ends),
            None,
        ),
        aliases=False,
        shapes="[rows, in], [rows, out], [groups] -> [groups, in, out]",
        domain=dtypes.FLOATING,
    )
)

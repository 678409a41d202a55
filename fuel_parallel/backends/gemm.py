"""A product of strided matrices in the words of a BLAS: extents, leading dimensions, transposes and batch strides.

Pure arithmetic on shapes and strides, kept from call to call: products of a training step are met again.

A BLAS counts columns first. A matrix that lies row by row is to it a transposed one, and the product of two is
`out.T = right.T @ left.T`: so whoever calls it hands over the right operand first, and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

Ints = tuple[int, ...]

LARGEST = 2**31 - 1
"""The largest extent or leading dimension: a BLAS counts them in 32 bits."""
MOST_CALLS = 32
"""Batches that are not one stride apart are looped over up to here; of more, the operand is copied."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """How one operand lies: rows `leading` elements apart, or columns where it is `transposed`; `step` in a batch."""

    transposed: bool
    leading: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class Gemm:
    """`calls` times a batch of `count` products [rows, inner] @ [inner, columns].

    `starts` are the bytes from the begin of left, right and out to those of each call.
    """

    rows: int
    columns: int
    inner: int
    count: int
    left: Matrix
    right: Matrix
    out: Matrix
    starts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Unfit:
    """What must be copied first, so that each row follows the one before it: left, right, out."""

    left: bool
    right: bool
    out: bool


@lru_cache(maxsize=4096)
def gemm_of(shapes: tuple[Ints, Ints, Ints], strides: tuple[Ints, Ints, Ints], itemsize: int) -> Gemm | Unfit | None:
    """The product of arrays of these shapes and strides (bytes): left, right, and out, which is not empty.

    The first two broadcast to the third over the leading dimensions. None if an extent is too large for a BLAS.

    >>> gemm = gemm_of(((5, 2, 3), (3, 4), (5, 2, 4)), ((24, 12, 4), (16, 4), (32, 16, 4)), 4)
    >>> gemm.rows, gemm.columns, gemm.inner, gemm.count      # one large product, since the rows of left are in order
    (10, 4, 3, 1)
    """
    rows, inner = shapes[0][-2:]
    columns = shapes[1][-1]
    if max(rows, inner, columns) > LARGEST:
        return None
    batch = shapes[2][:-2]
    lead = [_batch_strides(shape, stride, len(batch)) for shape, stride in zip(shapes, strides, strict=True)]
    lies = [_lies(shape[-2:], stride[-2:], itemsize) for shape, stride in zip(shapes, strides, strict=True)]
    whole = [all(s >= 0 and s % itemsize == 0 for s in each) for each in lead]
    left, right, out = lies
    if left is None or right is None or out is None or out.transposed or not all(whole):
        bad = [lie is None or not each for lie, each in zip(lies, whole, strict=True)]
        return Unfit(bad[0], bad[1], bad[2] or (out is not None and out.transposed))
    looped = next(n for n in range(len(batch) + 1) if all(_step(batch[n:], each[n:]) is not None for each in lead))
    if math.prod(batch[:looped]) > MOST_CALLS:
        bad = [_step(batch, each) is None for each in lead]
        return Unfit(bad[0], bad[1], bad[2])
    count = math.prod(batch[looped:])
    left, right, out = (
        Matrix(lie.transposed, lie.leading, (_step(batch[looped:], each[looped:]) or 0) // itemsize)
        for lie, each in zip((left, right, out), lead, strict=True)
    )
    if count > LARGEST:
        return None
    if right.step == 0 and count * rows <= LARGEST and _continues(left, rows) and _continues(out, rows):
        rows, count = rows * count, 1
    return Gemm(rows, columns, inner, count, left, right, out, tuple(_starts(batch[:looped], lead)))


def _batch_strides(shape: Ints, strides: Ints, dimensions: int) -> Ints:
    """The strides over the leading dimensions of the result: 0 where the operand is repeated."""
    own = [0 if extent == 1 else stride for extent, stride in zip(shape[:-2], strides[:-2], strict=True)]
    return (*[0] * (dimensions - len(own)), *own)


def _lies(shape: Ints, strides: Ints, itemsize: int) -> Matrix | None:
    """How a matrix lies, its rows in order if that can be said; None if neither rows nor columns are."""
    for transposed in (False, True):
        (outer, inner), (far, near) = (shape[::-1], strides[::-1]) if transposed else (shape, strides)
        leading, rest = (max(inner, 1), 0) if outer == 1 else divmod(far, itemsize)
        if (near == itemsize or inner == 1) and not rest and max(inner, 1) <= leading <= LARGEST:
            return Matrix(transposed, leading)
    return None


def _step(extents: Ints, strides: Ints) -> int | None:
    """The one stride of a batch over several dimensions; None if there is none."""
    kept = [(extent, stride) for extent, stride in zip(extents, strides, strict=True) if extent != 1]
    for (_, outer), (extent, inner) in pairwise(kept):
        if outer != extent * inner:
            return None
    return kept[-1][1] if kept else 0


def _continues(matrix: Matrix, rows: int) -> bool:
    """Whether the rows of the next matrix of a batch follow those of this one."""
    return not matrix.transposed and matrix.step == rows * matrix.leading


def _starts(extents: Ints, lead: list[Ints]) -> Iterator[tuple[int, int, int]]:
    for index in product(*map(range, extents)):
        left, right, out = (sum(i * s for i, s in zip(index, each, strict=False)) for each in lead)
        yield left, right, out

"""The arithmetic of reductions: what `op` of the arrays of all ranks is, for every dtype of the library.

Arrays are reduced in the order of ranks, as numpy reduces them: bools are *or* and *and*, integers wrap, a NaN makes
the least and the greatest NaN. 16-bit floats are accumulated in float32 and rounded once, at the end.

MPI can do a part of this; `BY_MPI` says which. The rule: MPI's operations are those of C, so it does what C and numpy
do alike, and that is sums and products of numbers from the width of an int on, and order where there is no NaN.
Narrower integers have no arithmetic of their own in C: Open MPI 5.0.11 lets their sums stay at the greatest value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType

Host = np.ndarray[Any, Any]

BLOCK_BYTES = 1 << 20
"""Arrays are reduced in blocks of this size: large enough that calls do not count, small enough to stay in cache."""

_UFUNCS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}

_AVG = ReduceOp.AVG  # looked up on the class it costs as much as the rest of a small call

_INTEGERS = frozenset((*dtypes.SIGNED, *dtypes.UNSIGNED))
_WIDE_INTEGERS = frozenset((dtypes.int32, dtypes.int64, dtypes.uint32, dtypes.uint64))
_REALS = frozenset((dtypes.float32, dtypes.float64))

BY_MPI: dict[ReduceOp, frozenset[DType]] = {
    ReduceOp.SUM: _WIDE_INTEGERS | _REALS | frozenset(dtypes.COMPLEX),
    ReduceOp.AVG: _REALS | frozenset(dtypes.COMPLEX),
    ReduceOp.PRODUCT: _WIDE_INTEGERS | _REALS,  # complex: C makes infinities of what is NaN in numpy
    ReduceOp.MIN: _INTEGERS,
    ReduceOp.MAX: _INTEGERS,
}
"""For which dtypes MPI's operation is ours. All others are reduced by this module, whoever moves the bytes."""


def averaged(total: Host, op: ReduceOp, ranks: int) -> Host:
    """The total itself, or for AVG divided by the number of ranks, in place."""
    if op is _AVG:
        np.divide(total, total.dtype.type(ranks), out=total)
    return total


def reduce_into(result: Host, arrays: Sequence[Host], op: ReduceOp) -> None:
    """Reduces flat arrays in their order, block by block, so that each passes memory once.

    `result` may be the first of them. AVG divides by their number.
    """
    wide = dtypes.accumulated_in(result.dtype)
    step = max(BLOCK_BYTES // wide.itemsize, 1)
    for start in range(0, result.size, step):
        block = slice(start, start + step)
        out = result[block]
        total = out if wide is result.dtype else np.empty(out.size, wide)
        _reduce_block(total, [array[block] for array in arrays], op)
        if total is not out:
            out[...] = total


def _reduce_block(total: Host, arrays: list[Host], op: ReduceOp) -> None:
    ufunc = _UFUNCS[op]
    if len(arrays) == 1:
        total[...] = arrays[0]
    elif total.dtype == arrays[0].dtype:
        ufunc(arrays[0], arrays[1], out=total)
    else:
        total[...] = arrays[0]
        ufunc(total, arrays[1], out=total)
    for array in arrays[2:]:
        ufunc(total, array, out=total)
    averaged(total, op, len(arrays))


def prefixes(arrays: Sequence[Host], op: ReduceOp, exclusive: bool) -> Iterator[Host]:
    """The reduction of all arrays up to each in turn; `exclusive` leaves that one out, and begins with the identity.

    >>> [p.tolist() for p in prefixes([np.array([1]), np.array([2]), np.array([3])], ReduceOp.SUM, True)]
    [[0], [1], [3]]
    """
    dtype = arrays[0].dtype
    wide = [array.astype(dtypes.accumulated_in(dtype), copy=False) for array in arrays]
    if exclusive:
        wide = [np.full_like(wide[0], identity(op, wide[0].dtype)), *wide[:-1]]
    # A running value from the second on; adding an identity of floats would turn -0.0 into 0.0.
    first, rest = wide[:exclusive], wide[exclusive:]
    running = itertools.accumulate(rest, lambda total, array: np.asarray(_UFUNCS[op](total, array)))
    return (total.astype(dtype) for total in itertools.chain(first, running))


def identity(op: ReduceOp, dtype: DType) -> Any:
    """What changes nothing: 0 for SUM, 1 for PRODUCT, the greatest value for MIN and the least for MAX.

    >>> identity(ReduceOp.MIN, dtypes.int8), identity(ReduceOp.MAX, dtypes.float32)
    (np.int8(127), np.float32(-inf))
    """
    if op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        return dtype.type(op is ReduceOp.PRODUCT)
    if dtypes.kind(dtype) == "bool":
        return dtype.type(op is ReduceOp.MIN)
    if dtypes.kind(dtype) == "integral":
        bounds = np.iinfo(dtype)
        return dtype.type(bounds.max if op is ReduceOp.MIN else bounds.min)
    return dtype.type(np.inf if op is ReduceOp.MIN else -np.inf)


def same_bits_everywhere(op: ReduceOp, dtype: DType) -> bool:
    """Whether numpy computes an element alike wherever it lies in an array.

    Not so for the least of 0.0 and -0.0 and for complex products: vector and scalar instructions differ there.
    """
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        return True
    kind = dtypes.kind(dtypes.dtype(dtype))
    return kind in ("bool", "integral") or (op is ReduceOp.PRODUCT and kind == "real floating")

"""Reductions of our own over any transport that can move bytes: for all that MPI cannot reduce, or not as numpy does.

    all-to-all      an array is cut into one section for each rank; each rank gets its section of all arrays
    reduce          in the order of ranks, see `reduction`
    gather          the reduced sections, to where they are wanted

An element is computed once, so all ranks get the same bits. Bytes move in the dtype of the arrays: bfloat16 costs half
of float32. Small arrays are gathered whole instead, and every rank reduces all of them: one collective of MPI, not two.
Each function is a collective call; arrays are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fuel_parallel.comm.reduction import Host, prefixes, reduce_into
from fuel_parallel.partitioning import partition

if TYPE_CHECKING:
    from fuel_parallel.comm.communicator import ReduceOp
    from fuel_parallel.comm.transport import Transport
    from fuel_parallel.lazy.dtypes import DType


GATHERED_BYTES = 32 << 10
"""Up to this size, of the arrays of all ranks together, they are gathered whole."""


def all_reduce(transport: Transport, x: Host, op: ReduceOp, out: Host | None = None) -> Host:
    """The reduction, on every rank; into `out`, if given, which may be `x`."""
    if x.nbytes * transport.ranks <= GATHERED_BYTES:
        total = _reduced_everywhere(transport, x, op)
    else:
        sizes = _sizes(x, transport.ranks)
        total = transport.all_gather(reduce_scatter(transport, x.reshape(-1), op, sizes), sizes).reshape(x.shape)
    if out is None:
        return total
    out[...] = total
    return out


def _reduced_everywhere(transport: Transport, x: Host, op: ReduceOp) -> Host:
    gathered = transport.all_gather(x.reshape(1, -1), (1,) * transport.ranks)
    # Which of 0.0 and -0.0 is the lesser depends on whether numpy takes a vector instruction, and so on where an
    # element lies: for the same bits everywhere all lie alike.
    rows = _aligned((transport.ranks + 1, x.size), x.dtype)
    rows[1:] = gathered
    reduce_into(rows[0], list(rows[1:]), op)
    total: Host = rows[0].reshape(x.shape)
    return total


def _aligned(shape: tuple[int, int], dtype: DType) -> Host:
    """An array that begins with a cache line."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + 64, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def reduce(transport: Transport, x: Host, op: ReduceOp, root: int) -> Host | None:
    """The reduction on `root`, None elsewhere."""
    if x.nbytes * transport.ranks <= GATHERED_BYTES:
        total = _reduced_everywhere(transport, x, op)
        return total if transport.rank == root else None
    sizes = _sizes(x, transport.ranks)
    mine = reduce_scatter(transport, x.reshape(-1), op, sizes)
    blocks = [mine if rank == root else mine[:0] for rank in range(transport.ranks)]
    shapes = [(size if transport.rank == root else 0,) for size in sizes]
    received = transport.all_to_all(blocks, shapes, x.nbytes)
    return np.concatenate(received).reshape(x.shape) if transport.rank == root else None


def reduce_scatter(transport: Transport, x: Host, op: ReduceOp, rows: Sequence[int], out: Host | None = None) -> Host:
    """My rows of the reduction."""
    arrays = _exchanged(transport, x, rows)
    result = np.empty(arrays[0].shape, x.dtype) if out is None else out
    reduce_into(result.reshape(-1), [array.reshape(-1) for array in arrays], op)
    return result


def scan(transport: Transport, x: Host, op: ReduceOp, *, exclusive: bool, reverse: bool) -> Host:
    """The reduction of the arrays of all ranks up to mine; with `reverse`, from mine on."""
    sizes = _sizes(x, transport.ranks)
    arrays = _exchanged(transport, x.reshape(-1), sizes)
    step = -1 if reverse else 1
    blocks = list(prefixes(arrays[::step], op, exclusive))[::step]
    return np.concatenate(transport.all_to_all(blocks, [(size,) for size in sizes], x.nbytes)).reshape(x.shape)


def _exchanged(transport: Transport, x: Host, rows: Sequence[int]) -> list[Host]:
    """My rows of the arrays of all ranks."""
    ends = np.cumsum(rows)
    blocks = [x[end - count : end] for end, count in zip(ends, rows, strict=True)]
    return transport.all_to_all(blocks, [blocks[transport.rank].shape] * transport.ranks, x.nbytes)


def _sizes(x: Host, ranks: int) -> list[int]:
    """How many elements of an array each rank reduces."""
    return [len(part) for part in partition(x.size, ranks)]

"""The collectives as ops: shape rule, kernel, vjp. Attributes begin with the communicator.

Kernels hand contiguous arrays of the host or a device to the transport for those, of every dtype of the library; what a
reduction of them is, is in `reduction`. Gathering and scattering always happen along the first dimension; others are
moved there and back.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fuel_parallel.comm.communicator import Communicator, ReduceOp
from fuel_parallel.comm.meeting import guarded, together, transport_of
from fuel_parallel.comm.transport import Pending, Transport
from fuel_parallel.errors import GradientError
from fuel_parallel.lazy import dtypes, effects
from fuel_parallel.lazy.node import Op, Shape, Spec, define
from fuel_parallel.lazy.ops import binary, creation, manipulation, reductions
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.partitioning import partition

Rows = tuple[int, ...]
Array = Any


# Reductions.


def _start_all_reduce(
    xp: Any, x: Any, comm: Communicator, op: ReduceOp, replicated: bool, *, reuse: bool, out: None
) -> Pending:
    if isinstance(x, np.generic) or not x.flags.c_contiguous:
        x, reuse = xp.ascontiguousarray(x).reshape(x.shape), True
    return transport_of(xp, x, comm).start_all_reduce(x, op, reuse=reuse)


_start_all_reduce_guarded = guarded(_start_all_reduce)


def _all_reduce_kernel(xp: Any, x: Any, *attrs: Any) -> Any:
    return _start_all_reduce_guarded(xp, x, *attrs).wait()


def _all_reduce_vjp(g: Tensor, y: Tensor, x: Tensor, comm: Communicator, op: ReduceOp, replicated: bool) -> Tensor:
    if replicated:
        return g if op is ReduceOp.SUM else g * (1 / comm.world_size)
    if op in (ReduceOp.SUM, ReduceOp.AVG):
        return comm.all_reduce(g, op)
    total = comm.all_reduce(g)
    if op is ReduceOp.PRODUCT:
        return total * _product_of_others(x, comm)
    hit = creation.astype(x == y, g.dtype)
    return total * hit / comm.all_reduce(hit)


def _product_of_others(x: Tensor, comm: Communicator) -> Tensor:
    """The product of the other ranks' tensors, by all of them: dividing by mine would fail at zero."""
    everyone = comm.all_gather(manipulation.expand_dims(x, axis=0), 0)
    others = [everyone[rank] for rank in range(comm.world_size) if rank != comm.rank]
    return reductions.prod(manipulation.stack(others), axis=0)


ALL_REDUCE = define(
    Op(
        "all_reduce",
        infer=lambda x, comm, op, replicated: x,
        kernel=_all_reduce_kernel,
        start=_start_all_reduce_guarded,
        vjp=(_all_reduce_vjp,),
        crosses_ranks=True,
        aliases=False,
        attr_names=("comm", "op", "replicated"),
        shapes="[...] -> [...]",
    )
)


def _reduce_kernel(xp: Any, transport: Transport, x: Array, comm: Communicator, op: ReduceOp, root: int) -> Array:
    result = transport.reduce(x, op, root)
    return xp.zeros_like(x) if result is None else result


def _check_linear(function: str, op: ReduceOp) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise GradientError(f"grad: {function} by {op.name} has no gradient; use all_reduce, which has")


def _reduce_vjp(g: Tensor, y: Tensor, x: Tensor, comm: Communicator, op: ReduceOp, root: int) -> Tensor:
    _check_linear("reduce", op)
    cotangent = comm.broadcast(g, root)
    return cotangent if op is ReduceOp.SUM else cotangent * (1 / comm.world_size)


REDUCE = define(
    Op(
        "reduce",
        infer=lambda x, comm, op, root: x,
        kernel=together(_reduce_kernel),
        vjp=(_reduce_vjp,),
        crosses_ranks=True,
        aliases=False,
        attr_names=("comm", "op", "root"),
        shapes="[...] -> [...]",
    )
)


def _with_extent(x: Spec, dim: int, extent: int) -> Spec:
    return Spec((*x.shape[:dim], extent, *x.shape[dim + 1 :]), x.dtype, x.device)


def _start_reduce_scatter(
    xp: Any, x: Any, comm: Communicator, op: ReduceOp, dim: int, rows: Rows, *, reuse: bool, out: None
) -> Pending:
    front = xp.ascontiguousarray(xp.moveaxis(x, dim, 0))
    pending = transport_of(xp, front, comm).start_reduce_scatter(front, op, rows)
    return pending if dim == 0 else _Moved(pending, xp, dim)


class _Moved(Pending):
    """A result whose first dimension belongs elsewhere."""

    def __init__(self, pending: Pending, xp: Any, dim: int) -> None:
        self.pending, self.xp, self.dim = pending, xp, dim

    def progress(self) -> None:
        self.pending.progress()

    def wait(self) -> Any:
        return self.xp.moveaxis(self.pending.wait(), 0, self.dim)


def _reduce_scatter_vjp(
    g: Tensor, y: Tensor, x: Tensor, comm: Communicator, op: ReduceOp, dim: int, rows: Rows
) -> Tensor:
    _check_linear("reduce_scatter", op)
    gathered = comm.all_gather(g, dim, sizes=rows)
    return gathered if op is ReduceOp.SUM else gathered * (1 / comm.world_size)


_start_scatter_guarded = guarded(_start_reduce_scatter)

REDUCE_SCATTER = define(
    Op(
        "reduce_scatter",
        infer=lambda x, comm, op, dim, rows: _with_extent(x, dim, rows[comm.rank]),
        kernel=lambda xp, x, *attrs: _start_scatter_guarded(xp, x, *attrs).wait(),
        start=_start_scatter_guarded,
        vjp=(_reduce_scatter_vjp,),
        crosses_ranks=True,
        aliases=False,
        attr_names=("comm", "op", "dim", "rows"),
        shapes="[..., n, ...] -> [..., rows of the rank, ...] along dim",
    )
)


def _scan_kernel(
    xp: Any, transport: Transport, x: Array, comm: Communicator, op: ReduceOp, exclusive: bool, reverse: bool
) -> Array:
    return transport.scan(x, op, exclusive=exclusive, reverse=reverse)


def _scan_vjp(
    g: Tensor, y: Tensor, x: Tensor, comm: Communicator, op: ReduceOp, exclusive: bool, reverse: bool
) -> Tensor:
    """My tensor is in the sums of all ranks from mine on: their cotangents, summed from the other end."""
    if op is ReduceOp.SUM:
        return (comm.exscan if exclusive else comm.scan)(g, op, reverse=not reverse)
    xs = comm.all_gather(manipulation.expand_dims(x, axis=0), 0)
    cotangents = comm.all_gather(manipulation.expand_dims(g, axis=0), 0)
    mine = comm.rank
    # Zeros, but of both: a rank that is in nobody's terms gathers all the same, and in the next derivative too.
    nothing = creation.zeros_like(x)
    never = creation.astype(nothing, dtypes.bool_)
    total = binary.where(never, xs[mine] + cotangents[mine], nothing)
    for gathered in (xs, cotangents):
        effects.keep(gathered.node)
    for rank in range(comm.world_size):
        first, last = (rank + exclusive, comm.world_size) if reverse else (0, rank + 1 - exclusive)
        if first <= mine < last:
            total = total + cotangents[rank] * _part_in_scan(xs[first:last], mine - first, op)
    return total


def _part_in_scan(terms: Tensor, place: int, op: ReduceOp) -> Tensor:
    """The derivative of the reduction of `terms` with respect to one of them; extrema share it with their equals."""
    if op is ReduceOp.PRODUCT:
        others = [terms[other] for other in range(terms.shape[0]) if other != place]
        return reductions.prod(manipulation.stack(others), axis=0) if others else creation.ones_like(terms[0])
    extremum = (reductions.max if op is ReduceOp.MAX else reductions.min)(terms, axis=0)
    hits = creation.astype(terms == extremum, terms.dtype)
    return hits[place] / reductions.sum(hits, axis=0)


SCAN = define(
    Op(
        "scan",
        infer=lambda x, comm, op, exclusive, reverse: x,
        kernel=together(_scan_kernel),
        vjp=(_scan_vjp,),
        crosses_ranks=True,
        aliases=False,
        attr_names=("comm", "op", "exclusive", "reverse"),
        shapes="[...] -> [...]",
    )
)

# Movement.


def _broadcast_vjp(g: Tensor, y: Tensor, x: Tensor, comm: Communicator, root: int) -> Tensor:
    return comm.reduce(g, ReduceOp.SUM, root)


BROADCAST = define(
    Op(
        "broadcast",
        infer=lambda x, comm, root: x,
        kernel=together(lambda xp, transport, x, comm, root: transport.broadcast(x, root)),
        vjp=(_broadcast_vjp,),
        crosses_ranks=True,
        aliases=False,
        attr_names=("comm", "root"),
        shapes="[...] -> [...]",
    )
)


def _all_gather_kernel(
    xp: Any, transport: Transport, x: Array, comm: Communicator, dim: int, rows: Rows, replicated: bool
) -> Array:
    front = xp.ascontiguousarray(xp.moveaxis(x, dim, 0))
    return xp.moveaxis(transport.all_gather(front, rows), 0, dim)


def _all_gather_vjp(
    g: Tensor, y: Tensor, x: Tensor, comm: Communicator, dim: int, rows: Rows, replicated: bool
) -> Tensor:
    if not replicated:
        return comm.reduce_scatter(g, ReduceOp.SUM, dim, sizes=rows)
    start = sum(rows[: comm.rank])
    return g[(slice(None),) * dim + (slice(start, start + rows[comm.rank]),)]


ALL_GATHER = define(
    Op(
        "all_gather",
        infer=lambda x, comm, dim, rows, replicated: _with_extent(x, dim, sum(rows)),
        kernel=together(_all_gather_kernel),
        vjp=(_all_gather_vjp,),
        crosses_ranks=True,
        aliases=False,
        attr_names=("comm", "dim", "rows", "replicated"),
        shapes="[..., n, ...] of each rank -> [..., sum of n, ...] along dim",
    )
)


def _infer_all_to_all(x: Spec, comm: Communicator, split_dim: int, concat_dim: int, rows: Rows) -> Spec:
    cut = _with_extent(x, split_dim, len(partition(x.shape[split_dim], comm.world_size)[comm.rank]))
    return _with_extent(cut, concat_dim, sum(rows) if split_dim != concat_dim else x.shape[split_dim])


def _blocks(xp: Any, x: Array, dim: int, extents: Sequence[int]) -> list[Array]:
    """The parts of these extents along a dimension, each contiguous."""
    before = (slice(None),) * dim
    ends = itertools.accumulate(extents)
    return [xp.ascontiguousarray(x[(*before, slice(e - n, e))]) for e, n in zip(ends, extents, strict=True)]


def _all_to_all_kernel(
    xp: Any, transport: Transport, x: Array, comm: Communicator, split_dim: int, concat_dim: int, rows: Rows
) -> Array:
    blocks = _blocks(xp, x, split_dim, [len(part) for part in partition(x.shape[split_dim], comm.world_size)])
    shape = list(blocks[comm.rank].shape)
    shapes: list[Shape] = []
    for extent in rows:
        if split_dim != concat_dim:
            shape[concat_dim] = extent
        shapes.append(tuple(shape))
    # What all ranks have together: no rank gives or gets more, and all know it.
    most_bytes = math.prod((*x.shape[:concat_dim], *x.shape[concat_dim + 1 :])) * sum(rows) * x.itemsize
    return xp.concatenate(transport.all_to_all(blocks, shapes, most_bytes), axis=concat_dim)


def _all_to_all_vjp(
    g: Tensor, y: Tensor, x: Tensor, comm: Communicator, split_dim: int, concat_dim: int, rows: Rows
) -> Tensor:
    return comm.all_to_all(g, concat_dim, split_dim, size=x.shape[split_dim])


ALL_TO_ALL = define(
    Op(
        "all_to_all",
        _infer_all_to_all,
        kernel=together(_all_to_all_kernel),
        vjp=(_all_to_all_vjp,),
        crosses_ranks=True,
        aliases=False,
        attr_names=("comm", "split_dim", "concat_dim", "rows"),
        shapes="[...] -> [...], split_dim cut by ranks and concat_dim joined",
    )
)


Table = tuple[Rows, ...]


def _sizes_kernel(xp: Any, transport: Transport, x: Array, comm: Communicator, dim: int, sizes: Table) -> Array:
    blocks = _blocks(xp, x, dim, sizes[comm.rank])
    shapes = [(*x.shape[:dim], row[comm.rank], *x.shape[dim + 1 :]) for row in sizes]
    most = max(*map(sum, sizes), *map(sum, zip(*sizes, strict=True)))  # that a rank gives or gets: all know it
    most_bytes = math.prod((*x.shape[:dim], *x.shape[dim + 1 :])) * most * x.itemsize
    return xp.concatenate(transport.all_to_all(blocks, shapes, most_bytes), axis=dim)


def _sizes_vjp(g: Tensor, y: Tensor, x: Tensor, comm: Communicator, dim: int, sizes: Table) -> Tensor:
    return comm.all_to_all(g, dim, dim, sizes=tuple(zip(*sizes, strict=True)))


ALL_TO_ALL_SIZES = define(
    Op(
        "all_to_all_sizes",
        infer=lambda x, comm, dim, sizes: _with_extent(x, dim, sum(row[comm.rank] for row in sizes)),
        kernel=together(_sizes_kernel),
        vjp=(_sizes_vjp,),
        crosses_ranks=True,
        aliases=False,
        attr_names=("comm", "dim", "sizes"),
        shapes="[..., n, ...] -> [..., sum of sizes for the rank, ...] along dim",
    )
)


def _shift_kernel(xp: Any, transport: Transport, x: Array, comm: Communicator, offset: int, wrap: bool) -> Array:
    def peer(rank: int) -> int | None:
        return rank % comm.world_size if wrap or 0 <= rank < comm.world_size else None

    received = transport.exchange(x, peer(comm.rank + offset), peer(comm.rank - offset))
    return xp.zeros_like(x) if received is None else received


SHIFT = define(
    Op(
        "shift",
        infer=lambda x, comm, offset, wrap: x,
        kernel=together(_shift_kernel),
        vjp=(lambda g, y, x, comm, offset, wrap: comm.shift(g, -offset, wrap=wrap),),
        crosses_ranks=True,
        aliases=False,
        attr_names=("comm", "offset", "wrap"),
        shapes="[...] -> [...]",
    )
)

# One loss on all ranks: nothing moves forward, the cotangents do.

REPLICATE = define(
    Op(
        "replicate",
        infer=lambda x, comm: x,
        kernel=lambda xp, x, comm: x,
        vjp=(lambda g, y, x, comm: comm.all_reduce(g, replicated=True),),
        attr_names=("comm",),
        shapes="[...] -> [...]",
    )
)


def _shard_kernel(xp: Any, x: Any, comm: Communicator, dim: int) -> Any:
    part = partition(x.shape[dim], comm.world_size)[comm.rank]
    return x[(slice(None),) * dim + (slice(part.start, part.stop),)]


SHARD = define(
    Op(
        "shard",
        infer=lambda x, comm, dim: _with_extent(x, dim, len(partition(x.shape[dim], comm.world_size)[comm.rank])),
        kernel=_shard_kernel,
        vjp=(lambda g, y, x, comm, dim: comm.all_gather(g, dim, size=x.shape[dim], replicated=True),),
        attr_names=("comm", "dim"),
        shapes="[..., n, ...] -> [..., part of n, ...] along dim",
    )
)

"""The ops of sharded parameters: rows to the whole tensor for a while, and gradients to their mean over ranks."""

from __future__ import annotations

from typing import Any

from fuel_parallel.comm.communicator import Communicator, ReduceOp
from fuel_parallel.comm.meeting import guarded, transport_of
from fuel_parallel.comm.transport import Pending
from fuel_parallel.lazy import effects
from fuel_parallel.lazy.node import Op, Spec, apply, define
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.partitioning import partition


def gather_rows(rows: Tensor, comm: Communicator, size: int) -> Tensor:
    """The tensor of `size` rows of which each rank has its part, by `partition`; vjp: my rows of the mean over ranks.

    It is made again for the backward pass, which so does not hold the value of the forward pass.
    """
    extents = tuple(len(part) for part in partition(size, comm.world_size))
    node = apply(GATHER_ROWS, (rows.node,), comm, extents)
    effects.note(node)
    return Tensor(node)


def mean_gradient(x: Tensor, comm: Communicator) -> Tensor:
    """`x`, which all ranks hold alike and from here on use differently; vjp: the mean over ranks."""
    return Tensor(apply(MEAN_GRADIENT, (x.node,), comm))


def _infer(rows: Spec, comm: Communicator, extents: tuple[int, ...]) -> Spec:
    return Spec((sum(extents), *rows.shape[1:]), rows.dtype, rows.device)


def _start(xp: Any, x: Any, comm: Communicator, extents: tuple[int, ...], *, reuse: bool, out: Any) -> Pending:
    rows = xp.ascontiguousarray(x).reshape(x.shape)
    return transport_of(xp, rows, comm).start_all_gather(rows, extents, out)


_start_guarded = guarded(_start)

GATHER_ROWS = define(
    Op(
        "gather_rows",
        infer=_infer,
        kernel=lambda xp, x, *attrs: _start_guarded(xp, x, *attrs).wait(),
        into=lambda xp, out, x, *attrs: _start_guarded(xp, x, *attrs, out=out).wait(),
        start=_start_guarded,
        vjp=(lambda g, y, x, comm, extents: comm.reduce_scatter(g, ReduceOp.AVG, sizes=extents),),
        crosses_ranks=True,
        aliases=False,
        recomputed=True,
        attr_names=("comm", "extents"),
        shapes="[n, ...] of each rank -> [sum of n, ...]",
    )
)

MEAN_GRADIENT = define(
    Op(
        "mean_gradient",
        infer=lambda x, comm: x,
        kernel=lambda xp, x, comm: x,
        vjp=(lambda g, y, x, comm: comm.all_reduce(g, ReduceOp.AVG),),
        attr_names=("comm",),
        shapes="[...] -> [...]",
    )
)

"""Clipping of gradients: by the norm of all of them together, over all ranks, or each element by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fuel_parallel.arguments import checked
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.ops import binary, creation, elementwise, manipulation, reductions
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.lazy.tree import flatten, unflatten
from fuel_parallel.module import Parameter
from fuel_parallel.optim.optimizer import check_gradients
from fuel_parallel.optim.ownership import counted, cut_over


@checked
def clip_by_global_norm(
    gradients: Any,
    max_norm: float | Tensor,
    *,
    parameters: Sequence[Parameter],
    tp: Communicator | None = None,
    pp: Communicator | None = None,
    dp: Communicator | None = None,
    loss_scale: float | Tensor = 1.0,
) -> tuple[Any, Tensor]:
    """Gradients made shorter, where their norm is above `max_norm`, and the norm that they had (arXiv:1211.5063).

    The norm is that of the gradient of the whole model, a float64 scalar, the same to the bit on all ranks that have
    the same gradients: gradients of parts (of parameters with an `fp.Shard`) are summed over `tp`, copies of parts and
    what all tensor-parallel ranks hold alike count once, and `pp` has the other stages. Average over data-parallel
    ranks first; rows that these share (ZeRO) are summed over `dp`. One number is sent along each axis that is given.
    Squares of 16-bit gradients are summed in float32.

    A norm of NaN or infinity is returned, and the gradients become NaN: `MixedPrecision` skips such a step.

    Args:
        gradients: A nest of them, in the order of `parameters`.
        max_norm: The greatest norm; data, which may change each step.
        parameters: Of which the gradients are.
        tp: The ranks that hold the other parts of parameters; needed if one is a part.
        pp: The ranks that hold the other stages of a pipeline.
        dp: The ranks that hold the other rows, of `ShardedOptimizer.shards` or of a model cut by `shard_parameters`;
            None if they all hold the same.
        loss_scale: What the loss was multiplied by, and with it the gradients, which stay so; the norm does not.

    Raises `ArgumentError` when gradients and parameters do not go together, or `tp` or `dp` is missing.

    >>> weight = Parameter([0.0, 0.0])
    >>> (clipped,), norm = clip_by_global_norm([creation.asarray([3.0, 4.0])], 1.0, parameters=[weight])
    >>> print(clipped.numpy(), norm.item())
    [0.6 0.8] 5.0
    """
    leaves, structure = flatten(gradients)
    _check(leaves, parameters, tp, dp)
    _check_limit("clip_by_global_norm: max_norm", max_norm)
    tp_rank, dp_rank = (0 if comm is None else comm.rank for comm in (tp, dp))
    total = _sum_of_squares(leaves, parameters, tp_rank, dp_rank)
    for comm in (tp, pp, dp):
        if comm is not None and comm.world_size > 1:
            # Summed here, in the order of the ranks, and not by the MPI, so that all have the same bits.
            total = reductions.sum(comm.all_gather(manipulation.reshape(total, (1,))))
    norm = elementwise.sqrt(total) / _data(loss_scale)
    limit = _data(max_norm)
    # Not where(norm <= limit, 1, ...): a NaN must not pass as small.
    scale = binary.where(norm > limit, limit / norm, norm * 0.0 + 1.0)
    return unflatten(structure, [_times(g, scale) for g in leaves]), norm


@checked
def clip_by_value(gradients: Any, limit: float | Tensor) -> Any:
    """A nest of gradients with each element between -limit and limit; a NaN stays.

    >>> clip_by_value([creation.asarray([3.0, -4.0, 0.5])], 1.0)[0].tolist()
    [1.0, -1.0, 0.5]
    """
    _check_limit("clip_by_value: limit", limit)
    leaves, structure = flatten(gradients)
    most = _data(limit)
    clipped = []
    for g in leaves:
        here = creation.astype(most, g.dtype)
        clipped.append(binary.clip(g, -here, here))
    return unflatten(structure, clipped)


def _sum_of_squares(gradients: list[Tensor], parameters: Sequence[Parameter], tp_rank: int, dp_rank: int) -> Tensor:
    """Of what this rank counts, in float64."""
    parts = [counted(parameter, g, tp_rank, dp_rank) for parameter, g in zip(parameters, gradients, strict=True)]
    sums = [reductions.sum(elementwise.square(_wide(g))) for g in parts if g is not None]
    if not sums:
        return creation.zeros((), dtype=dtypes.float64)
    return reductions.sum(manipulation.stack([creation.astype(s, dtypes.float64) for s in sums]))


def _times(gradient: Tensor, scale: Tensor) -> Tensor:
    wide = _wide(gradient)
    return creation.astype(wide * creation.astype(scale, wide.dtype), gradient.dtype)


def _wide(gradient: Tensor) -> Tensor:
    return creation.astype(gradient, dtypes.float32) if dtypes.is_half(gradient.dtype) else gradient


def _data(value: float | Tensor) -> Tensor:
    """A float64 scalar that is data, so that another value does not make another plan."""
    if isinstance(value, Tensor):
        return creation.astype(value, dtypes.float64)
    return creation.asarray(np.float64(value))


def _check_limit(what: str, value: float | Tensor) -> None:
    if isinstance(value, Tensor):
        if value.shape != ():
            raise ShapeError(f"{what} is one number, not a tensor of shape {value.shape}")
    elif not value > 0:
        raise ArgumentError(f"{what} must be above 0, but is {value!r}")


def _check(
    gradients: list[Any], parameters: Sequence[Parameter], tp: Communicator | None, dp: Communicator | None
) -> None:
    check_gradients("clip_by_global_norm", parameters, gradients)
    for index, parameter in enumerate(parameters):
        for name, comm, is_cut in zip(("tp", "dp"), (tp, dp), cut_over(parameter), strict=True):
            if is_cut and comm is None and parameter.shard is not None:
                raise ArgumentError(
                    f"clip_by_global_norm: parameter {index} is a part of a tensor of shape "
                    f"{parameter.shard.global_shape}, and the norm is that of the whole; give the communicator of the "
                    f'ranks that hold the others, such as {name}=mesh["{name}"]'
                )

"""Which elements of a parameter this rank counts, so that over all ranks each element is counted once."""

from __future__ import annotations

from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter, RowShard

Box = tuple[slice, ...]


def counted_box(parameter: Parameter) -> Box:
    """The slice, in each dimension, of what counts for this rank of a parameter's elements; starts and stops are given.

    >>> from fuel_parallel import Shard
    >>> counted_box(Parameter([1.0, 2.0, 3.0], shard=Shard((6,), (3,), owned=(slice(1, None),))))
    (slice(1, 3, 1),)
    """
    owned = None if parameter.shard is None else parameter.shard.owned
    slices = (slice(None),) * parameter.ndim if owned is None else owned
    return tuple(slice(*own.indices(extent)) for own, extent in zip(slices, parameter.shape, strict=True))


def counted(parameter: Parameter, gradient: Tensor, tp_rank: int, dp_rank: int) -> Tensor | None:
    """The part of a parameter's gradient that this rank counts; None for nothing.

    A part of a larger tensor counts where it is, but copies of it once; what all tensor-parallel ranks hold alike
    counts on the first of them, and what all data-parallel ranks do on the first of those.
    """
    over_tp, over_dp = cut_over(parameter)
    if (dp_rank and not over_dp) or (tp_rank and not over_tp):
        return None
    shard = parameter.shard
    return gradient if shard is None or shard.owned is None else gradient[counted_box(parameter)]


def cut_over(parameter: Parameter) -> tuple[bool, bool]:
    """Whether a parameter is a part that tensor-parallel ranks share, and whether rows that data-parallel ranks do."""
    shard = parameter.shard
    if isinstance(shard, RowShard):
        return shard.outer is not None, True
    return shard is not None, False

"""Which elements of a parameter this rank counts, so that over all ranks each element is counted once."""

from __future__ import annotations

from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter, RowShard, Shard


def counted(parameter: Parameter, gradient: Tensor, tp_rank: int, dp_rank: int) -> Tensor | None:
    """The part of a parameter's gradient that this rank counts; None for nothing.

    A part of a larger tensor counts where it is, but copies of it once; what all tensor-parallel ranks hold alike
    counts on the first of them, and what all data-parallel ranks do on the first of those.
    """
    over_tp, over_dp = cut_over(parameter)
    if (dp_rank and not over_dp) or (tp_rank and not over_tp):
        return None
    shard = parameter.shard
    if shard is None or shard.owned is None:
        return gradient
    return gradient[tuple(slice(span.start, span.stop) for span in shard.counted(parameter.shape))]


def cut_over(parameter: Parameter) -> tuple[bool, bool]:
    """Whether a parameter is a part that tensor-parallel ranks share, and whether rows that data-parallel ranks do."""
    shard = parameter.shard
    if isinstance(shard, RowShard):
        return shard.outer is not None, True
    return shard is not None and not _is_a_whole_copy(parameter, shard), False


def _is_a_whole_copy(parameter: Parameter, shard: Shard) -> bool:
    """Whether it is the whole, of which nothing counts here: another stage of the pipeline has it, too."""
    return parameter.shape == shard.global_shape and any(not span for span in shard.counted(parameter.shape))

"""Shards of single tensors: the arithmetic of a split, without layers or ranks that talk."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.lazy.parts import part_of
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Shard
from fuel_parallel.partitioning import partition


class ShardDim(Enum):
    """Which dimension of a weight [in, out] is cut."""

    COLUMN = -1
    """The last: each rank computes some of the outputs."""
    ROW = -2
    """The one before: each rank takes some of the inputs."""

    def __repr__(self) -> str:
        return f"ShardDim.{self.name}"


@dataclass(frozen=True)
class TensorShard:
    """A rank's part of a tensor.

    Args:
        tensor: The part.
        dim: How the whole was cut.
        rank: Whose part it is.
        shard: Where it lies in the whole.
    """

    tensor: Tensor
    dim: ShardDim
    rank: int
    shard: Shard


@dataclass(frozen=True)
class TensorParallelConfig:
    """A split over `world_size` ranks.

    >>> TensorParallelConfig(3).shard_range(8, 1)
    range(3, 6)
    """

    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ArgumentError(f"TensorParallelConfig: world_size must be at least 1, but is {self.world_size}")

    def shard_range(self, size: int, rank: int) -> range:
        """What `rank` gets of `size`, by `partition`. Raises `ArgumentError` for a rank that is not there."""
        if not 0 <= rank < self.world_size:
            raise ArgumentError(f"there is no rank {rank}; the ranks are 0 to {self.world_size - 1}")
        return partition(size, self.world_size)[rank]


def make_shard(tensor: Tensor, dim: ShardDim, config: TensorParallelConfig, rank: int) -> TensorShard:
    """The part of a weight that a rank holds, lazily. Parts of random draws are drawn without the rest.

    Raises `ShapeError` when the tensor has no such dimension, `ArgumentError` for a rank that is not there.

    >>> from fuel_parallel.lazy import ones
    >>> shard = make_shard(ones((4, 5)), ShardDim.COLUMN, TensorParallelConfig(2), rank=1)
    >>> shard.tensor.shape, shard.shard.start
    ((4, 2), (0, 3))
    """
    if tensor.ndim < -dim.value:
        raise ShapeError(f"make_shard: {dim!r} needs {-dim.value} dimensions or more, but the shape is {tensor.shape}")
    box = [range(extent) for extent in tensor.shape]
    box[dim.value] = config.shard_range(tensor.shape[dim.value], rank)
    start = tuple(span.start for span in box)
    return TensorShard(part_of(tensor, tuple(box)), dim, rank, Shard(tensor.shape, start))

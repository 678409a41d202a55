"""Parameters cut by rows over the ranks of data parallelism, and the buckets in which their rows travel.

Rank r holds rows `partition(rows, ranks)[r]` of each parameter: a box, which a checkpoint of any number of ranks reads.
What has no rows, a scalar, is whole on all ranks.

A bucket is flat, and ordered by rank: all that rank 0 holds of its tensors, then all that rank 1 does. So one
reduce-scatter gives a rank its rows of all of them, and one all-gather brings them back. A scalar is in the part of
each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fuel_parallel.comm.communicator import Communicator, ReduceOp
from fuel_parallel.comm.symbolic import SymbolicComm
from fuel_parallel.errors import CommunicatorError
from fuel_parallel.lazy.node import Shape
from fuel_parallel.lazy.ops import manipulation
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter, RowShard, Shard
from fuel_parallel.partitioning import partition


def rows_of(shape: Shape, comm: Communicator) -> range:
    """The rows of a tensor with at least one dimension that belong to this rank."""
    return partition(shape[0], comm.world_size)[comm.rank]


def own_rows(x: Tensor, comm: Communicator) -> Tensor:
    """This rank's rows of a tensor; a scalar itself."""
    return _rows_on(comm.rank, x, comm)


def _rows_on(rank: int, x: Tensor, comm: Communicator) -> Tensor:
    if not x.ndim:
        return x
    rows = partition(x.shape[0], comm.world_size)[rank]
    return x[rows.start : rows.stop]


def shard_of_rows(shape: Shape, outer: Shard | None, comm: Communicator) -> Shard | None:
    """Where this rank's rows lie in the whole tensor, of which the parameter may be a part itself: `outer`."""
    if not shape:
        return outer
    mine = rows_of(shape, comm)
    if outer is None:
        return RowShard(shape, (mine.start, *[0] * (len(shape) - 1)))
    start = (outer.start[0] + mine.start, *outer.start[1:])
    owned = outer.owned
    if owned is not None:
        counted = outer.counted(shape)[0]
        first, last = (min(max(row, mine.start), mine.stop) - mine.start for row in (counted.start, counted.stop))
        owned = (slice(first, last), *owned[1:])
    return RowShard(outer.global_shape, start, owned, outer)


def check_same(function: str, parameters: Sequence[Parameter], comm: Communicator) -> None:
    """Raises `CommunicatorError` where ranks have parameters of other shapes or dtypes, or other parts of one.

    A collective call; a symbolic rank has nobody to ask.
    """
    if comm.world_size == 1 or isinstance(comm, SymbolicComm):
        return
    first, *others = comm.all_gather_object([_described(p) for p in parameters])
    for rank, theirs in enumerate(others, 1):
        if theirs == first:
            continue
        index = next((i for i, (a, b) in enumerate(zip(first, theirs, strict=False)) if a != b), None)
        if index is None:
            what = f"{len(first)} on rank 0, {len(theirs)} on rank {rank}"
        else:
            what = f"parameter {index} is {first[index]} on rank 0, {theirs[index]} on rank {rank}"
        raise CommunicatorError(
            f"{function}: all ranks of {comm.name} must have the same parameters, but they differ: {what}. Give the "
            "communicator of the ranks that hold the same parts, such as mesh['dp']"
        )


def _described(parameter: Parameter) -> str:
    shard = parameter.shard
    at = "" if shard is None else f" at {list(shard.start)} of {list(shard.global_shape)}"
    return f"{parameter.dtype.name}{list(parameter.shape)}{at}"


@dataclass(frozen=True)
class Bucket:
    """Tensors of these shapes, one dtype for all, that travel together."""

    shapes: tuple[Shape, ...]
    comm: Communicator

    def mean_rows(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of the means over ranks, by one reduce-scatter."""
        parts = [_rows_on(rank, x, self.comm) for rank in self._ranks for x in wholes]
        flat = self.comm.reduce_scatter(_joined(parts), ReduceOp.AVG, sizes=self._sizes)
        return self._cut(flat, 0, self.comm.rank)

    def wholes(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The whole tensors, on every rank, by one all-gather of what each rank has of them."""
        flat = self.comm.all_gather(_joined(shards), sizes=self._sizes)
        parts, start = [], 0
        for rank, size in enumerate(self._sizes):
            parts.append(self._cut(flat, start, rank))
            start += size
        by_tensor = zip(self.shapes, zip(*parts, strict=True), strict=True)
        return [manipulation.concat(of_ranks) if shape else of_ranks[0] for shape, of_ranks in by_tensor]

    @property
    def _ranks(self) -> range:
        return range(self.comm.world_size)

    def _shapes_on(self, rank: int) -> list[Shape]:
        return [
            (len(partition(shape[0], self.comm.world_size)[rank]), *shape[1:]) if shape else () for shape in self.shapes
        ]

    @property
    def _sizes(self) -> list[int]:
        """How many elements of the bucket each rank holds."""
        return [sum(map(math.prod, self._shapes_on(rank))) for rank in self._ranks]

    def _cut(self, flat: Tensor, start: int, rank: int) -> list[Tensor]:
        """What lies from `start` on: the tensors as that rank holds them."""
        found = []
        for shape in self._shapes_on(rank):
            size = math.prod(shape)
            found.append(manipulation.reshape(flat[start : start + size], shape))
            start += size
        return found


def _joined(parts: Sequence[Tensor]) -> Tensor:
    flat = [manipulation.reshape(x, (-1,)) for x in parts]
    return flat[0] if len(flat) == 1 else manipulation.concat(flat)

"""What collectives are given: who is asked, by what to reduce, ranks, dimensions and extents, all checked."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fuel_parallel.errors import ArgumentError, CommunicatorError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.ops.reductions import normalize_axis
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.partitioning import partition


class ReduceOp(Enum):
    """How a reduction combines the values of the ranks. For bools SUM and MAX are *or*, PRODUCT and MIN are *and*."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVG = "avg"

    __hash__ = object.__hash__  # Enum's own is written in Python, and small collectives take microseconds

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}"


@dataclass(frozen=True, slots=True)
class CommInfo:
    """Who I am in a communicator."""

    rank: int
    world_size: int

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


def check_reduction(function: str, x: Tensor, op: ReduceOp) -> None:
    """Raises the user's error unless values of that dtype can be reduced so."""
    if not isinstance(op, ReduceOp):
        raise ArgumentError(f"{function}: op is one of {', '.join(map(repr, ReduceOp))}, not {op!r}")
    kind = dtypes.kind(x.dtype)
    if op is ReduceOp.AVG and kind in ("bool", "integral"):
        raise DTypeError(
            f"{function}: the average of {x.dtype.name} is no {x.dtype.name}; cast to a floating dtype first"
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and kind == "complex floating":
        raise DTypeError(f"{function}: complex numbers have no order, so {op.name} of {x.dtype.name} is not defined")


def check_differentiable(function: str, dtype: dtypes.DType, differentiable: bool) -> None:
    """Raises the user's error unless a message of that dtype can have a cotangent."""
    if differentiable and dtypes.kind(dtype) != "real floating":
        raise DTypeError(f"{function}: differentiable=True needs a floating dtype, not {dtype.name}")


def check_rank(info: CommInfo, function: str, what: str, rank: int) -> None:
    """Raises the user's error unless it is a rank of the communicator."""
    if not isinstance(rank, int) or not 0 <= rank < info.world_size:
        raise ArgumentError(f"{function}: {what} must be a rank from 0 to {info.world_size - 1}, not {rank!r}")


def check_peer(info: CommInfo, function: str, what: str, rank: int) -> None:
    """Raises the user's error unless it is another rank of the communicator."""
    check_rank(info, function, what, rank)
    if rank == info.rank:
        raise CommunicatorError(f"{function}: {what}={rank} is this rank itself; use the tensor as it is")


def check_dim(function: str, x: Tensor, dim: int) -> int:
    """The dimension, counted from 0."""
    if x.ndim == 0:
        raise ShapeError(f"{function}: a 0-d tensor has no dimension to split or join; reshape it to (1,) first")
    return normalize_axis(function, dim, x.ndim)


def size_table(info: CommInfo, mine: int, sizes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The extents of the parts from each rank to each."""
    n = info.world_size
    try:
        table = tuple(tuple(map(operator.index, row)) for row in sizes)
    except TypeError:
        raise ArgumentError(
            f"all_to_all: sizes is a table of ints, sizes[source][dest] for {n} ranks; got {sizes!r}"
        ) from None
    if [len(row) for row in table] != [n] * n or any(extent < 0 for row in table for extent in row):
        raise ArgumentError(
            f"all_to_all: sizes is a table of {n} rows of {n} extents, 0 or more, sizes[source][dest]; got {sizes!r}"
        )
    if sum(table[info.rank]) != mine:
        raise ShapeError(
            f"all_to_all: sizes[{info.rank}], what this rank sends, sums to {sum(table[info.rank])}, but its "
            f"tensor has an extent of {mine}"
        )
    return table


def given_rows(info: CommInfo, function: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """The extent of each rank's shard, as the user lists them."""
    try:
        rows = tuple(map(operator.index, sizes))
    except TypeError:
        rows = ()
    if len(rows) != info.world_size or min(rows) < 0:
        raise ArgumentError(
            f"{function}: sizes has an extent, 0 or more, for each of {info.world_size} ranks; got {sizes!r}"
        )
    return rows


def equal_rows(info: CommInfo, function: str, mine: int, size: int | None) -> tuple[int, ...]:
    """The extent of each rank's shard: all alike, or the parts of a whole of extent `size`."""
    if size is None:
        return (mine,) * info.world_size
    rows = tuple(len(part) for part in partition(size, info.world_size))
    if rows[info.rank] != mine:
        raise ShapeError(
            f"{function}: size={size} over {info.world_size} ranks gives rank {info.rank} an extent of "
            f"{rows[info.rank]}, but its shard has {mine}"
        )
    return rows

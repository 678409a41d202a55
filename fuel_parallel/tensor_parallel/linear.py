"""Linear layers whose weight is cut by columns or by rows."""

from __future__ import annotations

import math
from typing import Any

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ShapeError
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.random import Generator
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Parameter, Shard
from fuel_parallel.partitioning import partition
from fuel_parallel.tensor_parallel.mappings import copy_to_ranks, gather_from_ranks, reduce_from_ranks, scatter_to_ranks


class ColumnParallel(Module):
    """x @ weight + bias, where each rank holds some of the columns of weight [in, out], and gives those of the result.

    Numbers of columns that do not divide are cut by `partition`. The weights of all ranks together start as those of
    `fp.Linear` with the same generator.

    Args:
        inputs: Extent of the last dimension of x.
        outputs: Extent of the last dimension of the whole result.
        generator: Draws the weights; all ranks in the same state.
        comm: The ranks.
        bias: Add one.
        gather_output: Give the whole result on every rank, and not this rank's columns.
        dtype: Of the weights; None for the default.

    >>> from fuel_parallel import IdentityComm
    >>> ColumnParallel(3, 5, Generator(0), IdentityComm())(creation.ones((2, 3))).shape
    (2, 5)
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        generator: Generator,
        comm: Communicator,
        *,
        bias: bool = True,
        gather_output: bool = False,
        dtype: Any = None,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.gather_output = gather_output
        self._comm = comm
        mine = partition(outputs, comm.world_size)[comm.rank]
        self.weight = _weight(inputs, outputs, generator, (slice(0, inputs), slice(mine.start, mine.stop)), dtype)
        self.bias = None
        if bias:
            at = Shard((outputs,), (mine.start,))
            self.bias = Parameter(creation.zeros(len(mine), dtype=dtype), shard=at if comm.world_size > 1 else None)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in], the same on all ranks, to this rank's columns of [..., out], or all of them."""
        _check_last("ColumnParallel", x, self.inputs)
        y = copy_to_ranks(x, self._comm) @ self.weight
        y = y if self.bias is None else y + self.bias
        return gather_from_ranks(y, self._comm, -1, size=self.outputs) if self.gather_output else y


class RowParallel(Module):
    """x @ weight + bias, where each rank holds some rows of weight [in, out], and the columns of x that go to them.

    Args:
        inputs: Extent of the last dimension of the whole x.
        outputs: Extent of the last dimension of the result.
        generator: Draws the weights; all ranks in the same state.
        comm: The ranks.
        bias: Add one, after the sum.
        scatter_input: x is whole on every rank, and this rank takes its columns of it; by default it has no others.
        dtype: Of the weights; None for the default.

    >>> from fuel_parallel import IdentityComm
    >>> RowParallel(3, 5, Generator(0), IdentityComm())(creation.ones((2, 3))).shape
    (2, 5)
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        generator: Generator,
        comm: Communicator,
        *,
        bias: bool = True,
        scatter_input: bool = False,
        dtype: Any = None,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.scatter_input = scatter_input
        self._comm = comm
        mine = partition(inputs, comm.world_size)[comm.rank]
        self._rows = len(mine)
        self.weight = _weight(inputs, outputs, generator, (slice(mine.start, mine.stop), slice(0, outputs)), dtype)
        self.bias = Parameter(creation.zeros(outputs, dtype=dtype)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's columns of [..., in], or all of them, to [..., out], the same on all ranks."""
        _check_last("RowParallel", x, self.inputs if self.scatter_input else self._rows)
        x = scatter_to_ranks(x, self._comm, -1) if self.scatter_input else x
        y = reduce_from_ranks(x @ self.weight, self._comm)
        return y if self.bias is None else y + self.bias


def _weight(inputs: int, outputs: int, generator: Generator, part: tuple[slice, slice], dtype: Any) -> Parameter:
    """A part of the weight that `fp.Linear` would have."""
    bound = 1 / math.sqrt(inputs) if inputs else 0.0
    start = tuple(cut.start for cut in part)
    shape = tuple(cut.stop - cut.start for cut in part)
    whole = (inputs, outputs)
    drawn = generator.uniform(shape, -bound, bound, dtype=dtype, global_shape=whole, start=start)
    return Parameter(drawn, shard=Shard(whole, start) if shape != whole else None)


def _check_last(layer: str, x: Tensor, extent: int) -> None:
    if x.ndim < 1 or x.shape[-1] != extent:
        raise ShapeError(f"{layer}: the last dimension of x must be {extent} on this rank, but x has shape {x.shape}")

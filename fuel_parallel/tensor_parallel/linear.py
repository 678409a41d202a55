"""Linear layers whose weight is cut by columns or by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

from fuel_parallel.arguments import checked
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.layers import Linear
from fuel_parallel.lazy.ops import creation, manipulation
from fuel_parallel.lazy.parts import part_of
from fuel_parallel.lazy.random import Generator
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Parameter, Shard
from fuel_parallel.partitioning import partition
from fuel_parallel.tensor_parallel.mappings import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_from_ranks,
    scatter_sum,
    scatter_to_ranks,
)

Box = tuple[range, ...]


class CutLinear(Module):
    """What linear layers that are cut over ranks share."""

    weight_axis = 0

    @classmethod
    def from_dense(cls, dense: Linear, comm: Communicator, **options: Any) -> Self:
        """This rank's part of a dense layer that all ranks hold alike; options are those of the constructor."""
        inputs, outputs = dense.weight.shape
        bias, dtype = dense.bias is not None, dense.weight.dtype
        layer = cls(inputs, outputs, Generator(0), comm, bias=bias, dtype=dtype, **options)  # type: ignore[call-arg]
        take_part(layer, dense)
        return layer


class ColumnParallel(CutLinear):
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
        block: Cut only between blocks of so many columns, such as the heads of an attention.
        columns: The columns of each rank, if they are not those of `partition`. They may overlap: gradients of columns
            that several ranks hold are summed.
        sequence_dim: x is this rank's part of the sequence, which lies in that dimension; None if x is whole.
        dtype: Of the weights; None for the default.

    >>> from fuel_parallel import IdentityComm
    >>> ColumnParallel(3, 5, Generator(0), IdentityComm())(creation.ones((2, 3))).shape
    (2, 5)
    """

    @checked
    def __init__(
        self,
        inputs: int,
        outputs: int,
        generator: Generator,
        comm: Communicator,
        *,
        bias: bool = True,
        gather_output: bool = False,
        block: int = 1,
        columns: Sequence[range] | None = None,
        sequence_dim: int | None = None,
        dtype: Any = None,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.gather_output, self.block, self.sequence_dim = gather_output, block, sequence_dim
        self._comm = comm
        self._overlap = columns is not None and sum(map(len, columns)) > outputs
        if gather_output and columns is not None:
            raise ArgumentError("ColumnParallel: gather_output=True joins parts made by `partition`, not columns= ones")
        ranges = cut("ColumnParallel", "columns", outputs, comm, block) if columns is None else columns
        self._columns = ranges[comm.rank]
        own = _owned(ranges, comm.rank) if self._overlap else None
        self.weight = _weight(
            (inputs, outputs), (range(inputs), self._columns), generator, dtype, comm, own and (slice(None), own)
        )
        self.bias = None
        if bias:
            self.bias = _part((outputs,), (self._columns,), _zeros(dtype), comm, own and (own,))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in], the same on all ranks, to this rank's columns of [..., out], or all of them."""
        _check_last("ColumnParallel", x, self.inputs)
        y = enter(x, self._comm, self.sequence_dim) @ self._whole_gradient(self.weight)
        y = y if self.bias is None else y + self._whole_gradient(self.bias)
        return self._gather(y) if self.gather_output else y

    def _whole_gradient(self, weight: Tensor) -> Tensor:
        """The weight itself. Where other ranks hold some of its columns too, its gradient is the sum of theirs."""
        if not self._overlap or not isinstance(weight, Tensor):  # a stored weight has no gradient
            return weight
        before, after = self._columns.start, self.outputs - self._columns.stop
        padded = manipulation.pad(weight, [(0, 0)] * (weight.ndim - 1) + [(before, after)])
        return self._comm.replicate(padded)[..., before : self._columns.stop]

    def _gather(self, y: Tensor) -> Tensor:
        blocks = self.outputs // self.block
        y = manipulation.reshape(y, (*y.shape[:-1], y.shape[-1] // self.block, self.block))
        y = gather_from_ranks(y, self._comm, -2, size=blocks)
        return manipulation.reshape(y, (*y.shape[:-2], self.outputs))


class RowParallel(CutLinear):
    """x @ weight + bias, where each rank holds some rows of weight [in, out], and the columns of x that go to them.

    Args:
        inputs: Extent of the last dimension of the whole x.
        outputs: Extent of the last dimension of the result.
        generator: Draws the weights; all ranks in the same state.
        comm: The ranks.
        bias: Add one, after the sum.
        scatter_input: x is whole on every rank, and this rank takes its columns of it; by default it has no others.
        block: Cut only between blocks of so many rows.
        sequence_dim: Give this rank's part of the sequence, which lies in that dimension; None for the whole result.
        dtype: Of the weights; None for the default.

    >>> from fuel_parallel import IdentityComm
    >>> RowParallel(3, 5, Generator(0), IdentityComm())(creation.ones((2, 3))).shape
    (2, 5)
    """

    @checked
    def __init__(
        self,
        inputs: int,
        outputs: int,
        generator: Generator,
        comm: Communicator,
        *,
        bias: bool = True,
        scatter_input: bool = False,
        block: int = 1,
        sequence_dim: int | None = None,
        dtype: Any = None,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.scatter_input, self.block, self.sequence_dim = scatter_input, block, sequence_dim
        self._comm = comm
        self._rows = cut("RowParallel", "rows", inputs, comm, block)[comm.rank]
        self.weight = _weight((inputs, outputs), (self._rows, range(outputs)), generator, dtype, comm)
        self.bias = Parameter(creation.zeros(outputs, dtype=dtype)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's columns of [..., in], or all of them, to [..., out], the same on all ranks."""
        _check_last("RowParallel", x, self.inputs if self.scatter_input else len(self._rows))
        x = self._scatter(x) if self.scatter_input else x
        y = leave(x @ self.weight, self._comm, self.sequence_dim)
        if self.bias is None:
            return y
        # On a part of the sequence the bias has a part of its gradient.
        return y + (self.bias if self.sequence_dim is None else copy_to_ranks(self.bias, self._comm))

    def _scatter(self, x: Tensor) -> Tensor:
        x = manipulation.reshape(x, (*x.shape[:-1], self.inputs // self.block, self.block))
        x = scatter_to_ranks(x, self._comm, -2)
        return manipulation.reshape(x, (*x.shape[:-2], len(self._rows)))


def enter(x: Tensor, comm: Communicator, sequence_dim: int | None) -> Tensor:
    """`x` as a layer cut over ranks takes it: whole."""
    return copy_to_ranks(x, comm) if sequence_dim is None else gather_sequence(x, comm, sequence_dim)


def leave(y: Tensor, comm: Communicator, sequence_dim: int | None) -> Tensor:
    """The sum of the ranks' results, whole or this rank's part of the sequence."""
    return reduce_from_ranks(y, comm) if sequence_dim is None else scatter_sum(y, comm, sequence_dim)


def cut(layer: str, what: str, size: int, comm: Communicator, block: int) -> list[range]:
    """The rows or columns of each rank, in whole blocks."""
    if block < 1 or size % block:
        raise ArgumentError(f"{layer}: {size} {what} are no whole number of blocks of {block}")
    return [range(part.start * block, part.stop * block) for part in partition(size // block, comm.world_size)]


def _owned(ranges: Sequence[range], rank: int) -> slice:
    """Of this rank's columns those that no rank before it holds."""
    taken = max((r.stop for r in ranges[:rank]), default=0)
    mine = ranges[rank]
    return slice(min(max(taken - mine.start, 0), len(mine)), len(mine))


def _weight(
    whole: tuple[int, int],
    box: Box,
    generator: Generator,
    dtype: Any,
    comm: Communicator,
    owned: tuple[slice, ...] | None = None,
) -> Parameter:
    """A part of the weight that `fp.Linear` would have."""
    bound = 1 / math.sqrt(whole[0]) if whole[0] else 0.0

    def draw(shape: tuple[int, ...], start: tuple[int, ...]) -> Tensor:
        return generator.uniform(shape, -bound, bound, dtype=dtype, global_shape=whole, start=start)

    return _part(whole, box, draw, comm, owned)


def _zeros(dtype: Any) -> Callable[[tuple[int, ...], tuple[int, ...]], Tensor]:
    return lambda shape, start: creation.zeros(shape, dtype=dtype)


def _part(
    whole: tuple[int, ...],
    box: Box,
    draw: Callable[[tuple[int, ...], tuple[int, ...]], Tensor],
    comm: Communicator,
    owned: tuple[slice, ...] | None = None,
) -> Parameter:
    shape, start = tuple(map(len, box)), tuple(r.start for r in box)
    # Also where this rank happens to hold all, and the others nothing: they are to agree on what is cut.
    return Parameter(draw(shape, start), shard=Shard(whole, start, owned) if comm.world_size > 1 else None)


def take_part(layer: Module, dense: Module) -> None:
    """Each variable of the layer becomes its part of the dense one's."""
    values = dense.named_variables()
    for name, variable in layer.named_variables().items():
        if variable.shard is None:
            variable.assign(values[name])
        else:
            ends = zip(variable.shard.start, variable.shape, strict=True)
            variable.assign(part_of(values[name], tuple(range(start, start + size) for start, size in ends)))


def _check_last(layer: str, x: Tensor, extent: int) -> None:
    if x.ndim < 1 or x.shape[-1] != extent:
        raise ShapeError(f"{layer}: the last dimension of x must be {extent} on this rank, but x has shape {x.shape}")

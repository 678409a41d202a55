"""An embedding whose rows are cut over ranks."""

from __future__ import annotations

from typing import Any

from fuel_parallel.arguments import checked
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.layers import Embedding
from fuel_parallel.lazy.ops import binary, creation
from fuel_parallel.lazy.random import Generator
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Parameter, Shard
from fuel_parallel.partitioning import partition
from fuel_parallel.tensor_parallel.linear import enter, leave, take_part
from fuel_parallel.tensor_parallel.mappings import gather_from_ranks


class VocabParallelEmbedding(Module):
    """A table [vocabulary, dim] of which each rank holds some rows, looked up by integers of any shape.

    A rank gives zeros for the tokens of others, and the sum over ranks is the whole (arXiv:1909.08053, section 3). The
    rows of all ranks together start as those of `fp.Embedding` with the same generator. With `sequence_dim` the result
    is this rank's part of the sequence, which lies in that dimension.

    >>> from fuel_parallel import IdentityComm
    >>> VocabParallelEmbedding(10, 4, Generator(0), IdentityComm())(creation.asarray([[1, 2, 3]])).shape
    (1, 3, 4)
    """

    weight_axis = 1

    @checked
    def __init__(
        self,
        vocabulary: int,
        dim: int,
        generator: Generator,
        comm: Communicator,
        *,
        std: float = 0.02,
        sequence_dim: int | None = None,
        dtype: Any = None,
    ) -> None:
        self.vocabulary = vocabulary
        self._comm = comm
        self.sequence_dim = sequence_dim
        self._mine = partition(vocabulary, comm.world_size)[comm.rank]
        whole, start = (vocabulary, dim), (self._mine.start, 0)
        rows = generator.normal((len(self._mine), dim), std=std, dtype=dtype, global_shape=whole, start=start)
        self.weight = Parameter(rows, shard=Shard(whole, start) if comm.world_size > 1 else None)

    @classmethod
    def from_dense(
        cls, dense: Embedding, comm: Communicator, *, sequence_dim: int | None = None
    ) -> VocabParallelEmbedding:
        """This rank's rows of a dense table that all ranks hold alike."""
        table = dense.weight
        vocabulary, dim = table.shape
        layer = cls(vocabulary, dim, Generator(0), comm, sequence_dim=sequence_dim, dtype=table.dtype)
        take_part(layer, dense)
        return layer

    def __call__(self, indices: Tensor) -> Tensor:
        """Integers [...] to rows [..., dim], the same on all ranks, or this rank's part of the sequence."""
        if self._comm.world_size == 1:
            return self.weight[indices]
        return leave(self._rows(indices), self._comm, self.sequence_dim)

    def logits(self, x: Tensor, *, gather_output: bool = True) -> Tensor:
        """`fp.Embedding.logits` on every rank; without `gather_output` those of this rank's rows.

        The latter are what `vocab_parallel_cross_entropy` takes.
        """
        mine = enter(x, self._comm, self.sequence_dim) @ self.weight.mT
        return gather_from_ranks(mine, self._comm, -1, size=self.vocabulary) if gather_output else mine

    def _rows(self, indices: Tensor) -> Tensor:
        """The rows that this rank holds, zeros for the others."""
        if not len(self._mine):
            return creation.zeros((*indices.shape, self.weight.shape[1]), dtype=self.weight.dtype)
        here = (indices >= self._mine.start) & (indices < self._mine.stop)
        rows = self.weight[binary.where(here, indices - self._mine.start, 0)]
        return binary.where(here.reshape(*indices.shape, 1), rows, 0.0)

"""An embedding whose rows are cut over ranks."""

from __future__ import annotations

from typing import Any

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.lazy.ops import binary, creation, neural
from fuel_parallel.lazy.random import Generator
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Parameter, Shard
from fuel_parallel.partitioning import partition
from fuel_parallel.tensor_parallel.mappings import reduce_from_ranks


class VocabParallelEmbedding(Module):
    """A table [vocabulary, dim] of which each rank holds some rows, looked up by integers of any shape.

    A rank gives zeros for the tokens of others, and the sum over ranks is the whole (arXiv:1909.08053, section 3). The
    rows of all ranks together start as those of `fp.Embedding` with the same generator.

    >>> from fuel_parallel import IdentityComm
    >>> VocabParallelEmbedding(10, 4, Generator(0), IdentityComm())(creation.asarray([[1, 2, 3]])).shape
    (1, 3, 4)
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        generator: Generator,
        comm: Communicator,
        *,
        std: float = 0.02,
        dtype: Any = None,
    ) -> None:
        self._comm = comm
        self._mine = partition(vocabulary, comm.world_size)[comm.rank]
        whole, start = (vocabulary, dim), (self._mine.start, 0)
        rows = generator.normal((len(self._mine), dim), std=std, dtype=dtype, global_shape=whole, start=start)
        self.weight = Parameter(rows, shard=Shard(whole, start) if comm.world_size > 1 else None)

    def __call__(self, indices: Tensor) -> Tensor:
        """Integers [...] to rows [..., dim], the same on all ranks."""
        if self._comm.world_size == 1:
            return neural.embedding(indices, self.weight)
        if not len(self._mine):
            zeros = creation.zeros((*indices.shape, self.weight.shape[1]), dtype=self.weight.dtype)
            return reduce_from_ranks(zeros, self._comm)
        here = (indices >= self._mine.start) & (indices < self._mine.stop)
        rows = neural.embedding(binary.where(here, indices - self._mine.start, 0), self.weight)
        return reduce_from_ranks(binary.where(here.reshape(*indices.shape, 1), rows, 0.0), self._comm)

"""A mixture of experts whose experts are on different ranks: tokens travel to them and back (arXiv:2006.16668)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuel_parallel.comm.communicator import Communicator, ReduceOp
from fuel_parallel.experts import MixtureOfExperts, through_slots
from fuel_parallel.lazy.ops import creation, indexing
from fuel_parallel.lazy.random import Generator
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.partitioning import partition


class ExpertParallel(MixtureOfExperts):
    """`fp.MixtureOfExperts` of which each rank holds some experts, and has tokens of its own.

    Experts are cut by `partition`; a rank may have none. The router is the same on all ranks, and the weights of all
    ranks together start as those of the dense layer with the same generator.

    With a capacity, all ranks have as many tokens, and each expert takes so many of each rank: shapes are known, and
    one plan serves all steps. Without one nothing is dropped; then how many tokens go where must be known first. So
    calling the layer **runs** all that its input depends on, which runs again with the rest of the step, and tells the
    ranks each other's numbers; and the plan is made anew when the numbers change.

    The balance loss is that of the tokens of all ranks: its mean over ranks is what the dense layer gives for them all.

    Args:
        dim, hidden, experts, generator: As in `fp.MixtureOfExperts`; the generator in the same state on all ranks.
        comm: The ranks.
        **options: top_k, renormalise, capacity_factor, activation and dtype, as in `fp.MixtureOfExperts`.

    >>> from fuel_parallel import SymbolicComm
    >>> layer = ExpertParallel(4, 16, 8, Generator(0), SymbolicComm(1, 3), capacity_factor=1.25)
    >>> layer.experts.up.shape, layer(creation.ones((5, 4))).value.shape
    ((3, 4, 16), (5, 4))
    """

    def __init__(
        self, dim: int, hidden: int, experts: int, generator: Generator, comm: Communicator, **options: Any
    ) -> None:
        self._comm = comm
        self._parts = partition(experts, comm.world_size)
        super().__init__(dim, hidden, experts, generator, **options)

    @classmethod
    def from_dense(cls, dense: MixtureOfExperts, comm: Communicator) -> ExpertParallel:
        """This rank's experts of a dense layer that all ranks hold alike."""
        layer = cls(
            dense.dim,
            dense.experts.up.shape[2],
            dense.count,
            Generator(0),
            comm,
            top_k=dense.top_k,
            renormalise=dense.renormalise,
            capacity_factor=dense.capacity_factor,
            activation=dense.experts.activation,
            dtype=dense.router.dtype,
        )
        mine = layer._parts[comm.rank]
        layer.router.assign(dense.router)
        whole = dense.experts.named_variables()
        for name, weight in layer.experts.named_variables().items():
            weight.assign(whole[name][mine.start : mine.stop])
        return layer

    def _held(self) -> range:
        return self._parts[self._comm.rank]

    def _through_slots(self, slots: Tensor) -> Tensor:
        arrived = self._comm.all_to_all(slots, 0, 1)
        return self._comm.all_to_all(through_slots(self.experts, arrived), 1, 0, size=self.count)

    def _through_rows(self, rows: Tensor, ends: Tensor) -> Tensor:
        counts = np.diff(ends.numpy(), prepend=0)
        by_rank = np.array(self._comm.all_gather_object(counts.tolist(), type=list[int])).reshape(-1, self.count)
        sizes = [[int(row[part.start : part.stop].sum()) for part in self._parts] for row in by_rank]
        arrived = self._comm.all_to_all(rows, 0, 0, sizes=sizes)
        mine = self._parts[self._comm.rank]
        # By source and then by expert, as they come; stably sorted, by expert and then by source.
        here = by_rank[:, mine.start : mine.stop]
        order = np.argsort(np.repeat(np.tile(np.arange(len(mine)), len(here)), here.reshape(-1)), kind="stable")
        sorted_rows = indexing.take(arrived, creation.asarray(order), axis=0)
        results = self.experts(sorted_rows, creation.asarray(np.cumsum(here.sum(axis=0), dtype=np.int64)))
        back = indexing.take(results, creation.asarray(np.argsort(order)), axis=0)
        return self._comm.all_to_all(back, 0, 0, sizes=list(zip(*sizes, strict=True)))

    def _over_ranks(self, share: Tensor) -> Tensor:
        return self._comm.all_reduce(share, ReduceOp.AVG)

"""Shares of a batch, and gradients averaged over ranks."""

from __future__ import annotations

from typing import Any

from fuel_parallel.comm.communicator import Communicator, ReduceOp
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.tree import flatten, unflatten
from fuel_parallel.partitioning import partition


def average_gradients(gradients: Any, comm: Communicator) -> Any:
    """The mean over all ranks of each gradient in a nest.

    Of a mean loss over equal shares of a batch it is the whole batch's gradient.
    One all-reduce each, in the order of the nest, which must be the same on every rank.
    """
    leaves, structure = flatten(gradients)
    return unflatten(structure, [comm.all_reduce(g, ReduceOp.AVG) for g in leaves])


def shard_rows(batch: int, comm: Communicator) -> range:
    """The rows of a global batch that belong to this rank. Shares must be equal, or a mean of means would be wrong.

    Raises `ArgumentError` when the batch cannot be shared equally.
    """
    if batch < 1 or batch % comm.world_size:
        raise ArgumentError(
            f"a batch of {batch} cannot be shared equally by {comm.world_size} ranks; "
            f"use a multiple of {comm.world_size}"
        )
    return partition(batch, comm.world_size)[comm.rank]

"""The four mappings between activations that all ranks hold and parts of them (arXiv:1909.08053, section 3).

| mapping | forward | vjp |
|---|---|---|
| `copy_to_ranks` (f) | the tensor itself | all-reduce |
| `reduce_from_ranks` (g) | all-reduce | the cotangent itself |
| `scatter_to_ranks` | my part of a dimension | all-gather |
| `gather_from_ranks` | all-gather | my part of the cotangent |

Outside of a pair of them all ranks hold the same values, and the loss, of which they all compute the same, counts once.
"""

from __future__ import annotations

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.lazy.tensor import Tensor


def copy_to_ranks(x: Tensor, comm: Communicator) -> Tensor:
    """`x`, which all ranks hold alike, to be used by each with its part of the weights. vjp: the sum over ranks."""
    return comm.replicate(x)


def reduce_from_ranks(x: Tensor, comm: Communicator) -> Tensor:
    """The sum of all ranks' parts of a result, on every rank. vjp: the cotangent itself."""
    return comm.all_reduce(x, replicated=True)


def scatter_to_ranks(x: Tensor, comm: Communicator, dim: int = -1) -> Tensor:
    """This rank's part, by `partition`, of an `x` that all ranks hold alike. vjp: the all-gather."""
    return comm.shard(x, dim)


def gather_from_ranks(x: Tensor, comm: Communicator, dim: int = -1, *, size: int | None = None) -> Tensor:
    """The parts of all ranks joined along `dim`, on every rank; vjp: this rank's part of the cotangent.

    `size` is the extent of the whole, where the parts are not of one size.
    """
    return comm.all_gather(x, dim, size=size, replicated=True)

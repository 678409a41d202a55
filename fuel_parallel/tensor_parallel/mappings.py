"""The mappings between activations that all ranks hold and parts of them.

| mapping | forward | vjp |
|---|---|---|
| `copy_to_ranks` (f) | the tensor itself | all-reduce |
| `reduce_from_ranks` (g) | all-reduce | the cotangent itself |
| `scatter_to_ranks` | my part of a dimension | all-gather |
| `gather_from_ranks` | all-gather | my part of the cotangent |
| `gather_sequence` | all-gather | reduce-scatter |
| `scatter_sum` | reduce-scatter | all-gather |

The first four are those of Shoeybi et al. (2019, arXiv:1909.08053, section 3). Outside of a pair of them all ranks hold
the same values, and the loss, of which they all compute the same, counts once. The last two take the place of f and g
where activations outside of the pair are cut along the sequence (Korthikanti et al., 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ShapeError
from fuel_parallel.lazy.node import Node
from fuel_parallel.lazy.tensor import Tensor

_made: WeakValueDictionary[tuple[int, Communicator, int | None], Node] = WeakValueDictionary()


def copy_to_ranks(x: Tensor, comm: Communicator) -> Tensor:
    """`x`, which all ranks hold alike, to be used by each with its part of the weights. vjp: the sum over ranks.

    Layers that take the same `x` share one copy, so that their cotangents are added before they travel.
    """
    return _once(x, comm, None)


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


def gather_sequence(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """The whole sequence, to be used by each rank with its part of the weights. vjp: the reduce-scatter.

    All parts are of one size. Layers that take the same `x` share one all-gather.
    """
    return _once(x, comm, dim % x.ndim)


def scatter_sum(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """This rank's part of the sequence, of the sum of all ranks' parts of a result. vjp: the all-gather.

    Raises `ShapeError` when the sequence cannot be shared equally: a layer cannot see how long the others' parts are.
    """
    if x.shape[dim] % comm.world_size:
        raise ShapeError(
            f"a sequence of {x.shape[dim]} (dimension {dim} of shape {x.shape}) cannot be shared equally by "
            f"{comm.world_size} ranks; pad it to a multiple of {comm.world_size}"
        )
    return comm.reduce_scatter(x, dim=dim)


def _once(x: Tensor, comm: Communicator, dim: int | None) -> Tensor:
    """The copy (dim is None) or the gathered sequence that was made of this very node, else a new one."""
    key = (x.node.serial, comm, dim)
    made = _made.get(key)
    if made is None or made.inputs != (x.node,):  # a node that was realized has let go of its inputs
        made = (comm.replicate(x) if dim is None else comm.all_gather(x, dim)).node
        if comm.world_size > 1:
            _made[key] = made
    return Tensor(made)

"""Which elements of a parameter this rank counts, so that over all ranks each element is counted once."""

from __future__ import annotations

from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter

Box = tuple[slice, ...]


def counted_box(parameter: Parameter) -> Box:
    """The slice, in each dimension, of what counts for this rank of a parameter's elements; starts and stops are given.

    >>> from fuel_parallel import Shard
    >>> counted_box(Parameter([1.0, 2.0, 3.0], shard=Shard((6,), (3,), owned=(slice(1, None),))))
    (slice(1, 3, 1),)
    """
    owned = None if parameter.shard is None else parameter.shard.owned
    slices = (slice(None),) * parameter.ndim if owned is None else owned
    return tuple(slice(*own.indices(extent)) for own, extent in zip(slices, parameter.shape, strict=True))


def counted(parameter: Parameter, gradient: Tensor, rank: int) -> Tensor | None:
    """The part of a parameter's gradient that rank `rank` of the tensor-parallel ranks counts; None for nothing.

    A part of a larger tensor counts where it is, but copies of it once; what all ranks hold alike counts on rank 0.
    """
    if parameter.shard is None:
        return gradient if rank == 0 else None
    return gradient if parameter.shard.owned is None else gradient[counted_box(parameter)]

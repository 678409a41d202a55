"""A batch, cut into micro-batches."""

from __future__ import annotations

from typing import Any

from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.lazy.tree import flatten, unflatten
from fuel_parallel.partitioning import partition
from fuel_parallel.runtime.realize import realize

Array = Any


class Batch:
    """A nest of tensors and arrays, cut along dimension 0 into `count` parts, of as equal sizes as can be.

    Without `exactly`, fewer rows make as many parts. Raises `ArgumentError` when there is nothing to cut, or less than
    `count` rows.

    >>> batch = Batch("inputs", creation.arange(5), 2, exactly=True)
    >>> batch.rows, batch.arrays(1)
    ((3, 2), [array([3, 4])])
    """

    def __init__(self, name: str, batch: Any, count: int, *, exactly: bool) -> None:
        leaves, self._structure = flatten(batch)
        if batch is None or not leaves:
            raise ArgumentError(f"PipelineRunner: {name} are missing; this rank has the stage that needs them")
        tensors = [leaf if isinstance(leaf, Tensor) else creation.asarray(leaf) for leaf in leaves]
        realize(tensors)
        self._arrays: list[Array] = [tensor.node.value for tensor in tensors]
        sizes = {a.shape[0] if a.ndim else None for a in self._arrays}
        size = next(iter(sizes))
        if len(sizes) > 1 or size is None:
            shapes = ", ".join(str(a.shape) for a in self._arrays)
            raise ArgumentError(
                f"PipelineRunner: {name} are cut into micro-batches along dimension 0, which must be of one "
                f"extent; got shapes {shapes}"
            )
        if size < (count if exactly else 1):
            raise ArgumentError(
                f"PipelineRunner: {name} have {size} rows, fewer than the {count} micro-batches of the schedule"
            )
        self._parts = partition(size, min(size, count))
        self.rows = tuple(len(part) for part in self._parts)
        self.shapes = tuple((a.shape[1:], str(a.dtype)) for a in self._arrays)

    def arrays(self, microbatch: int) -> list[Array]:
        """The arrays of a micro-batch, in order."""
        rows = self._parts[microbatch]
        return [array[rows.start : rows.stop] for array in self._arrays]

    def part(self, microbatch: int) -> Any:
        """A micro-batch, nested like the batch."""
        return unflatten(self._structure, [creation.asarray(a, copy=False) for a in self.arrays(microbatch)])

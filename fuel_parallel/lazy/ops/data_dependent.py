"""Functions whose result has a shape that depends on values: positions of what is true, distinct values.

These compute when they are called, since a graph must know its shapes: the argument is realized, and what comes back
are positions that are known. Elements are then taken at those positions by ops of the graph, so that gradients pass.
On ranks of a world that is only symbolic they raise, like all that asks for a value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fuel_parallel.backends import backend_of
from fuel_parallel.errors import ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Spec, data_node
from fuel_parallel.lazy.ops import creation, indexing, manipulation
from fuel_parallel.lazy.tensor import Tensor


class UniqueAll(NamedTuple):
    """What `unique_all` returns."""

    values: Tensor
    indices: Tensor
    inverse_indices: Tensor
    counts: Tensor


class UniqueCounts(NamedTuple):
    """What `unique_counts` returns."""

    values: Tensor
    counts: Tensor


class UniqueInverse(NamedTuple):
    """What `unique_inverse` returns."""

    values: Tensor
    inverse_indices: Tensor


def nonzero(x: Tensor, /) -> tuple[Tensor, ...]:
    """For each dimension the positions (int64) of the elements that are not zero, in row-major order. Realizes `x`.

    >>> [positions.tolist() for positions in nonzero(creation.asarray([[0, 5], [7, 0]]))]
    [[0, 1], [1, 0]]
    """
    x = creation.to_tensor("nonzero", x)
    if x.ndim == 0:
        raise ShapeError("nonzero: expected at least 1 dimension, but x is 0-d; give it one with reshape(x, (1,))")
    xp, value = _computed(x)
    return tuple(_positions(found, x.device) for found in xp.nonzero(value))


def unique_all(x: Tensor, /) -> UniqueAll:
    """The distinct values in rising order, where each stands first, where each element of `x` is among them, counts.

    Positions are those of the flattened `x`; each NaN is a value of its own. Realizes `x`.

    >>> found = unique_all(creation.asarray([3, 1, 3]))
    >>> found.values.tolist(), found.indices.tolist(), found.inverse_indices.tolist(), found.counts.tolist()
    ([1, 3], [1, 0], [1, 0, 1], [1, 2])
    """
    x = creation.to_tensor("unique_all", x)
    xp, value = _computed(x)
    flat = value.reshape(-1)
    if dtypes.is_half(x.dtype):
        flat = flat.astype(dtypes.float32)
    _, first, inverse, counts = xp.unique(
        flat, return_index=True, return_inverse=True, return_counts=True, equal_nan=False
    )
    indices = _positions(first, x.device)
    values = indexing.take(manipulation.reshape(x, (-1,)), indices)
    return UniqueAll(values, indices, _positions(inverse.reshape(value.shape), x.device), _positions(counts, x.device))


def unique_counts(x: Tensor, /) -> UniqueCounts:
    """The distinct values in rising order and how often each occurs. Realizes `x`."""
    found = unique_all(x)
    return UniqueCounts(found.values, found.counts)


def unique_inverse(x: Tensor, /) -> UniqueInverse:
    """The distinct values in rising order and where each element of `x` is among them. Realizes `x`."""
    found = unique_all(x)
    return UniqueInverse(found.values, found.inverse_indices)


def unique_values(x: Tensor, /) -> Tensor:
    """The distinct values in rising order. Realizes `x`.

    >>> unique_values(creation.asarray([3, 1, 3])).tolist()
    [1, 3]
    """
    return unique_all(x).values


def _computed(x: Tensor) -> tuple[Any, Any]:
    """The array module of the device of `x`, and the value of `x` there."""
    x.realize()
    return backend_of(x.device).array_module, x.node.value


def _positions(array: Any, device: str) -> Tensor:
    """Positions that were just computed on a device, as a leaf of the graph."""
    settled = backend_of(device).settle(array.astype(dtypes.int64, copy=False))
    return Tensor(data_node(settled, Spec(tuple(settled.shape), dtypes.int64, device)))

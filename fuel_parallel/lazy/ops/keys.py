"""Indexing keys, taken apart: what `x[key]` and `x[key] = value` mean for a shape.

A key has a basic part (slices and new axes, which copy nothing) and an advanced part (integer tensors, numpy's rules; a
mask stands for the positions of what is true in it).
"""

from __future__ import annotations

import builtins
import operator
from typing import Any

import numpy as np

from fuel_parallel.errors import IndexingError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Shape
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor

Window = tuple[tuple[int, int, int], ...]
"""For each dimension (start, step, count)."""


class Key:
    """An indexing key, taken apart for a shape.

    `window` and then `expanded` (new axes in, nothing dropped) are the basic part; `indices` stand for the dimensions
    `axes` of the expanded shape; without index tensors, `final` is the shape with the dimensions of plain ints gone.
    """

    def __init__(self, x: Tensor, key: Any) -> None:
        shape = x.shape
        items = _fill_ellipsis(x, key if isinstance(key, tuple) else (key,))
        advanced = builtins.any(isinstance(item, Tensor) for item in items)
        window: list[tuple[int, int, int]] = []
        expanded: list[int] = []
        final: list[int] = []
        self.indices: list[Tensor] = []
        axes: list[int] = []
        sizes = iter(shape)
        for item in items:
            if item is None:
                expanded.append(1)
                final.append(1)
                continue
            extent = next(sizes)
            if isinstance(item, slice):
                window.append(_slice_window(item, extent))
                expanded.append(window[-1][2])
                final.append(window[-1][2])
            elif isinstance(item, Tensor) or advanced:
                axes.append(len(expanded))
                self.indices.append(
                    item
                    if isinstance(item, Tensor)
                    else creation.asarray(_position(item, extent, shape), device=x.device)
                )
                window.append((0, 1, extent))
                expanded.append(extent)
            else:
                window.append((_position(item, extent, shape), 1, 1))
                expanded.append(1)
        self.window: Window = tuple(window)
        self.expanded = tuple(expanded)
        self.final = tuple(final)
        self.axes = tuple(axes)


def check_item(x: Tensor, item: Any) -> Any:
    """An item of a key: None, an Ellipsis, a slice, an int or a tensor; raises the user's error for anything else."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, builtins.bool | np.bool_):
        item = creation.asarray(bool(item), device=x.device)
    if isinstance(item, list | np.ndarray) and np.asarray(item).ndim:
        item = creation.asarray(
            item, dtype=dtypes.int64 if np.size(item) == 0 and isinstance(item, list) else None, device=x.device
        )
    if isinstance(item, Tensor):
        if item.dtype != dtypes.bool_ and dtypes.kind(item.dtype) != "integral":
            raise IndexingError(f"indexing: an index tensor must have an integer dtype, not {item.dtype.name}")
        return item
    try:
        return operator.index(item)
    except TypeError:
        raise IndexingError(
            "indexing: expected an int, a slice, None, ..., a tensor of integers or a mask, "
            f"not {type(item).__name__} {item!r}"
        ) from None


def check_index(x: Tensor, item: Any) -> Any:
    """`check_item` where a mask cannot stand."""
    if is_mask(item):
        raise IndexingError("indexing: an index tensor must have an integer dtype, not bool; a mask reads as x[mask]")
    return check_item(x, item)


def is_mask(item: Any) -> bool:
    """Whether an item of a key is a tensor of bools."""
    return isinstance(item, Tensor) and item.dtype == dtypes.bool_


def is_scalar_mask(key: Any) -> bool:
    """Whether a key is one bool, which stands for no dimension."""
    return isinstance(key, builtins.bool | np.bool_) or (is_mask(key) and key.ndim == 0)


def check_mask(mask: Tensor, shape: Shape, axis: int) -> None:
    """Raises the user's error unless the extents of a mask are those of the tensor, or 0."""
    own = shape[axis : axis + mask.ndim]
    if mask.ndim > len(own) or any(a not in (0, b) for a, b in zip(mask.shape, own, strict=True)):
        raise IndexingError(
            f"indexing: a mask of shape {mask.shape} does not fit x of shape {shape} at dimension {axis}"
        )


def _fill_ellipsis(x: Tensor, key: tuple[Any, ...]) -> list[Any]:
    """One item for each dimension, and None for each new one; masks as the positions of what is true in them."""
    shape = x.shape
    items = [check_item(x, item) for item in key]
    dimensions = builtins.sum(_dimensions(item) for item in items)
    ellipses = builtins.sum(item is Ellipsis for item in items)
    if ellipses > 1:
        raise IndexingError("indexing: only one Ellipsis (...) may stand in a key")
    if dimensions > len(shape):
        raise IndexingError(f"indexing: {dimensions} indices for a tensor of shape {shape} ({len(shape)} dimensions)")
    whole = [slice(None)] * (len(shape) - dimensions)
    place = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    items = [*items[:place], *whole, *items[place + 1 :]]
    result: list[Any] = []
    axis = 0
    for item in items:
        result += _positions(item, shape, axis) if is_mask(item) else [item]
        axis += _dimensions(item)
    return result


def _dimensions(item: Any) -> int:
    """How many dimensions an item of a key stands for."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if is_mask(item) else 1


def _positions(mask: Tensor, shape: Shape, axis: int) -> tuple[Tensor, ...]:
    """A mask as index tensors; it is realized for that."""
    from fuel_parallel.lazy.ops.data_dependent import nonzero

    check_mask(mask, shape, axis)
    if mask.ndim == 0:
        raise IndexingError("indexing: a mask without dimensions must be the only index")
    return nonzero(mask)


def _position(index: int, extent: int, shape: Shape) -> int:
    if not -extent <= index < extent:
        raise IndexingError(f"indexing: index {index} is out of bounds for extent {extent} (shape {shape})")
    return index % extent


def _slice_window(item: slice, extent: int) -> tuple[int, int, int]:
    try:
        start, stop, step = item.indices(extent)
    except (TypeError, ValueError) as reason:
        raise IndexingError(f"indexing: {item} is not a slice of ints: {reason}") from None
    count = len(range(start, stop, step))
    return (start, step, count) if count else (0, 1, 0)

"""Boxes: where a piece of a tensor lies in the whole. Pure arithmetic, on which planning and resharding stand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """The elements from `start` on, `shape` of them along each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape holds all of it."""
        return len(self.start) == len(self.shape) == len(shape) and all(
            first >= 0 and extent >= 0 and first + extent <= whole
            for first, extent, whole in zip(self.start, self.shape, shape, strict=True)
        )

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it is in an array that holds `outer`.

        >>> Box((2, 3), (1, 2)).within(Box((2, 2), (4, 4)))
        (slice(0, 1, None), slice(1, 3, None))
        """
        return tuple(
            slice(first - base, first - base + extent)
            for first, extent, base in zip(self.start, self.shape, outer.start, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """The box of a tensor that is not cut."""
    return Box((0,) * len(shape), tuple(shape))


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if that is nothing.

    >>> overlap(Box((0, 0), (4, 4)), Box((3, 2), (4, 4)))
    Box(start=(3, 2), shape=(1, 2))
    """
    start = tuple(map(max, zip(a.start, b.start, strict=True)))
    stops = (min(i + n, j + m) for i, n, j, m in zip(a.start, a.shape, b.start, b.shape, strict=True))
    shape = tuple(stop - first for stop, first in zip(stops, start, strict=True))
    return Box(start, shape) if all(extent > 0 for extent in shape) else None


def gap_or_clash(boxes: Iterable[Box], shape: Sequence[int]) -> str:
    """What keeps boxes from being a partition of a tensor of that shape; empty if nothing does."""
    filled = [box for box in boxes if box.size]
    if clash := next(_clashes(filled), None):
        first, second = clash
        return f"two parts overlap: {describe(first)} and {describe(second)}"
    held, size = sum(box.size for box in filled), math.prod(shape)
    return "" if held == size else f"no rank holds {size - held} of its {size} elements"


def split_rows(box: Box, rows: int) -> Iterator[Box]:
    """A box cut along its first dimension into boxes of so many rows, the last one of what is left."""
    for row in range(0, box.shape[0], rows):
        extent = min(rows, box.shape[0] - row)
        yield Box((box.start[0] + row, *box.start[1:]), (extent, *box.shape[1:]))


def describe(box: Box) -> str:
    """As it is written in Python: `[0:2, 4:8]`."""
    return "[" + ", ".join(f"{first}:{first + n}" for first, n in zip(box.start, box.shape, strict=True)) + "]"


def _clashes(boxes: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Pairs that overlap, by a sweep along the dimension that is cut most."""
    if not boxes or not boxes[0].shape:
        yield from [(boxes[0], boxes[1])] if len(boxes) > 1 else []
        return
    dim = max(range(len(boxes[0].shape)), key=lambda d: len({box.start[d] for box in boxes}))
    boxes = sorted(boxes, key=lambda box: box.start[dim])
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if other.start[dim] >= box.start[dim] + box.shape[dim]:
                break
            if overlap(box, other) is not None:
                yield box, other

"""How a size is cut into parts: the one rule behind every split of the library."""

from __future__ import annotations

from fuel_parallel.arguments import whole
from fuel_parallel.errors import ArgumentError


def partition(size: int, parts: int) -> list[range]:
    """Contiguous ranges that cover `range(size)`; their lengths differ by one at most, the longer ones come first.

    >>> partition(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    extent, count = whole(size), whole(parts)
    if extent is None or count is None or extent < 0 or count < 1:
        raise ArgumentError(
            f"partition: expected whole numbers, size >= 0 and parts >= 1; got size {size!r} and parts {parts!r}"
        )
    short, longer = divmod(extent, count)
    ranges, start = [], 0
    for index in range(count):
        stop = start + short + (index < longer)
        ranges.append(range(start, stop))
        start = stop
    return ranges

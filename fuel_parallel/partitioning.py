"""How a size is cut into parts: the one rule behind every split of the library."""

from __future__ import annotations

from fuel_parallel.errors import ArgumentError


def partition(size: int, parts: int) -> list[range]:
    """Contiguous ranges that cover `range(size)`; their lengths differ by one at most, the longer ones come first.

    >>> partition(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    if size < 0 or parts < 1:
        raise ArgumentError(f"partition: expected size >= 0 and parts >= 1, got size {size} and parts {parts}")
    short, longer = divmod(size, parts)
    ranges, start = [], 0
    for index in range(parts):
        stop = start + short + (index < longer)
        ranges.append(range(start, stop))
        start = stop
    return ranges

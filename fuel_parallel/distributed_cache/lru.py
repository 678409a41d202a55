"""Which page was used least recently: a list of page numbers from which any can be taken out at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import numpy as np

from fuel_parallel.distributed_cache.pages import Pages

_OUTSIDE = -1


class PageOrder:
    """Pages from the one that was added first to the one that was added last; no operation depends on how many.

    A doubly linked list in two arrays, so that a million pages take eight megabytes.

    >>> order = PageOrder(10)
    >>> order.append([3, 7, 5])
    >>> order.discard([7, 8])
    >>> list(order), order.first
    ([3, 5], 3)
    """

    def __init__(self, num_pages: int) -> None:
        # The last place is the list's own: what follows it is the first, what precedes it the last page.
        self._end = num_pages
        self._next = array("i", [_OUTSIDE]) * (num_pages + 1)
        self._previous = array("i", [_OUTSIDE]) * (num_pages + 1)
        self._next[num_pages] = self._previous[num_pages] = num_pages
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, page: int) -> bool:
        return self._next[page] != _OUTSIDE

    def __iter__(self) -> Iterator[int]:
        page = self._next[self._end]
        while page != self._end:
            yield page
            page = self._next[page]

    @property
    def first(self) -> int | None:
        """The page that was added first; None if there is none."""
        page = self._next[self._end]
        return None if page == self._end else page

    def count(self, pages: Pages) -> int:
        """How many of these are in the list."""
        return int(np.count_nonzero(np.frombuffer(self._next, np.int32)[pages] != _OUTSIDE))

    def append(self, pages: Iterable[int]) -> None:
        """Puts pages last, in this order; those that are in the list stay where they are."""
        following, previous, end = self._next, self._previous, self._end
        last = previous[end]
        for page in pages:
            if following[page] == _OUTSIDE:
                following[last] = page
                previous[page] = last
                following[page] = end
                last = page
                self._count += 1
        previous[end] = last

    def discard(self, pages: Iterable[int]) -> None:
        """Takes pages out; those that are not in the list are left alone."""
        following, previous = self._next, self._previous
        for page in pages:
            after = following[page]
            if after != _OUTSIDE:
                before = previous[page]
                following[before] = after
                previous[after] = before
                following[page] = _OUTSIDE
                self._count -= 1

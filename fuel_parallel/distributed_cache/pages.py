"""Pages of a KV cache: how large one is, how many a budget holds, and which are in use by how many.

A page has the keys and values of `page_tokens` tokens, and a pool is a fixed number of pages: nothing fragments. What a
page number stands for in memory is not decided here.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fuel_parallel.errors import ArgumentError, CacheError, OutOfPagesError

Pages = np.ndarray[Any, np.dtype[np.int32]]
"""Page numbers, one-dimensional."""

# Bytes of an element, and of the scale that each token's head of keys or values has besides.
_BYTES = {"float64": (8, 0), "float32": (4, 0), "float16": (2, 0), "bfloat16": (2, 0), "int8": (1, 4)}


class PageLayout(msgspec.Struct, frozen=True):
    """What a page holds on one rank.

    Args:
        layers: The attention layers that the rank has, maybe none.
        kv_heads: The heads of keys and values that it has of each, maybe none.
        head_size: Elements of a head.
        page_tokens: Tokens of a page.
        dtype: float64, float32, float16, bfloat16, or int8 with a float32 scale for each token and head.

    Raises:
        ArgumentError: A size that cannot be, or another dtype.

    >>> layout = PageLayout(layers=32, kv_heads=8, head_size=128, page_tokens=16, dtype="bfloat16")
    >>> layout.page_bytes, layout.pages_in(40 * 2**30)
    (2097152, 20480)
    """

    layers: int
    kv_heads: int
    head_size: int
    page_tokens: int = 16
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, least in (("layers", 0), ("kv_heads", 0), ("head_size", 1), ("page_tokens", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(f"PageLayout: {name} must be {least} or more, not {getattr(self, name)}")
        if self.dtype not in _BYTES:
            raise ArgumentError(f"PageLayout: dtype is one of {', '.join(_BYTES)}, not {self.dtype!r}")

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: keys and values of all layers, with their scales."""
        element, scale = _BYTES[self.dtype]
        return 2 * self.layers * self.page_tokens * self.kv_heads * (self.head_size * element + scale)

    def pages_in(self, budget_bytes: int) -> int:
        """How many pages fit. Raises `ArgumentError` if not even one does, or if they take nothing."""
        if not self.page_bytes:
            raise ArgumentError(
                "PageLayout: pages of a rank without layers or heads take no bytes, so any number fits; take the "
                "number that the other ranks have"
            )
        if budget_bytes < self.page_bytes:
            raise ArgumentError(
                f"PageLayout: a page takes {self.page_bytes} bytes, the budget is {budget_bytes}; give the cache more "
                "memory, or take smaller pages or a smaller dtype"
            )
        return budget_bytes // self.page_bytes


class PagePool:
    """Which of a fixed number of pages are in use, and by how many.

    Two integers a page, in arrays, and no work that depends on the number of pages: pages that were never used are
    given in order, then those that came back last. The same calls give the same pages on every rank.

    >>> pool = PagePool(4)
    >>> pages = pool.allocate(3)
    >>> pages.tolist(), pool.free_count
    ([0, 1, 2], 1)
    >>> pool.retain(pages[:1])
    >>> pool.release(pages).tolist()
    [1, 2]
    """

    def __init__(self, num_pages: int) -> None:
        if not 1 <= num_pages < 2**31:
            raise ArgumentError(f"PagePool: expected from 1 to {2**31 - 1} pages, got {num_pages}")
        self.num_pages = num_pages
        self._owners = np.zeros(num_pages, np.int32)
        self._returned = np.empty(num_pages, np.int32)  # a stack
        self._returned_count = 0
        self._fresh = 0  # pages from here on were never used

    @property
    def free_count(self) -> int:
        """Pages that nobody owns."""
        return self._returned_count + self.num_pages - self._fresh

    @property
    def used_count(self) -> int:
        """Pages that somebody owns."""
        return self.num_pages - self.free_count

    def owners(self, page: int) -> int:
        """How many own a page; 0 if it is free."""
        return int(self._owners[page]) if 0 <= page < self.num_pages else 0

    def allocate(self, count: int) -> Pages:
        """Pages with one owner each. Raises `OutOfPagesError`, and gives none, if there are not as many."""
        if count < 0:
            raise ArgumentError(f"PagePool: cannot allocate {count} pages")
        if count > self.free_count:
            raise OutOfPagesError(
                f"PagePool: {count} pages were asked for, {self.free_count} of {self.num_pages} are free; let "
                "sequences end, evict cached prefixes, or give the cache more memory"
            )
        again = min(count, self._returned_count)
        fresh = count - again
        pages = np.empty(count, np.int32)
        pages[:again] = self._returned[self._returned_count - again : self._returned_count][::-1]
        pages[again:] = np.arange(self._fresh, self._fresh + fresh, dtype=np.int32)
        self._returned_count -= again
        self._fresh += fresh
        self._owners[pages] = 1
        return pages

    def retain(self, pages: Pages) -> None:
        """One more owner for each page. Raises `CacheError` if one is free."""
        self._check(pages, "used after it was freed")
        np.add.at(self._owners, pages, 1)

    def release(self, pages: Pages) -> Pages:
        """One owner less for each page; gives those that have none left, in this order.

        Raises `CacheError`, and changes nothing, if one has no owner, or fewer than it is named.
        """
        self._check(pages, "freed twice")
        np.subtract.at(self._owners, pages, 1)
        left = self._owners[pages]
        if len(left) and left.min() < 0:
            np.add.at(self._owners, pages, 1)
            raise CacheError(f"PagePool: page {int(pages[left.argmin()])} is freed more often than it has owners")
        freed: Pages = pages[left == 0]
        if len(np.unique(freed)) < len(freed):
            freed = np.array(list(dict.fromkeys(freed.tolist())), np.int32)
        # Backwards, so that they are given out again in this order.
        self._returned[self._returned_count : self._returned_count + len(freed)] = freed[::-1]
        self._returned_count += len(freed)
        return freed

    def _check(self, pages: Pages, mistake: str) -> None:
        if len(pages) == 0:
            return
        if pages.min() < 0 or pages.max() >= self.num_pages:
            wrong = pages[(pages < 0) | (pages >= self.num_pages)]
            raise CacheError(f"PagePool: there is no page {int(wrong[0])}; pages are 0 to {self.num_pages - 1}")
        free = self._owners[pages] == 0
        if free.any():
            raise CacheError(f"PagePool: page {int(pages[free][0])} is {mistake}: nobody owns it")

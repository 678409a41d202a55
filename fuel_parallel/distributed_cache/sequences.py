"""Sequences over pages: which page has which tokens of which sequence.

Sequences share pages that are full. One that writes into a page which others own as well gets a copy of it first (copy
on write), so that forks, as for several samples of one prompt, cost a page each and no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from fuel_parallel.distributed_cache.pages import PagePool, Pages
from fuel_parallel.errors import ArgumentError, CacheError


class PageCopy(msgspec.Struct, frozen=True):
    """The first `tokens` tokens of page `source` are to be copied to page `target` before anything is written."""

    source: int
    target: int
    tokens: int


@dataclass
class _Sequence:
    pages: Pages
    length: int


class SequenceTable:
    """The sequences of a pool.

    >>> table = SequenceTable(PagePool(8), page_tokens=4)
    >>> table.begin(1)
    >>> table.extend(1, 6)
    ()
    >>> table.fork(1, 2)
    >>> table.extend(2, 1)
    (PageCopy(source=1, target=2, tokens=2),)
    >>> table.pages(1).tolist(), table.pages(2).tolist()
    ([0, 1], [0, 2])
    """

    def __init__(self, pool: PagePool, page_tokens: int) -> None:
        if page_tokens < 1:
            raise ArgumentError(f"SequenceTable: page_tokens must be 1 or more, not {page_tokens}")
        self.pool = pool
        self.page_tokens = page_tokens
        self._sequences: dict[int, _Sequence] = {}

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._sequences

    def __iter__(self) -> Iterator[int]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def length(self, sequence: int) -> int:
        """How many tokens it has."""
        return self._get(sequence).length

    def pages(self, sequence: int) -> Pages:
        """Its pages, in order; a copy."""
        return self._get(sequence).pages.copy()

    def begin(self, sequence: int, shared: Pages | None = None) -> None:
        """Begins a sequence with full pages that others own already; it owns them, too."""
        self._check_new(sequence)
        pages = np.empty(0, np.int32) if shared is None else shared.copy()
        self.pool.retain(pages)
        self._sequences[sequence] = _Sequence(pages, len(pages) * self.page_tokens)

    def pages_needed(self, sequence: int, tokens: int) -> int:
        """How many pages `extend` would take from the pool."""
        one = self._get(sequence)
        new = -(-(one.length + tokens) // self.page_tokens) - len(one.pages)
        return new + (tokens > 0 and self._writes_into_shared(one))

    def extend(self, sequence: int, tokens: int) -> tuple[PageCopy, ...]:
        """Makes room for more tokens; gives the page that is to be copied first, if any.

        Raises `OutOfPagesError`, and changes nothing, if the pool has not as many pages.
        """
        if tokens < 0:
            raise ArgumentError(f"SequenceTable: cannot extend sequence {sequence} by {tokens} tokens")
        one = self._get(sequence)
        given = self.pool.allocate(self.pages_needed(sequence, tokens))
        copies: tuple[PageCopy, ...] = ()
        if tokens > 0 and self._writes_into_shared(one):
            shared, given = one.pages[-1:].copy(), np.roll(given, -1)
            copies = (PageCopy(int(shared[0]), int(given[-1]), one.length % self.page_tokens),)
            one.pages = np.concatenate([one.pages[:-1], given[-1:]])
            given = given[:-1]
            self.pool.release(shared)
        if len(given):
            one.pages = np.concatenate([one.pages, given])
        one.length += tokens
        return copies

    def fork(self, sequence: int, child: int) -> None:
        """Begins `child` with all tokens of a sequence; no page is copied until one of them is written to."""
        one = self._get(sequence)
        self._check_new(child)
        self.pool.retain(one.pages)
        self._sequences[child] = _Sequence(one.pages.copy(), one.length)

    def replace(self, sequence: int, first: int, pages: Pages) -> None:
        """Has it own other pages with the same content from its page number `first` on, and lets the old ones go."""
        one = self._get(sequence)
        old = one.pages[first : first + len(pages)].copy()
        self.pool.retain(pages)
        one.pages[first : first + len(pages)] = pages
        self.pool.release(old)

    def end(self, sequence: int) -> Pages:
        """Ends a sequence; gives the pages that it owned. Those that nobody else owns are free now."""
        pages = self._get(sequence).pages
        del self._sequences[sequence]
        self.pool.release(pages)
        return pages

    def _writes_into_shared(self, one: _Sequence) -> bool:
        return bool(one.length % self.page_tokens) and self.pool.owners(int(one.pages[-1])) > 1

    def _get(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise CacheError(f"there is no sequence {sequence}: it has ended, or never began")
        return self._sequences[sequence]

    def _check_new(self, sequence: int) -> None:
        if sequence in self._sequences:
            raise CacheError(f"sequence {sequence} has begun already; give the new one another number")

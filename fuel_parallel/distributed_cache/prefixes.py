"""Prefixes whose pages are kept when their sequence has ended, so that a later one begins where they end.

The prefixes of a tenant make a tree: a node is a page, its children are the pages that follow it in some prompt. A
node is found by its hash, which stands for all tokens up to it, and is believed only if the tokens and the page before
it are the right ones as well: no two prompts are taken for each other, whatever their hashes.

The cache owns its pages as a sequence does. Whoever owns a page of it owns those before it, and lets them go no sooner.
Hence the page that nobody else owns and that was let go least recently is a leaf, and can be evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from fuel_parallel.distributed_cache.hashing import HASH_BYTES, PageHashes, Tokens, token_array
from fuel_parallel.distributed_cache.lru import PageOrder
from fuel_parallel.distributed_cache.pages import PagePool, Pages
from fuel_parallel.errors import CacheError


@dataclass(frozen=True)
class Match:
    """The longest cached prefix of a prompt: its pages, and the hash of each."""

    pages: Pages
    hashes: tuple[bytes, ...]


class EvictedPage(msgspec.Struct, frozen=True):
    """A page that is given to others from now on. Who wants to keep its content saves it under `page_hash` first."""

    page: int
    page_hash: bytes


@dataclass
class CacheStatistics:
    """What a cache did: `hits` and `misses` count prompts, `evictions` pages, `collisions` hashes of other tokens."""

    hits: int = 0
    misses: int = 0
    tokens_asked: int = 0
    tokens_saved: int = 0
    evictions: int = 0
    collisions: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of all tokens of prompts that were cached."""
        return self.tokens_saved / self.tokens_asked if self.tokens_asked else 0.0


class PrefixCache:
    """The prefixes that a pool keeps.

    Args:
        pool: Whose pages they are.
        page_tokens: Tokens of a page.
        secret: Keys the hashes; see `PageHashes`.

    >>> pool = PagePool(8)
    >>> cache = PrefixCache(pool, page_tokens=2, secret=b"not for users")
    >>> pages = pool.allocate(2)
    >>> cache.insert("", token_array([5, 6, 7, 8]), pages).tolist()
    [0, 1]
    >>> cache.let_go(pages) if len(pool.release(pages)) == 0 else None
    >>> cache.match("", [5, 6, 7, 9, 10]).pages.tolist(), cache.match("other", [5, 6, 7, 9, 10]).pages.tolist()
    ([0], [])
    >>> [one.page for one in cache.evict(1)]
    [1]
    """

    def __init__(self, pool: PagePool, page_tokens: int, secret: bytes) -> None:
        self.pool = pool
        self.page_tokens = page_tokens
        self.hashes = PageHashes(page_tokens, secret)
        self.statistics = CacheStatistics()
        self._page_of: dict[bytes, int] = {}
        # By page. Memory that is never written to is not taken from the machine.
        self._tokens = np.empty((pool.num_pages, page_tokens), np.int32)
        self._before = np.empty(pool.num_pages, np.int32)  # -1: the page is a root
        self._hash = np.empty((pool.num_pages, HASH_BYTES), np.uint8)
        self._cached = np.zeros(pool.num_pages, np.bool_)
        self._pins = np.zeros(pool.num_pages, np.int32)
        self._unused = PageOrder(pool.num_pages)  # nobody else owns them, nobody pinned them

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._page_of

    def __iter__(self) -> Iterator[bytes]:
        """The hashes of all pages."""
        return iter(self._page_of)

    @property
    def evictable_count(self) -> int:
        """How many pages `evict` could free."""
        return len(self._unused)

    def match(self, tenant: str, tokens: Sequence[int] | Tokens) -> Match:
        """The longest cached prefix, in full pages. Changes nothing: who uses it owns it, then calls `take`."""
        prompt = token_array(tokens)
        pages: list[int] = []
        hashes: list[bytes] = []
        for page_hash in self.hashes.chain(tenant, prompt):
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
            hashes.append(page_hash)
        found = np.array(pages, np.int32)
        sound = self._sound(found, prompt[: len(pages) * self.page_tokens], before=-1)
        if sound < len(pages):
            self.statistics.collisions += 1
        return Match(found[:sound], tuple(hashes[:sound]))

    def count_evictable(self, match: Match) -> int:
        """How many pages of a match nobody owns, so that taking it makes `evictable_count` less by them."""
        return self._unused.count(match.pages)

    def take(self, match: Match, tokens_asked: int) -> None:
        """A sequence now owns the pages of a match with its prompt of `tokens_asked` tokens."""
        self._unused.discard(match.pages.tolist())
        statistics = self.statistics
        statistics.tokens_asked += tokens_asked
        statistics.tokens_saved += len(match.pages) * self.page_tokens
        if len(match.pages):
            statistics.hits += 1
        else:
            statistics.misses += 1

    def insert(self, tenant: str, tokens: Tokens, pages: Pages, after: Match | None = None) -> Pages:
        """Keeps full pages that a sequence owns; `after` is what the cache has of the sequence already.

        Gives, for each of `tokens`' pages, the page that has its place: another one where the cache has the same tokens
        already. The sequence is to own that in place of its own (`SequenceTable.replace`) before it does anything
        else. The result is shorter if a hash stands for other tokens: pages from there on are not kept.
        """
        before_hash = after.hashes[-1] if after and after.hashes else None
        before = int(after.pages[-1]) if after and len(after.pages) else -1
        places: list[int] = []
        step = self.page_tokens
        for index, page_hash in enumerate(self.hashes.chain(tenant, tokens, before_hash)):
            content = tokens[index * step : (index + 1) * step]
            page = self._page_of.get(page_hash)
            if page is None:
                page = int(pages[index])
                self._keep(page, page_hash, content, before)
            elif not self._sound(np.array([page], np.int32), content, before):
                self.statistics.collisions += 1
                break
            places.append(page)
            before = page
        self._unused.discard(places)
        return np.array(places, np.int32)

    def let_go(self, pages: Pages) -> None:
        """A sequence, which owned `pages` in this order, has released them."""
        self._make_evictable(page for page in pages[::-1].tolist() if self._cached[page])

    def evict(self, count: int) -> list[EvictedPage]:
        """Frees up to `count` pages, the leaves that were used least recently."""
        evicted: list[EvictedPage] = []
        while len(evicted) < count and (page := self._unused.first) is not None:
            page_hash = self._hash[page].tobytes()
            self._unused.discard([page])
            del self._page_of[page_hash]
            self._cached[page] = False
            evicted.append(EvictedPage(page, page_hash))
        self.pool.release(np.array([one.page for one in evicted], np.int32))
        self.statistics.evictions += len(evicted)
        return evicted

    def pin(self, tenant: str, tokens: Sequence[int] | Tokens) -> Match:
        """Keeps what is cached of a prefix, such as a system prompt, from being evicted until `unpin` of the result."""
        match = self.match(tenant, tokens)
        self._pins[match.pages] += 1
        self._unused.discard(match.pages.tolist())
        return match

    def unpin(self, match: Match) -> None:
        """Takes back a `pin`. Raises `CacheError` if that was done already."""
        if (self._pins[match.pages] == 0).any():
            raise CacheError(f"unpin: not all of these {len(match.pages)} pages are pinned; a pin is taken back once")
        self._pins[match.pages] -= 1
        self._make_evictable(match.pages[::-1].tolist())

    def _make_evictable(self, deepest_first: Iterable[int]) -> None:
        pool, pins = self.pool, self._pins
        self._unused.append(page for page in deepest_first if not pins[page] and pool.owners(page) == 1)

    def _keep(self, page: int, page_hash: bytes, content: Tokens, before: int) -> None:
        self.pool.retain(np.array([page], np.int32))
        self._page_of[page_hash] = page
        self._tokens[page] = content
        self._before[page] = before
        self._hash[page] = np.frombuffer(page_hash, np.uint8)
        self._cached[page] = True
        self._pins[page] = 0

    def _sound(self, pages: Pages, tokens: Tokens, before: int) -> int:
        """How many pages, from the first, have these tokens and follow each other, the first `before`."""
        right = (self._tokens[pages] == tokens.reshape(len(pages), self.page_tokens)).all(axis=1)
        right &= self._before[pages] == np.concatenate([[before], pages[:-1]])[: len(pages)]
        return len(pages) if right.all() else int(right.argmin())

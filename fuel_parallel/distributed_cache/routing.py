"""Which of several replicas of a model gets a request: the one that has most of its prompt, or the one that is idle.

Replicas tell what they have by a `PrefixDigest`: the first bits of the hash of each cached page, sorted. With b bits
and n pages an uncached page is taken for a cached one with probability n / 2**b at most; that costs a worse choice,
never a wrong result, for the replica looks again.

A router may be wrong about loads in only one way that matters: it must not pile all onto one replica because that has
the popular prefix. No request goes to a replica whose load is above (1 + `imbalance`) times the mean, as with
consistent hashing with bounded loads (Mirrokni et al., 2018, arXiv:1608.01350).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from fuel_parallel.distributed_cache.hashing import PageHashes, prefix_id, token_array
from fuel_parallel.distributed_cache.protocol import CacheRoutingHint
from fuel_parallel.errors import ArgumentError

_DTYPES: dict[int, Any] = {16: np.uint16, 32: np.uint32, 64: np.uint64}


class PrefixDigest(msgspec.Struct, frozen=True):
    """Which pages a replica has, in `bits` / 8 bytes a page: `PrefixDigest.of`.

    >>> digest = PrefixDigest.of([bytes(range(16))], bits=32)
    >>> bytes(range(16)) in digest, bytes(16) in digest, len(digest.data)
    (True, False, 4)
    """

    bits: int
    data: bytes

    @classmethod
    def of(cls, page_hashes: Iterable[bytes], bits: int = 32) -> PrefixDigest:
        """The digest of pages' hashes, such as a `PrefixCache`; `bits` is 16, 32 or 64."""
        if bits not in _DTYPES:
            raise ArgumentError(f"PrefixDigest: bits is 16, 32 or 64, not {bits}")
        return cls(bits, np.sort(_truncated(b"".join(page_hashes), bits)).tobytes())

    def __contains__(self, page_hash: bytes) -> bool:
        return self.prefix_pages([page_hash]) == 1

    def prefix_pages(self, page_hashes: Sequence[bytes]) -> int:
        """How many of these pages, from the first, the replica has."""
        known = np.frombuffer(self.data, _DTYPES[self.bits])
        asked = _truncated(b"".join(page_hashes), self.bits)
        places = np.searchsorted(known, asked)
        found = np.zeros(len(asked), np.bool_)
        inside = places < len(known)
        found[inside] = known[places[inside]] == asked[inside]
        return len(found) if found.all() else int(found.argmin())

    def false_positive_rate(self) -> float:
        """How likely a page that is not there seems to be there, at most."""
        return min(1.0, len(self.data) / (self.bits / 8) / 2.0**self.bits)


class RoutingPolicy(Enum):
    """What a router looks at."""

    LONGEST_PREFIX = "longest-prefix"  # the most cached tokens, among equals the least load
    LEAST_LOADED = "least-loaded"  # the least load
    BALANCED = "balanced"  # the least load with what is left to compute of this prompt


class Router:
    """Chooses replicas, and counts what they have to do.

    Load is counted in tokens that are still to be computed.

    Args:
        replicas: How many there are.
        hashes: Those of the replicas' caches: the same secret and size of a page.
        policy: See `RoutingPolicy`.
        imbalance: By how much, as a share of the mean, a replica's load may be above it and still get requests; None
            for no bound.

    >>> hashes = PageHashes(page_tokens=2, secret=b"")
    >>> router = Router(2, hashes)
    >>> router.update(1, PrefixDigest.of(hashes.chain("", token_array([1, 2, 3, 4]))))
    >>> router.route([1, 2, 3, 4, 5])[0]
    1
    """

    def __init__(
        self,
        replicas: int,
        hashes: PageHashes,
        policy: RoutingPolicy = RoutingPolicy.BALANCED,
        imbalance: float | None = 0.5,
    ) -> None:
        if replicas < 1 or (imbalance is not None and imbalance < 0):
            raise ArgumentError(
                f"Router: expected replicas >= 1 and imbalance >= 0 or None, got {replicas} and {imbalance}"
            )
        self.hashes = hashes
        self.policy = policy
        self.imbalance = imbalance
        self.loads = np.zeros(replicas)
        self._digests = [PrefixDigest.of([])] * replicas
        self._turns = np.zeros(replicas)  # when each was chosen last: among equals, the one that waits longest

    def update(self, replica: int, digest: PrefixDigest) -> None:
        """Takes in what a replica has now."""
        self._digests[self._checked(replica)] = digest

    def hint(self, tokens: Sequence[int], tenant: str = "") -> CacheRoutingHint:
        """The longest part of a prompt that any replica has, and which have it."""
        pages, hashes = self._cached_pages(tokens, tenant)
        longest = int(pages.max())
        if longest == 0:
            return CacheRoutingHint(0, (), 0)
        ranks = tuple(np.flatnonzero(pages == longest).tolist())
        return CacheRoutingHint(prefix_id(hashes[longest - 1]), ranks, longest * self.hashes.page_tokens)

    def route(self, tokens: Sequence[int], tenant: str = "") -> tuple[int, int]:
        """The replica for a prompt, and how many tokens it seems to have; its load grows by the rest."""
        pages, _ = self._cached_pages(tokens, tenant)
        cached = np.minimum(pages * self.hashes.page_tokens, len(tokens))
        work = len(tokens) - cached
        open_to = np.ones(len(self.loads), np.bool_)
        if self.imbalance is not None:
            # The least loaded is never above the mean, but rounding may put it there.
            open_to = self.loads <= (1 + self.imbalance) * self.loads.mean()
            open_to[self.loads.argmin()] = True
        match self.policy:
            case RoutingPolicy.LONGEST_PREFIX:
                keys = (self.loads, work)
            case RoutingPolicy.LEAST_LOADED:
                keys = (self.loads, self.loads)
            case RoutingPolicy.BALANCED:
                keys = (work, self.loads + work)
        chosen = int(np.lexsort((self._turns, *keys, ~open_to))[0])
        self._turns[chosen] = self._turns.max() + 1
        self.loads[chosen] += work[chosen]
        return chosen, int(cached[chosen])

    def add_load(self, replica: int, tokens: float) -> None:
        """A replica has more to do, or, with a negative number, has done something."""
        replica = self._checked(replica)
        self.loads[replica] = max(0.0, self.loads[replica] + tokens)

    def _cached_pages(self, tokens: Sequence[int], tenant: str) -> tuple[np.ndarray[Any, Any], list[bytes]]:
        hashes = list(self.hashes.chain(tenant, token_array(tokens)))
        return np.array([digest.prefix_pages(hashes) for digest in self._digests]), hashes

    def _checked(self, replica: int) -> int:
        if not 0 <= replica < len(self.loads):
            raise ArgumentError(f"Router: there is no replica {replica}; replicas are 0 to {len(self.loads) - 1}")
        return replica


def _truncated(hashes: bytes, bits: int) -> np.ndarray[Any, Any]:
    """The first bits of each hash, as a number."""
    rows = np.frombuffer(hashes, np.uint8).reshape(-1, 16)
    numbers: np.ndarray[Any, Any] = np.ascontiguousarray(rows[:, : bits // 8]).view(_DTYPES[bits]).reshape(-1)
    return numbers

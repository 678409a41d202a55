"""Names of prefixes: a hash for each full page, of its tokens and of all before them.

Hashes are keyed by a secret and by the tenant (BLAKE2b, RFC 7693): without the secret a hash tells nobody anything,
and the same tokens of two tenants have nothing in common. Replicas that route to each other need the same secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fuel_parallel.errors import ArgumentError

HASH_BYTES = 16
Tokens = np.ndarray[Any, np.dtype[np.int32]]


def token_array(tokens: Sequence[int] | Tokens) -> Tokens:
    """Token numbers as they are hashed and compared. Raises `ArgumentError` for one that is no int32, or negative."""
    given = np.asarray(tokens)
    if given.size == 0:
        return np.empty(0, np.int32)
    if given.ndim != 1 or given.dtype.kind not in "iu" or given.min() < 0 or given.max() >= 2**31:
        raise ArgumentError(
            f"tokens are a sequence of numbers from 0 to {2**31 - 1}; got {given.dtype.name} of shape {given.shape}"
        )
    return given.astype(np.int32)


class PageHashes:
    """Hashes the pages of a prompt.

    Args:
        page_tokens: Tokens of a page.
        secret: At most 64 bytes that users do not know.

    >>> hashes = PageHashes(page_tokens=2, secret=b"not for users")
    >>> one, two = (list(hashes.chain(tenant, token_array([1, 2, 3, 4, 5]))) for tenant in ("one", "two"))
    >>> len(one), set(one) & set(two)
    (2, set())
    """

    def __init__(self, page_tokens: int, secret: bytes) -> None:
        if len(secret) > 64:
            raise ArgumentError(f"PageHashes: secret has at most 64 bytes, not {len(secret)}")
        self.page_tokens = page_tokens
        self._secret = secret

    def root(self, tenant: str) -> bytes:
        """What comes before a tenant's first page."""
        return hashlib.blake2b(tenant.encode(), key=self._secret, digest_size=HASH_BYTES).digest()

    def chain(self, tenant: str, tokens: Tokens, before: bytes | None = None) -> Iterator[bytes]:
        """The hash of each full page; `before` is that of the page before the first, else they begin the prompt."""
        root = self.root(tenant)
        keyed = hashlib.blake2b(key=root, digest_size=HASH_BYTES)
        data, step = tokens.astype("<i4", copy=False).tobytes(), 4 * self.page_tokens
        last = root if before is None else before
        for start in range(0, len(data) - step + 1, step):
            page = keyed.copy()
            page.update(last + data[start : start + step])
            last = page.digest()
            yield last


def prefix_id(page_hash: bytes) -> int:
    """The number of 64 bits that names a prefix in events and hints."""
    return int.from_bytes(page_hash[:8], "big")

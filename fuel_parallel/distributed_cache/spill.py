"""Where the content of evicted pages can go: host memory, files, or one after the other.

A rank saves its own part of a page when it is evicted (`EvictedPage`), under the page's hash, and may load it when a
later prompt has the same hash. What every rank could load counts as written, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from fuel_parallel.errors import ArgumentError

_MAGIC = b"fuelpage"
_CHECKSUM_BYTES = 16


class SpillStore(Protocol):
    """Keeps the contents of pages by their hashes, within a budget; it may forget any of them."""

    def save(self, page_hash: bytes, content: bytes) -> None:
        """Keeps a page's content if it can."""

    def load(self, page_hash: bytes) -> bytes | None:
        """The content, exactly as it was saved; None if it is not there any more."""

    def discard(self, page_hash: bytes) -> None:
        """Forgets a page."""

    def __contains__(self, page_hash: bytes) -> bool:
        """Whether the page is there, as far as is known without reading it."""


class HostSpill:
    """Pages in host memory, the least recently used of which go to `below`, if there is such a store.

    >>> store = HostSpill(budget_bytes=5)
    >>> store.save(b"a", b"123")
    >>> store.save(b"b", b"456")
    >>> store.load(b"a"), store.load(b"b")
    (None, b'456')
    """

    def __init__(self, budget_bytes: int, below: SpillStore | None = None) -> None:
        self.budget_bytes = _checked(budget_bytes)
        self.below = below
        self.used_bytes = 0
        self._pages: OrderedDict[bytes, bytes] = OrderedDict()

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._pages or (self.below is not None and page_hash in self.below)

    def save(self, page_hash: bytes, content: bytes) -> None:
        """Keeps a page's content; what no longer fits goes below."""
        self.discard(page_hash)
        if len(content) > self.budget_bytes:
            self._push(page_hash, content)
            return
        while self.used_bytes + len(content) > self.budget_bytes:
            oldest, pushed = self._pages.popitem(last=False)
            self.used_bytes -= len(pushed)
            self._push(oldest, pushed)
        self._pages[page_hash] = content
        self.used_bytes += len(content)

    def load(self, page_hash: bytes) -> bytes | None:
        """The content, or None. What comes from below stays there."""
        if page_hash in self._pages:
            self._pages.move_to_end(page_hash)
            return self._pages[page_hash]
        return None if self.below is None else self.below.load(page_hash)

    def discard(self, page_hash: bytes) -> None:
        """Forgets a page, below as well."""
        self.used_bytes -= len(self._pages.pop(page_hash, b""))
        if self.below is not None:
            self.below.discard(page_hash)

    def _push(self, page_hash: bytes, content: bytes) -> None:
        if self.below is not None:
            self.below.save(page_hash, content)


class FileSpill:
    """Pages in files of a folder, which are there again after a restart with the same secret of the cache.

    A file appears whole or not at all, and its checksum covers the page's hash and content: one that is damaged, or is
    another page's, is removed and was never there. Each rank needs a folder of its own.

    Args:
        folder: Made if it does not exist.
        budget_bytes: For the files with their headers; the least recently saved or loaded ones go first.
    """

    def __init__(self, folder: str | os.PathLike[str], budget_bytes: int) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.budget_bytes = _checked(budget_bytes)
        self.used_bytes = 0
        self.damaged = 0
        """Files that were removed because they did not have their checksum."""
        self._sizes: OrderedDict[str, int] = OrderedDict()
        for unfinished in self.folder.glob("*.part"):
            unfinished.unlink(missing_ok=True)
        for path in sorted(self.folder.glob("*.page"), key=lambda path: (path.stat().st_mtime_ns, path.name)):
            self._note(path.stem, path.stat().st_size)
        self._shrink()

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash.hex() in self._sizes

    def save(self, page_hash: bytes, content: bytes) -> None:
        """Writes a page's file. Raises `OSError` if the file system does not take it."""
        name = page_hash.hex()
        data = _MAGIC + _checksum(page_hash, content) + content
        if len(data) > self.budget_bytes:
            return
        self.discard(page_hash)
        self._shrink(room_for=len(data))
        handle, part = tempfile.mkstemp(suffix=".part", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(part, self._path(name))
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
        self._note(name, len(data))

    def load(self, page_hash: bytes) -> bytes | None:
        """The content of an undamaged file, else None."""
        name = page_hash.hex()
        if name not in self._sizes:
            return None
        try:
            data = self._path(name).read_bytes()
        except FileNotFoundError:
            data = b""
        header = len(_MAGIC) + _CHECKSUM_BYTES
        content = data[header:]
        if data[:header] != _MAGIC + _checksum(page_hash, content):
            self.damaged += 1
            self.discard(page_hash)
            return None
        self._sizes.move_to_end(name)
        return content

    def discard(self, page_hash: bytes) -> None:
        """Removes a page's file."""
        self._remove(page_hash.hex())

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.page"

    def _note(self, name: str, size: int) -> None:
        self._sizes[name] = size
        self.used_bytes += size

    def _remove(self, name: str) -> None:
        if name in self._sizes:
            self._path(name).unlink(missing_ok=True)
            self.used_bytes -= self._sizes.pop(name)

    def _shrink(self, room_for: int = 0) -> None:
        while self._sizes and self.used_bytes + room_for > self.budget_bytes:
            self._remove(next(iter(self._sizes)))


def _checksum(page_hash: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(page_hash + content, digest_size=_CHECKSUM_BYTES).digest()


def _checked(budget_bytes: int) -> int:
    if budget_bytes < 0:
        raise ArgumentError(f"a spill store's budget is 0 bytes or more, not {budget_bytes}")
    return budget_bytes

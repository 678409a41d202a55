"""A rank's copy of the cache's bookkeeping: commands in, the same outcome on every rank.

Nothing here looks at a clock, a random number or another rank. Two replicas that apply the same commands in the same
order have the same pages for the same tokens, evict the same pages, and have the same `digest`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from fuel_parallel.distributed_cache.hashing import Tokens, prefix_id
from fuel_parallel.distributed_cache.pages import PagePool, Pages
from fuel_parallel.distributed_cache.prefixes import EvictedPage, Match, PrefixCache
from fuel_parallel.distributed_cache.sequences import PageCopy, SequenceTable
from fuel_parallel.errors import ArgumentError, CacheError, OutOfPagesError


class Admit(msgspec.Struct, frozen=True, tag=True):
    """A sequence begins with a prompt, at the end of the longest cached prefix. Tokens are little-endian int32."""

    sequence: int
    tokens: bytes
    tenant: str = ""


class Extend(msgspec.Struct, frozen=True, tag=True):
    """A sequence gets more tokens."""

    sequence: int
    tokens: bytes


class Fork(msgspec.Struct, frozen=True, tag=True):
    """`child` begins with all tokens of a sequence."""

    sequence: int
    child: int


class Confirm(msgspec.Struct, frozen=True, tag=True):
    """All ranks hold the first `num_tokens` tokens of a sequence: its full pages may be used by others."""

    sequence: int
    num_tokens: int


class End(msgspec.Struct, frozen=True, tag=True):
    """A sequence ends."""

    sequence: int


Command = Admit | Extend | Fork | Confirm | End


class Outcome(msgspec.Struct, frozen=True):
    """What a command did, in the order in which a rank is to follow it: save, copy, then write.

    Args:
        sequence: Whose pages changed.
        reused_tokens: `Admit`: how many tokens need not be computed.
        evicted: Pages whose content is lost from now on, unless it is saved first.
        copies: Pages that are to be copied before they are written to.
        pages: All pages of the sequence from number `first_page` on, where these changed.
        first_page: See `pages`.
        prefix: `Confirm`: the prefix that all ranks hold, as an event names it; 0 if there is no new one.
    """

    sequence: int
    reused_tokens: int = 0
    evicted: tuple[EvictedPage, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    pages: tuple[int, ...] = ()
    first_page: int = 0
    prefix: int = 0


class CacheConfig(msgspec.Struct, frozen=True):
    """What all ranks of a group have alike: `num_pages` of `page_tokens` tokens, and the secret of the hashes."""

    num_pages: int
    page_tokens: int
    secret: bytes = b""


@dataclass
class _Text:
    """The tokens of a sequence that are not kept by the cache yet, and what is."""

    tenant: str
    kept: Match
    pending: bytearray = field(default_factory=bytearray)


class CacheReplica:
    """The pool, the sequences and the prefixes of one rank.

    >>> replica = CacheReplica(CacheConfig(num_pages=8, page_tokens=2))
    >>> prompt = np.arange(5, dtype="<i4").tobytes()
    >>> replica.apply(Admit(1, prompt)).pages
    (0, 1, 2)
    >>> confirmed = replica.apply(Confirm(1, num_tokens=5))
    >>> replica.apply(Admit(2, prompt)).reused_tokens
    4
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.pool = PagePool(config.num_pages)
        self.table = SequenceTable(self.pool, config.page_tokens)
        self.prefixes = PrefixCache(self.pool, config.page_tokens, config.secret)
        self.applied = 0
        """How many commands were applied."""
        self.digest = b""
        """Stands for all outcomes so far."""
        self._texts: dict[int, _Text] = {}

    def apply(self, command: Command) -> Outcome:
        """Does what a command says.

        Raises `CacheError` for a sequence that is not there, or is already, `OutOfPagesError` where pages do not
        suffice even if all that can be is evicted. Then nothing was changed, and the command does not count.
        """
        match command:
            case Admit():
                outcome = self._admit(command)
            case Extend():
                outcome = self._extend(command)
            case Fork():
                outcome = self._fork(command)
            case Confirm():
                outcome = self._confirm(command)
            case End():
                outcome = self._end(command)
        self.applied += 1
        said = self.digest + msgspec.msgpack.encode((type(command).__name__, outcome))
        self.digest = hashlib.blake2b(said, digest_size=8).digest()
        return outcome

    def confirmed_tokens(self, sequence: int) -> int:
        """How many tokens of a sequence are in pages that the cache keeps."""
        return len(self._text(sequence).kept.pages) * self.config.page_tokens

    def can_confirm(self, sequence: int, num_tokens: int) -> bool:
        """Whether `Confirm` would have the cache keep a page that it does not keep yet."""
        kept = len(self._text(sequence).kept.pages)
        return len(self._unshared(self.table.pages(sequence)[kept : num_tokens // self.config.page_tokens])) > 0

    def _admit(self, command: Admit) -> Outcome:
        tokens = _decoded(command.tokens)
        if not len(tokens):
            raise ArgumentError(f"Admit: the prompt of sequence {command.sequence} has no tokens; it needs one")
        if command.sequence in self.table:
            raise CacheError(f"sequence {command.sequence} has begun already; give the new one another number")
        # The last token is computed in any case: what comes after it depends on its output.
        found = self.prefixes.match(command.tenant, tokens[:-1])
        reused = len(found.pages) * self.config.page_tokens
        needed = -(-(len(tokens) - reused) // self.config.page_tokens)
        room = self.pool.free_count + self.prefixes.evictable_count - self.prefixes.count_evictable(found)
        self._check_room(command.sequence, needed, room)
        self.table.begin(command.sequence, found.pages)
        self.prefixes.take(found, len(tokens))
        evicted = self._make_room(needed)
        self.table.extend(command.sequence, len(tokens) - reused)
        self._texts[command.sequence] = _Text(command.tenant, found, bytearray(command.tokens[4 * reused :]))
        pages = tuple(self.table.pages(command.sequence).tolist())
        return Outcome(command.sequence, reused_tokens=reused, evicted=evicted, pages=pages)

    def _extend(self, command: Extend) -> Outcome:
        text, tokens = self._text(command.sequence), _decoded(command.tokens)
        length = self.table.length(command.sequence)
        needed = self.table.pages_needed(command.sequence, len(tokens))
        self._check_room(command.sequence, needed, self.pool.free_count + self.prefixes.evictable_count)
        evicted = self._make_room(needed)
        copies = self.table.extend(command.sequence, len(tokens))
        text.pending += command.tokens
        first = length // self.config.page_tokens
        pages = tuple(self.table.pages(command.sequence)[first:].tolist()) if needed else ()
        return Outcome(command.sequence, evicted=evicted, copies=copies, pages=pages, first_page=first if needed else 0)

    def _fork(self, command: Fork) -> Outcome:
        text = self._text(command.sequence)
        self.table.fork(command.sequence, command.child)
        self._texts[command.child] = replace(text, pending=bytearray(text.pending))
        return Outcome(command.child, pages=tuple(self.table.pages(command.child).tolist()))

    def _confirm(self, command: Confirm) -> Outcome:
        text, step = self._text(command.sequence), self.config.page_tokens
        if not 0 <= command.num_tokens <= self.table.length(command.sequence):
            raise ArgumentError(
                f"Confirm: sequence {command.sequence} has {self.table.length(command.sequence)} tokens, "
                f"not {command.num_tokens}"
            )
        kept = len(text.kept.pages)
        own = self._unshared(self.table.pages(command.sequence)[kept : max(kept, command.num_tokens // step)])
        tokens = _decoded(bytes(text.pending[: 4 * step * len(own)]))
        places = self.prefixes.insert(text.tenant, tokens, own, text.kept)
        if not len(places):
            return Outcome(command.sequence)
        hashes = tuple(self.prefixes.hashes.chain(text.tenant, tokens, text.kept.hashes[-1] if kept else None))
        self.table.replace(command.sequence, kept, places)
        text.kept = Match(np.concatenate([text.kept.pages, places]), text.kept.hashes + hashes[: len(places)])
        del text.pending[: 4 * step * len(places)]
        changed = tuple(places.tolist()) if (places != own[: len(places)]).any() else ()
        name = prefix_id(text.kept.hashes[-1])
        return Outcome(command.sequence, pages=changed, first_page=kept if changed else 0, prefix=name)

    def _end(self, command: End) -> Outcome:
        self._text(command.sequence)
        del self._texts[command.sequence]
        self.prefixes.let_go(self.table.end(command.sequence))
        return Outcome(command.sequence)

    def _unshared(self, own: Pages) -> Pages:
        """The pages up to the first that a fork shares: it might not own those before it in the cache."""
        shared = [index for index, page in enumerate(own.tolist()) if self.pool.owners(page) > 1]
        return own[: shared[0]] if shared else own

    def _check_room(self, sequence: int, needed: int, available: int) -> None:
        if needed > available:
            raise OutOfPagesError(
                f"sequence {sequence} needs {needed} pages, {available} of {self.pool.num_pages} are free or "
                "can be evicted; wait until others end, end one, or give the cache more memory"
            )

    def _make_room(self, needed: int) -> tuple[EvictedPage, ...]:
        return tuple(self.prefixes.evict(max(0, needed - self.pool.free_count)))

    def _text(self, sequence: int) -> _Text:
        if sequence not in self._texts:
            raise CacheError(f"there is no sequence {sequence}: it has ended, or never began")
        return self._texts[sequence]


def _decoded(tokens: bytes) -> Tokens:
    return np.frombuffer(tokens, "<i4").astype(np.int32, copy=False)

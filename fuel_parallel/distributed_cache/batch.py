"""One step's work on paged sequences: which tokens are computed, and where keys and values lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fuel_parallel.distributed_cache.sequences import SequenceTable
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor


class Chunk(NamedTuple):
    """The tokens of a sequence that a step computes: `tokens` of them, from position `first` on."""

    sequence: int
    first: int
    tokens: int


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """What a model needs to know of a step beside its tokens; made by `PagedBatch.of`.

    Chunks of several sequences lie one after the other in one dimension of tokens: a decoding sequence has one token,
    a prompt as many as the step takes. Extents are padded to a few sizes, so that steps have few plans: `size` tokens,
    of which `tokens` count. Tensors are in host memory but for `positions` and `last`, which the model reads.

    Args:
        chunks: Whose tokens, in order.
        tokens: How many tokens there are.
        positions: [size] of each token in its sequence.
        slots: [size], where keys and values are written; -1 for padding.
        page_table: [rows, most pages].
        lengths: [rows], tokens of each sequence up to the end of its chunk; 0 for padding.
        starts: [rows + 1], where each chunk begins.
        last: [rows], where the last token of each chunk lies.
    """

    chunks: tuple[Chunk, ...]
    tokens: int
    positions: Tensor
    slots: Tensor
    page_table: Tensor
    lengths: Tensor
    starts: Tensor
    last: Tensor

    @classmethod
    def of(cls, table: SequenceTable, chunks: Sequence[Chunk], *, device: str = "cpu") -> PagedBatch:
        """The batch of some chunks of a table's sequences, which have room for them already.

        Raises:
            ArgumentError: No chunk, one without tokens or beyond its sequence's length, or a sequence twice.
            CacheError: A sequence that is not there.

        >>> from fuel_parallel.distributed_cache import PagePool
        >>> table = SequenceTable(PagePool(8), page_tokens=2)
        >>> table.begin(7)
        >>> table.extend(7, 5)
        ()
        >>> batch = PagedBatch.of(table, [Chunk(7, first=2, tokens=3)])
        >>> batch.slots.tolist(), batch.lengths.tolist(), batch.last.tolist()
        ([2, 3, 4], [5], [2])
        """
        _check(table, chunks)
        counts = np.array([chunk.tokens for chunk in chunks])
        ends = np.array([chunk.first + chunk.tokens for chunk in chunks])
        starts = np.concatenate([[0], np.cumsum(counts)])
        tokens, step = int(starts[-1]), table.page_tokens
        rows, size = padded(len(chunks)), padded(tokens)
        pages = np.zeros((rows, 1 << (-(-int(ends.max()) // step) - 1).bit_length()), np.int32)
        positions, slots = np.zeros(size, np.int32), np.full(size, -1, np.int64)
        for row, chunk in enumerate(chunks):
            own = table.pages(chunk.sequence)[: -(-ends[row] // step)]
            pages[row, : len(own)] = own
            places = np.arange(chunk.first, ends[row])
            here = slice(starts[row], starts[row + 1])
            positions[here] = places
            slots[here] = own[places // step].astype(np.int64) * step + places % step
        return cls(
            tuple(chunks),
            tokens,
            creation.asarray(positions, device=device),
            creation.asarray(slots),
            creation.asarray(pages),
            creation.asarray(_filled(ends, rows, 0)),
            creation.asarray(_filled(starts, rows + 1, tokens)),
            creation.asarray(_filled(starts[1:] - 1, rows, 0), device=device),
        )

    @property
    def size(self) -> int:
        """Tokens with padding."""
        return self.slots.shape[0]

    @property
    def rows(self) -> int:
        """Sequences with padding."""
        return self.lengths.shape[0]

    def padded_tokens(self, tokens: Any) -> Tensor:
        """Token numbers of all chunks, one after the other, as [size].

        Raises `ArgumentError` if they are not as many as the chunks have.
        """
        flat = np.asarray(tokens).reshape(-1)
        if len(flat) != self.tokens:
            raise ArgumentError(f"PagedBatch: its chunks have {self.tokens} tokens, but {len(flat)} were given")
        return creation.asarray(_filled(flat, self.size, 0), device=self.positions.device)


def padded(count: int) -> int:
    """The least extent of at least `count` that batches have: up to 16 any, then eight in each octave.

    >>> [padded(count) for count in (1, 15, 17, 100, 1000)]
    [1, 15, 18, 104, 1024]
    """
    unit = 1 << max(0, (count - 1).bit_length() - 4)
    return -(-count // unit) * unit


def _filled(values: np.ndarray[Any, Any], extent: int, padding: int) -> np.ndarray[Any, Any]:
    result = np.full(extent, padding, np.int32)
    result[: len(values)] = values
    return result


def _check(table: SequenceTable, chunks: Sequence[Chunk]) -> None:
    if not chunks:
        raise ArgumentError("PagedBatch: a step needs at least one chunk")
    for chunk in chunks:
        length = table.length(chunk.sequence)
        if chunk.first < 0 or chunk.tokens < 1 or chunk.first + chunk.tokens > length:
            raise ArgumentError(
                f"PagedBatch: sequence {chunk.sequence} has {length} tokens; a chunk of {chunk.tokens} from position "
                f"{chunk.first} on is not a part of them; extend the sequence first"
            )
    if len({chunk.sequence for chunk in chunks}) < len(chunks):
        raise ArgumentError(f"PagedBatch: one chunk for each sequence; got {[chunk.sequence for chunk in chunks]}")

"""How ranks learn which collectives the others are about to run.

Entry k of a communicator has a digest on every rank. A rank publishes the digests of a whole plan before it runs, and
asks before entry k whether all ranks have published the same. Digests that are there are compared at once, however the
ranks cut their work into plans, so that most entries are found equal long before their turn.

- `NodeExchange`, where all ranks share a node: a line of shared memory for each rank, with the number of entries it has
  published and a ring of their digests. A microsecond or two, and no message.
- `WireExchange`, everywhere else: a non-blocking all-reduce for each entry, started when it is published.

Both only look; waiting is the guard's.
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE = 512
"""Entries that are published at once, at most."""

# A rank publishes a piece only after all have published the one before: nobody still reads what two pieces overwrite.
_RING = 2 * PIECE
_LINE = 16 + _RING  # in words; the first two cache lines are the counter's
_COUNT, _ENDED = 0, 8


class Exchange(Protocol):
    """What the guard asks. `compare` and `missing` never wait."""

    def publish(self, first: int, digests: memoryview) -> None:
        """The digests of my entries from number `first` on, `PIECE` of them at most."""

    def compare(self, number: int, published: int) -> int:
        """The first entry from `number` on that not all ranks are known to have alike; ~n if some have another n."""

    def missing(self, number: int) -> list[int] | None:
        """The ranks that have not published entry `number`; None if that cannot be known."""

    def skip(self, published: int, number: int) -> None:
        """All ranks go on with `number`, though I have published up to `published` only, and compare nothing before."""

    def say_ended(self) -> None:
        """My script has ended."""

    def has_ended(self, rank: int) -> bool:
        """Whether the script of a rank is known to have ended."""


class NodeExchange:
    """Through memory of `nbytes(ranks)` that all ranks share."""

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int) -> None:
        words = memoryview(memory).cast("q")
        self._lines = [words[r * _LINE : (r + 1) * _LINE] for r in range(ranks)]
        self._mine = self._lines[rank]
        self._others = [self._lines[(rank + i) % ranks] for i in range(1, ranks)]

    @staticmethod
    def nbytes(ranks: int) -> int:
        """How much memory it takes."""
        return ranks * _LINE * 8

    def publish(self, first: int, digests: memoryview) -> None:
        """See `Exchange.publish`."""
        count = len(digests)
        begin = first % _RING
        room = _RING - begin
        if count <= room:
            self._mine[16 + begin : 16 + begin + count] = digests
        else:
            self._mine[16 + begin : 16 + _RING] = digests[:room]
            self._mine[16 : 16 + count - room] = digests[room:]
        self._mine[_COUNT] = first + count

    def compare(self, number: int, published: int) -> int:
        """See `Exchange.compare`."""
        least = published
        for line in self._others:
            count = line[_COUNT]
            if count < least:
                if count <= number:
                    return number
                least = count
        begin = 16 + number % _RING
        end = begin + least - number
        if end > _LINE:
            least -= end - _LINE
            end = _LINE
        if least == number + 1:
            mine = self._mine[begin]
            for line in self._others:
                if line[begin] != mine:
                    return ~number
            return least
        ours = self._mine[begin:end]
        if all(line[begin:end] == ours for line in self._others):
            return least
        for place in range(begin, end):
            if any(line[place] != self._mine[place] for line in self._others):
                return ~(number + place - begin)
        return least

    def missing(self, number: int) -> list[int]:
        """See `Exchange.missing`."""
        return [rank for rank, line in enumerate(self._lines) if line[_COUNT] <= number]

    def skip(self, published: int, number: int) -> None:
        """See `Exchange.skip`."""
        self._mine[_COUNT] = number

    def say_ended(self) -> None:
        """See `Exchange.say_ended`."""
        self._mine[_ENDED] = 1

    def has_ended(self, rank: int) -> bool:
        """See `Exchange.has_ended`."""
        return bool(self._lines[rank][_ENDED])


class WireExchange:
    """By messages on a communicator of its own."""

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._greatest = MPI.MAX
        self._in_place = MPI.IN_PLACE
        self._under_way: deque[tuple[int, MPI.Request, np.ndarray[Any, Any]]] = deque()
        self._abandoned: list[Any] = []  # of plans that failed: MPI still writes there

    def publish(self, first: int, digests: memoryview) -> None:
        """See `Exchange.publish`."""
        while self._under_way and self._under_way[-1][0] >= first:
            self._abandoned.append(self._under_way.pop())
        for number, digest in enumerate(digests, first):
            # The greatest, and the least with its sign turned: equal everywhere if they are the same.
            pair = np.array([digest, -digest], dtype=np.int64)
            self._under_way.append((number, self._comm.Iallreduce(self._in_place, pair, self._greatest), pair))

    def compare(self, number: int, published: int) -> int:
        """See `Exchange.compare`."""
        while self._under_way:
            at, request, pair = self._under_way[0]
            if not request.Test():
                return max(at, number)
            if pair[0] != -pair[1]:
                return ~at  # it stays, for when its turn comes
            self._under_way.popleft()
        return published

    def missing(self, number: int) -> None:
        """Unknown: an all-reduce does not tell who has not come."""
        return

    def skip(self, published: int, number: int) -> None:
        """See `Exchange.skip`. MPI wants the same all-reduces of all ranks, needed or not."""
        self.publish(published, memoryview(bytes(8 * (number - published))).cast("q"))
        self._abandoned.extend(self._under_way)
        self._under_way.clear()

    def say_ended(self) -> None:
        """Nothing: the entry of the script's end says it."""

    def has_ended(self, rank: int) -> bool:
        """Not known before it is this rank's turn."""
        return False

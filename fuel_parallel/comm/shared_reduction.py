"""All-reduce in shared memory, in halves: announced when the input is ready, reduced when all ranks have announced.

An array that lies in a window of the node is reduced in place: each rank reduces its section of all ranks' arrays into
all of them, in the order of ranks, so that all get the same bits. Nobody waits between the two halves:

    start       the array's place is announced; one that lies elsewhere is copied into a window of the pool first
    progress    if all have announced: my section is reduced
    wait        until all have reduced theirs

**Order.** Reductions of this process are done strictly in the order in which they were started, whatever groups of
ranks they are of, and `settle` does what is left of all of them before this rank blocks in anything else. So whoever
waits for this rank's section gets it as soon as with blocking calls, and what cannot deadlock with those cannot here.

**Too few windows.** A rank without room announces that. When the turn of that reduction comes, all ranks know, and all
make one more window for the pool. Where there is no memory for it, MPI reduces this array: the result is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fuel_parallel.comm.node_memory import ANNOUNCED_AT_ONCE, BY_MPI, NOWHERE, NodeMemory
from fuel_parallel.comm.reduction import BLOCK_BYTES, reduce_into
from fuel_parallel.comm.transport import Host, Pending, Transport
from fuel_parallel.partitioning import partition

if TYPE_CHECKING:
    from fuel_parallel.comm.communicator import ReduceOp

announced: deque[SharedReduction] = deque()
"""Reductions whose section of this rank is still to be done, the oldest first."""

_not_waited_for: set[SharedReduction] = set()
"""What was started. Others write into its memory, even if a plan failed and nobody here wants the result any more."""


def progress() -> None:
    """Does my section of all reductions for which all ranks are ready, in order."""
    while announced and announced[0].ready:
        announced.popleft().reduce()


def settle() -> None:
    """Does my section of all reductions that were started. To be called before this rank waits for anything else."""
    while announced:
        _do_next()


def _do_next() -> None:
    oldest = announced[0]
    oldest.memory.wait_for_announcements(oldest.number)
    announced.popleft().reduce()


class SharedReduction(Pending):
    """One all-reduce of an array; `mpi` does it where there is no room for it in shared memory.

    The result is to be in `out`, if that is given. One that does not lie in shared memory is copied to, and arrays of
    fewer than `copied` bytes are then left to MPI.
    """

    def __init__(
        self,
        memory: NodeMemory,
        mpi: Transport,
        x: Host,
        op: ReduceOp,
        *,
        reuse: bool,
        out: Host | None = None,
        copied: int = 0,
    ) -> None:
        self.out = out
        self.memory, self.mpi, self.op, self.reuse = memory, mpi, op, reuse
        self.shape, self.array = x.shape, x.reshape(-1)
        # What was announced long ago must have been read before its words are written over.
        if _not_waited_for:
            _not_waited_for.difference_update([one for one in _not_waited_for if one.is_over])
        oldest = memory.announced - ANNOUNCED_AT_ONCE
        while oldest >= memory.reduced:
            _do_next()
        if oldest >= 0:
            memory.wait_for_sections(oldest)
        place = memory.locate(self.array) if reuse else NOWHERE
        if place is NOWHERE and out is not None and x.nbytes < copied:
            place = BY_MPI
        elif place is NOWHERE and (room := memory.borrow(x.nbytes)) is not None:
            self._move(room)
            place = memory.locate(self.array)
        self.number = memory.announce(place)
        announced.append(self)
        _not_waited_for.add(self)

    @property
    def ready(self) -> bool:
        """Whether all ranks have announced theirs."""
        return self.memory.all_announced(self.number)

    @property
    def is_over(self) -> bool:
        """Whether all ranks have done their sections."""
        return self.memory.all_reduced(self.number)

    def progress(self) -> None:
        """See `Pending.progress`."""
        progress()

    def wait(self) -> Host:
        """See `Pending.wait`."""
        memory = self.memory
        while memory.reduced <= self.number:
            _do_next()
        memory.wait_for_sections(self.number)
        _not_waited_for.discard(self)
        result = self.array.reshape(self.shape)
        if self.out is None:
            return result
        if self.out.__array_interface__["data"] != result.__array_interface__["data"]:
            self.out[...] = result
        return self.out

    def reduce(self) -> None:
        """Does my section; only when all are `ready`, and in order."""
        memory = self.memory
        arrays = None if memory.anybody_wants_mpi(self.number) else self._arrays()
        if arrays is None:
            target = self.array if self.reuse else self.out if self.out is None else self.out.reshape(-1)
            self.array = self.mpi.all_reduce(self.array, self.op, target)
        else:
            _reduce_section(arrays, self.op, memory.rank)
        memory.tell_reduced()

    def _arrays(self) -> list[Host] | None:
        """The arrays of all ranks, all in shared memory."""
        memory = self.memory
        found = memory.announcement(self.number, self.array.size, self.array.dtype)
        arrays = [array for array in found if array is not None]
        if len(arrays) == memory.ranks:
            return arrays
        window = memory.grow(self.array.nbytes)
        if window is None:
            return None
        if found[memory.rank] is None:
            self._move(window.claim(memory.rank, self.array.nbytes))
        memory.meet()  # those who had to move have moved
        news = [segment[: self.array.nbytes].view(self.array.dtype) for segment in window.segments]
        return [new if array is None else array for array, new in zip(found, news, strict=True)]

    def _move(self, room: Host) -> None:
        target = room.view(self.array.dtype)
        target[...] = self.array
        self.array, self.reuse = target, True


class SharedScatter(SharedReduction):
    """One reduce-scatter of an array, `rows[r]` of whose rows are rank r's: a reduction that stays with its section."""

    def __init__(self, memory: NodeMemory, mpi: Transport, x: Host, op: ReduceOp, rows: Sequence[int]) -> None:
        self.rows, self.whole = rows, x
        super().__init__(memory, mpi, x, op, reuse=False)

    def wait(self) -> Host:
        """See `Pending.wait`."""
        while self.memory.reduced <= self.number:
            _do_next()
        # Others still read what I handed in, but nobody writes there: it is free when all have done their sections.
        self.memory.wait_for_sections(self.number)
        _not_waited_for.discard(self)
        return self.section

    def reduce(self) -> None:
        """Does my section; only when all are `ready`, and in order."""
        memory = self.memory
        arrays = None if memory.anybody_wants_mpi(self.number) else self._arrays()
        if arrays is None:
            self.section = self.mpi.reduce_scatter(self.whole, self.op, self.rows)
        else:
            width = self.whole.size // max(sum(self.rows), 1)
            start = width * sum(self.rows[: memory.rank])
            self.section = np.empty((self.rows[memory.rank], *self.shape[1:]), self.whole.dtype)
            flat = self.section.reshape(-1)
            reduce_into(flat, [x[start : start + flat.size] for x in arrays], self.op)
        memory.tell_reduced()


def _reduce_section(arrays: Sequence[Host], op: ReduceOp, rank: int) -> None:
    """Reduces this rank's section of the arrays into all of them."""
    ranks = len(arrays)
    mine = _section(arrays[0].size, ranks, rank)
    step = max(BLOCK_BYTES // arrays[0].itemsize, 1)
    for start in range(mine.start, mine.stop, step):
        first, *others = [x[start : min(start + step, mine.stop)] for x in arrays]
        reduce_into(first, [first, *others], op)
        for other in others:
            other[...] = first


@lru_cache(maxsize=1024)
def _section(size: int, ranks: int, rank: int) -> range:
    return partition(size, ranks)[rank]

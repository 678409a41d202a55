"""Memory that the ranks of a node share, and how they meet in it.

`NodeMemory` belongs to one group of ranks on one node. However many communicators have that very group, they use the
same memory: collectives block, so two communicators of the same ranks are never at work at once. It consists of

- one *scratch* window of a fixed size a rank, through which pieces of large arrays pass while they are still in cache;
- *allocations* that `allocate` hands out, for arrays that are born in shared memory.

Windows come from `MPI.Win.Allocate_shared`. Open MPI and MPICH both unlink the file behind a window as soon as all
ranks have mapped it, so that a rank that is killed leaves nothing of it in /dev/shm. Making and freeing a window is
collective; garbage is collected whenever Python likes. Hence the scratch window lives until the process ends, one for
each group of ranks, and an allocation whose array is gone on *all* ranks is used again or freed at the next `allocate`.

**Meeting.** `meet` returns when all ranks have called it as often. Each rank counts in a cache line of its own that the
others read. A wait looks for some 2 us and then yields its core between looks: a scheduler with other work may have put
both ranks on one, where each look longer is time that the other lacks (100 us a meeting, measured, after 2000 looks).
It also drives MPI forward, for somebody may be waiting for the rest of a message of ours.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

Host = np.ndarray[Any, Any]

SLOT_BYTES = 1 << 20
"""Scratch memory of a rank for what it hands in, twice."""

_LINE_WORDS = 16  # 128 bytes: two cache lines, which are fetched in pairs
_ARRIVED = 0  # the word of a rank's line that counts meetings
_PLACES = 4, 8  # where a place begins that is published in an even and in an odd turn: allocation, offset, in place
_SPINS = 50  # looks, of some 40 ns each, before a waiting rank yields its core: the other may be waiting for that one
_YIELDS = 32  # between two calls that drive MPI forward
_PAGE = 4096

_yield_core = os.sched_yield if hasattr(os, "sched_yield") else lambda: time.sleep(0)


@dataclass(eq=False)
class _Window:
    """A shared window, mapped on all ranks; `segments[r]` is the memory of rank r."""

    win: MPI.Win
    segments: list[Host]
    address: int
    size: int
    user: weakref.ref[Host] | None = field(default=None)

    @property
    def idle(self) -> bool:
        return self.user is None or self.user() is None


class NodeMemory:
    """The shared memory of the ranks of `comm`, all on one node. Made and used collectively; owns `comm`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank, self.ranks = comm.rank, comm.size
        self.piece_bytes = SLOT_BYTES // self.ranks // 64 * 64
        self.turn = 0
        self._allocations: list[_Window] = []
        head = _pages(self.ranks * _LINE_WORDS * 8)
        window = self._window(head + 2 * SLOT_BYTES + 2 * _pages(self.piece_bytes))
        self.usable = window is not None
        if window is None:
            return
        self._scratch = window
        self._sync = window.win.Sync
        self._lines = window.segments[0][:head].data.cast("q")
        self._mine = self.rank * _LINE_WORDS
        self._others = [(self.rank + i) % self.ranks * _LINE_WORDS for i in range(1, self.ranks)]
        self._slots: dict[np.dtype[Any], list[list[Host]]] = {}
        self._results: dict[np.dtype[Any], list[list[Host]]] = {}
        self._head = head
        if self.rank == 0:
            window.segments[0][:head] = 0
        comm.Barrier()

    def slots(self, dtype: np.dtype[Any]) -> list[list[Host]]:
        """`slots(dtype)[i % 2][r]`: what rank r hands in, in turn i. Only rank r writes there."""
        views = self._slots.get(dtype)
        if views is None:
            views = self._slots[dtype] = self._views(dtype, self._head, SLOT_BYTES)
        return views

    def results(self, dtype: np.dtype[Any]) -> list[list[Host]]:
        """`results(dtype)[i % 2][r]`: a piece that rank r has reduced, in turn i."""
        views = self._results.get(dtype)
        if views is None:
            views = self._results[dtype] = self._views(dtype, self._head + 2 * SLOT_BYTES, self.piece_bytes)
        return views

    def _views(self, dtype: np.dtype[Any], start: int, size: int) -> list[list[Host]]:
        stride = _pages(size)
        size -= size % dtype.itemsize
        begins = (start, start + stride)
        return [[segment[begin : begin + size].view(dtype) for segment in self._scratch.segments] for begin in begins]

    # Meeting.

    def meet(self) -> None:
        """Returns when all ranks have called it as often as this one; what they wrote before can then be read."""
        self._sync()
        self.turn = turn = self.turn + 1
        lines = self._lines
        lines[self._mine + _ARRIVED] = turn
        for place in self._others:
            if lines[place] < turn:
                self._wait(place, turn)
        self._sync()

    def _wait(self, place: int, turn: int) -> None:
        lines = self._lines
        for _ in range(_SPINS):
            if lines[place] >= turn:
                return
        yielded = 0
        while lines[place] < turn:
            _yield_core()
            yielded += 1
            if yielded % _YIELDS == 0:
                self.comm.Iprobe()

    # Arrays that are born here.

    def allocate(self, nbytes: int) -> Host | None:
        """Shared memory of `nbytes` for this rank, uninitialised; None where there is not enough.

        A collective call with the same `nbytes` on all ranks. The memory is this rank's as long as anybody on this rank
        holds the array or a view of it.
        """
        idle = np.array([window.idle for window in self._allocations], dtype=np.uint8)
        if idle.size:
            from mpi4py import MPI

            self.comm.Allreduce(MPI.IN_PLACE, idle, MPI.MIN)
        chosen = None
        for window, is_idle in zip(list(self._allocations), idle, strict=True):
            if is_idle and chosen is None and nbytes <= window.size <= 2 * nbytes:
                chosen = window
            elif is_idle:
                self._allocations.remove(window)
                _free(window)
        if chosen is None:
            chosen = self._window(_pages(max(nbytes, 1)))
            if chosen is None:
                return None
            self._allocations.append(chosen)
        # Of a memoryview, not of an array: views of views would hold the innermost array and let go of this one.
        memory = np.frombuffer(chosen.segments[self.rank].data, dtype=np.uint8)
        chosen.user = weakref.ref(memory)
        return memory[:nbytes]

    def publish(self, x: Host, *, in_place: bool) -> bool:
        """Says to the others where in an allocation `x` lies, if it does; they know after the next `meet`."""
        address = x.__array_interface__["data"][0]
        allocation, offset = -1, 0
        for number, window in enumerate(self._allocations):
            if 0 <= address - window.address <= window.size - x.nbytes:
                allocation, offset = number, address - window.address
        lines, at = self._lines, self._mine + _PLACES[self.turn % 2]
        lines[at], lines[at + 1], lines[at + 2] = allocation, offset, in_place
        return allocation >= 0

    def published(self, size: int, dtype: np.dtype[Any]) -> tuple[list[Host | None], bool]:
        """The ranks' arrays of `size` elements where they lie here, else None; whether all are reduced in place."""
        arrays: list[Host | None] = []
        in_place = True
        # Of the turn before: a rank that is ahead may have published the place of its next array in this one.
        first = _PLACES[(self.turn - 1) % 2]
        for line in range(0, self.ranks * _LINE_WORDS, _LINE_WORDS):
            allocation, offset, there = self._lines[line + first : line + first + 3]
            in_place = in_place and allocation >= 0 and bool(there)
            if allocation < 0:
                arrays.append(None)
            else:
                segment = self._allocations[allocation].segments[line // _LINE_WORDS]
                arrays.append(segment[offset : offset + size * dtype.itemsize].view(dtype))
        return arrays, in_place

    @property
    def has_allocations(self) -> bool:
        """Whether anything was allocated; the same on all ranks."""
        return bool(self._allocations)

    # Windows.

    def _window(self, size: int) -> _Window | None:
        """A window with `size` bytes for each rank, or None, on all ranks, where memory does not suffice."""
        from mpi4py import MPI

        room = np.array([_has_room(size * self.ranks)], dtype=np.uint8)
        self.comm.Allreduce(MPI.IN_PLACE, room, MPI.MIN)
        if not room[0]:
            return None
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        win = MPI.Win.Allocate_shared(size, 1, info, self.comm)
        info.Free()
        # Win.Sync is a memory barrier, and allowed within an epoch only: this one lasts as long as the window.
        win.Lock_all(MPI.MODE_NOCHECK)
        parts: list[Any] = [win.Shared_query(rank)[0] for rank in range(self.ranks)]
        segments = [np.frombuffer(part, dtype=np.uint8)[:size] for part in parts]
        return _Window(win, segments, segments[self.rank].__array_interface__["data"][0], size)

    def free(self) -> None:
        """Gives back what nobody uses. A collective call; allocations that some rank still holds stay mapped."""
        from mpi4py import MPI

        idle = np.array([window.idle for window in self._allocations], dtype=np.uint8)
        if idle.size:
            self.comm.Allreduce(MPI.IN_PLACE, idle, MPI.MIN)
        for window, is_idle in zip(self._allocations, idle, strict=True):
            if is_idle:
                _free(window)
        self._allocations = []
        if self.usable:
            self.usable = False
            self._slots, self._results = {}, {}
            self._lines.release()
            _free(self._scratch)


def _free(window: _Window) -> None:
    window.segments.clear()
    window.win.Unlock_all()
    window.win.Free()


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _has_room(size: int) -> bool:
    """Whether shared memory of this size can be filled: beyond what the file system has, a write is a bus error."""
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        return True  # not Linux: MPI itself knows where shared memory is
    return shared.f_bavail * shared.f_frsize > size + size // 8


# One memory for each group of ranks, as long as the process lives.

_memories: dict[tuple[int, ...], NodeMemory] = {}


def memory_of(local: MPI.Intracomm) -> NodeMemory:
    """The memory of the ranks of `local`, which lie on one node; takes `local` over. A collective call."""
    from mpi4py import MPI

    group, world = local.Get_group(), MPI.COMM_WORLD.Get_group()
    key = tuple(MPI.Group.Translate_ranks(group, list(range(local.size)), world))
    group.Free()
    world.Free()
    if MPI.UNDEFINED in key:  # processes that joined later: no name for the group, so a memory for themselves
        key = (-1, len(_memories), *key)
    known = _memories.get(key)
    if known is not None:
        local.Free()
        return known
    _memories[key] = made = NodeMemory(local)
    return made


@atexit.register
def free_all() -> None:
    """Frees all windows, in the order in which they were made. A collective call, at the end of the process.

    Registered here, when the library is imported, so that it comes after what scripts and `fp.init()` register, which
    may still use collectives. mpi4py finalizes MPI later than all of these.
    """
    if not _memories:
        return
    from mpi4py import MPI

    if not MPI.Is_finalized():
        for memory in _memories.values():
            memory.free()
    _memories.clear()

"""Memory that the ranks of a node share, and how they meet in it.

`NodeMemory` belongs to one group of ranks on one node. However many communicators have that very group, they use the
same memory: collectives block, so two communicators of the same ranks are never at work at once. It consists of

- one *scratch* window of a fixed size a rank, through which pieces of large arrays pass while they are still in cache;
- *allocations* that `allocate` hands out, for arrays that are born in shared memory;
- a *pool* of windows that all-reduces have needed: `borrow` gives this rank's part of one that it does not use. Which
  one a rank has is its own affair; only that there is one more is agreed, in the all-reduce that found too few.

Windows come from `MPI.Win.Allocate_shared`. Open MPI and MPICH both unlink the file behind a window as soon as all
ranks have mapped it, so that a rank that is killed leaves nothing of it in /dev/shm. Making and freeing a window is
collective; garbage is collected whenever Python likes. Hence the scratch window lives until the process ends, one for
each group of ranks, and an allocation whose array is gone on *all* ranks is used again or freed at the next `allocate`.

**Meeting.** `meet` returns when all ranks have called it as often. Each rank counts in a cache line of its own that the
others read. A wait looks for some 2 us and then yields its core between looks: a scheduler with other work may have put
both ranks on one, where each look longer is time that the other lacks (100 us a meeting, measured, after 2000 looks).
It also drives MPI forward, for somebody may be waiting for the rest of a message of ours.

**Announcing.** All-reduces in place need no meeting: a rank announces where its array lies and goes on; it counts what
it has announced, and what it has reduced its section of. See `shared_reduction`.
"""

from __future__ import annotations

import os
import time
import weakref
from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fuel_parallel import failure

if TYPE_CHECKING:
    from mpi4py import MPI

Host = np.ndarray[Any, Any]

SLOT_BYTES = 1 << 20
"""Scratch memory of a rank for what it hands in, twice."""

ANNOUNCED_AT_ONCE = 8
"""All-reduces of one group of ranks that may be under way at a time."""

MOST_POOLED = 256
"""Windows in a pool: results that a script holds on to must not fill the node's memory."""

# The words of a rank's line. Cache lines are fetched in pairs of 16 words: what is written apart lies apart.
_LINE_WORDS = 64
_ARRIVED = 0  # how many meetings
_PLACES = 4, 8  # what is published in an even and in an odd turn: window and offset
_ANNOUNCED = 16  # how many all-reduces are announced
_REDUCED = 32  # of how many my section is reduced
_ANNOUNCEMENTS = 48  # window and offset of each, the first after the last again

NOWHERE, BY_MPI = (-1, 0), (-2, 0)
"""In place of a window and an offset: the array lies elsewhere; or MPI should reduce it."""
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
    pooled: bool = False
    user: weakref.ref[Host] | None = field(default=None)

    @property
    def idle(self) -> bool:
        return self.user is None or self.user() is None

    def claim(self, rank: int, nbytes: int) -> Host:
        """The rank's own bytes; the window is idle no more until they are let go of."""
        # Of a memoryview, not of an array: views of views would hold the innermost array and let go of this one.
        memory = np.frombuffer(self.segments[rank].data, dtype=np.uint8)
        self.user = weakref.ref(memory)
        return memory[:nbytes]


class NodeMemory:
    """The shared memory of the ranks of `comm`, all on one node. Made and used collectively; owns `comm`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank, self.ranks = comm.rank, comm.size
        self.piece_bytes = SLOT_BYTES // self.ranks // 64 * 64
        self.turn = 0
        self._windows: dict[int, _Window] = {}
        self._addresses: list[tuple[int, int]] = []  # and the windows that begin there, ascending
        self._made = 0
        self.announced = self.reduced = 0
        head = _pages(self.ranks * _LINE_WORDS * 8)
        window = self._window(head + 2 * SLOT_BYTES)
        self.usable = window is not None
        if window is None:
            return
        self._scratch = window
        self._sync = window.win.Sync
        self._lines = window.segments[0][:head].data.cast("q")
        self._mine = self.rank * _LINE_WORDS
        self._others = [(self.rank + i) % self.ranks * _LINE_WORDS for i in range(1, self.ranks)]
        self._slots: dict[np.dtype[Any], list[list[Host]]] = {}
        self._head = head
        if self.rank == 0:
            window.segments[0][:head] = 0
        comm.Barrier()

    def slots(self, dtype: np.dtype[Any]) -> list[list[Host]]:
        """`slots(dtype)[i % 2][r]`: what rank r hands in, in turn i. Only rank r writes there."""
        views = self._slots.get(dtype)
        if views is None:
            begins = self._head, self._head + SLOT_BYTES
            views = self._slots[dtype] = [
                [segment[begin : begin + SLOT_BYTES].view(dtype) for segment in self._scratch.segments]
                for begin in begins
            ]
        return views

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
        chosen = None
        for number in self._idle_everywhere(pooled=False):
            window = self._windows[number]
            if chosen is None and nbytes <= window.size <= 2 * nbytes:
                chosen = window
            else:
                self._remove(number)
        if chosen is None:
            chosen = self._add(nbytes, pooled=False)
        return None if chosen is None else chosen.claim(self.rank, nbytes)

    def borrow(self, nbytes: int) -> Host | None:
        """The part of this rank of a window of the pool that it does not use; None where there is none. No meeting."""
        fitting = [
            window
            for window in self._windows.values()
            if nbytes <= window.size <= 2 * nbytes and window.pooled and window.idle
        ]
        return min(fitting, key=lambda window: window.size).claim(self.rank, nbytes) if fitting else None

    def grow(self, nbytes: int) -> _Window | None:
        """Another window for the pool, or None where there is no room. A collective call."""
        pooled = sum(window.pooled for window in self._windows.values())
        made = self._add(nbytes, pooled=True) if pooled < MOST_POOLED else None
        if made is None:
            idle = self._idle_everywhere(pooled=True)
            for number in idle:
                self._remove(number)
            made = self._add(nbytes, pooled=True) if idle else None
        return made

    def _add(self, nbytes: int, *, pooled: bool) -> _Window | None:
        window = self._window(_pages(max(nbytes, 1)))
        if window is not None:
            window.pooled = pooled
            self._windows[self._made] = window
            insort(self._addresses, (window.address, self._made))
            self._made += 1  # never the number of an earlier one: somebody may not have read yet where that lies
        return window

    def _remove(self, number: int) -> None:
        window = self._windows.pop(number)
        self._addresses.remove((window.address, number))
        _free(window)

    def _idle_everywhere(self, *, pooled: bool) -> list[int]:
        """The windows that nobody uses on any rank. A collective call."""
        numbers = [number for number, window in self._windows.items() if window.pooled is pooled]
        idle = np.array([self._windows[number].idle for number in numbers], dtype=np.uint8)
        if idle.size:
            from mpi4py import MPI

            self.comm.Allreduce(MPI.IN_PLACE, idle, MPI.MIN)
        return [number for number, is_idle in zip(numbers, idle, strict=True) if is_idle]

    def locate(self, x: Host) -> tuple[int, int]:
        """The window that `x` lies in, on this rank, and its offset there; `NOWHERE` if in none."""
        address = x.__array_interface__["data"][0]
        before = bisect_right(self._addresses, (address, self._made)) - 1
        if before >= 0:
            start, number = self._addresses[before]
            if address + x.nbytes <= start + self._windows[number].size:
                return number, address - start
        return NOWHERE

    def publish(self, x: Host) -> bool:
        """Says to the others where `x` lies, if it lies in a window; they know after the next `meet`."""
        number, offset = self.locate(x)
        lines, at = self._lines, self._mine + _PLACES[self.turn % 2]
        lines[at], lines[at + 1] = number, offset
        return number >= 0

    def published(self, size: int, dtype: np.dtype[Any]) -> list[Host | None]:
        """The ranks' arrays of `size` elements where they lie here, else None."""
        # Of the turn before: a rank that is ahead may have published the place of its next array in this one.
        return self._arrays(_PLACES[(self.turn - 1) % 2], size * dtype.itemsize, dtype)

    def _arrays(self, word: int, nbytes: int, dtype: np.dtype[Any]) -> list[Host | None]:
        """For each rank the array whose window and offset stand at `word` of its line."""
        arrays: list[Host | None] = []
        for rank in range(self.ranks):
            number, offset = self._lines[rank * _LINE_WORDS + word : rank * _LINE_WORDS + word + 2]
            window = self._windows[number] if number >= 0 else None
            arrays.append(None if window is None else window.segments[rank][offset : offset + nbytes].view(dtype))
        return arrays

    @property
    def has_windows(self) -> bool:
        """Whether an array may lie in one; the same on all ranks."""
        return bool(self._windows)

    # All-reduces in place: announced, and reduced.

    def announce(self, place: tuple[int, int]) -> int:
        """Says to the others where my array lies; gives the number of this all-reduce."""
        number = self.announced
        lines, at = self._lines, self._mine + _ANNOUNCEMENTS + 2 * (number % ANNOUNCED_AT_ONCE)
        lines[at], lines[at + 1] = place
        self._sync()
        self.announced = lines[self._mine + _ANNOUNCED] = number + 1
        return number

    def all_announced(self, number: int) -> bool:
        """Whether all ranks have announced an all-reduce."""
        return self._is_everywhere(_ANNOUNCED, number + 1)

    def wait_for_announcements(self, number: int) -> None:
        """Returns when all ranks have announced an all-reduce."""
        self._wait_everywhere(_ANNOUNCED, number + 1)

    def anybody_wants_mpi(self, number: int) -> bool:
        """Whether a rank has announced that MPI should do it, in an all-reduce that all have announced."""
        word = _ANNOUNCEMENTS + 2 * (number % ANNOUNCED_AT_ONCE)
        return any(self._lines[rank * _LINE_WORDS + word] == BY_MPI[0] for rank in range(self.ranks))

    def announcement(self, number: int, size: int, dtype: np.dtype[Any]) -> list[Host | None]:
        """The ranks' arrays in an all-reduce that all have announced; None where one does not lie in a window."""
        return self._arrays(_ANNOUNCEMENTS + 2 * (number % ANNOUNCED_AT_ONCE), size * dtype.itemsize, dtype)

    def tell_reduced(self) -> None:
        """Says that my section of one more all-reduce is done; they are done in order."""
        self._sync()
        self.reduced = self._lines[self._mine + _REDUCED] = self.reduced + 1

    def all_reduced(self, number: int) -> bool:
        """Whether all ranks have done their sections of an all-reduce."""
        return self._is_everywhere(_REDUCED, number + 1)

    def wait_for_sections(self, number: int) -> None:
        """Returns when all ranks have done their sections of an all-reduce."""
        self._wait_everywhere(_REDUCED, number + 1)

    def _is_everywhere(self, word: int, count: int) -> bool:
        lines = self._lines
        for line in self._others:
            if lines[line + word] < count:
                return False
        self._sync()
        return True

    def _wait_everywhere(self, word: int, count: int) -> None:
        lines = self._lines
        for line in self._others:
            if lines[line + word] < count:
                self._wait(line + word, count)
        self._sync()

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
        """Gives back what nobody uses. A collective call; windows that some rank still holds stay mapped."""
        for number in [*self._idle_everywhere(pooled=False), *self._idle_everywhere(pooled=True)]:
            self._remove(number)
        self._windows, self._addresses = {}, []
        if self.usable:
            self.usable = False
            self._slots = {}
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


def free_all() -> None:
    """Frees all windows, in the order in which they were made. A collective call, at the end of the process.

    It comes after the script's exit functions and the meeting of `fp.init()`, which may still use collectives. mpi4py
    finalizes MPI later than all of these.
    """
    if not _memories:
        return
    from mpi4py import MPI

    if not MPI.Is_finalized():
        for memory in _memories.values():
            memory.free()
    _memories.clear()


failure.at_the_end.append(free_all)

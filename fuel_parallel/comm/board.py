"""Memory in which the ranks of a node see each other's state, without a message.

It is anonymous memory (`memfd`), opened by the other ranks through /proc: it has no name that a killed job could leave
behind. `share` maps it; a `Board` is what each rank of the node writes on for all to read: who it is, what it waits
for, and three short texts. Its texts are written by a rank's watchdog every now and then, its numbers only by a rank
that has waited for a while, so that a board costs nothing as long as all goes well.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

_PAGE = 4096
_TEXT_BYTES = 1000
_NUMBERS = ("pid", "stack", "waits_for", "wait")
_TEXTS = ("line", "doing", "last")


def share(local: MPI.Intracomm, nbytes: int) -> mmap.mmap | None:
    """Memory of `nbytes`, all zero, shared by the ranks of `local`; None on all where one cannot have it.

    A collective call among ranks of one node.
    """
    from mpi4py import MPI

    descriptor, name = -1, ""
    if local.rank == 0 and hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create("fuel-parallel")
            os.ftruncate(descriptor, nbytes)
            name = f"/proc/{os.getpid()}/fd/{descriptor}"
    name = local.bcast(name)
    memory = None
    if name:
        with contextlib.suppress(OSError, ValueError):
            if local.rank:
                descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            memory = mmap.mmap(descriptor, nbytes)
    everywhere = np.array([memory is not None], dtype=np.uint8)
    local.Allreduce(MPI.IN_PLACE, everywhere, MPI.MIN)
    if descriptor >= 0:
        os.close(descriptor)
    return memory if everywhere[0] else None


@dataclass(frozen=True)
class Seen:
    """What a rank has written: its process, what it waits for, where its script is.

    Args:
        rank: Its rank in the world.
        host: Its host.
        pid: Its process.
        stack: The descriptor of the file into which it writes its Python stack when asked by a signal.
        waits_for: The rank that it waits for; None when it is not known to wait.
        wait: Which of its waits that is.
        line: Where its script was, a second ago at most.
        doing: The collective that it is in.
        last: The collective that it finished last.
    """

    rank: int
    host: str
    pid: int
    stack: int
    waits_for: int | None
    wait: int
    line: str
    doing: str
    last: str


class Board:
    """One page for each rank of the node. `ranks` are their ranks in the world, mine is the one at `mine`."""

    def __init__(self, memory: mmap.mmap, ranks: list[int], mine: int) -> None:
        self.ranks = ranks
        self.mine = mine
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        self.write(pid=os.getpid(), stack=-1)

    @staticmethod
    def of(local: MPI.Intracomm, ranks: list[int]) -> Board:
        """The board of the ranks of `local`; alone on its node, or where nothing can be shared, a rank has its own."""
        memory = share(local, local.size * _PAGE)
        if memory is None:
            return Board(mmap.mmap(-1, _PAGE), [ranks[local.rank]], 0)
        return Board(memory, ranks, local.rank)

    def write(self, *, waits_for: int | None = None, **numbers: int) -> None:
        """Writes some of my numbers; `waits_for` always."""
        page = self.mine * _PAGE // 8
        for name, value in numbers.items():
            self._words[page + _NUMBERS.index(name)] = value
        self._words[page + _NUMBERS.index("waits_for")] = -1 if waits_for is None else waits_for

    def say(self, **texts: str) -> None:
        """Writes some of my texts."""
        for name, text in texts.items():
            data = text.encode("utf-8", "replace")[:_TEXT_BYTES]
            at = self.mine * _PAGE + 512 + _TEXTS.index(name) * 1024
            self._memory[at : at + len(data) + 1] = data + b"\0"

    def read(self, rank: int) -> Seen | None:
        """What a rank of the world has written; None for one of another node."""
        if rank not in self.ranks:
            return None
        at = self.ranks.index(rank)
        pid, stack, waits_for, wait = self._words[at * _PAGE // 8 : at * _PAGE // 8 + len(_NUMBERS)]
        texts: list[Any] = []
        for number in range(len(_TEXTS)):
            begin = at * _PAGE + 512 + number * 1024
            texts.append(self._memory[begin : begin + 1024].partition(b"\0")[0].decode("utf-8", "replace"))
        return Seen(rank, socket.gethostname(), pid, stack, None if waits_for < 0 else waits_for, wait, *texts)

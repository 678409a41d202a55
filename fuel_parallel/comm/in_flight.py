"""What MPI has in flight while ranks compute: its requests, and the memory that it reads and writes meanwhile.

MPI counts in C ints before version 4, which Open MPI 5 still is, and libraries count bytes in them where they should
not. So no call is given more than `LARGEST_MESSAGE` bytes: larger arrays go in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fuel_parallel.comm import background
from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.comm.reduction import averaged
from fuel_parallel.comm.shared_reduction import settle
from fuel_parallel.comm.transport import Host, Pending, Receiving, check_host, filled

if TYPE_CHECKING:
    from mpi4py import MPI

    from fuel_parallel.comm.mpi import MpiTransport

LARGEST_MESSAGE = 1 << 30
"""The most bytes in one call of MPI."""

_sends: list[tuple[MPI.Request, Host]] = []
"""Sends that are not known to be through, with the memory they read from."""

_under_way: set[Pending] = set()
"""What was started and not waited for: a plan that failed leaves some, and MPI still has its memory."""


def finish_requests() -> None:
    """Waits until all that was started is through; MPI must not be finalized before."""
    settle()
    background.finish()
    for pending in list(_under_way):
        pending.wait()
    for request, _ in _sends:
        request.Wait()
    _sends.clear()


def hold(request: MPI.Request, sent: Host) -> None:
    """Keeps what a send reads until it is through."""
    _sends.append((request, sent))


def let_go() -> None:
    """Lets go of what sends have read that are through by now."""
    _sends[:] = [(request, sent) for request, sent in _sends if not request.Test()]


def pieces(x: Host) -> Iterator[Host]:
    """An array, or where it is too large for one call of MPI, its elements part by part."""
    if x.nbytes <= LARGEST_MESSAGE:
        yield x
        return
    flat = x.reshape(-1)
    step = LARGEST_MESSAGE // x.itemsize
    for start in range(0, flat.size, step):
        yield flat[start : start + step]


class MpiRequests(Pending):
    """Requests of MPI that are under way together, the array that they fill, and what they read, held until then."""

    def __init__(self, requests: list[MPI.Request], result: Host, sent: Any = None) -> None:
        self.requests, self.result, self.sent = requests, result, sent
        _under_way.add(self)

    def progress(self) -> None:
        """See `Pending.progress`."""
        for request in self.requests:
            request.Test()

    def wait(self) -> Host:
        """See `Pending.wait`."""
        for request in self.requests:
            request.Wait()
        _under_way.discard(self)
        return self.result


class MpiReduction(MpiRequests):
    """An MPI_Iallreduce under way, or several: one for each piece."""

    def __init__(self, transport: MpiTransport, x: Host, op: ReduceOp, reuse: bool) -> None:
        self.op, self.ranks = op, transport.ranks
        check_host(x)
        result = filled(x, x if reuse else None)
        start, mpi_op = transport.comm.Iallreduce, transport.ops[op]
        super().__init__([start(transport.in_place, piece, mpi_op) for piece in pieces(result)], result)

    def wait(self) -> Host:
        """See `Pending.wait`."""
        return averaged(super().wait(), self.op, self.ranks)


class MpiExchange(MpiRequests):
    """Messages to one rank and from another under way, two for each piece."""

    def __init__(self, transport: MpiTransport, x: Host, dest: int, source: int) -> None:
        result: Host = transport.xp.empty_like(x)
        comm, tag = transport.comm, transport.tag
        requests = [comm.Irecv(transport.words(piece), source, tag) for piece in pieces(result)]
        requests += [comm.Isend(transport.words(piece), dest, tag) for piece in pieces(x)]
        super().__init__(requests, result, x)


class MpiReceive(MpiRequests, Receiving):
    """Messages that fill an array, one for each piece."""

    def __init__(self, transport: MpiTransport, result: Host, source: int, tag: int) -> None:
        super().__init__(
            [transport.comm.Irecv(transport.words(piece), source, tag) for piece in pieces(result)], result
        )

    def has_come(self) -> bool:
        """See `Receiving.has_come`."""
        return all(request.Test() for request in self.requests)


class MpiGather(MpiRequests):
    """An MPI_Iallgatherv under way."""

    def __init__(self, transport: MpiTransport, x: Host, rows: Sequence[int], out: Host | None) -> None:
        check_host(x)
        total = sum(rows)
        result = np.empty((total, *x.shape[1:]), dtype=x.dtype) if out is None else out
        words, kind = transport.words(result)
        width = words.size // total
        sent = transport.words(x)
        super().__init__([transport.comm.Iallgatherv(sent, [words, [r * width for r in rows], kind])], result, sent)

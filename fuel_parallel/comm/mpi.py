"""Ranks of an MPI job, through mpi4py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fuel_parallel.comm.communicator import CommInfo, Communicator, ReduceOp
from fuel_parallel.comm.entries import SPLIT
from fuel_parallel.comm.guard import Guard
from fuel_parallel.comm.node_local import NodeLocalTransport
from fuel_parallel.comm.shared_reduction import settle
from fuel_parallel.comm.transport import Host, Pending, Transport, averaged, filled
from fuel_parallel.errors import CommunicatorError
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Shape

if TYPE_CHECKING:
    from mpi4py import MPI


NONBLOCKING_BYTES = 64 << 10
"""From this size on a plan's all-reduce is an MPI_Iallreduce; below, there is less to hide than it costs."""

_in_flight: list[tuple[MPI.Request, Host]] = []
"""Sends that are not known to be through, with the memory they read from."""

_reductions: set[MpiReduction] = set()
"""All-reduces that were started and not waited for: a plan that failed leaves some, and MPI still has their memory."""


def finish_requests() -> None:
    """Waits until all that was started is through; MPI must not be finalized before."""
    settle()
    for reduction in list(_reductions):
        reduction.wait()
    for request, _ in _in_flight:
        request.Wait()
    _in_flight.clear()


class MpiComm(Communicator):
    """A communicator over an MPI one, of which it makes a duplicate: no other message can be mistaken for its own.

    `MpiComm()` is that of all ranks; making one is collective.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, name: str = "world") -> None:
        from mpi4py import MPI

        own = (MPI.COMM_WORLD if comm is None else comm).Dup()
        plain = MpiTransport(own)
        transport = NodeLocalTransport(plain) if own.Get_size() > 1 else plain
        super().__init__(CommInfo(own.Get_rank(), own.Get_size()), transport, name)
        if own.Get_size() > 1:
            self.guard = Guard(own, name)
        self._mpi = own
        self._splits = itertools.count(1)

    def split(self, color: int | None, key: int = 0) -> MpiComm | None:
        """See `Communicator.split`."""
        from mpi4py import MPI

        number = next(self._splits)
        settle()
        with self.together(SPLIT):
            part = self._mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        result = MpiComm(MPI.Intracomm(part), f"{self.name}.split{number}({color})")
        part.Free()
        return result


class MpiTransport(Transport):
    """Blocking MPI calls on host arrays; sends are non-blocking and hold their buffer until they are through."""

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self.comm = comm
        self.nonblocking_from = NONBLOCKING_BYTES
        self.ops = {
            ReduceOp.SUM: MPI.SUM,
            ReduceOp.AVG: MPI.SUM,  # divided afterwards
            ReduceOp.PRODUCT: MPI.PROD,
            ReduceOp.MIN: MPI.MIN,
            ReduceOp.MAX: MPI.MAX,
        }
        self.in_place = MPI.IN_PLACE
        self._mpi = MPI

    def all_reduce(self, x: Host, op: ReduceOp, out: Host | None = None) -> Host:
        result = filled(x, out)
        self.comm.Allreduce(self.in_place, result, self.ops[op])
        return result

    @property
    def ranks(self) -> int:
        return self.comm.size

    def start_all_reduce(self, x: Host, op: ReduceOp, *, reuse: bool = False) -> Pending:
        # By the size alone, and not by whether there is anything to do meanwhile: a blocking all-reduce on one rank
        # and a non-blocking one on another would not be the same operation to MPI.
        if x.nbytes < self.nonblocking_from:
            return super().start_all_reduce(x, op, reuse=reuse)
        return MpiReduction(self, x, op, reuse)

    def reduce(self, x: Host, op: ReduceOp, root: int) -> Host | None:
        result = np.empty_like(x) if self.comm.rank == root else None
        self.comm.Reduce(x, result, self.ops[op], root)
        return result

    def broadcast(self, x: Host, root: int) -> Host:
        result = x.copy() if self.comm.rank == root else np.empty_like(x)
        self.comm.Bcast(self.words(result), root)
        return result

    def all_gather(self, x: Host, rows: Sequence[int]) -> Host:
        result = np.empty((sum(rows), *x.shape[1:]), dtype=x.dtype)
        words, kind = self.words(result)
        width = words.size // sum(rows) if sum(rows) else 0
        counts = [r * width for r in rows]
        self.comm.Allgatherv(self.words(x), [words, counts, kind])
        return result

    def reduce_scatter(self, x: Host, op: ReduceOp, rows: Sequence[int]) -> Host:
        result = np.empty((rows[self.comm.rank], *x.shape[1:]), dtype=x.dtype)
        width = x.size // x.shape[0] if x.shape[0] else 0
        self.comm.Reduce_scatter(x, result, [r * width for r in rows], self.ops[op])
        return result

    def all_to_all(self, blocks: Sequence[Host], shapes: Sequence[Shape]) -> list[Host]:
        dtype = blocks[0].dtype
        sent = np.concatenate([block.reshape(-1) for block in blocks])
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        received = np.empty(sum(sizes), dtype=dtype)
        send_words, kind = self.words(sent)
        receive_words, _ = self.words(received)
        per = max(dtype.itemsize // 8, 1)
        self.comm.Alltoallv(
            [send_words, [block.size * per for block in blocks], kind], [receive_words, [s * per for s in sizes], kind]
        )
        ends = np.cumsum(sizes)
        return [received[end - size : end].reshape(shape) for end, size, shape in zip(ends, sizes, shapes, strict=True)]

    def exchange(self, x: Host, dest: int | None, source: int | None) -> Host | None:
        nobody = self._mpi.PROC_NULL
        result = np.empty_like(x)
        self.comm.Sendrecv(
            self.words(x),
            nobody if dest is None else dest,
            recvbuf=self.words(result),
            source=nobody if source is None else source,
        )
        return None if source is None else result

    def send(self, x: Host, dest: int, tag: int) -> None:
        _in_flight[:] = [(request, buffer) for request, buffer in _in_flight if not request.Test()]
        # A copy: the plan may use the memory again before the message is through.
        buffer = x.copy()
        _in_flight.append((self.comm.Isend(self.words(buffer), dest, tag), buffer))

    def recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Host:
        result = np.empty(shape, dtype=dtype)
        status = self._mpi.Status()
        self.comm.Probe(source, tag, status)
        sent = status.Get_count(self._mpi.BYTE)
        if sent != result.nbytes:
            raise CommunicatorError(
                f"recv: expected {dtype.name}{list(shape)} ({result.nbytes} bytes) from rank {source}, "
                f"but it sent {sent} bytes"
            )
        self.comm.Recv(self.words(result), source, tag)
        return result

    def barrier(self) -> None:
        self.comm.Barrier()

    def words(self, x: Host) -> list[Any]:
        """An array's memory as integers of its item size: moving needs no arithmetic, and MPI knows no bfloat16."""
        flat = x.reshape(-1)
        width = min(x.dtype.itemsize, 8)
        kinds = {1: self._mpi.UINT8_T, 2: self._mpi.UINT16_T, 4: self._mpi.UINT32_T, 8: self._mpi.UINT64_T}
        return [flat.view(f"u{width}"), kinds[width]]


class MpiReduction(Pending):
    """An MPI_Iallreduce under way."""

    def __init__(self, transport: MpiTransport, x: Host, op: ReduceOp, reuse: bool) -> None:
        self.op, self.ranks = op, transport.ranks
        self.result = filled(x, x if reuse else None)
        self.request = transport.comm.Iallreduce(transport.in_place, self.result, transport.ops[op])
        _reductions.add(self)

    def progress(self) -> None:
        self.request.Test()

    def wait(self) -> Host:
        self.request.Wait()
        _reductions.discard(self)
        return averaged(self.result, self.op, self.ranks)

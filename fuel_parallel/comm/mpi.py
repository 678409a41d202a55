"""Ranks of an MPI job, through mpi4py.

No call of MPI is given more than `in_flight.LARGEST_MESSAGE` bytes: larger arrays go in pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fuel_parallel.backends.device_memory import DeviceMemory
from fuel_parallel.comm import in_flight, sections
from fuel_parallel.comm.communicator import CommInfo, Communicator, ReduceOp
from fuel_parallel.comm.entries import SPLIT
from fuel_parallel.comm.guard import Guard
from fuel_parallel.comm.in_flight import MpiExchange, MpiGather, MpiReceive, MpiReduction, pieces
from fuel_parallel.comm.node_local import NodeLocalTransport
from fuel_parallel.comm.reduction import BY_MPI, averaged
from fuel_parallel.comm.shared_reduction import settle
from fuel_parallel.comm.transport import Done, Host, Pending, Receiving, Transport, check_buffers, check_host, filled
from fuel_parallel.errors import CommunicatorError
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.effects import run_pending
from fuel_parallel.lazy.node import Shape

if TYPE_CHECKING:
    from mpi4py import MPI


NONBLOCKING_BYTES = 64 << 10
"""From this size on a plan's all-reduce is an MPI_Iallreduce; below, there is less to hide than it costs."""


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
        self._on_device: Transport | None = None
        self._memory: DeviceMemory | None = None
        self._messengers: dict[str, Transport] = {}

    def split(self, color: int | None, key: int = 0) -> MpiComm | None:
        """See `Communicator.split`."""
        return self._split(color, key, f"split{next(self._splits)}({color})")

    def _group(self, ranks: tuple[int, ...], name: str) -> MpiComm:
        part = self._split(min(ranks), ranks.index(self.rank), f"{name}({min(ranks)})")
        if part is None or part.world_size != len(ranks):
            found = 0 if part is None else part.world_size
            raise CommunicatorError(
                f"group: rank {self.rank} lists the {len(ranks)} ranks {list(ranks)}, but {found} ranks list a group "
                f"with {min(ranks)} as its least rank; all ranks of a group give the same list"
            )
        return part

    def _split(self, color: int | None, key: int, name: str) -> MpiComm | None:
        from mpi4py import MPI

        run_pending()
        settle()
        with self.together(SPLIT):
            part = self._mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        result = MpiComm(MPI.Intracomm(part), f"{self.name}.{name}")
        part.Free()
        return result

    def messenger_of(self, memory: DeviceMemory | None) -> Transport:
        """See `Communicator.messenger_of`."""
        if memory is None:
            return self.transport
        settle()  # as before everything that may wait for another rank
        if self._on_device is not None and memory is self._memory:
            return self._on_device
        from fuel_parallel.comm.staged import StagedTransport

        return self._messengers.setdefault(memory.device, StagedTransport(self.transport, memory))

    def _device_transport(self, memory: DeviceMemory) -> Transport:
        settle()
        if self._on_device is None:
            from fuel_parallel.comm import device

            self._on_device, self.device_choice = device.choose(self._mpi, self.transport, memory)
            self._memory = memory
        if memory is not self._memory and self._memory is not None:
            raise CommunicatorError(
                f"communicator {self.name!r} has had tensors of {self._memory.device} on rank {self.rank}, and now one "
                f"of {memory.device}; a rank has one device in each: move the tensor, or make another one with split()"
            )
        return self._on_device


class MpiTransport(Transport):
    """Blocking MPI calls on host arrays; sends are non-blocking and hold their buffer until they are through.

    MPI moves all dtypes as words of their size, and reduces those of `BY_MPI`; the others are reduced by `sections`.
    All that MPI reads and writes goes through `buffer`; `DirectTransport` makes it arrays of a device.
    """

    xp: Any = np
    """The module that makes arrays."""

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
        # So that a send of the script cannot be taken for a part of a collective. MPI says it of its world only: the
        # parts of a split do not know it in Open MPI.
        self.tag: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]

    @property
    def ranks(self) -> int:
        return self.comm.size

    @property
    def rank(self) -> int:
        return self.comm.rank

    # Reductions.

    def all_reduce(self, x: Host, op: ReduceOp, out: Host | None = None) -> Host:
        self.check(x, out)
        if x.dtype not in BY_MPI[op]:
            return sections.all_reduce(self, x, op, out)
        result = filled(x, out)
        for piece in pieces(result):
            self.comm.Allreduce(self.in_place, self.buffer(piece), self.ops[op])
        return averaged(result, op, self.ranks)

    def start_all_reduce(self, x: Host, op: ReduceOp, *, reuse: bool = False) -> Pending:
        # By size and dtype alone, and not by whether there is anything to do meanwhile: a blocking all-reduce on one
        # rank and a non-blocking one on another would not be the same operation to MPI.
        if x.nbytes < self.nonblocking_from or x.dtype not in BY_MPI[op]:
            return Done(self.all_reduce(x, op, x if reuse else None))
        return MpiReduction(self, x, op, reuse)

    def reduce(self, x: Host, op: ReduceOp, root: int) -> Host | None:
        if x.dtype not in BY_MPI[op]:
            return sections.reduce(self, x, op, root)
        result = self.xp.empty_like(x) if self.rank == root else None
        self._reduce(x, result, op, root)
        return None if result is None else averaged(result, op, self.ranks)

    def _reduce(self, x: Host, result: Host | None, op: ReduceOp, root: int) -> None:
        targets = itertools.repeat(None) if result is None else pieces(result)
        for piece, target in zip(pieces(x), targets, strict=False):
            received = None if target is None else self.buffer(target)
            self.comm.Reduce(self.buffer(piece), received, self.ops[op], root)

    def reduce_scatter(self, x: Host, op: ReduceOp, rows: Sequence[int], out: Host | None = None) -> Host:
        if x.dtype not in BY_MPI[op]:
            return sections.reduce_scatter(self, x, op, rows, out)
        result = self.xp.empty((rows[self.rank], *x.shape[1:]), dtype=x.dtype) if out is None else out
        if x.nbytes <= in_flight.LARGEST_MESSAGE:
            width = x.size // x.shape[0] if x.shape[0] else 0
            counts = [r * width for r in rows]
            self.comm.Reduce_scatter(self.buffer(x), self.buffer(result), counts, self.ops[op])
        else:
            for rank, (end, count) in enumerate(zip(np.cumsum(rows), rows, strict=True)):
                self._reduce(x[end - count : end], result if rank == self.rank else None, op, rank)
        return averaged(result, op, self.ranks)

    # Movement.

    def broadcast(self, x: Host, root: int, out: Host | None = None) -> Host:
        if self.rank == root:
            result = filled(x, out)
        else:
            result = self.xp.empty_like(x) if out is None else out
        self.fill(result, root)
        return result

    def fill(self, x: Host, root: int) -> None:
        """Writes into `x` what rank `root` has in its own."""
        for piece in pieces(x):
            self.comm.Bcast(self.words(piece), root)

    def all_gather(self, x: Host, rows: Sequence[int], out: Host | None = None) -> Host:
        result = self.xp.empty((sum(rows), *x.shape[1:]), dtype=x.dtype) if out is None else out
        if result.nbytes <= in_flight.LARGEST_MESSAGE:
            words, kind = self.words(result)
            width = words.size // sum(rows) if sum(rows) else 0
            self.comm.Allgatherv(self.words(x), [words, [r * width for r in rows], kind])
            return result
        for rank, (end, count) in enumerate(zip(np.cumsum(rows), rows, strict=True)):
            place = result[end - count : end]
            if rank == self.rank:
                place[...] = x
            self.fill(place, rank)
        return result

    def start_all_gather(self, x: Host, rows: Sequence[int], out: Host | None = None) -> Pending:
        # By the size of the whole, which all ranks know.
        nbytes = sum(rows) * x.itemsize * int(np.prod(x.shape[1:], dtype=np.int64))
        if nbytes < self.nonblocking_from or nbytes > in_flight.LARGEST_MESSAGE or self.xp is not np:
            return Done(self.all_gather(x, rows, out))
        return MpiGather(self, x, rows, out)

    def all_to_all(self, blocks: Sequence[Host], shapes: Sequence[Shape], most_bytes: int) -> list[Host]:
        dtype = blocks[0].dtype
        if most_bytes > in_flight.LARGEST_MESSAGE:
            return self._all_to_all_in_turns(blocks, [self.xp.empty(shape, dtype) for shape in shapes])
        sent = self.xp.concatenate([block.reshape(-1) for block in blocks])
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        received = self.xp.empty(sum(sizes), dtype=dtype)
        send_words, kind = self.words(sent)
        receive_words, _ = self.words(received)
        per = max(dtype.itemsize // 8, 1)
        self.comm.Alltoallv(
            [send_words, [block.size * per for block in blocks], kind], [receive_words, [s * per for s in sizes], kind]
        )
        ends = np.cumsum(sizes)
        return [received[end - size : end].reshape(shape) for end, size, shape in zip(ends, sizes, shapes, strict=True)]

    def _all_to_all_in_turns(self, blocks: Sequence[Host], received: list[Host]) -> list[Host]:
        """In turn t, to the rank t after this one and from the rank t before it."""
        received[self.rank][...] = blocks[self.rank]
        for turn in range(1, self.ranks):
            dest, source = (self.rank + turn) % self.ranks, (self.rank - turn) % self.ranks
            self._exchange(blocks[dest], dest, received[source], source)
        return received

    def exchange(self, x: Host, dest: int | None, source: int | None, out: Host | None = None) -> Host | None:
        result = None if source is None else self.xp.empty_like(x) if out is None else out
        self._exchange(None if dest is None else x, dest, result, source)
        return result

    def start_exchange(self, x: Host, dest: int, source: int) -> Pending:
        return MpiExchange(self, x, dest, source)

    def _exchange(self, x: Host | None, dest: int | None, result: Host | None, source: int | None) -> None:
        """Sends `x` while receiving into `result`; the two may be of different size, and have no or more pieces."""
        nobody, nothing = self._mpi.PROC_NULL, self.xp.empty(0, np.uint8)
        parts = itertools.zip_longest(() if x is None else pieces(x), () if result is None else pieces(result))
        for sent, place in parts:
            self.comm.Sendrecv(
                self.words(nothing if sent is None else sent),
                nobody if sent is None or dest is None else dest,
                self.tag,
                self.words(nothing if place is None else place),
                nobody if place is None or source is None else source,
                self.tag,
            )

    def send(self, x: Host, dest: int, tag: int, *, final: bool = False) -> None:
        in_flight.let_go()
        # A copy: the plan may use the memory again before the message is through.
        for piece in pieces(x if final else x.copy()):
            in_flight.hold(self.comm.Isend(self.words(piece), dest, tag), piece)

    def recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Host:
        result: Host = self.xp.empty(shape, dtype=dtype)
        status = self._mpi.Status()
        for piece in pieces(result):
            self.comm.Probe(source, tag, status)
            sent = status.Get_count(self._mpi.BYTE)
            if sent != piece.nbytes:
                raise CommunicatorError(
                    f"recv: expected {dtype.name}{list(shape)} ({result.nbytes} bytes) from rank {source}, "
                    f"but it sent {sent} bytes"
                )
            self.comm.Recv(self.words(piece), source, tag)
        return result

    def start_recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Receiving:
        return MpiReceive(self, self.xp.empty(shape, dtype=dtype), source, tag)

    def barrier(self) -> None:
        self.comm.Barrier()

    def words(self, x: Host) -> list[Any]:
        """An array's memory as integers of its item size: moving needs no arithmetic, and MPI knows no bfloat16."""
        flat = self.buffer(x).reshape(-1)
        width = min(x.dtype.itemsize, 8)
        kinds = {1: self._mpi.UINT8_T, 2: self._mpi.UINT16_T, 4: self._mpi.UINT32_T, 8: self._mpi.UINT64_T}
        return [flat.view(f"u{width}"), kinds[width]]

    def check(self, x: Host, out: Host | None) -> None:
        """Refuses arrays that an all-reduce of MPI would get wrong."""
        check_buffers(x, out)

    def datatype(self, dtype: DType) -> MPI.Datatype:
        """MPI's name for numbers of that kind."""
        return self._mpi.Datatype.fromcode(dtype.char)

    def buffer(self, x: Host) -> Any:
        """An array as MPI may have it now: it reads and writes memory of the host only."""
        check_host(x)
        return x

"""Arrays of GPUs, moved by NCCL (RCCL on ROCm): for ranks that have a GPU each.

NCCL is bootstrapped over MPI: rank 0 makes an id, all get it and meet. From then on a collective is queued on a stream
of its own, which first waits for the current stream, and which the current stream then waits for: the host waits for
nothing. So an all-reduce that was started goes on beside the kernels that are queued before its `wait`.

Movement is in bytes, for every dtype. Reductions are NCCL's where it computes what the library promises (see
`reduction`): sums and products of integers, float32, float64, bools, extrema of integers; 16-bit floats go as float32
and are rounded once; complex sums go as pairs. AVG is the sum, divided by the number of ranks. All ranks get the same
bits: NCCL computes an element once. The rest is staged: int16, extrema of floats (NaN), complex products, scans; and
messages with tags, for NCCL has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from fuel_parallel.backends.device_memory import DeviceMemory, Event
from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.comm.reduction import averaged
from fuel_parallel.comm.shared_reduction import settle
from fuel_parallel.comm.transport import Pending, Receiving, Transport, check_array
from fuel_parallel.errors import CommunicatorError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Shape

Array = Any

_OPS = {
    ReduceOp.SUM: "NCCL_SUM",
    ReduceOp.AVG: "NCCL_SUM",  # divided afterwards
    ReduceOp.PRODUCT: "NCCL_PROD",
    ReduceOp.MIN: "NCCL_MIN",
    ReduceOp.MAX: "NCCL_MAX",
}
_KINDS = {
    dtypes.int8: "NCCL_INT8",
    dtypes.uint8: "NCCL_UINT8",
    dtypes.int32: "NCCL_INT32",
    dtypes.uint32: "NCCL_UINT32",
    dtypes.int64: "NCCL_INT64",
    dtypes.uint64: "NCCL_UINT64",
    dtypes.float32: "NCCL_FLOAT32",
    dtypes.float64: "NCCL_FLOAT64",
}
_PAIRS = {dtypes.complex64: dtypes.float32, dtypes.complex128: dtypes.float64}
_OF_BOOLS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
}


def reduces(op: ReduceOp, dtype: DType) -> bool:
    """Whether a reduction is NCCL's; others are staged.

    >>> reduces(ReduceOp.SUM, dtypes.bfloat16), reduces(ReduceOp.MAX, dtypes.float32)
    (True, False)
    """
    if dtype == dtypes.bool_ or (dtype in _KINDS and dtypes.kind(dtype) == "integral"):
        return True
    if dtype in _KINDS or dtypes.is_half(dtype):
        return op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
    return dtype in _PAIRS and op in (ReduceOp.SUM, ReduceOp.AVG)


def new_communicator(host: Transport, memory: DeviceMemory) -> Any:
    """The NCCL communicator of the ranks of a transport of host arrays. A collective call.

    A rank on which NCCL fails raises what NCCL raises; without an id, all raise.
    """
    nccl, unique, problem = memory.nccl(), np.empty(0, np.int8), None
    if host.rank == 0:
        try:
            unique = np.array(nccl.get_unique_id(), np.int8)
        except Exception as error:  # whatever it is: the others wait for the id, and must hear that there is none
            problem = error
    size = int(host.broadcast(np.array([unique.size]), 0)[0])
    if size == 0:
        raise CommunicatorError("NCCL makes no id on rank 0") from problem
    unique = host.broadcast(unique if host.rank == 0 else np.empty(size, np.int8), 0)
    with memory.running(memory.stream()):
        return nccl.NcclCommunicator(host.ranks, tuple(unique.tolist()), host.rank)


class NcclTransport(Transport):
    """NCCL's collectives on arrays of one GPU; `staged` does what NCCL does not."""

    def __init__(self, communicator: Any, memory: DeviceMemory, staged: Transport) -> None:
        self.communicator, self.memory, self.staged = communicator, memory, staged
        self.nccl, self.xp = memory.nccl(), memory.array_module
        self.stream = memory.new_stream()

    @property
    def ranks(self) -> int:
        """See `Transport.ranks`."""
        return self.staged.ranks

    @property
    def rank(self) -> int:
        """See `Transport.rank`."""
        return self.staged.rank

    # Reductions.

    def all_reduce(self, x: Array, op: ReduceOp, out: Array | None = None) -> Array:
        """See `Transport.all_reduce`."""
        check_array(x, out)
        if not reduces(op, x.dtype):
            return self.staged.all_reduce(x, op, out)
        return self._start(x, op, self.xp.empty_like(x) if out is None else out).wait()

    def start_all_reduce(self, x: Array, op: ReduceOp, *, reuse: bool = False) -> Pending:
        """See `Transport.start_all_reduce`."""
        if not reduces(op, x.dtype):
            return self.staged.start_all_reduce(x, op, reuse=reuse)
        return self._start(x, op, x if reuse else self.xp.empty_like(x))

    def _start(self, x: Array, op: ReduceOp, result: Array) -> _Reduction:
        r = _Reduction(self, x, op, result)
        with r.queueing():
            if r.numbers.size:
                self.communicator.allReduce(
                    self._at(r.numbers), self._at(r.total), r.numbers.size, r.kind, r.nccl_op, self.stream.ptr
                )
        return r

    def reduce(self, x: Array, op: ReduceOp, root: int) -> Array | None:
        """See `Transport.reduce`."""
        if not reduces(op, x.dtype):
            return self.staged.reduce(x, op, root)
        r = _Reduction(self, x, op, self.xp.empty_like(x))
        with r.queueing():
            if r.numbers.size:
                self.communicator.reduce(
                    self._at(r.numbers), self._at(r.total), r.numbers.size, r.kind, r.nccl_op, root, self.stream.ptr
                )
        result = r.wait()
        return result if self.rank == root else None

    def reduce_scatter(self, x: Array, op: ReduceOp, rows: Sequence[int], out: Array | None = None) -> Array:
        """See `Transport.reduce_scatter`."""
        if not reduces(op, x.dtype):
            return self.staged.reduce_scatter(x, op, rows, out)
        result = self.xp.empty((rows[self.rank], *x.shape[1:]), dtype=x.dtype) if out is None else out
        r = _Reduction(self, x, op, result)
        with r.queueing():
            if len(set(rows)) > 1:
                self._reduce_sections(r, rows)
            elif r.total.size:
                self.communicator.reduceScatter(
                    self._at(r.numbers), self._at(r.total), r.total.size, r.kind, r.nccl_op, self.stream.ptr
                )
        return r.wait()

    def _reduce_sections(self, r: _Reduction, rows: Sequence[int]) -> None:
        """Each rank's rows to it, where they are not equally many."""
        width = r.numbers.size // sum(rows)
        with self._group():
            for rank, (end, count) in enumerate(zip(itertools.accumulate(rows), rows, strict=True)):
                part = r.numbers[(end - count) * width : end * width]
                if part.size:
                    target = self._at(r.total) if rank == self.rank else 0
                    self.communicator.reduce(
                        self._at(part), target, part.size, r.kind, r.nccl_op, rank, self.stream.ptr
                    )

    def scan(self, x: Array, op: ReduceOp, *, exclusive: bool, reverse: bool) -> Array:
        """See `Transport.scan`."""
        return self.staged.scan(x, op, exclusive=exclusive, reverse=reverse)

    # Movement.

    def broadcast(self, x: Array, root: int, out: Array | None = None) -> Array:
        """See `Transport.broadcast`."""
        result = self.xp.empty_like(x) if out is None else out
        with self._queued():
            if x.nbytes:
                self.communicator.broadcast(
                    self._at(x), self._at(result), x.nbytes, self.nccl.NCCL_UINT8, root, self.stream.ptr
                )
        return result

    def all_gather(self, x: Array, rows: Sequence[int], out: Array | None = None) -> Array:
        """See `Transport.all_gather`."""
        result = self.xp.empty((sum(rows), *x.shape[1:]), dtype=x.dtype) if out is None else out
        with self._queued():
            if len(set(rows)) == 1:
                if x.nbytes:
                    self.communicator.allGather(
                        self._at(x), self._at(result), x.nbytes, self.nccl.NCCL_UINT8, self.stream.ptr
                    )
            else:
                with self._group():
                    for rank, (end, count) in enumerate(zip(itertools.accumulate(rows), rows, strict=True)):
                        part = result[end - count : end]
                        if part.nbytes:
                            source = self._at(x if rank == self.rank else part)
                            self.communicator.broadcast(
                                source, self._at(part), part.nbytes, self.nccl.NCCL_UINT8, rank, self.stream.ptr
                            )
        return result

    def all_to_all(self, blocks: Sequence[Array], shapes: Sequence[Shape], most_bytes: int) -> list[Array]:
        """See `Transport.all_to_all`."""
        received = [self.xp.empty(shape, dtype=blocks[0].dtype) for shape in shapes]
        received[self.rank] = blocks[self.rank].copy()
        with self._queued(), self._group():
            for rank in range(self.ranks):
                if rank != self.rank:
                    self._send(blocks[rank], rank)
                    self._receive(received[rank], rank)
        return received

    def exchange(self, x: Array, dest: int | None, source: int | None, out: Array | None = None) -> Array | None:
        """See `Transport.exchange`."""
        result = None if source is None else self.xp.empty_like(x) if out is None else out
        with self._queued(), self._group():
            if dest is not None:
                self._send(x, dest)
            if result is not None and source is not None:
                self._receive(result, source)
        return result

    # What needs tags, or host arrays only.

    def send(self, x: Array, dest: int, tag: int, *, final: bool = False) -> None:
        """See `Transport.send`."""
        self.staged.send(x, dest, tag, final=final)

    def recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Array:
        """See `Transport.recv`."""
        return self.staged.recv(shape, dtype, source, tag)

    def start_recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Receiving:
        """See `Transport.start_recv`."""
        return self.staged.start_recv(shape, dtype, source, tag)

    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self.staged.barrier()

    # Queueing.

    @contextmanager
    def _queued(self) -> Iterator[None]:
        """What is queued on NCCL's stream inside comes after the current stream's work, and before what follows."""
        self.stream.wait_event(self.memory.stream().record())
        yield
        self.memory.stream().wait_event(self.stream.record())

    @contextmanager
    def _group(self) -> Iterator[None]:
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()

    def _send(self, x: Array, rank: int) -> None:
        if x.nbytes:
            self.communicator.send(self._at(x), x.nbytes, self.nccl.NCCL_UINT8, rank, self.stream.ptr)

    def _receive(self, x: Array, rank: int) -> None:
        if x.nbytes:
            self.communicator.recv(self._at(x), x.nbytes, self.nccl.NCCL_UINT8, rank, self.stream.ptr)

    def _at(self, x: Array) -> int:
        return self.memory.address(x) if x.size else 0


class _Reduction(Pending):
    """A reduction of `x`: NCCL reduces the flat `numbers` into `total`, which is `result` or becomes it at the end.

    It holds all memory until the current stream waits for it; one that nobody waits for, after a plan that failed,
    until the process ends.
    """

    _not_waited_for: ClassVar[set[_Reduction]] = set()

    def __init__(self, transport: NcclTransport, x: Array, op: ReduceOp, result: Array) -> None:
        self.transport, self.op, self.result = transport, op, result
        flat, target, dtype = x.reshape(-1), result.reshape(-1), x.dtype
        if dtype == dtypes.bool_:
            self.numbers, self.total, op = flat.view(np.uint8), target.view(np.uint8), _OF_BOOLS[op]
        elif dtype in _PAIRS:
            self.numbers, self.total = flat.view(_PAIRS[dtype]), target.view(_PAIRS[dtype])
        elif dtypes.is_half(dtype):
            self.numbers = flat.astype(np.float32)
            self.total = transport.xp.empty(target.shape, dtype=np.float32)
        else:
            self.numbers, self.total = flat, target
        self.kind: int = getattr(transport.nccl, _KINDS[self.numbers.dtype])
        self.nccl_op: int = getattr(transport.nccl, _OPS[op])
        self._done: Event | None = None

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Around the call of NCCL: it comes after the current stream's work; that goes on meanwhile."""
        stream = self.transport.stream
        stream.wait_event(self.transport.memory.stream().record())
        yield
        self._done = stream.record()
        self._not_waited_for.add(self)

    def progress(self) -> None:
        """Nothing: the device goes on by itself."""

    def wait(self) -> Array:
        """See `Pending.wait`: what is queued from now on comes after it; the host waits for nothing."""
        settle()  # the script may now read the result, and so wait for ranks that wait for my part of others
        if self._done is not None:
            self.transport.memory.stream().wait_event(self._done)
        self._not_waited_for.discard(self)
        if self.total.dtype == np.float32 and dtypes.is_half(self.result.dtype):
            averaged(self.total, self.op, self.transport.ranks)
            self.result[...] = self.total.astype(self.result.dtype).reshape(self.result.shape)
            return self.result
        return averaged(self.result, self.op, self.transport.ranks)

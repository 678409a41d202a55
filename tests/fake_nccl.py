"""A stand-in for `cupy.cuda.nccl`, on the memory of `stand_in`: it does by MPI what it is asked for, and notes it."""

from __future__ import annotations

import ctypes

import numpy as np
import stand_in
from mpi4py import MPI


class FakeNccl:
    """Like `cupy.cuda.nccl`, on memory that the host can read: does what is asked by MPI, and notes it."""

    NAMES = ("SUM", "PROD", "MIN", "MAX", "INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT32", "FLOAT64")

    def __init__(self):
        self.functions = {"SUM": np.add, "PROD": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
        self.names = dict(enumerate(self.NAMES, 40))
        for number, name in self.names.items():
            setattr(self, f"NCCL_{name}", number)
        self.calls, self.ids, self.in_group, self.delayed = [], 0, False, []
        self.comm = MPI.COMM_WORLD.Dup()

    def get_unique_id(self):
        self.ids += 1
        return tuple((i * 37 + 11) % 256 - 128 for i in range(128))

    def NcclCommunicator(self, ranks, unique, rank):
        return FakeCommunicator(self, ranks, unique, rank)

    def groupStart(self):
        self.in_group = True
        self.calls.append(("groupStart",))

    def groupEnd(self):
        self.in_group = False
        self.calls.append(("groupEnd",))
        work, self.delayed = self.delayed, []
        if work:
            stream = work[0][0]
            # Receives first: the whole group goes on at once.
            stream.add(lambda: [request.Wait() for request in [start() for _, start in work] if request is not None])


class FakeCommunicator:
    def __init__(self, nccl, ranks, unique, rank):
        self.nccl, self.ranks, self.unique, self.rank = nccl, ranks, unique, rank
        self.streams = {}

    def _memory(self, address, count, kind):
        dtype = np.dtype(self.nccl.names[kind].lower())
        if not address:
            return np.empty(count, dtype)
        return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)

    def _do(self, note, stream, start):
        self.nccl.calls.append(note)
        stream = next(s for s in self.streams if s.ptr == stream)
        if self.nccl.in_group:
            self.nccl.delayed.append((stream, start))
        else:
            stream.add(lambda: (lambda request: request and request.Wait())(start()))

    def _reduced(self, source, op):
        everyone = self.nccl.comm.allgather(source.tobytes())
        arrays = [np.frombuffer(one, source.dtype) for one in everyone]
        with np.errstate(all="ignore"):
            return self.nccl.functions[self.nccl.names[op]].reduce(arrays, dtype=source.dtype)

    def allReduce(self, source, target, count, kind, op, stream):
        def start():
            self._memory(target, count, kind)[...] = self._reduced(self._memory(source, count, kind), op)

        self._do(("allReduce", count, self.nccl.names[kind], self.nccl.names[op]), stream, start)

    def reduce(self, source, target, count, kind, op, root, stream):
        def start():
            total = self._reduced(self._memory(source, count, kind), op)
            if root == self.rank:
                self._memory(target, count, kind)[...] = total

        self._do(("reduce", count, self.nccl.names[kind], self.nccl.names[op], root), stream, start)

    def reduceScatter(self, source, target, count, kind, op, stream):
        def start():
            total = self._reduced(self._memory(source, count * self.ranks, kind), op)
            self._memory(target, count, kind)[...] = total[self.rank * count : (self.rank + 1) * count]

        self._do(("reduceScatter", count, self.nccl.names[kind], self.nccl.names[op]), stream, start)

    def broadcast(self, source, target, count, kind, root, stream):
        def start():
            value = self.nccl.comm.bcast(self._memory(source, count, kind).tobytes(), root)
            self._memory(target, count, kind)[...] = np.frombuffer(value, np.uint8)

        self._do(("broadcast", count, self.nccl.names[kind], root), stream, start)

    def allGather(self, source, target, count, kind, stream):
        def start():
            everyone = self.nccl.comm.allgather(self._memory(source, count, kind).tobytes())
            self._memory(target, count * self.ranks, kind)[...] = np.frombuffer(b"".join(everyone), np.uint8)

        self._do(("allGather", count, self.nccl.names[kind]), stream, start)

    def send(self, source, count, kind, peer, stream):
        self._do(
            ("send", count, self.nccl.names[kind], peer),
            stream,
            lambda: self.nccl.comm.Isend(self._memory(source, count, kind), peer),
        )

    def recv(self, target, count, kind, peer, stream):
        self._do(
            ("recv", count, self.nccl.names[kind], peer),
            stream,
            lambda: self.nccl.comm.Irecv(self._memory(target, count, kind), peer),
        )


class Streams(stand_in.StandInMemory):
    """Remembers the streams it made, so that the fake can find one by its number."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.made = []

    def new_stream(self):
        self.made.append(super().new_stream())
        return self.made[-1]

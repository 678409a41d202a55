"""The collectives that are timed: how each is called on so many bytes, and whether what came of it is right.

`nbytes` counts as in NCCL's and OSU's tables. Bus bandwidth is what a wire would have to carry for a perfect algorithm,
so that it can be compared with the wire's own whatever the collective and the number of ranks: bytes over time, times a
factor. (NCCL tests, doc/PERFORMANCE.md.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuel_parallel.backends.device_memory import DeviceMemory
from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.comm.speed.timing import Call
from fuel_parallel.comm.transport import Host, Transport
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.partitioning import partition

Array = Any


@dataclass(frozen=True)
class Place:
    """Where the arrays of a rank are: on the host, or in the memory of a device."""

    memory: DeviceMemory | None = None

    @property
    def xp(self) -> Any:
        """The module of its arrays."""
        return np if self.memory is None else self.memory.array_module

    def put(self, host: Host) -> Array:
        """An array with these values."""
        return host.copy() if self.memory is None else self.xp.asarray(host)

    def get(self, array: Array) -> Host:
        """The values of an array."""
        return np.asarray(array) if self.memory is None else np.asarray(array.get())

    def finish(self) -> None:
        """Waits until all is done that was begun there."""
        if self.memory is not None:
            self.memory.stream().synchronize()


@dataclass(frozen=True)
class Case:
    """One collective on one size, ready to be called on all ranks.

    Args:
        call: Makes the call and gives its result.
        place: Where its arrays are.
        arrays: What goes in; zeros are timed, for sums of sums would overflow.
        expected: What `call` must give on this rank, if it gives anything.
        ways: One-way trips of a call.
    """

    call: Call
    place: Place
    arrays: tuple[Array, ...] = ()
    expected: Host | None = None
    trips: int = 1

    def check(self) -> bool:
        """Makes one call; whether its result is right. Leaves zeros in the arrays."""
        result = self.call()
        right = self.expected is None or np.array_equal(self.place.get(result).reshape(-1), self.expected.reshape(-1))
        for array in self.arrays:
            array[...] = 0
        return right


@dataclass(frozen=True)
class Collective:
    """How a collective is timed.

    Args:
        make: The case for a transport, a place for arrays, a number of elements and a dtype.
        bus: The factor of the bus bandwidth for so many ranks.
        counted: What the bytes are.
        shared: Whether a node's shared memory is a way of its own.
    """

    make: Callable[[Transport, Place, int, DType], Case]
    bus: Callable[[int], float]
    counted: str
    shared: bool = False


def pattern(size: int, rank: int, dtype: DType) -> Host:
    """Small whole numbers, others on each rank; their sums over ranks are exact in every dtype."""
    return ((np.arange(size) + rank) % 3).astype(dtype)


def _total(size: int, ranks: int, dtype: DType) -> Host:
    total: Host = np.sum([pattern(size, r, np.dtype(np.int64)) for r in range(ranks)], axis=0).astype(dtype)
    return total


def _rows(size: int, ranks: int) -> tuple[int, ...]:
    return tuple(map(len, partition(size, ranks)))


def _mine(size: int, t: Transport) -> slice:
    part = partition(size, t.ranks)[t.rank]
    return slice(part.start, part.stop)


def _all_reduce(t: Transport, place: Place, size: int, dtype: DType) -> Case:
    # As plans do: in place, in memory that the transport thinks best.
    memory = t.allocate(size * dtype.itemsize)
    x = place.put(pattern(size, t.rank, dtype)) if memory is None else memory.view(dtype)
    if memory is not None:
        x[...] = pattern(size, t.rank, dtype)
    return Case(
        lambda: t.start_all_reduce(x, ReduceOp.SUM, reuse=True).wait(), place, (x,), _total(size, t.ranks, dtype)
    )


def _reduce(t: Transport, place: Place, size: int, dtype: DType) -> Case:
    x = place.put(pattern(size, t.rank, dtype))
    return Case(lambda: t.reduce(x, ReduceOp.SUM, 0), place, (x,), None if t.rank else _total(size, t.ranks, dtype))


def _broadcast(t: Transport, place: Place, size: int, dtype: DType) -> Case:
    x = place.put(pattern(size, t.rank, dtype))
    return Case(lambda: t.broadcast(x, 0), place, (x,), pattern(size, 0, dtype))


def _all_gather(t: Transport, place: Place, size: int, dtype: DType) -> Case:
    rows = _rows(size, t.ranks)
    x = place.put(pattern(size, 0, dtype)[_mine(size, t)])
    return Case(lambda: t.all_gather(x, rows), place, (x,), pattern(size, 0, dtype))


def _reduce_scatter(t: Transport, place: Place, size: int, dtype: DType) -> Case:
    rows = _rows(size, t.ranks)
    x = place.put(pattern(size, t.rank, dtype))
    expected = _total(size, t.ranks, dtype)[_mine(size, t)]
    return Case(lambda: t.reduce_scatter(x, ReduceOp.SUM, rows), place, (x,), expected)


def _all_to_all(t: Transport, place: Place, size: int, dtype: DType) -> Case:
    rows = _rows(size, t.ranks)
    x = place.put(pattern(size, t.rank, dtype))
    blocks = [x[part.start : part.stop] for part in partition(size, t.ranks)]
    shapes = [(rows[t.rank],)] * t.ranks
    expected = np.concatenate([pattern(size, r, dtype)[_mine(size, t)] for r in range(t.ranks)])
    most = max(rows) * t.ranks * dtype.itemsize
    return Case(lambda: place.xp.concatenate(t.all_to_all(blocks, shapes, most)), place, (x,), expected)


def _shift(t: Transport, place: Place, size: int, dtype: DType) -> Case:
    x = place.put(pattern(size, t.rank, dtype))
    dest, source = (t.rank + 1) % t.ranks, (t.rank - 1) % t.ranks
    return Case(lambda: t.exchange(x, dest, source), place, (x,), pattern(size, source, dtype))


def _send(t: Transport, place: Place, size: int, dtype: DType) -> Case:
    """There and back between the first rank and the last."""
    x = place.put(pattern(size, t.rank, dtype))
    last = t.ranks - 1

    def call() -> Any:
        if t.rank == 0:
            t.send(x, last, 0)
            return t.recv(x.shape, dtype, last, 0)
        if t.rank == last:
            back = t.recv(x.shape, dtype, 0, 0)
            t.send(back, 0, 0)
            return back
        return x

    expected = pattern(size, 0 if t.rank == last else t.rank, dtype)
    return Case(call, place, (x,), expected, trips=2)


def _barrier(t: Transport, place: Place, size: int, dtype: DType) -> Case:
    return Case(t.barrier, place)


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": Collective(_all_reduce, lambda n: 2 * (n - 1) / n, "the array of each rank", shared=True),
    "reduce_scatter": Collective(_reduce_scatter, lambda n: (n - 1) / n, "what each rank hands in", shared=True),
    "all_gather": Collective(_all_gather, lambda n: (n - 1) / n, "what each rank gets", shared=True),
    "broadcast": Collective(_broadcast, lambda n: 1.0, "the array", shared=True),
    "reduce": Collective(_reduce, lambda n: 1.0, "the array of each rank"),
    "all_to_all": Collective(_all_to_all, lambda n: (n - 1) / n, "what each rank hands in"),
    "shift": Collective(_shift, lambda n: 1.0, "the array that each rank sends to the next"),
    "send": Collective(_send, lambda n: 1.0, "the array; from the first rank to the last, half of there and back"),
    "barrier": Collective(_barrier, lambda n: 0.0, "none"),
}

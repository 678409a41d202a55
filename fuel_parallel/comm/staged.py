"""Arrays of a device, moved through pinned host memory: for every MPI, every device and every dtype.

An array goes piece by piece through one of two slots, and copies go on while MPI works on the other one:

    turn           t                      t+1
    piece i        copied to the host     MPI              copied to the device
    piece i+1                             copied to host   MPI                    ...

Copies are queued on the current stream, so they come after the kernels that made the array and before those that read
the result, and a slot is filled again only after it was emptied. What goes on between ranks is the host transport's, so
results have the bits that host arrays would have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fuel_parallel.backends.device_memory import DeviceMemory, Event
from fuel_parallel.comm.background import Background
from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.comm.transport import Host, Pending, Receiving, Transport, check_array, filled
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Shape

Array = Any

SLOT_BYTES = 4 << 20
"""The memory of a slot for what comes from the device, and as much for what goes there: large enough that starting a
copy and a collective costs little of the time that they take, small enough that little of it is not overlapped."""


class StagedTransport(Transport):
    """Any transport of host arrays as one of arrays of a device.

    `background` does the all-reduces that go on while other work is done; without one they are done at once.
    """

    def __init__(self, host: Transport, memory: DeviceMemory, background: Background | None = None) -> None:
        self.host, self.memory, self.background = host, memory, background
        self.slot_bytes = SLOT_BYTES
        self._slots: list[_Slot] = []
        self._last: Event | None = None

    @property
    def ranks(self) -> int:
        """See `Transport.ranks`."""
        return self.host.ranks

    @property
    def rank(self) -> int:
        """See `Transport.rank`."""
        return self.host.rank

    # Reductions.

    def all_reduce(self, x: Array, op: ReduceOp, out: Array | None = None) -> Array:
        """See `Transport.all_reduce`."""
        return self._elementwise(x, lambda piece, room: self.host.all_reduce(piece, op, piece), out)

    def start_all_reduce(self, x: Array, op: ReduceOp, *, reuse: bool = False) -> Pending:
        """See `Transport.start_all_reduce`."""
        if self.background is None or not self.background.takes(x):
            return super().start_all_reduce(x, op, reuse=reuse)
        return self.background.start(x, op, reuse)

    def reduce(self, x: Array, op: ReduceOp, root: int) -> Array | None:
        """See `Transport.reduce`."""
        result = self.memory.array_module.empty_like(x) if self.rank == root else None
        flat = x.reshape(-1)
        target = None if result is None else result.reshape(-1)

        def store(slot: _Slot, part: slice, reduced: Host | None) -> None:
            if target is not None and reduced is not None:
                self._store(target[part], slot, reduced)

        parts = self._parts(x)
        self._pipeline(
            len(parts),
            lambda slot, turn: slot.load([flat[parts[turn]]]),
            lambda slot, turn: self.host.reduce(slot.loaded[0], op, root),
            lambda slot, turn, reduced: store(slot, parts[turn], reduced),
        )
        return result

    def reduce_scatter(self, x: Array, op: ReduceOp, rows: Sequence[int], out: Array | None = None) -> Array:
        """See `Transport.reduce_scatter`."""
        result = self.memory.array_module.empty((rows[self.rank], *x.shape[1:]), dtype=x.dtype) if out is None else out
        sections, turns = self._sections(x, rows)
        flat, target = x.reshape(-1), result.reshape(-1)

        def reduce(slot: _Slot, turn: int) -> Host:
            sizes = [len(section[turn]) for section in sections]
            room = slot.room(sizes[self.rank], x.dtype)
            return self.host.reduce_scatter(slot.loaded_together, op, sizes, room)

        def store(slot: _Slot, turn: int, reduced: Host) -> None:
            mine, begin = sections[self.rank][turn], sections[self.rank][0].start
            self._store(target[mine.start - begin : mine.stop - begin], slot, reduced)

        self._pipeline(
            turns,
            lambda slot, turn: slot.load([flat[s[turn].start : s[turn].stop] for s in sections]),
            reduce,
            store,
        )
        return result

    def scan(self, x: Array, op: ReduceOp, *, exclusive: bool, reverse: bool) -> Array:
        """See `Transport.scan`."""
        return self._elementwise(x, lambda piece, room: self.host.scan(piece, op, exclusive=exclusive, reverse=reverse))

    # Movement.

    def broadcast(self, x: Array, root: int, out: Array | None = None) -> Array:
        """See `Transport.broadcast`."""
        if self.rank != root:
            return self._elementwise(x, lambda piece, room: self.host.broadcast(room(), root, room()), out, reads=False)

        def hand_out(piece: Host, room: Callable[[], Host]) -> None:
            self.host.broadcast(piece, root, piece)

        return self._elementwise(x, hand_out, filled(x, out))

    def all_gather(self, x: Array, rows: Sequence[int], out: Array | None = None) -> Array:
        """See `Transport.all_gather`."""
        result = self.memory.array_module.empty((sum(rows), *x.shape[1:]), dtype=x.dtype) if out is None else out
        sections, turns = self._sections(result, rows)
        flat, target, begin = x.reshape(-1), result.reshape(-1), sections[self.rank][0].start

        def gather(slot: _Slot, turn: int) -> Host:
            sizes = [len(section[turn]) for section in sections]
            return self.host.all_gather(slot.loaded[0], sizes, slot.room(sum(sizes), x.dtype))

        def store(slot: _Slot, turn: int, gathered: Host) -> None:
            place = 0
            for section in sections:
                part = section[turn]
                self._store(target[part.start : part.stop], slot, gathered[place : place + len(part)])
                place += len(part)

        mine = sections[self.rank]
        self._pipeline(
            turns,
            lambda slot, turn: slot.load([flat[mine[turn].start - begin : mine[turn].stop - begin]]),
            gather,
            store,
        )
        return result

    def all_to_all(self, blocks: Sequence[Array], shapes: Sequence[Shape], most_bytes: int) -> list[Array]:
        """See `Transport.all_to_all`."""
        xp, dtype = self.memory.array_module, blocks[0].dtype
        received = [xp.empty(shape, dtype=dtype) for shape in shapes]
        step = max(self.slot_bytes // dtype.itemsize // self.ranks, 1)
        turns = 1
        if most_bytes > step * dtype.itemsize:
            # Not even the ranks that have little know how large the largest block of all is.
            largest = np.array([max(array.size for array in (*blocks, *received))], np.int64)
            turns = max(-(-int(self.host.all_reduce(largest, ReduceOp.MAX)[0]) // step), 1)
        sent, places = [block.reshape(-1) for block in blocks], [array.reshape(-1) for array in received]

        def part(array: Array, turn: int) -> Array:
            return array[turn * step : (turn + 1) * step]

        def exchange(slot: _Slot, turn: int) -> list[Host]:
            sizes = [(part(place, turn).size,) for place in places]
            return self.host.all_to_all(slot.loaded, sizes, self.ranks * step * dtype.itemsize)

        def store(slot: _Slot, turn: int, pieces: list[Host]) -> None:
            together = slot.room(sum(piece.size for piece in pieces), dtype)
            end = 0
            for place, piece in zip(places, pieces, strict=True):
                begin, end = end, end + piece.size
                together[begin:end] = piece
                self._store(part(place, turn), slot, together[begin:end])

        self._pipeline(turns, lambda slot, turn: slot.load([part(block, turn) for block in sent]), exchange, store)
        return received

    def exchange(self, x: Array, dest: int | None, source: int | None, out: Array | None = None) -> Array | None:
        """See `Transport.exchange`."""
        received = self._elementwise(
            x, lambda piece, room: self.host.exchange(piece, dest, source, room()), out, reads=dest is not None
        )
        return None if source is None else received

    # Whole, as one message: whoever receives may do so in host memory.

    def send(self, x: Array, dest: int, tag: int, *, final: bool = False) -> None:
        """See `Transport.send`."""
        host = np.empty(x.shape, x.dtype)
        flat, target = x.reshape(-1), host.reshape(-1)
        parts = self._parts(x)

        def keep(slot: _Slot, turn: int) -> None:
            target[parts[turn]] = slot.loaded[0]

        self._pipeline(len(parts), lambda slot, turn: slot.load([flat[parts[turn]]]), keep, lambda *_: None)
        self.host.send(host, dest, tag, final=True)

    def recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Array:
        """See `Transport.recv`."""
        return self._to_device(self.host.recv(shape, dtype, source, tag))

    def start_recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Receiving:
        """See `Transport.start_recv`."""
        return _ToDevice(self.host.start_recv(shape, dtype, source, tag), self._to_device)

    def _to_device(self, array: Host) -> Array:
        host = array.reshape(-1)
        result = self.memory.array_module.empty(array.shape, dtype=array.dtype)
        parts, target = self._parts(result), result.reshape(-1)
        self._pipeline(
            len(parts),
            lambda slot, turn: slot.load([]),
            lambda slot, turn: None,
            lambda slot, turn, _: self._store(target[parts[turn]], slot, host[parts[turn]]),
        )
        return result

    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self.host.barrier()

    # The pipeline.

    def _elementwise(
        self,
        x: Array,
        transfer: Callable[[Host, Callable[[], Host]], Host | None],
        out: Array | None = None,
        *,
        reads: bool = True,
    ) -> Array:
        """What is done to an array element by element; `transfer` gets a piece and, if it asks, room for as much.

        Without `reads` the piece has no meaning. Nothing is stored where nothing comes back.
        """
        check_array(x, out)
        result = self.memory.array_module.empty_like(x) if out is None else out
        flat, target, parts = x.reshape(-1), result.reshape(-1), self._parts(x)

        def move(slot: _Slot, turn: int) -> Host | None:
            def room() -> Host:
                return slot.room(parts[turn].stop - parts[turn].start, x.dtype)

            return transfer(slot.loaded[0] if reads else room(), room)

        def store(slot: _Slot, turn: int, moved: Host | None) -> None:
            if moved is not None:
                self._store(target[parts[turn]], slot, moved)

        self._pipeline(len(parts), lambda slot, turn: slot.load([flat[parts[turn]]] if reads else []), move, store)
        return result

    def _pipeline(
        self,
        turns: int,
        load: Callable[[_Slot, int], None],
        transfer: Callable[[_Slot, int], Any],
        store: Callable[[_Slot, int, Any], None],
    ) -> None:
        """For each turn: queue copies into a slot, let the ranks do their part on it, queue copies out of it."""
        if self._last is not None:  # what was queued on another stream may still be read from the slots
            self._last.synchronize()
        if not self._slots:
            self._slots = [_Slot(self.memory), _Slot(self.memory)]
        try:
            load(self._slots[0], 0)
            for turn in range(turns):
                if turn + 1 < turns:
                    load(self._slots[(turn + 1) % 2], turn + 1)
                slot = self._slots[turn % 2]
                slot.wait()
                store(slot, turn, transfer(slot, turn))
        finally:
            self._last = self.memory.stream().record()

    def _store(self, target: Array, slot: _Slot, values: Host) -> None:
        """Queues the copy of values to the device; those outside of the slot's memory are put there first."""
        self.memory.copy_to_device(target, slot.inside(values))

    def _parts(self, x: Array) -> list[slice]:
        """The pieces of a flat array; one for an empty array, for the ranks must do something together."""
        step = max(self.slot_bytes // x.dtype.itemsize, 1)
        return [slice(start, min(start + step, x.size)) for start in range(0, max(x.size, 1), step)]

    def _sections(self, whole: Array, rows: Sequence[int]) -> tuple[list[list[range]], int]:
        """For each rank the pieces of its rows in the flat array, equally many, the last ones perhaps empty."""
        width = math.prod(whole.shape[1:])
        step = max(self.slot_bytes // whole.dtype.itemsize // len(rows), 1)
        turns = max(-(-max(rows) * width // step), 1)
        return list(_cut(rows, width, step, turns)), turns


class _ToDevice(Receiving):
    """A receive that comes to the host first."""

    def __init__(self, receiving: Receiving, to_device: Callable[[Host], Array]) -> None:
        self._receiving, self._to_device = receiving, to_device

    def has_come(self) -> bool:
        """See `Receiving.has_come`."""
        return self._receiving.has_come()

    def wait(self) -> Array:
        """See `Pending.wait`."""
        return self._to_device(self._receiving.wait())


class _Slot:
    """Pinned memory of one piece: `loaded` came from the device; `room` is for what goes there."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self._from_device = self._to_device = memory.pinned(0)
        self._arrived: Event | None = None
        self.loaded: list[Host] = []
        self.loaded_together: Host = self._from_device

    def load(self, arrays: Sequence[Array]) -> None:
        """Queues the copies of flat arrays of one dtype, to lie one after the other."""
        if arrays:
            dtype = arrays[0].dtype
            # Not larger than needed at first: most communicators never move large arrays.
            self._from_device = self.memory.at_least(self._from_device, sum(array.nbytes for array in arrays))
            together = self._from_device.view(np.uint8)[: sum(array.nbytes for array in arrays)].view(dtype)
            self.loaded, self.loaded_together, end = [], together, 0
            for array in arrays:
                begin, end = end, end + array.size
                self.loaded.append(together[begin:end])
                self.memory.copy_to_host(self.loaded[-1], array)
        self._arrived = self.memory.stream().record()

    def wait(self) -> None:
        """Until what was loaded is there, and with it all that was queued before: what was stored from here."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def room(self, size: int, dtype: DType) -> Host:
        """Memory for values that go to the device."""
        self._to_device = self.memory.at_least(self._to_device, size * dtype.itemsize)
        return self._to_device[: size * dtype.itemsize].view(dtype)

    def inside(self, values: Host) -> Host:
        """The values themselves where they lie in this slot; else a copy that does."""
        if any(np.may_share_memory(values, own) for own in (self._from_device, self._to_device)):
            return values
        room = self.room(values.size, values.dtype)
        room[...] = values
        return room


def _cut(rows: Sequence[int], width: int, step: int, turns: int) -> Iterator[list[range]]:
    end = 0
    for count in rows:
        begin, end = end, end + count * width
        starts = [min(begin + turn * step, end) for turn in range(turns + 1)]
        yield [range(start, stop) for start, stop in itertools.pairwise(starts)]

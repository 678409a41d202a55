"""Copies between ordinary host memory and a device, through a few pieces of pinned memory that are kept.

From ordinary memory a driver copies at a fraction of the bus's speed, and the caller waits. Here an array goes piece by
piece through slots of pinned memory: while one is copied by the device, the host fills or empties another. A slot is
used again when its last copy is done, so that pinned memory stays bounded however large the arrays are.
"""

from __future__ import annotations

import threading
from typing import Any

from fuel_parallel.backends.device_memory import DeviceMemory, Event, Host

SLOT_BYTES = 4 << 20
"""Memory of a slot at most: large enough that starting a copy costs little of the time that it takes."""
SLOTS = 2
"""One for the device and one for the host."""


class Staging:
    """The slots of one device. Threads may use them, one at a time."""

    def __init__(self, memory: DeviceMemory, slot_bytes: int = SLOT_BYTES) -> None:
        self.memory, self.slot_bytes = memory, slot_bytes
        self._slots = [_Slot(memory) for _ in range(SLOTS)]
        self._turn = 0
        self._lock = threading.Lock()

    def to_device(self, array: Any, host: Host) -> None:
        """Queues the copy of a host array into an array of as many elements, on the current stream.

        The host array may be written as soon as this returns. The device's is contiguous.
        """
        source, target = host.reshape(-1), array.reshape(-1)
        with self._lock:
            for part in self._parts(source):
                slot = self._next()
                room = slot.room(source[part])
                room[...] = source[part]
                self.memory.copy_to_device(target[part], room)
                slot.done = self.memory.stream().record()

    def to_host(self, host: Host, array: Any) -> None:
        """Copies a contiguous array into a contiguous host array, when all that was queued before is done."""
        source, target = array.reshape(-1), host.reshape(-1)
        under_way: list[tuple[slice, _Slot, Host]] = []
        with self._lock:
            for part in self._parts(target):
                if len(under_way) == len(self._slots):
                    _arrive(target, *under_way.pop(0))
                slot = self._next()
                room = slot.room(target[part])
                self.memory.copy_to_host(room, source[part])
                slot.done = self.memory.stream().record()
                under_way.append((part, slot, room))
            for each in under_way:
                _arrive(target, *each)

    def _parts(self, flat: Host) -> list[slice]:
        step = max(self.slot_bytes // flat.dtype.itemsize, 1)
        return [slice(start, min(start + step, flat.size)) for start in range(0, flat.size, step)]

    def _next(self) -> _Slot:
        """The slot whose turn it is, when it is free."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        slot.wait()
        return slot


class _Slot:
    """Pinned memory, and the place in a stream after its last copy."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.host = memory.pinned(0)
        self.done: Event | None = None

    def room(self, like: Host) -> Host:
        """Pinned memory for as much."""
        self.host = self.memory.at_least(self.host, like.nbytes)
        return self.host[: like.nbytes].view(like.dtype)

    def wait(self) -> None:
        """Until its last copy is done."""
        if self.done is not None:
            self.done.synchronize()
            self.done = None


def _arrive(target: Host, part: slice, slot: _Slot, room: Host) -> None:
    slot.wait()
    target[part] = room

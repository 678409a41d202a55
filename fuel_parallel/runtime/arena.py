"""Arenas: the bytes that plans share, one arena for each device whose kernels write into given memory. See `memory`."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuel_parallel.backends import backend_of
from fuel_parallel.backends.device_memory import Stream
from fuel_parallel.lazy.node import Spec
from fuel_parallel.runtime.memory import ALIGNMENT, Place


class Arena:
    """The bytes of one device that plans share; grows to the largest plan."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.memory: Any = None
        self.nbytes = 0
        self.address = 0
        self._views: dict[tuple[int, Spec], Any] = {}
        self._stream: Stream | None = None

    @property
    def addresses(self) -> range:
        """Of all bytes."""
        return range(self.address, self.address + self.nbytes)

    def at_least(self, nbytes: int) -> None:
        """Sees to it that there are so many bytes, or more."""
        if self.nbytes >= nbytes:
            return
        self.release()
        backend = backend_of(self.device)
        with backend.running():
            raw = backend.array_module.empty(nbytes + ALIGNMENT, dtype=np.uint8)
            skip = -backend.address(raw) % ALIGNMENT
            self.memory, self.nbytes = raw[skip : skip + nbytes], nbytes
            self.address = backend.address(self.memory)

    def follow(self) -> None:
        """Lets a plan on the current stream begin after those that work in the bytes on another one."""
        backend = backend_of(self.device)
        if backend.memory is None:
            return
        with backend.running():
            stream, before = backend.memory.stream(), self._stream
            if before is not None and before.ptr != stream.ptr:
                stream.wait_event(before.record())
            self._stream = stream

    def release(self) -> None:
        """Lets all bytes go."""
        self.memory, self.nbytes, self.address = None, 0, 0
        self._views.clear()

    def view(self, place: Place) -> Any:
        """The array at a place. Kept: the next run asks for the same ones, and making one takes as long as a kernel."""
        key = place.offset, place.spec
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _VIEWS_LIMIT:
                self._views.clear()
            flat = self.memory[place.offset : place.offset + place.spec.nbytes]
            found = self._views[key] = flat.view(place.spec.dtype).reshape(place.spec.shape)
        return found


def arena_of(device: str) -> Arena:
    """The arena of a device, empty at first."""
    found = _arenas.get(device)
    if found is None:
        found = _arenas[device] = Arena(device)
    return found


def forget_arenas() -> list[str]:
    """Leaves all arenas to whoever still works in them; the next plan gets new ones. Gives their devices."""
    devices = list(_arenas)
    _arenas.clear()
    return devices


def arena_bytes() -> int:
    """Bytes of the arenas of all devices."""
    return sum(arena.nbytes for arena in _arenas.values())


_arenas: dict[str, Arena] = {}
_VIEWS_LIMIT = 1 << 13

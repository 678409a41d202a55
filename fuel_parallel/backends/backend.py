"""The interface between the runtime and a kind of device.

A backend is arrays, an array module that computes on them, and copies. How an op is computed follows from what it
says of itself, and is decided when a plan is made:

1. by a kernel that is written for the op in C, if there is one and the backend has a dialect;
2. by its kernel of the registry on `array_module`, if the backend `runs` it there;
3. by a generated kernel, if the backend has a dialect and the op an expression in it;
4. on the host otherwise, between two Copy steps of the plan.

A package adds a backend by an entry point of the group `fuel_parallel.backends`, whose name is the kind of device and
whose value is a `Backend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fuel_parallel.backends.device_memory import DeviceMemory, Event, Host, Stream
from fuel_parallel.errors import DeviceError


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What a device says of itself. `memory` is in bytes, 0 where it does not say."""

    device: str
    name: str
    vendor: str
    memory: int


class Departure:
    """A copy of an array to the host that was queued. `host` has its values when `wait` has returned.

    Until then the array is held, but what is written over its memory must come after the copy: see `hold_up`.
    """

    def __init__(self, memory: DeviceMemory, host: Host, source: Any, arrived: Event) -> None:
        self.host = host
        self._memory, self._source, self._arrived = memory, source, arrived

    def wait(self) -> None:
        """Waits until the values are there."""
        self._arrived.synchronize()
        self._source = None

    def hold_up(self) -> None:
        """Lets what is queued from now on, on the current stream of the device, begin only after the copy."""
        self._memory.stream().wait_event(self._arrived)


class Recording(Protocol):
    """Work of a device that was captured."""

    @property
    def nbytes(self) -> int:
        """The memory that it holds."""

    def launch(self) -> None:
        """Queues all of it on the current stream, with the addresses that it was captured with."""


class Backend(ABC):
    """One device: its arrays, and what computes on them. `Backend(number)` opens a device."""

    array_module: Any
    """A module with numpy's functions for this device's arrays: the first argument of every kernel."""
    dialect: str = ""
    """The C dialect of generated kernels, `cuda` or `opencl`; then the array module has `RawModule`, as CuPy has."""
    writes: bool = False
    """Whether functions of the array module, and kernels' `into`, write into memory that they are given, and views of
    bytes can begin anywhere: then a plan finds a place for each result, see `runtime.memory`."""
    graphs: bool = False
    """Whether queued work can be captured as a graph, see `record`."""
    lacks: frozenset[str] = frozenset()
    """Names of dtypes in which generated kernels cannot compute."""
    views: bool = True
    """Whether an array in another order of dimensions is a view; else it is a copy in the order of its elements."""
    family: str = ""
    """Devices of one family copy to each other directly, others through the host; the kind of device if empty."""
    dlpack_device: tuple[int, int]
    """Device type and number, as DLPack counts them."""
    has_tf32: bool = False
    """Whether `matmul_precision("high")` changes its float32 products."""
    memory: DeviceMemory | None = None
    """How to reach the device's memory from other ranks; None where arrays lie in the host's, or go through it."""
    queues: bool = False
    """Whether work is queued on the current stream of `memory`, and done while the host goes on, so that one thread can
    keep several devices busy. Any other device has a thread of its own in a plan over several devices: its kernels and
    copies run there, while `from_host` and `to_host` may be called on other threads, too."""
    _way_out: Stream | None = None

    @classmethod
    def count(cls) -> int:
        """How many devices of this kind there are; `DeviceError` says what is missing and how to mend it."""
        return 1

    @classmethod
    def refused(cls) -> Mapping[str, str]:
        """Devices of this kind that are seen and cannot be used, by their names, and why."""
        return {}

    def runs(self, op: str, inputs: Sequence[Any], attrs: tuple[Any, ...]) -> bool:
        """Whether the op's kernel in the registry runs on `array_module`; `inputs` have shapes and dtypes."""
        return True

    def captures(self, op: str, inputs: Sequence[Any], attrs: tuple[Any, ...]) -> bool:
        """Whether a graph may hold the op: its kernel queues work, always the same, and waits for nothing.

        Elementwise ops and regions always may, on a device with `graphs`. What this says of others is a promise about
        the values of a graph that is launched again, not about the capture: an op that fails in one is left out.
        """
        return False

    def record(self, work: Callable[[], None]) -> Recording:
        """Captures what `work` queues on this device, which is not done now. What `work` raises is raised here."""
        raise DeviceError(f"{type(self).__name__} has no graphs")

    @abstractmethod
    def holds(self, array: Any) -> bool:
        """Whether an array lies on this device."""

    @abstractmethod
    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """The array's values in host memory, computed and arrived; shares memory where it can."""

    @abstractmethod
    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        """The values of a host array on this device. The host array may be written as soon as this returns."""

    @abstractmethod
    def settle(self, value: Any) -> Any:
        """A kernel's result as an array that can outlive the plan: contiguous, and pinning no larger buffer."""

    def address(self, array: Any) -> int:
        """Where an array begins, as the device counts."""
        if self.memory is None:
            raise DeviceError(f"arrays of {type(self).__name__} have no address; override `address` where `writes`")
        return self.memory.address(array)

    def owns(self, array: Any) -> bool:
        """Whether the array is all of its memory, and no view of another's. False where the module has no `ndarray`."""
        kind: Any = getattr(self.array_module, "ndarray", ())
        return isinstance(array, kind) and bool(array.flags.owndata)

    def from_peer(self, peer: Backend, array: Any) -> Any:
        """The values of an array of another device of the same family on this one, without a stop at the host."""
        if self.memory is None or peer.memory is None:
            return self.from_host(peer.to_host(array))
        with peer.running():
            source = peer.settle(array)
            made = peer.memory.stream().record()
        with self.running():
            copied = self.array_module.empty(source.shape, dtype=source.dtype)
            stream = self.memory.stream()
            stream.wait_event(made)
            self.memory.copy_from_peer(copied, peer.memory, source)
            arrived = stream.record()
        with peer.running():
            # The source may be let go, and its memory used again: by what comes after the copy.
            peer.memory.stream().wait_event(arrived)
        return copied

    def depart(self, array: Any) -> Departure:
        """Queues the copy of an array to pinned memory of the host; for a backend that `queues`.

        It goes on beside what is queued on the current stream from now on.
        """
        memory = self.memory
        if memory is None:
            raise TypeError(f"{type(self).__name__} queues nothing: use to_host")
        with self.running():
            source = self.settle(array)
            made = memory.stream().record()
            host = memory.pinned(source.nbytes)
            if self._way_out is None:
                self._way_out = memory.new_stream()
            with memory.running(self._way_out):
                self._way_out.wait_event(made)
                memory.copy_to_host(host, source)
                arrived = self._way_out.record()
        return Departure(memory, host.view(source.dtype).reshape(source.shape), source, arrived)

    def wait(self) -> None:
        """Returns when all that was queued on the device is done."""
        if self.memory is not None:
            with self.running():
                self.memory.stream().synchronize()

    def properties(self, device: str) -> DeviceProperties:
        """What the device says of itself. `device` is the name it goes by."""
        return DeviceProperties(device, type(self).__name__, "", 0)

    def dlpack(self, array: Any, **options: Any) -> Any:
        """The array as a DLPack capsule."""
        return array.__dlpack__(**options)

    def running(self) -> AbstractContextManager[Any]:
        """The context in which kernels run: current device, floating-point warnings."""
        return nullcontext()

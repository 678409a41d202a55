"""The memory of a device, as far as those who move bytes between ranks need to know it.

Streams and events are those of CuPy, or behave like them: what is queued on a stream is done in order; an event that
was recorded on a stream is reached when all that was queued before it is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

Host = np.ndarray[Any, Any]


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Waits until it is reached."""


class Stream(Protocol):
    """A queue of work of a device."""

    ptr: int

    def synchronize(self) -> None:
        """Waits until all that was queued is done."""

    def record(self) -> Event:
        """The place after all that was queued until now."""

    def wait_event(self, event: Event) -> None:
        """Lets what is queued from now on begin only when the event, of any stream, is reached."""


class DeviceMemory(ABC):
    """The memory of one device. Arrays are contiguous, and of the array module; copies do not wait for anything."""

    array_module: Any
    device: str
    """The device's name, such as `cuda:0`."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Host:
        """New bytes of host memory that copies from and to the device can go on in while the host does other things."""

    def at_least(self, pinned: Host, nbytes: int) -> Host:
        """Pinned memory of so many bytes: `pinned` if that has as many, else new one, no larger than it takes.

        The sizes are powers of two, so that what grows with each array that it is used for is not made anew each time.
        """
        return pinned if pinned.nbytes >= nbytes else self.pinned(1 << max(nbytes - 1, 4095).bit_length())

    @abstractmethod
    def copy_to_host(self, host: Host, array: Any) -> None:
        """Queues the copy of an array into pinned memory of as many bytes, on the current stream."""

    @abstractmethod
    def copy_to_device(self, array: Any, host: Host) -> None:
        """Queues the copy of pinned memory into an array of as many bytes, on the current stream."""

    @abstractmethod
    def copy_from_peer(self, array: Any, peer: DeviceMemory, source: Any) -> None:
        """Queues the copy of an array of another device of this process into one of this device, on the current stream.

        Directly between the two where they can, else through the host, as the driver decides.
        """

    @abstractmethod
    def stream(self) -> Stream:
        """The current stream of this thread: the one on which kernels run."""

    @abstractmethod
    def new_stream(self) -> Stream:
        """Another stream, which waits for no other."""

    @abstractmethod
    def running(self, stream: Stream) -> AbstractContextManager[Any]:
        """The context in which the device and a stream are this thread's current ones."""

    @abstractmethod
    def address(self, array: Any) -> int:
        """Where an array begins, as the device counts."""

    @abstractmethod
    def identity(self) -> str:
        """What tells the device from all others of its machine, whatever numbers processes give them; "" if nothing."""

    def nccl(self) -> Any:
        """The module `cupy.cuda.nccl`, or one like it; None where there is none."""
        return None

"""The interface between the runtime and a kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from fuel_parallel.backends.device_memory import DeviceMemory


class Backend(ABC):
    """Arrays of one device and the array module that computes on them."""

    array_module: Any
    """A module with numpy's functions for this device's arrays: the first argument of every kernel."""
    dlpack_device: tuple[int, int]
    """Device type and number, as DLPack counts them."""
    memory: DeviceMemory | None = None
    """How to reach the device's memory; None where arrays lie in the host's."""

    @abstractmethod
    def holds(self, array: Any) -> bool:
        """Whether an array lies on this device."""

    @abstractmethod
    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """The array's values in host memory, computed and arrived; shares memory where it can."""

    @abstractmethod
    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        """The values of a host array on this device."""

    @abstractmethod
    def settle(self, value: Any) -> Any:
        """A kernel's result as an array that can outlive the plan: contiguous, and pinning no larger buffer."""

    def owns(self, array: Any) -> bool:
        """Whether the array is all of its memory, and no view of another's."""
        return isinstance(array, self.array_module.ndarray) and bool(array.flags.owndata)

    def dlpack(self, array: Any, **options: Any) -> Any:
        """The array as a DLPack capsule."""
        return array.__dlpack__(**options)

    def running(self) -> AbstractContextManager[Any]:
        """The context in which kernels run: current device, floating-point warnings."""
        return nullcontext()

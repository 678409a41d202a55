"""The CPU, by numpy."""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from fuel_parallel.backends.backend import Backend, DeviceProperties


class NumpyBackend(Backend):
    """Host arrays."""

    array_module = np
    dlpack_device = (1, 0)
    writes = True

    def __init__(self, number: int = 0) -> None:
        """There is one device: threads are numpy's business."""
        _keep_freed_memory()

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def holds(self, array: Any) -> bool:
        return isinstance(array, np.ndarray | np.generic)

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        return array

    def properties(self, device: str) -> DeviceProperties:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return DeviceProperties(device, f"NumPy {np.__version__}", platform.machine(), memory)

    def settle(self, value: Any) -> Any:
        array = np.asarray(value)
        base = array.base
        if not array.flags.c_contiguous or (isinstance(base, np.ndarray) and base.nbytes > array.nbytes):
            # order="C" and a copy: the view's base may be many times as large as what is kept.
            return array.copy(order="C")
        return array

    def dlpack(self, array: Any, **options: Any) -> Any:
        # Only the newer capsules can say that memory is not to be written.
        if options.get("max_version", (0, 0)) < (1, 0):
            return array.__dlpack__(**options)
        view = array.view()
        view.flags.writeable = False
        return view.__dlpack__(**options)

    def running(self) -> AbstractContextManager[Any]:
        # Infinities and NaNs are values here, as the array API standard wants; numpy's warnings would name our lines.
        return np.errstate(all="ignore")


def _keep_freed_memory() -> None:
    """Lets the C library keep what arrays of up to 32 MiB leave behind, for the next ones.

    glibc gives free memory back to the system beyond a limit, which begins at 128 KiB and follows the largest array
    that was ever freed. A script that has freed none pays a page fault for every 4 KiB of every array: an all-reduce of
    256 KiB took five times as long. What is freed here was never touched, and costs nothing.
    """
    np.empty((32 << 20) - 8192, dtype=np.uint8)

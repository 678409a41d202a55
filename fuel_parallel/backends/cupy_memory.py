"""The memory of a CUDA or ROCm device, by CuPy."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from fuel_parallel.backends.device_memory import DeviceMemory, Host, Stream


class CupyMemory(DeviceMemory):
    """The memory of one GPU."""

    def __init__(self, device: str = "cuda:0") -> None:
        import cupy

        self.array_module = cupy
        self.device = device
        self._number = int(device.partition(":")[2] or 0)

    def pinned(self, nbytes: int) -> Host:
        """See `DeviceMemory.pinned`."""
        if not nbytes:
            return np.empty(0, np.uint8)
        return np.frombuffer(self.array_module.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def copy_to_host(self, host: Host, array: Any) -> None:
        """See `DeviceMemory.copy_to_host`."""
        if array.nbytes:
            array.data.copy_to_host_async(ctypes.c_void_p(host.ctypes.data), array.nbytes, self.stream())

    def copy_to_device(self, array: Any, host: Host) -> None:
        """See `DeviceMemory.copy_to_device`."""
        if array.nbytes:
            array.data.copy_from_host_async(ctypes.c_void_p(host.ctypes.data), array.nbytes, self.stream())

    def copy_from_peer(self, array: Any, peer: DeviceMemory, source: Any) -> None:
        """See `DeviceMemory.copy_from_peer`."""
        runtime = self.array_module.cuda.runtime
        other = int(peer.device.partition(":")[2] or 0)
        if other != self._number and runtime.deviceCanAccessPeer(self._number, other):
            with contextlib.suppress(runtime.CUDARuntimeError):  # it is enabled already
                runtime.deviceEnablePeerAccess(other)
        runtime.memcpyPeerAsync(array.data.ptr, self._number, source.data.ptr, other, array.nbytes, self.stream().ptr)

    def stream(self) -> Stream:
        """See `DeviceMemory.stream`."""
        stream: Stream = self.array_module.cuda.get_current_stream()
        return stream

    def new_stream(self) -> Stream:
        """See `DeviceMemory.new_stream`."""
        with self.array_module.cuda.Device(self._number):
            stream: Stream = self.array_module.cuda.Stream(non_blocking=True)
            return stream

    def running(self, stream: Stream) -> AbstractContextManager[Any]:
        """See `DeviceMemory.running`."""

        @contextmanager
        def both() -> Iterator[None]:
            with self.array_module.cuda.Device(self._number), stream:  # type: ignore[attr-defined]
                yield

        return both()

    def address(self, array: Any) -> int:
        """See `DeviceMemory.address`."""
        return int(array.data.ptr)

    def identity(self) -> str:
        """See `DeviceMemory.identity`. Parts of one GPU (MIG) have it in common: NCCL takes them for one."""
        return str(self.array_module.cuda.runtime.deviceGetPCIBusId(self._number))

    def nccl(self) -> Any:
        """See `DeviceMemory.nccl`."""
        try:
            from cupy.cuda import nccl
        except ImportError:
            return None
        return nccl if getattr(nccl, "available", True) else None

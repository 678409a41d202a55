"""CUDA and ROCm devices, by CuPy."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from fuel_parallel.backends.backend import Backend
from fuel_parallel.backends.cupy_memory import CupyMemory
from fuel_parallel.errors import ArgumentError


def visible_devices() -> list[str]:
    """Device strings of the GPUs that CuPy sees; empty without CuPy, driver or GPU."""
    try:
        kind, count = _probe()
    except ArgumentError:
        return []
    return [f"{kind}:{i}" for i in range(count)]


def _probe() -> tuple[str, int]:
    """The vendor and the number of GPUs, or an error that says what is missing."""
    if importlib.util.find_spec("cupy") is None:
        raise ArgumentError("no GPU backend: CuPy is missing; pip install 'fuel-parallel[cuda13]' (or cuda12, rocm)")
    import cupy

    kind = "rocm" if cupy.cuda.runtime.is_hip else "cuda"
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as reason:
        raise ArgumentError(f"no {kind} device: {reason}") from None
    return kind, count


class CupyBackend(Backend):
    """Arrays of one GPU."""

    def __init__(self, kind: str, number: int) -> None:
        found, count = _probe()
        if found != kind or number >= count:
            there = ", ".join(f"{found}:{i}" for i in range(count)) or "none"
            raise ArgumentError(f"device {kind}:{number} is not there; visible GPUs: {there}")
        import cupy

        self.array_module = cupy
        self.number = number
        self.dlpack_device = (10 if kind == "rocm" else 2, number)
        self.memory = CupyMemory(f"{kind}:{number}")

    def holds(self, array: Any) -> bool:
        return isinstance(array, self.array_module.ndarray) and array.device.id == self.number

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        # get() waits for the current stream, which is the one kernels run on.
        host: np.ndarray[Any, Any] = array.get()
        return host

    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        with self.running():
            return self.array_module.asarray(array)

    def settle(self, value: Any) -> Any:
        return self.array_module.ascontiguousarray(value)

    def running(self) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = self.array_module.cuda.Device(self.number)
        return device

"""CUDA and ROCm devices, by CuPy."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from fuel_parallel.backends.backend import Backend, DeviceProperties
from fuel_parallel.backends.cublas import CupyWithProducts
from fuel_parallel.backends.cupy_memory import CupyMemory
from fuel_parallel.errors import DeviceError


def _probe() -> tuple[str, int]:
    """The vendor and the number of GPUs, or an error that says what is missing."""
    if importlib.util.find_spec("cupy") is None:
        raise DeviceError("CuPy is not installed; pip install 'fuel-parallel[cuda13]' (or cuda12, rocm)")
    try:
        import cupy
    except Exception as reason:  # a broken installation raises anything from ImportError to OSError
        raise DeviceError(f"CuPy cannot be imported: {type(reason).__name__}: {reason}") from reason
    kind = "rocm" if cupy.cuda.runtime.is_hip else "cuda"
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as reason:
        raise DeviceError(f"the driver shows no device: {reason}") from None
    return kind, count


class CupyBackend(Backend):
    """Arrays of one GPU. CUDA and ROCm differ in name, and in who multiplies: CuPy is built for one or the other."""

    kind: ClassVar[str]
    dialect = "cuda"
    queues = True

    @classmethod
    def count(cls) -> int:
        found, count = _probe()
        if found != cls.kind:
            raise DeviceError(
                f"the CuPy that is installed is built for {found}, not {cls.kind}; "
                f"pip install 'fuel-parallel[{'rocm' if cls.kind == 'rocm' else 'cuda13'}]' into a fresh environment"
            )
        if not count:
            raise DeviceError("the driver shows no device; are they hidden by CUDA_VISIBLE_DEVICES or the like?")
        return count

    def __init__(self, number: int) -> None:
        import cupy

        self.array_module = cupy
        self.number = number
        self.dlpack_device = (10 if self.kind == "rocm" else 2, number)
        self.memory = CupyMemory(f"{self.kind}:{number}")

    def holds(self, array: Any) -> bool:
        return isinstance(array, self.array_module.ndarray) and array.device.id == self.number

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        # get() waits for the current stream, which is the one kernels run on.
        host: np.ndarray[Any, Any] = array.get()
        return host

    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        with self.running():
            return self.array_module.asarray(array)

    def properties(self, device: str) -> DeviceProperties:
        found = self.array_module.cuda.runtime.getDeviceProperties(self.number)
        name = found["name"]
        vendor = "AMD" if self.kind == "rocm" else "NVIDIA"
        return DeviceProperties(
            device, name.decode() if isinstance(name, bytes) else str(name), vendor, int(found["totalGlobalMem"])
        )

    def settle(self, value: Any) -> Any:
        return self.array_module.ascontiguousarray(value)

    def running(self) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = self.array_module.cuda.Device(self.number)
        return device


class CudaBackend(CupyBackend):
    """NVIDIA's GPUs, with matrix products by cuBLAS itself."""

    kind = "cuda"

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.array_module = _with_products()
        capability = self.array_module.cuda.Device(number).compute_capability
        self.has_tf32 = int(capability) >= 80


@lru_cache(maxsize=1)
def _with_products() -> CupyWithProducts:
    """One for all devices, as CuPy is."""
    import cupy

    return CupyWithProducts(cupy)


class RocmBackend(CupyBackend):
    """AMD's GPUs."""

    kind = "rocm"

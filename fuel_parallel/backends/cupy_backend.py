"""CUDA and ROCm devices, by CuPy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from fuel_parallel.backends.backend import Backend, DeviceProperties
from fuel_parallel.backends.cublas import CupyWithProducts
from fuel_parallel.backends.cuda_graph import CudaGraph
from fuel_parallel.backends.cupy_memory import CupyMemory
from fuel_parallel.backends.staging import Staging
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


CAPTURED = frozenset({
    "all", "any", "arange", "argmax", "argmin", "attention", "attention_backward", "broadcast_to", "concat",
    "contiguous", "cumulative_prod", "cumulative_sum", "eye", "full", "index", "index_add", "index_update", "linspace",
    "log_softmax", "max", "mean", "min", "nll", "nll_backward", "normalize", "permute_dims", "pick", "prod",
    "random_uniform", "reshape", "row_dot", "scale_and_subtract", "slice", "slice_update", "softmax", "stop_gradient",
    "sum", "tril", "triu", "unpick", "unslice",
})  # fmt: skip
"""Ops that launch CuPy's own kernels or ours, and no library's, from shapes and attributes alone.

CuPy keeps cuBLAS, cuSOLVER and cuRAND out of captures, plans of cuFFT hold memory that is not the graph's, and Thrust
waits. A few forms are refused by CuPy though their op is listed, such as a `concat` of more than eight small arrays,
for which it copies a table to the device: a plan goes around those.
"""


class CupyBackend(Backend):
    """Arrays of one GPU. CUDA and ROCm differ in name, and in who multiplies: CuPy is built for one or the other."""

    kind: ClassVar[str]
    dialect = "cuda"
    queues = True
    writes = True

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
        self.staging = Staging(self.memory)

    def holds(self, array: Any) -> bool:
        return isinstance(array, self.array_module.ndarray) and array.device.id == self.number

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        host = np.empty(array.shape, array.dtype)
        with self.running():
            # On the current stream, which is the one kernels run on.
            self.staging.to_host(host, array if array.flags.c_contiguous else array.copy(order="C"))
        return host

    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        with self.running():
            result = self.array_module.empty(array.shape, dtype=array.dtype)
            self.staging.to_device(result, array)
        return result

    def properties(self, device: str) -> DeviceProperties:
        found = self.array_module.cuda.runtime.getDeviceProperties(self.number)
        name = found["name"]
        vendor = "AMD" if self.kind == "rocm" else "NVIDIA"
        return DeviceProperties(
            device, name.decode() if isinstance(name, bytes) else str(name), vendor, int(found["totalGlobalMem"])
        )

    def settle(self, value: Any) -> Any:
        # Not ascontiguousarray: that gives an array without dimensions one.
        holds_more = value.base is not None and value.base.nbytes > value.nbytes
        if not holds_more and value.flags.c_contiguous:
            return value
        with self.running():  # CuPy copies to the device that is current
            return value.copy(order="C")

    def running(self) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = self.array_module.cuda.Device(self.number)
        return device


class CudaBackend(CupyBackend):
    """NVIDIA's GPUs, with matrix products by cuBLAS itself. CuPy captures graphs of CUDA only."""

    kind = "cuda"
    graphs = True

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.array_module = _with_products()
        capability = self.array_module.cuda.Device(number).compute_capability
        self.has_tf32 = int(capability) >= 80

    def captures(self, op: str, inputs: Sequence[Any], attrs: tuple[Any, ...]) -> bool:
        return op in CAPTURED or (op == "matmul" and self.array_module.products.multiplies(inputs[0].dtype))

    def record(self, work: Callable[[], None]) -> CudaGraph:
        with self.running():
            self.array_module.products.prepare()
            return CudaGraph(self.array_module, work)


@lru_cache(maxsize=1)
def _with_products() -> CupyWithProducts:
    """One for all devices, as CuPy is."""
    import cupy

    return CupyWithProducts(cupy)


class RocmBackend(CupyBackend):
    """AMD's GPUs."""

    kind = "rocm"

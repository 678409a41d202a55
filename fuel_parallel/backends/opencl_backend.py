"""OpenCL devices, by pyopencl: GPUs of any vendor, and CPUs.

Devices are numbered through all platforms, Oclgrind's simulator last. One that cannot compile a kernel is left out,
with the reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from fuel_parallel.backends.backend import Backend, DeviceProperties
from fuel_parallel.errors import DeviceError

MOVING = frozenset({"reshape", "permute_dims", "broadcast_to", "slice", "unslice", "slice_update", "concat"})
"""Ops that move elements whatever their dtype."""

COMPUTED = frozenset({"matmul", "index_add", "cumulative_sum", "cumulative_prod"})
"""Ops that have a kernel of their own, in the dtypes in which the device computes."""

PASSING = frozenset({"copy", "item", "stop_gradient", "region"})
"""Ops that move nothing, or know themselves what to do."""


class OpenClBackend(Backend):
    """Arrays of one OpenCL device.

    Elementwise ops and reductions are generated; the ops named here move elements or multiply matrices; all others, and
    complex numbers, are computed on the host.
    """

    dialect = "opencl"
    views = False

    @classmethod
    def count(cls) -> int:
        """See `Backend.count`."""
        found, refused = _devices()
        if not found:
            raise DeviceError("; ".join(f"{name}: {reason}" for name, reason in refused.items()))
        return len(found)

    @classmethod
    def refused(cls) -> Mapping[str, str]:
        """See `Backend.refused`."""
        return _devices()[1]

    def __init__(self, number: int) -> None:
        from fuel_parallel.backends.opencl_arrays import OpenClModule

        device = _devices()[0][number]
        self.device = device
        self.array_module = OpenClModule(device)
        self.dlpack_device = (4, number)
        # A context is of one device, and its buffers are not another's.
        self.family = f"opencl:{number}"
        self.lacks = frozenset({"complex64", "complex128", *(() if device.double_fp_config else ("float64",))})

    def runs(self, op: str, inputs: Sequence[Any], attrs: tuple[Any, ...]) -> bool:
        """See `Backend.runs`."""
        if op in PASSING or op in MOVING:
            return True
        if op == "index":
            return len(attrs[0]) == 1
        if op == "index_add" and (len(attrs[1]) > 1 or inputs[0].dtype.kind == "b"):
            return False
        return op in COMPUTED and not any(x.dtype.name in self.lacks for x in inputs)

    def holds(self, array: Any) -> bool:
        return getattr(array, "module", None) is self.array_module

    def owns(self, array: Any) -> bool:
        """See `Backend.owns`."""
        return False  # an array may be a view, and does not know it

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        host: np.ndarray[Any, Any] = array.get()
        return host

    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        return self.array_module.put(array)

    def settle(self, value: Any) -> Any:
        # Its elements are laid in order now: while it is turned it holds what belongs to another value.
        return self.array_module.asarray(value).reshape(value.shape)

    def wait(self) -> None:
        self.array_module.queue.finish()

    def properties(self, device: str) -> DeviceProperties:
        d = self.device
        return DeviceProperties(device, f"{d.name.strip()}, {d.platform.name}", d.vendor, int(d.global_mem_size))

    def dlpack(self, array: Any, **options: Any) -> Any:
        raise DeviceError("an OpenCL tensor has no DLPack capsule that others read; move it first: x.to('cpu')")


_PROBE = "__kernel void probe(__global int* out) { out[get_global_id(0)] = 1; }"


@lru_cache(maxsize=1)
def _devices() -> tuple[list[Any], dict[str, str]]:
    """The devices that compile kernels, and for the others the reason."""
    if importlib.util.find_spec("pyopencl") is None:
        return [], {"pyopencl": "not installed; pip install 'fuel-parallel[opencl]'"}
    try:
        import pyopencl as cl

        platforms = cl.get_platforms()
    except Exception as reason:  # a loader without any driver raises an error of its own
        return [], {"drivers": f"there is none ({_brief(reason)}); install the vendor's, or pocl for CPUs"}
    found: list[Any] = []
    refused: dict[str, str] = {}
    for platform in sorted(platforms, key=lambda platform: platform.name == "Oclgrind"):
        for device in _devices_of(platform, refused):
            try:
                cl.Program(cl.Context([device]), _PROBE).build()
            except Exception as reason:  # of many kinds, by vendor
                refused[f"{device.name.strip()}, {platform.name}"] = f"cannot compile a kernel: {_brief(reason)}"
            else:
                found.append(device)
    return found, refused if found or refused else {"drivers": "they show no device"}


def _devices_of(platform: Any, refused: dict[str, str]) -> list[Any]:
    try:
        return list(platform.get_devices())
    except Exception as reason:  # a platform without devices is an error to some loaders
        refused[platform.name] = f"shows no device: {_brief(reason)}"
        return []


def _brief(reason: Exception) -> str:
    """The line of a build log that says what is wrong."""
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error")), lines[0] if lines else type(reason).__name__)

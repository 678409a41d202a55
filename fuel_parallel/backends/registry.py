"""Kinds of devices: those of this library, and those that other packages register by entry point."""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points

from fuel_parallel.backends.backend import Backend
from fuel_parallel.errors import DeviceError

GROUP = "fuel_parallel.backends"
"""The group of entry points."""

OWN = {
    "cpu": "fuel_parallel.backends.numpy_backend:NumpyBackend",
    "cuda": "fuel_parallel.backends.cupy_backend:CudaBackend",
    "rocm": "fuel_parallel.backends.cupy_backend:RocmBackend",
    "opencl": "fuel_parallel.backends.opencl_backend:OpenClBackend",
}
"""The kinds of this library. Nothing is imported before it is asked for."""


def kinds() -> list[str]:
    """All kinds of devices that have a backend, whether or not one is there."""
    return [*OWN, *(name for name in sorted(_registered()) if name not in OWN)]


def backend_class(kind: str) -> type[Backend]:
    """The backend of a kind of device; `DeviceError` if there is none, or it cannot be imported."""
    if kind in OWN:
        module, _, name = OWN[kind].partition(":")
        found: type[Backend] = getattr(importlib.import_module(module), name)
        return found
    entry = _registered().get(kind)
    if entry is None:
        raise DeviceError(f"unknown kind of device {kind!r}; expected one of {', '.join(kinds())}")
    try:
        loaded = entry.load()
    except Exception as reason:  # whatever the package raises while it is imported
        raise DeviceError(
            f"the backend of {kind!r}, {entry.value}, cannot be loaded: {type(reason).__name__}: {reason}; "
            "mend or uninstall the package that registers it"
        ) from reason
    if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
        raise DeviceError(
            f"the backend of {kind!r}, {entry.value}, is {loaded!r}; expected a subclass of "
            "fuel_parallel.backends.backend.Backend"
        )
    return loaded


@lru_cache(maxsize=1)
def _registered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}

"""What a device can do. A backend is found by the device's name; one that is missing gives a reason, not a crash."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuel_parallel.backends.backend import Backend
from fuel_parallel.backends.device_memory import DeviceMemory
from fuel_parallel.backends.numpy_backend import NumpyBackend
from fuel_parallel.errors import ArgumentError

_cpu = NumpyBackend()
_found: dict[str, Backend] = {"cpu": _cpu}


def backend_of(device: str) -> Backend:
    """The backend of a device string such as `cpu` or `cuda:0`; `ArgumentError` with the reason if there is none."""
    backend = _found.get(device)
    if backend is None:
        backend = _found[device] = _open(device)
    return backend


def check_device(device: str) -> str:
    """The device string itself, if the device can be used."""
    if not isinstance(device, str):
        raise ArgumentError(f"a device is named by a string such as 'cpu' or 'cuda:0', not {device!r}")
    backend_of(device)
    return device


def move(array: Any, device: str) -> Any:
    """An array of any device on another one, through host memory."""
    host = array if isinstance(array, np.ndarray | np.generic) else array.get()
    return backend_of(device).from_host(np.asarray(host))


def memory_of(array: Any) -> DeviceMemory | None:
    """The device memory that an array lies in; None for the host's."""
    for backend in _found.values():
        if backend.holds(array):
            return backend.memory
    raise ArgumentError(f"a {type(array).__module__}.{type(array).__qualname__} lies on no device of this library")


def available_devices() -> list[str]:
    """The devices that can be used now, `cpu` first."""
    from fuel_parallel.backends.cupy_backend import visible_devices

    return ["cpu", *visible_devices()]


def device_of_dlpack(place: tuple[int, int]) -> str:
    """The device string for DLPack's device type and number."""
    for device in available_devices():
        if backend_of(device).dlpack_device == tuple(place):
            return device
    raise ArgumentError(
        f"DLPack device {tuple(place)} is none of {', '.join(available_devices())}; move the array to one of them first"
    )


def _open(device: str) -> Backend:
    kind, _, number = device.partition(":")
    if kind in ("cuda", "rocm") and (number.isdigit() or not number):
        from fuel_parallel.backends.cupy_backend import CupyBackend

        return CupyBackend(kind, int(number or 0))
    raise ArgumentError(f"unknown device {device!r}; expected one of {', '.join(available_devices())}")

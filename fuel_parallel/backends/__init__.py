"""What a device can do. A backend is found by the device's name; one that is missing gives a reason, not a crash.

Devices are named by kind and number: `cpu`, `cuda:1`, `rocm:0`, `opencl:0`. A kind without a number is this rank's
device of that kind: ranks of a machine take turns over the devices that they see.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fuel_parallel.backends.backend import Backend
from fuel_parallel.backends.device_memory import DeviceMemory
from fuel_parallel.backends.listing import Devices
from fuel_parallel.backends.numpy_backend import NumpyBackend
from fuel_parallel.backends.registry import backend_class, kinds
from fuel_parallel.environment import detect
from fuel_parallel.errors import DeviceError

_cpu = NumpyBackend()
_found: dict[str, Backend] = {"cpu": _cpu}


def backend_of(device: str) -> Backend:
    """The backend of a device that `check_device` has named; `DeviceError` with the reason if there is none."""
    backend = _found.get(device)
    if backend is None:
        name = check_device(device)
        backend = _found[name]
    return backend


def check_device(device: str) -> str:
    """The full name of a device that can be used, else `DeviceError`: `cuda` becomes this rank's `cuda:1`.

    >>> check_device("cpu")
    'cpu'
    """
    if not isinstance(device, str):
        raise DeviceError(f"a device is named by a string such as 'cpu' or 'cuda:0', not {device!r}")
    if device in _found:
        return device
    kind, colon, digits = device.partition(":")
    if kind not in kinds() or (colon and not digits.isdecimal()):
        raise DeviceError(
            f"unknown device {device!r}; expected a kind ({', '.join(kinds())}) and a number, as in 'cuda:0'; "
            f"these can be used: {', '.join(available_devices())}"
        )
    backend = backend_class(kind)
    count = backend.count()
    number = int(digits) if colon else _local_rank() % count
    name = "cpu" if kind == "cpu" and number == 0 else f"{kind}:{number}"
    if number >= count:
        there = ", ".join(f"{kind}:{n}" for n in range(count)) if kind != "cpu" else "cpu"
        raise DeviceError(f"device {device!r} is not there; expected one of {there}")
    if name not in _found:
        _found[name] = backend(number)  # type: ignore[call-arg]
    return name


def default_device() -> str:
    """This rank's accelerator, or `cpu` where there is none: the first kind of CUDA and ROCm that has a device.

    Ranks of a machine take turns over the devices that they see; where `fuelrun` placed them, each sees its own.
    OpenCL is left out, for its device may be the CPU itself.
    """
    for kind in ("cuda", "rocm"):
        try:
            return check_device(kind)
        except DeviceError:
            continue
    return "cpu"


def devices() -> Devices:
    """The devices that can be used now, and for each kind without any what is missing.

    >>> "cpu" in devices()
    True
    """
    found, missing = [], {}
    for kind in kinds():
        try:
            names = _names(kind)
            found += [backend_of(name).properties(name) for name in names]
            missing.update({f"{kind} {one}": reason for one, reason in backend_class(kind).refused().items()})
        except DeviceError as reason:
            missing[kind] = str(reason)
    return Devices(tuple(found), missing)


def available_devices() -> list[str]:
    """The names of the devices that can be used now, `cpu` first."""
    names = []
    for kind in kinds():
        try:
            names += _names(kind)
        except DeviceError:
            continue
    return names


def _names(kind: str) -> list[str]:
    return ["cpu"] if kind == "cpu" else [f"{kind}:{number}" for number in range(backend_class(kind).count())]


def _local_rank() -> int:
    claim = detect()
    return int(claim.rank_variables().get("LOCAL_RANK", 0)) if claim else 0


# Where arrays are, and how they move.


def hops(source: str, device: str) -> list[str]:
    """The devices on the way from one to another, the last included: through the host between two families."""
    if source == device:
        return []
    if "cpu" in (source, device) or family_of(source) == family_of(device):
        return [device]
    return ["cpu", device]


def family_of(device: str) -> str:
    """The family of a device: within one, copies are direct."""
    return backend_of(device).family or device.partition(":")[0]


def move(array: Any, device: str) -> Any:
    """An array of any device on another one: one hop."""
    source, target = device_of(array), backend_of(device)
    if source == "cpu":
        return target.from_host(np.asarray(array))
    peer = backend_of(source)
    if family_of(source) == family_of(device):
        return target.from_peer(peer, array)
    with peer.running():
        host = peer.to_host(array)
    return target.from_host(host)


def memory_of(array: Any) -> DeviceMemory | None:
    """The device memory that an array lies in; None for the host's."""
    return backend_of(device_of(array)).memory


def device_of(array: Any) -> str:
    """The name of the device that an array lies on."""
    for name, backend in _found.items():
        if backend.holds(array):
            return name
    raise DeviceError(f"a {type(array).__module__}.{type(array).__qualname__} lies on no device of this library")


def device_of_dlpack(place: tuple[int, int]) -> str:
    """The device string for DLPack's device type and number."""
    for device in available_devices():
        if backend_of(device).dlpack_device == tuple(place):
            return device
    raise DeviceError(
        f"DLPack device {tuple(place)} is none of {', '.join(available_devices())}; move the array to one of them first"
    )

"""NVIDIA's GPUs, through NVML: memory, NVLinks and MIG, without starting CUDA."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from typing import Any

from fuel_parallel.topology import rates
from fuel_parallel.topology.model import DeviceInfo, DeviceKind, Interconnect, Switch
from fuel_parallel.topology.probe import pci
from fuel_parallel.topology.sysfs import Sysfs
from fuel_parallel.topology.topology import DeviceTopology

Nvml = Any
"""The module `pynvml`, of nvidia-ml-py."""

MOST_LINKS = 18


def add_gpus(t: DeviceTopology, sysfs: Sysfs, node: str, nvml: Nvml | None) -> None:
    """Adds the GPUs that `CUDA_VISIBLE_DEVICES` leaves, numbered as CUDA numbers them for this process."""
    nvml = nvml or _installed()
    if nvml is None:
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return  # no driver, or no GPU
    try:
        _add_all(t, sysfs, node, nvml)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _installed() -> Nvml | None:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _add_all(t: DeviceTopology, sysfs: Sysfs, node: str, nvml: Nvml) -> None:
    prefix = f"{node}/" if node else ""
    handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
    names = {}
    for number, index in enumerate(visible(len(handles), [_text(nvml.nvmlDeviceGetUUID(h)) for h in handles])):
        handle = handles[index]
        bus = pci.normal(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
        model = _text(nvml.nvmlDeviceGetName(handle))
        part = names[bus] = f"{prefix}cuda:{number}"
        t.add_device(
            DeviceInfo(
                id=part,
                node=node,
                kind=DeviceKind.CUDA,
                name=model,
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                numa=pci.numa_of(sysfs, bus),
                bus=bus,
                cores=sysfs.text(f"{pci.DEVICES}/{bus}/local_cpulist"),
                tflops=next((rate for word, rate in rates.TFLOPS.items() if word in model), None),
            )
        )
        pci.attach(t, sysfs, part, bus, node)
    buses = [pci.normal(_text(nvml.nvmlDeviceGetPciInfo(h).busId)) for h in handles]
    for bus, handle in zip(buses, handles, strict=True):
        if bus in names:
            _add_nvlinks(t, node, nvml, handle, names, bus, hidden=frozenset(buses) - names.keys())


def visible(count: int, uuids: list[str]) -> list[int]:
    """The GPUs that CUDA shows, in its order: a list of numbers or of beginnings of UUIDs, which ends at a wrong one.

    >>> visible(4, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
    [0, 1, 2, 3]
    """
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return list(range(count))
    found: list[int] = []
    for word in (w.strip() for w in setting.split(",")):
        matches = [n for n, uuid in enumerate(uuids) if word.startswith("GPU-") and uuid.startswith(word)]
        if word.isascii() and word.isdigit() and int(word) < count:
            matches = [int(word)]
        if len(matches) != 1:
            break
        found.append(matches[0])
    return found


def _add_nvlinks(
    t: DeviceTopology, node: str, nvml: Nvml, handle: Any, names: dict[str, str], bus: str, hidden: frozenset[str]
) -> None:
    """To other GPUs directly; to anything else, which is an NVSwitch, through one switch of the machine.

    `hidden` are the GPUs that this process may not use: a link to one of them is no link to a switch.
    """
    prefix = f"{node}/" if node else ""
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    ends: Counter[str] = Counter()
    for number in range(MOST_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, number):
                ends[pci.normal(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, number).busId))] += 1
        except nvml.NVMLError:
            continue  # no such link
    direct = {names[end]: count for end, count in ends.items() if end in names}
    switched = sum(count for end, count in ends.items() if end not in names and end not in hidden)
    for peer, count in direct.items():
        if t.link(names[bus], peer) is None:
            t.add_link(names[bus], peer, rates.nvlink(major * 10 + minor, count))
    if switched:
        switch = f"{prefix}nvswitch"
        if not t.has(switch):
            t.add_switch(Switch(id=switch, node=node, kind=Interconnect.NVLINK))
        t.add_link(names[bus], switch, rates.nvlink(major * 10 + minor, switched))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

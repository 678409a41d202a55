"""Network cards: what /sys/class/infiniband and /sys/class/net have that is a card, and not made by the kernel."""

from __future__ import annotations

import re

from fuel_parallel.topology.model import Nic
from fuel_parallel.topology.probe import pci
from fuel_parallel.topology.sysfs import Sysfs
from fuel_parallel.topology.topology import DeviceTopology


def add_nics(t: DeviceTopology, sysfs: Sysfs, node: str) -> None:
    """Adds each card once, by its InfiniBand name where it has one, and links it to what it is plugged into."""
    prefix = f"{node}/" if node else ""
    seen: set[str] = set()
    for kind in ("infiniband", "net"):
        for name in sysfs.names(f"sys/class/{kind}"):
            device = sysfs.target(f"sys/class/{kind}/{name}/device")
            if device is None:
                continue  # a bridge, a tunnel, the loopback
            # Virtual machines have cards behind a "virtio" device, which is below the PCI one.
            bus = next((p for p in reversed(device.parts) if re.fullmatch(pci.ADDRESS, p)), "")
            if bus and bus in seen:
                continue
            seen.add(bus)
            part = f"{prefix}nic:{name}"
            rate, numa = _mb_s(sysfs, kind, name), pci.numa_of(sysfs, bus) if bus else None
            t.add_nic(Nic(id=part, node=node, name=name, bus=bus, numa=numa, speed_mb_s=rate))
            if bus:
                pci.attach(t, sysfs, part, bus, node)


def _mb_s(sysfs: Sysfs, kind: str, name: str) -> float | None:
    """MB/s on the wire, of 2**20 bytes; None where the card does not say."""
    if kind == "net":
        megabits = sysfs.number(f"sys/class/net/{name}/speed")
        return megabits * 1e6 / 8 / 2**20 if megabits is not None and megabits > 0 else None
    for port in sysfs.names(f"sys/class/infiniband/{name}/ports", r"\d+"):
        rate = re.match(r"(\d{1,6}(?:\.\d+)?) Gb/sec", sysfs.text(f"sys/class/infiniband/{name}/ports/{port}/rate"))
        if rate:
            return float(rate[1]) * 1e9 / 8 / 2**20
    return None

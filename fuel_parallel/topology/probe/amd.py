"""AMD's GPUs, through the kernel's compute driver (/sys/class/kfd): no library is needed."""

from __future__ import annotations

import os
import re

from fuel_parallel.topology import rates
from fuel_parallel.topology.model import DeviceInfo, DeviceKind, Link
from fuel_parallel.topology.probe import pci
from fuel_parallel.topology.sysfs import Sysfs
from fuel_parallel.topology.topology import DeviceTopology

NODES = "sys/class/kfd/kfd/topology/nodes"
XGMI = 11
"""HSA_IOLINK_TYPE_XGMI, of the kernel's kfd_crat.h."""


def add_gpus(t: DeviceTopology, sysfs: Sysfs, node: str) -> None:
    """Adds the GPUs that `ROCR_VISIBLE_DEVICES` or `HIP_VISIBLE_DEVICES` leave, and their Infinity Fabric links."""
    prefix = f"{node}/" if node else ""
    found = []
    for name in sysfs.names(NODES, r"\d+"):
        facts = _properties(sysfs, f"{NODES}/{name}/properties")
        if facts.get("simd_count", 0) > 0:
            found.append((int(name), facts))
    parts: dict[int, tuple[str, str]] = {}
    for number, index in enumerate(_visible(len(found))):
        kfd, facts = found[index]
        place = facts.get("location_id", 0)
        bus = f"{facts.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
        version = facts.get("gfx_target_version", 0)
        arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        parts[kfd] = f"{prefix}rocm:{number}", arch
        t.add_device(
            DeviceInfo(
                id=f"{prefix}rocm:{number}",
                node=node,
                kind=DeviceKind.ROCM,
                name=arch,
                memory_bytes=_memory(sysfs, kfd),
                numa=pci.numa_of(sysfs, bus),
                bus=bus,
                cores=sysfs.text(f"{pci.DEVICES}/{bus}/local_cpulist"),
            )
        )
        pci.attach(t, sysfs, f"{prefix}rocm:{number}", bus, node)
    for kfd, (part, arch) in parts.items():
        for link in sysfs.names(f"{NODES}/{kfd}/io_links", r"\d+"):
            facts = _properties(sysfs, f"{NODES}/{kfd}/io_links/{link}/properties")
            peer = parts.get(facts.get("node_to", -1))
            if facts.get("type") == XGMI and peer is not None and t.link(part, peer[0]) is None:
                t.add_directed_link(part, peer[0], _fabric(arch, facts))


def _fabric(arch: str, facts: dict[str, int]) -> Link:
    """One link carries `max_bandwidth` MB/s for each of its bundle, if the kernel says so."""
    least, most = facts.get("min_bandwidth", 0), facts.get("max_bandwidth", 0)
    count = max(1, most // least) if least else 1
    return rates.xgmi(arch, count)


def _memory(sysfs: Sysfs, kfd: int) -> int | None:
    """Bytes of all banks of a GPU's own memory (heap types 1 and 2)."""
    total = 0
    for bank in sysfs.names(f"{NODES}/{kfd}/mem_banks", r"\d+"):
        facts = _properties(sysfs, f"{NODES}/{kfd}/mem_banks/{bank}/properties")
        if facts.get("heap_type") in (1, 2):
            total += facts.get("size_in_bytes", 0)
    return total or None


def _properties(sysfs: Sysfs, path: str) -> dict[str, int]:
    return {m[1]: int(m[2]) for m in re.finditer(r"^(\w+) (\d{1,20})$", sysfs.text(path), re.MULTILINE)}


def _visible(count: int) -> list[int]:
    """First ROCR's choice, then HIP's among those."""
    shown = list(range(count))
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        setting = os.environ.get(variable)
        if setting is not None:
            words = [w.strip() for w in setting.split(",")]
            shown = [shown[int(w)] for w in words if w.isascii() and w.isdigit() and int(w) < len(shown)]
    return shown

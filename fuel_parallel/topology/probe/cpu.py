"""Cores, caches and NUMA domains, and how much of them this process may use."""

from __future__ import annotations

import os
import re

from fuel_parallel.partitioning import partition
from fuel_parallel.topology import rates
from fuel_parallel.topology.cores import format_list
from fuel_parallel.topology.model import Cache, DeviceInfo, DeviceKind, Link, NumaDomain
from fuel_parallel.topology.sysfs import DOMAINS, Sysfs
from fuel_parallel.topology.topology import DeviceTopology

CPU = "sys/devices/system/cpu"


def add_cpus(
    t: DeviceTopology, sysfs: Sysfs, node: str, allowed: frozenset[int] | None, ranks: int | None = None
) -> None:
    """Adds the NUMA domains, each with one device `cpu:N` that has its cores. `allowed` are those that may be used.

    With `ranks` there are so many devices, each with a part of the cores of one domain.
    """
    prefix = f"{node}/" if node else ""
    name = model_name(sysfs)
    online = sysfs.cores(f"{CPU}/online") or frozenset(range(os.cpu_count() or 1))
    domains = _domains(sysfs, online)
    usable = {index: sorted(cores if allowed is None else cores & allowed) for index, cores, _ in domains}
    for index, cores, memory in domains:
        caches = tuple(_caches(sysfs, frozenset(usable[index]) or cores))
        t.add_numa(
            NumaDomain(
                id=f"{prefix}numa:{index}",
                node=node,
                index=index,
                cores=format_list(cores),
                memory_bytes=memory,
                caches=caches,
            )
        )
    memory_of = {index: memory for index, _, memory in domains}
    for number, (index, mine) in enumerate(_devices(usable, ranks)):
        cpu = DeviceInfo(
            id=f"{prefix}cpu:{number if ranks else index}",
            node=node,
            kind=DeviceKind.CPU,
            name=name,
            memory_bytes=memory_of[index],
            numa=index,
            cores=format_list(mine),
        )
        t.add_device(cpu)
        t.add_link(cpu.id, f"{prefix}numa:{index}", rates.near())
    for position, (index, _, _) in enumerate(domains):
        for other, _, _ in domains[position + 1 :]:
            t.add_link(f"{prefix}numa:{index}", f"{prefix}numa:{other}", _between_sockets(sysfs))


def _devices(usable: dict[int, list[int]], ranks: int | None) -> list[tuple[int, list[int]]]:
    """Domain and cores of each device. More ranks than cores share them, in turns."""
    own = {index: cores for index, cores in usable.items() if cores}
    if ranks is None:
        return list(own.items())
    every = [(index, core) for index, cores in own.items() for core in cores]
    found = []
    for part in partition(max(len(every), ranks), ranks):
        index = every[part.start % len(every)][0]
        mine = {every[n % len(every)] for n in part}
        found.append((index, sorted(core for domain, core in mine if domain == index)))
    return found


def allowed_cores(sysfs: Sysfs) -> frozenset[int]:
    """The cores that this process may run on: its affinity, which a cpuset, a batch system or a launcher sets."""
    if sysfs.root.resolve() == sysfs.root.resolve().parent and hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return sysfs.allowed_cores()


def model_name(sysfs: Sysfs) -> str:
    """The processor, as it calls itself."""
    found = re.search(r"^(?:model name|cpu|CPU part)\s*:\s*(.+)$", sysfs.text("proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else ""


def _domains(sysfs: Sysfs, online: frozenset[int]) -> list[tuple[int, frozenset[int], int | None]]:
    """Index, cores and bytes of memory of each domain; all is one domain where the kernel knows of none."""
    found = []
    for index, mine in sysfs.domains().items():
        cores = mine & online
        total = re.search(r"MemTotal:\s*(\d+) kB", sysfs.text(f"{DOMAINS}/node{index}/meminfo"))
        memory = int(total[1]) * 1024 if total else None
        if cores or memory:
            found.append((index, cores, memory))
    if found:
        return found
    total = re.search(r"^MemTotal:\s*(\d+) kB", sysfs.text("proc/meminfo"), re.MULTILINE)
    return [(0, online, int(total[1]) * 1024 if total else None)]


def _caches(sysfs: Sysfs, cores: frozenset[int]) -> list[Cache]:
    """The data caches of some cores, each once."""
    found: dict[tuple[int, str], Cache] = {}
    for core in sorted(cores):
        for index in sysfs.names(f"{CPU}/cpu{core}/cache", r"index\d+"):
            folder = f"{CPU}/cpu{core}/cache/{index}"
            level, shared = sysfs.number(f"{folder}/level"), sysfs.text(f"{folder}/shared_cpu_list")
            size = re.fullmatch(r"(\d{1,12})([KMG]?)", sysfs.text(f"{folder}/size"))
            if level and size and sysfs.text(f"{folder}/type") != "Instruction":
                nbytes = int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]
                found.setdefault((level, shared), Cache(level=level, bytes=nbytes, cores=shared))
    return sorted(found.values(), key=lambda c: c.level)


def _between_sockets(sysfs: Sysfs) -> Link:
    """The figures that NCCL assumes (src/graph/topo.h), by vendor and generation; unknown for others."""
    text = sysfs.text("proc/cpuinfo")
    vendor = re.search(r"^vendor_id\s*:\s*(\S+)", text, re.MULTILINE)
    model = re.search(r"^model\s*:\s*(\d+)", text, re.MULTILINE)
    return rates.sockets(vendor[1] if vendor else "", int(model[1]) if model else None)

"""Texts of NCCL's format, and what is counted in topologies."""

from __future__ import annotations

from fuel_parallel.topology import (
    DeviceKind,
    DeviceTopology,
)
from fuel_parallel.topology.model import gb_s

CPU = 'arch="x86_64" vendor="AuthenticAMD" familyid="25" modelid="17"'


def gpu(bus: str, inside: str = "", attributes: str = 'sm="80"', dev: str = "0") -> str:
    return (
        f'<pci busid="{bus}" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">\n'
        f'<gpu dev="{dev}" {attributes} rank="{dev}">{inside}</gpu></pci>\n'
    )


def system(*inside: str, cpu: str = CPU) -> str:
    return f'<system version="1">\n<cpu numaid="0" affinity="0000000f" {cpu}>\n{"".join(inside)}</cpu></system>\n'


def rate(t: DeviceTopology, a: str, b: str) -> float | None:
    found = t.bandwidth_mb_s(a, b)
    return None if found is None else round(gb_s(found), 3)


def counts(t: DeviceTopology) -> tuple[int, int, int, int]:
    return sum(d.kind is not DeviceKind.CPU for d in t.devices), len(t.nics), len(t.numa_domains), len(t.switches)

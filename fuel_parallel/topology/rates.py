"""What links carry in practice, in GB/s, one direction: NCCL's and RCCL's figures (src/graph/topo.h, topo.cc).

These are what a program reaches, below what data sheets say. A link that none of the tables knows is unknown: None.
"""

from __future__ import annotations

import re

from fuel_parallel.topology.model import Interconnect, Link, assumed

NVLINK = {60: 18.0, 70: 20.0, 80: 20.0, 86: 12.0, 90: 20.6, 100: 40.1}
"""One NVLink, by compute capability, of the least that has such links."""

XGMI = {"gfx906": 24.0, "gfx908": 24.0, "gfx90a": 36.0, "gfx94": 48.0}
"""One Infinity Fabric link, by the beginning of the architecture's name."""

PCIE_LANE = {2.5: 0.1875, 5.0: 0.375, 8.0: 0.75, 16.0: 1.5, 32.0: 3.0, 64.0: 6.0}
"""One PCIe lane, by its GT/s."""

INTEL_SOCKETS = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0), (0, 6.0))
"""Between two Intel processors, by the least number of their model."""

CAPABILITIES = {
    **{"P100": 60, "P40": 61, "V100": 70, "V100S": 70, "T4": 75},
    **dict.fromkeys(("A100", "A800", "A30"), 80),
    **dict.fromkeys(("A40", "A10", "A10G", "A16", "A2", "A5000", "A6000", "3090"), 86),
    **dict.fromkeys(("L4", "L40", "L40S", "4090"), 89),
    **dict.fromkeys(("H20", "H100", "H200", "H800", "GH200"), 90),
    **dict.fromkeys(("B100", "B200", "GB200"), 100),
    **dict.fromkeys(("B300", "GB300"), 103),
}
"""Compute capability, 90 for 9.0, by a word of the GPU's name; NVIDIA's list of CUDA GPUs."""

TFLOPS = {"V100": 125.0, "A100": 312.0, "H100": 989.0, "H200": 989.0, "L40S": 362.0, "A10G": 70.0, "T4": 65.0}
"""Dense 16-bit matrix products, by a word of the name; NVIDIA's data sheets."""

NEAR_GB_S, NEAR_US = 100.0, 0.1
"""Between a NUMA domain and its own cores: beyond what any other link carries."""


def capability_of(name: str) -> int | None:
    """The compute capability of a GPU by its name; None where no word of it is known.

    >>> capability_of("NVIDIA A100-SXM4-80GB"), capability_of("NVIDIA GeForce")
    (80, None)
    """
    words = re.split(r"[^A-Za-z0-9]+", name)
    return next((CAPABILITIES[word] for word in words if word in CAPABILITIES), None)


def nvlink(capability: int | None, count: int = 1) -> Link:
    """So many NVLinks of a GPU of a compute capability, 90 for 9.0.

    >>> nvlink(90, 18).path, nvlink(None, 2).bandwidth_mb_s
    ('NV18', None)
    """
    known = [rate for least, rate in sorted(NVLINK.items()) if capability is not None and least <= capability]
    return assumed(Interconnect.NVLINK, known[-1] * count if known else None, count=count, path=f"NV{count}")


def xgmi(architecture: str, count: int = 1) -> Link:
    """So many Infinity Fabric links of an AMD GPU, by a name such as "gfx90a"."""
    rate = next((r for name, r in XGMI.items() if architecture.startswith(name)), None)
    total = None if rate is None else rate * count
    return assumed(Interconnect.INFINITY_FABRIC, total, count=count, path=f"XGMI{count}")


def pcie(transfers: float | None, lanes: int | None) -> Link:
    """So many PCIe lanes of so many GT/s.

    >>> pcie(16.0, 8).path
    '16 GT/s x8'
    """
    lane = PCIE_LANE.get(transfers) if transfers is not None else None
    if lane is None or lanes is None:
        return assumed(Interconnect.PCIE, None)
    return assumed(Interconnect.PCIE, lane * lanes, path=f"{transfers:g} GT/s x{lanes}")


def sockets(vendor: str, model: int | None, architecture: str = "") -> Link:
    """Between two processors, by vendor and model as /proc/cpuinfo says them; unknown for others."""
    return assumed(Interconnect.SHARED_MEMORY, _socket_rate(vendor, model, architecture))


def near() -> Link:
    """Between a NUMA domain and its own cores."""
    return assumed(Interconnect.SHARED_MEMORY, NEAR_GB_S, latency_us=NEAR_US)


def _socket_rate(vendor: str, model: int | None, architecture: str) -> float | None:
    if architecture in _OTHER_SOCKETS:
        return _OTHER_SOCKETS[architecture]
    if vendor == "AuthenticAMD":
        return 16.0
    if vendor == "GenuineIntel" and model is not None:
        return next((rate for least, rate in INTEL_SOCKETS if model >= least), None)
    if vendor in _ZHAOXIN:
        return 9.0 if model == _YONGFENG else 6.0
    return None


_OTHER_SOCKETS = {"arm64": 6.0, "aarch64": 6.0, "ppc64": 32.0, "ppc64le": 32.0}
_ZHAOXIN = ("CentaurHauls", "  Shanghai  ")
_YONGFENG = 0x5B

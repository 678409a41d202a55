"""Texts of `nvidia-smi`, and what is read from them."""

from __future__ import annotations

from itertools import combinations

import pytest

from fuel_parallel.errors import TopologyError, TopologyFileError
from fuel_parallel.topology import DeviceTopology
from fuel_parallel.topology.files import examine_text

TITLES = "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
TWO_AND_A_CARD = (
    f"\tGPU0\tGPU1\tNIC0{TITLES}\n"
    "GPU0\t X \tNV4\tPIX\t0-7\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tSYS\t8-15\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\t X \t\t\t\t\n"
    "\n"
    "Legend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n\n"
    "NIC Legend:\n\n  NIC0: mlx5_3\n"
)
ACCESS = " \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n\nLegend:\n\n  X    = Self\n  GNS  = GPU not supported\n"
LIST = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-a0)\nGPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-a1)\n"
MIG = (
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-b0)\n"
    "  MIG 3g.40gb     Device  0: (UUID: MIG-b00)\n"
    "  MIG 1g.10gb     Device  1: (UUID: MIG-b01)\n"
    "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-b1)\n"
)


def read(text: str) -> DeviceTopology:
    return examine_text(text).topology


def path(t: DeviceTopology, a: str, b: str) -> str:
    link = t.link(a, b)
    assert link is not None
    assert t.link(b, a) == link
    return link.path


def paths(t: DeviceTopology, size: int) -> dict[tuple[int, int], str]:
    return {(a, b): path(t, f"cuda:{a}", f"cuda:{b}") for a, b in combinations(range(size), 2)}


def outcome(text: str) -> str:
    """The error, if there is one: of the only kind that there may be."""
    try:
        examine_text(text)
    except TopologyError as reason:
        return str(reason)
    return ""


def refused(text: str) -> str:
    with pytest.raises(TopologyFileError) as error:
        examine_text(text, "topo.txt")
    return str(error.value)

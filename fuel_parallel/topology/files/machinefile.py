"""Machine files of MPICH's Hydra and of Intel MPI: `n01:4`. What is in them, `hostfile` reads."""

from __future__ import annotations

from fuel_parallel.topology.files import hostfile
from fuel_parallel.topology.files.hostfile import read
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.topology import DeviceTopology

__all__ = ["matches", "read", "write"]


def matches(source: Source) -> bool:
    """Whether the first lines are hosts, and one has `:4` or a word of Hydra's."""
    return hostfile.looks_like_hosts(source, r"^\S+:[0-9]|\s(?:binding|user)\s*=")


def write(topology: DeviceTopology) -> str:
    """A machine file: a rank for each device that computes."""
    return "".join(f"{host}:{count}\n" for host, count in hostfile.slots_of(topology).items())

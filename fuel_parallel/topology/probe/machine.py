"""`probe`: all that can be found out about this machine without root."""

from __future__ import annotations

import os
from pathlib import Path

from fuel_parallel.topology.probe import amd, cpu, nics, nvidia
from fuel_parallel.topology.sysfs import Sysfs
from fuel_parallel.topology.topology import DeviceTopology


def probe(
    node: str = "",
    *,
    allowed: frozenset[int] | None = None,
    ranks: int | None = None,
    root: Path = Path("/"),
    nvml: nvidia.Nvml | None = None,
) -> DeviceTopology:
    """The devices of this machine that this process may use, and the links between them.

    `node` is the machine's name in a cluster: ids then begin with it. `allowed` are the cores that count, by default
    those of this process. With `ranks` the cores are so many CPU devices rather than one for each NUMA domain. `root`
    is where /sys and /proc are found. GPUs of NVIDIA are asked through `nvml`, which is nvidia-ml-py where that is
    installed, others through /sys.

    >>> here = probe()
    >>> len(here.devices) > 0, here.device(here.device_ids()[0]).kind
    (True, <DeviceKind.CPU: 'cpu'>)
    """
    sysfs = Sysfs(root)
    t = DeviceTopology(node or os.uname().nodename)
    cpu.add_cpus(t, sysfs, node, allowed or cpu.allowed_cores(sysfs) or None, ranks)
    nvidia.add_gpus(t, sysfs, node, nvml)
    amd.add_gpus(t, sysfs, node)
    nics.add_nics(t, sysfs, node)
    return t

"""How long work on the devices of one process takes: copies from device to device, and operations on them.

Work is a list, inputs before what uses them. A device does one operation at a time, and sends or receives one copy at a
time, each in the order of the list; a copy and an operation, and copies of different pairs, overlap. A copy takes what
its way through a `DeviceTopology` takes, if there is one that knows it, and else what PCIe carries; an operation takes
what its bytes take to pass the device's memory. All of it is arithmetic: equal work has equal times on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fuel_parallel.topology.model import DeviceId, DeviceKind, Interconnect
from fuel_parallel.topology.routes import LIKELY_MB_S, Route, likely_width
from fuel_parallel.topology.topology import MB, DeviceTopology

CALL_US = 10.0
"""To start a copy or an operation, and to know that it is done."""

MEMORY_MB_S = {"cpu": 40_000.0}
"""What operations read and write, by kind of device: one thread of numpy adding 64 MiB on a server."""

OTHER_MEMORY_MB_S = 500_000.0
"""The same of devices with memory of their own: that of a small GPU. Of large ones it is more; links are slower yet."""

HOST: DeviceId = "cpu"
"""The device that copies between two vendors pass through."""


class Work(NamedTuple):
    """So many bytes from one device to another; with equal ends an operation that reads and writes them there.

    `after` are the places in the list of what must be done before.
    """

    source: DeviceId
    target: DeviceId
    nbytes: int
    after: tuple[int, ...] = ()


class WorkCost:
    """Times of work. What the topology says when it is asked, is what counts.

    Devices are named as this process names them; in a topology of several machines they are those of the first that has
    one of that name.

    >>> cost = WorkCost()
    >>> there = Work("cuda:1", "cuda:0", 12 * 2**20)
    >>> cost.us(there), cost.finish_us([there, Work("cuda:0", "cuda:0", 500 * 2**20, after=(0,))])
    (1010.0, 2020.0)
    """

    def __init__(self, topology: DeviceTopology | None = None) -> None:
        self.topology = topology

    def us(self, work: Work) -> float:
        """The time of one piece of work by itself, in us."""
        if work.source == work.target:
            rate = MEMORY_MB_S.get(work.source.partition(":")[0], OTHER_MEMORY_MB_S)
            return CALL_US + work.nbytes / MB / rate * 1e6
        route = self._route(work.source, work.target)
        width = min(map(likely_width, route.links), default=0.0) if route else 0.0
        latency = (route.latency_us or 0.0) if route else 0.0
        return CALL_US + latency + work.nbytes / MB / (width or LIKELY_MB_S[Interconnect.PCIE]) * 1e6

    def finish_us(self, works: Sequence[Work]) -> float:
        """When the last of all is done, in us, if the first starts at 0."""
        ends: list[float] = []
        free: dict[tuple[DeviceId, bool], float] = {}
        for work in works:
            copies = work.source != work.target
            engines = [(device, copies) for device in {work.source, work.target}]
            ready = [ends[n] for n in work.after]
            end = max([0.0, *ready, *[free.get(engine, 0.0) for engine in engines]]) + self.us(work)
            free.update(dict.fromkeys(engines, end))
            ends.append(end)
        return max(ends, default=0.0)

    def _route(self, source: DeviceId, target: DeviceId) -> Route | None:
        ends = [self._part(source, near=target), self._part(target, near=source)]
        return self.topology.route(*ends) if self.topology and all(ends) else None

    def _part(self, device: DeviceId, near: DeviceId) -> str:
        """What the topology calls a device of this process; the host is the NUMA domain or CPU with the widest way."""
        topology = self.topology
        if topology is None:
            return ""
        names = [device, *[f"{node}/{device}" for node in topology.nodes]]
        found = next((name for name in names if topology.has(name)), "")
        if found or device != HOST or near == HOST:
            return found
        widths = topology.router.widths(other) if (other := self._part(near, near=HOST)) else {}
        cpus = [d.id for d in topology.devices_of_kind(DeviceKind.CPU)]
        hosts = [part for part in (*[n.id for n in topology.numa_domains], *cpus) if part in widths]
        return max(hosts, key=lambda part: widths[part], default="")

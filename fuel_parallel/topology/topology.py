"""`DeviceTopology`: the parts of a machine or cluster and its links, and what a transfer between two devices costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

from fuel_parallel.errors import TopologyError
from fuel_parallel.topology.model import (
    AnyPart,
    Connection,
    Description,
    DeviceId,
    DeviceInfo,
    DeviceKind,
    Link,
    Nic,
    NumaDomain,
    Switch,
)
from fuel_parallel.topology.routes import Route, Router

P = TypeVar("P", DeviceInfo, NumaDomain, Nic, Switch)
MB = 2**20


class DeviceTopology:
    """Devices, what lies between them, and the links.

    >>> from fuel_parallel.topology import Interconnect, Link
    >>> t = DeviceTopology("workstation")
    >>> pcie = Link(interconnect=Interconnect.PCIE, bandwidth_mb_s=24000.0, latency_us=0.5)
    >>> for n in range(2):
    ...     t.add_device(DeviceInfo(id=f"cuda:{n}", kind=DeviceKind.CUDA, memory_bytes=24 * 2**30))
    >>> t.add_switch(Switch(id="pci:0", kind=Interconnect.PCIE))
    >>> for n in range(2):
    ...     t.add_link(f"cuda:{n}", "pci:0", pcie)
    >>> t.bandwidth_mb_s("cuda:0", "cuda:1"), t.transfer_time_us("cuda:0", "cuda:1", 24 * 2**20)
    (24000.0, 1001.0)
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._parts: dict[str, AnyPart] = {}
        self._links: dict[str, dict[str, Link]] = {}
        self._router: Router | None = None

    # Building.

    def add_device(self, device: DeviceInfo) -> None:
        """Raises `TopologyError` when something has that id already."""
        self.add(device)

    def add_numa(self, numa: NumaDomain) -> None:
        """A NUMA domain, which passes on what comes."""
        self.add(numa)

    def add_nic(self, nic: Nic) -> None:
        """A network card."""
        self.add(nic)

    def add_switch(self, switch: Switch) -> None:
        """A switch, inside a machine or between machines."""
        self.add(switch)

    def add_link(self, a: str, b: str, link: Link) -> None:
        """A link both ways. Raises `TopologyError` when an end is unknown, or there is a link already."""
        self.add_directed_link(a, b, link)
        self.add_directed_link(b, a, link)

    def add_directed_link(self, source: str, target: str, link: Link) -> None:
        """A link one way."""
        for end in (source, target):
            if end not in self._parts:
                raise TopologyError(f"a link from {source!r} to {target!r}: there is no {end!r}; add it first")
        if source == target:
            raise TopologyError(f"a link from {source!r} to itself; what moves inside a device takes no link")
        if target in self._links[source]:
            raise TopologyError(
                f"there is a link from {source!r} to {target!r} already; bundles are one link with a count"
            )
        for what, number in (("bandwidth_mb_s", link.bandwidth_mb_s), ("latency_us", link.latency_us)):
            if number is not None and not (0 <= number < math.inf and (number or what == "latency_us")):
                raise TopologyError(
                    f"the link from {source!r} to {target!r} has {what} {number}; expected a positive number, "
                    "or None where it is unknown"
                )
        self._links[source][target] = link
        self._router = None

    def add(self, part: AnyPart) -> None:
        """Any part. Raises `TopologyError` when something has that id already."""
        if part.id in self._parts:
            raise TopologyError(f"there are two parts with the id {part.id!r}; ids are unique")
        self._parts[part.id] = part
        self._links[part.id] = {}
        self._router = None

    # Asking.

    def device(self, device: DeviceId) -> DeviceInfo:
        """Raises `TopologyError` when there is none, and says which there are."""
        found = self._parts.get(device)
        if not isinstance(found, DeviceInfo):
            some = ", ".join(self.device_ids()[:8]) or "none"
            raise TopologyError(f"there is no device {device!r}; the devices are {some}{' ...' * (len(self) > 8)}")
        return found

    def has(self, part: str) -> bool:
        """Whether there is a part of that id."""
        return part in self._parts

    def part(self, part: str) -> AnyPart:
        """A device, NUMA domain, network card or switch. Raises `TopologyError` when there is none."""
        if part not in self._parts:
            raise TopologyError(f"there is no part {part!r} in this topology")
        return self._parts[part]

    def device_ids(self) -> list[DeviceId]:
        """In the order in which they were added."""
        return [d.id for d in self.devices]

    @property
    def devices(self) -> list[DeviceInfo]:
        """All devices."""
        return list(self._of(DeviceInfo))

    @property
    def numa_domains(self) -> list[NumaDomain]:
        """All NUMA domains."""
        return list(self._of(NumaDomain))

    @property
    def nics(self) -> list[Nic]:
        """All network cards."""
        return list(self._of(Nic))

    @property
    def switches(self) -> list[Switch]:
        """All switches."""
        return list(self._of(Switch))

    @property
    def nodes(self) -> list[str]:
        """The names of the machines, in the order in which they were added."""
        return list(dict.fromkeys(p.node for p in self._parts.values() if p.node))

    def devices_of_kind(self, kind: DeviceKind) -> list[DeviceInfo]:
        """All devices of a kind."""
        return [d for d in self.devices if d.kind is kind]

    def devices_of_node(self, node: str) -> list[DeviceInfo]:
        """All devices of a machine."""
        return [d for d in self.devices if d.node == node]

    def total_memory(self) -> int:
        """Bytes of all devices whose memory is known."""
        return sum(d.memory_bytes or 0 for d in self.devices)

    def link(self, source: str, target: str) -> Link | None:
        """The direct link, if there is one."""
        self.part(source), self.part(target)
        return self._links[source].get(target)

    def links_of(self, source: str) -> dict[str, Link]:
        """The links that leave a part, by where they go."""
        self.part(source)
        return dict(self._links[source])

    def connections(self) -> Iterator[Connection]:
        """All links, each pair of equal ones once."""
        seen: set[tuple[str, str]] = set()
        for source, targets in self._links.items():
            for target, link in targets.items():
                if (target, source) in seen:
                    continue
                both = self._links[target].get(source) == link
                if both:
                    seen.add((source, target))
                yield Connection(source=source, target=target, link=link, one_way=not both)

    def route(self, source: str, target: str) -> Route | None:
        """The way that data takes: the one of most bandwidth, of those the one of least latency. None if none is known.

        A direct link is the way. Data passes through switches, network cards and NUMA domains, not through devices.
        """
        self.part(source), self.part(target)
        return self.router.route(source, target)

    def bandwidth_mb_s(self, source: DeviceId, target: DeviceId) -> float | None:
        """That of the narrowest link on the way; None when unknown; infinite within a device."""
        route = self.route(source, target)
        return None if route is None else route.bandwidth_mb_s

    def transfer_time_us(self, source: DeviceId, target: DeviceId, nbytes: int) -> float | None:
        """Latency of all links on the way, and the bytes over the bandwidth; None when that is unknown.

        Links whose latency is unknown count as 0: it is a part of the time only.
        """
        route = self.route(source, target)
        if route is None or route.bandwidth_mb_s is None:
            return None
        return (route.latency_us or 0.0) + nbytes / MB / route.bandwidth_mb_s * 1e6

    def fastest_peer(self, device: DeviceId) -> DeviceId | None:
        """The other device to which the known bandwidth is greatest, the first of equals; None where none is known."""
        self.device(device)
        known = {p: b for p in self.device_ids() if p != device and (b := self.bandwidth_mb_s(device, p)) is not None}
        return max(known, key=lambda p: known[p], default=None)

    @property
    def router(self) -> Router:
        """Finds ways; made anew after each change."""
        if self._router is None:
            ends = {part.id for part in self._of(DeviceInfo) if part.kind is not DeviceKind.CPU}
            self._router = Router(self._links, ends)
        return self._router

    # As a value.

    def description(self) -> Description:
        """All of it as one immutable value; parts and links in the order in which they were added."""
        return Description(name=self.name, parts=tuple(self._parts.values()), connections=tuple(self.connections()))

    @classmethod
    def from_description(cls, description: Description) -> DeviceTopology:
        """The topology of a description. Raises `TopologyError` like the `add_` methods."""
        topology = cls(description.name)
        for part in description.parts:
            topology.add(part)
        for c in description.connections:
            add = topology.add_directed_link if c.one_way else topology.add_link
            add(c.source, c.target, c.link)
        return topology

    def with_links(self, change: Callable[[str, str, Link], Link]) -> DeviceTopology:
        """The same parts, each link being what `change` makes of its source, its target and itself."""
        topology = DeviceTopology(self.name)
        for part in self._parts.values():
            topology.add(part)
        for source, targets in self._links.items():
            for target, link in targets.items():
                topology.add_directed_link(source, target, change(source, target, link))
        return topology

    def __eq__(self, other: object) -> bool:
        """Equal parts and equal links, in whatever order."""
        if not isinstance(other, DeviceTopology):
            return NotImplemented
        return (self.name, self._parts, self._links) == (other.name, other._parts, other._links)

    __hash__ = None  # type: ignore[assignment]  # it changes; its description can be hashed

    def __len__(self) -> int:
        return len(self.device_ids())

    def __repr__(self) -> str:
        kinds = {k.value: len(self.devices_of_kind(k)) for k in DeviceKind}
        counts = ", ".join(f"{n} {kind}" for kind, n in kinds.items() if n) or "no devices"
        return f"<DeviceTopology {self.name!r}: {len(self.nodes) or 1} node(s), {counts}>"

    def _of(self, kind: type[P]) -> Iterator[P]:
        return (part for part in self._parts.values() if isinstance(part, kind))

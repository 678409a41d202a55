"""A network whose machines are only names, and one machine from inside, put together: a cluster of such machines."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from fuel_parallel.errors import ArgumentError
from fuel_parallel.topology.model import AnyPart, Connection, Interconnect, Link, Nic, Origin, Switch
from fuel_parallel.topology.topology import DeviceTopology

MOST = 1 << 20
"""So many parts a cluster may have."""


def machine_in(network: DeviceTopology, machine: DeviceTopology) -> DeviceTopology:
    """The network with the machine in place of each of its nodes; ids of the machine's parts begin with the node.

    Where the network was linked to a node's card, it is linked to the machine's cards: to each its own where both have
    as many, otherwise to all; to its NUMA domains where it has no cards, or else to its devices. A link whose
    bandwidth the network does not know gets the speed of the machine's card, as an assumption. Raises
    `ArgumentError` when the network has no nodes, or the machine is several.

    >>> from fuel_parallel.topology import DeviceInfo, DeviceKind
    >>> network, machine = DeviceTopology("net"), DeviceTopology("box")
    >>> network.add_switch(Switch(id="leaf"))
    >>> for node in ("a", "b"):
    ...     network.add_nic(Nic(id=f"{node}/nic:0", node=node))
    ...     network.add_link(f"{node}/nic:0", "leaf", Link())
    >>> machine.add_device(DeviceInfo(id="cuda:0", kind=DeviceKind.CUDA))
    >>> machine_in(network, machine).route("a/cuda:0", "b/cuda:0").parts
    ('a/cuda:0', 'leaf', 'b/cuda:0')
    """
    template = _Template(machine)
    nodes = network.nodes
    if not nodes:
        raise ArgumentError(f"{network.name or 'the network'} has no machines to put {machine.name or 'one'} into")
    if len(nodes) * len(template.parts) > MOST:
        raise ArgumentError(f"{len(nodes)} machines of {len(template.parts)} parts are more than {MOST} parts")
    t = DeviceTopology(network.name)
    for part in network.description().parts:
        if not part.node:
            t.add(part)
    for node in nodes:
        for part in template.parts:
            t.add(msgspec.structs.replace(part, id=f"{node}/{template.short(part.id)}", node=node))
        for c in template.connections:
            _add(t, f"{node}/{template.short(c.source)}", f"{node}/{template.short(c.target)}", c.link, c.one_way)
    _link(t, network, template)
    return t


def machine_of(cluster: DeviceTopology, node: str) -> DeviceTopology:
    """One machine of a cluster by itself, its ids without the node's name; links that leave it are left out.

    >>> from fuel_parallel.topology import DeviceInfo, DeviceKind
    >>> cluster = DeviceTopology()
    >>> for name in ("a", "b"):
    ...     cluster.add_device(DeviceInfo(id=f"{name}/cuda:0", node=name, kind=DeviceKind.CUDA))
    >>> machine_of(cluster, "b").device_ids()
    ['cuda:0']

    Raises `ArgumentError` when there is no such machine.
    """
    if node not in cluster.nodes:
        some = ", ".join(cluster.nodes[:8]) + ", ..." * (len(cluster.nodes) > 8)
        raise ArgumentError(f"there is no machine {node!r}; the machines are {some or 'without names'}")
    t = DeviceTopology(node)
    inside = {part.id: part for part in cluster.description().parts if part.node == node}
    for part in inside.values():
        t.add(msgspec.structs.replace(part, id=part.id.removeprefix(f"{node}/"), node=""))
    for c in cluster.connections():
        if c.source in inside and c.target in inside:
            _add(t, c.source.removeprefix(f"{node}/"), c.target.removeprefix(f"{node}/"), c.link, c.one_way)
    return t


class _Template:
    """The machine's inside, and the parts by which it is reached."""

    def __init__(self, machine: DeviceTopology) -> None:
        if len(machine.nodes) > 1:
            raise ArgumentError(
                f"{machine.name or 'the machine'} is a cluster of {len(machine.nodes)} machines; expected one machine"
            )
        self.node = next(iter(machine.nodes), "")
        self.parts: list[AnyPart] = [p for p in machine.description().parts if not self._around(p)]
        inside = {part.id for part in self.parts}
        self.connections = [c for c in machine.connections() if {c.source, c.target} <= inside]
        if not machine.devices:
            raise ArgumentError(f"{machine.name or 'the machine'} has no devices")
        ways_in = (machine.nics, machine.numa_domains, machine.devices)
        self.entries: list[AnyPart] = [*next(found for found in ways_in if found)]

    def short(self, part: str) -> str:
        return part.removeprefix(f"{self.node}/") if self.node else part

    def _around(self, part: AnyPart) -> bool:
        """A switch of the network around a machine is none of its parts."""
        return isinstance(part, Switch) and part.kind is Interconnect.NETWORK and not (self.node and part.node)

    def ends(self, node: str, number: int, of: int) -> Iterator[tuple[str, AnyPart]]:
        """By what a node is reached instead of its part `number`, of so many that were."""
        chosen = [self.entries[number]] if of == len(self.entries) else self.entries
        for entry in chosen:
            yield f"{node}/{self.short(entry.id)}", entry


def _link(t: DeviceTopology, network: DeviceTopology, template: _Template) -> None:
    """Links all that is outside, and nodes to it."""
    node_of = {part.id: part.node for part in network.description().parts}
    leaving = {(c.source, c.target): c for c in network.connections() if _leaves(node_of, c)}
    # The parts of a node by which it was reached, in the order of the network.
    doors: dict[str, list[str]] = {node: [] for node in network.nodes}
    used = {end for pair in leaving for end in pair}
    for part, node in node_of.items():
        if node and part in used:
            doors[node].append(part)

    def ends(part: str) -> list[tuple[str, AnyPart | None]]:
        node = node_of[part]
        return [*template.ends(node, doors[node].index(part), len(doors[node]))] if node else [(part, None)]

    for c in leaving.values():
        sources, targets = ends(c.source), ends(c.target)
        between = node_of[c.source] and node_of[c.target] and len(sources) == len(targets)
        pairs = zip(sources, targets, strict=True) if between else ((a, b) for a in sources for b in targets)
        for (source, mine), (target, theirs) in pairs:
            _add(t, source, target, _carrying(c.link, mine, theirs), c.one_way)


def _leaves(node_of: dict[str, str], c: Connection) -> bool:
    return not node_of[c.source] or node_of[c.source] != node_of[c.target]


def _carrying(link: Link, *ends: AnyPart | None) -> Link:
    """The link, with the speed of its slower card where its own is unknown."""
    speeds = [end.speed_mb_s for end in ends if isinstance(end, Nic) and end.speed_mb_s]
    if link.bandwidth_mb_s is not None or not speeds:
        return link
    return msgspec.structs.replace(link, bandwidth_mb_s=min(speeds), origin=Origin.ASSUMED)


def _add(t: DeviceTopology, source: str, target: str, link: Link, one_way: bool) -> None:
    """Two cards of a node that were linked to one switch are one link to each of the machine's cards."""
    for a, b in ((source, target), *([] if one_way else [(target, source)])):
        if t.link(a, b) is None:
            t.add_directed_link(a, b, link)

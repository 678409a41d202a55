"""The networks that SLURM's topology files describe, as topologies: switches above nodes, blocks of nodes, rings, tori.

SLURM says who is next to whom and nothing of bandwidth, so that of each link is None. A node is a machine with one
device for its cores and one card; what is inside of it, a file of that machine says.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fuel_parallel.topology.files.hostlist import LONGEST, MOST
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.model import DeviceInfo, DeviceKind, Interconnect, Link, Nic, Switch
from fuel_parallel.topology.topology import DeviceTopology

RING = 16
"""SLURM takes no longer rings."""


@dataclass(frozen=True)
class Group:
    """A switch, block, ring or torus: its line in the file, the nodes in it, and the switches below it."""

    name: str
    line: int | None
    nodes: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


def tree(source: Source, name: str, groups: Sequence[Group]) -> DeviceTopology:
    """Switches above switches above nodes. Raises `TopologyFileError`: unknown children, cycles."""
    known = _by_name(source, groups, "switch")
    for group in groups:
        if not group.nodes and not group.children:
            raise source.error(f"switch {group.name!r} has neither nodes nor switches below it", line=group.line)
        strange = next((child for child in group.children if child not in known), None)
        if strange is not None:
            raise source.error(
                f"switch {group.name!r} has the switch {strange!r} below it, which the file does not describe; "
                "add it, or name it as a node",
                line=group.line,
            )
    _refuse_cycles(source, known)
    parents = Counter(child for group in groups for child in group.children)
    homes = _nodes_of(source, groups)
    _note_many(source, "switches", "below several switches", [c for c, n in parents.items() if n > 1])
    _note_many(source, "nodes", "below several switches; SLURM warns of it", [n for n, c in homes.items() if c > 1])
    t = DeviceTopology(name)
    for group in groups:
        t.add_switch(Switch(id=group.name, name=group.name, kind=Interconnect.NETWORK))
    _add_nodes(t, homes)
    for group in groups:
        for child in group.children:
            t.add_link(group.name, child, _network("tree"))
        for node in group.nodes:
            t.add_link(f"{node}/nic:0", group.name, _network("tree"))
    _note_islands(source, [(g.name, [*g.children, *(f"{n}/" for n in g.nodes)]) for g in groups])
    return t


def blocks(
    source: Source, name: str, groups: Sequence[Group], sizes: Sequence[int], line: int | None
) -> DeviceTopology:
    """Blocks of nodes, and blocks of blocks where `sizes` say so: 4,8,16 has pairs of blocks, and pairs of pairs."""
    _by_name(source, groups, "block")
    homes = _members(source, groups, "block")
    t = DeviceTopology(name)
    for group in groups:
        t.add_switch(Switch(id=group.name, name=group.name, kind=Interconnect.NETWORK))
    _add_nodes(t, homes)
    for group in groups:
        for node in group.nodes:
            t.add_link(f"{node}/nic:0", group.name, _network("block"))
    below, joined = [group.name for group in groups], 1
    for size, ratio in _ratios(source, sizes, line):
        if len(below) > 1 and ratio > joined:
            below, joined = _joined(t, below, size, ratio // joined), ratio
    if len(below) > 1:
        source.note(f"{len(below)} groups of blocks have nothing in common: links between them are unknown")
    return t


def rings(source: Source, name: str, groups: Sequence[Group]) -> DeviceTopology:
    """Rings of nodes, each linked to the next one."""
    _by_name(source, groups, "ring")
    homes = _members(source, groups, "ring")
    for group in groups:
        if len(group.nodes) > RING:
            raise source.error(
                f"ring {group.name!r} has {len(group.nodes)} nodes; SLURM takes at most {RING}", line=group.line
            )
    t = DeviceTopology(name)
    _add_nodes(t, homes)
    for group in groups:
        ends = [f"{node}/nic:0" for node in group.nodes]
        for a, b in itertools.pairwise(ends):
            t.add_link(a, b, _network("ring"))
        if len(ends) > 2:
            t.add_link(ends[-1], ends[0], _network("ring"))
    if len(groups) > 1:
        source.note(f"{len(groups)} rings, which are not connected: links between them are unknown")
    return t


def tori(source: Source, name: str, groups: Sequence[Group]) -> DeviceTopology:
    """Tori, as one switch each: who is in one is known, but not who is next to whom."""
    t = blocks(source, name, groups, (), None)
    source.note("in which order a torus has its nodes is not said: each is read as one switch with all its nodes")
    return t


def _by_name(source: Source, groups: Sequence[Group], what: str) -> dict[str, Group]:
    known: dict[str, Group] = {}
    if not groups:
        raise source.error(f"it describes no {what}")
    for group in groups:
        first = known.setdefault(group.name, group)
        if first is not group:
            where = "" if first.line is None else f", first in line {first.line}"
            raise source.error(f"the {what} {group.name!r} is described twice{where}; join the two", line=group.line)
        if len(group.name) > LONGEST:
            raise source.error(f"the name {group.name[:40]!r}... has more than {LONGEST} characters", line=group.line)
    return known


def _nodes_of(source: Source, groups: Sequence[Group]) -> Counter[str]:
    """All nodes in the order of the file, and how often each is named."""
    total, homes = 0, Counter[str]()
    for group in groups:
        total += len(group.nodes) + len(group.children)
        if total > MOST:
            raise source.error(f"with {group.name!r} it names more than {MOST} nodes and switches", line=group.line)
        homes.update(group.nodes)
    return homes


def _members(source: Source, groups: Sequence[Group], what: str) -> Counter[str]:
    """Like `_nodes_of`, where each node can be in one group only, and none may be empty."""
    homes = _nodes_of(source, groups)
    first: dict[str, Group] = {}
    for group in groups:
        if not group.nodes:
            raise source.error(f"the {what} {group.name!r} has no nodes", line=group.line)
        for node in group.nodes:
            if node in first:
                raise source.error(
                    f"node {node!r} is in the {what}s {first[node].name!r} and {group.name!r}; it can be in one",
                    line=group.line,
                )
            first[node] = group
    return homes


def _refuse_cycles(source: Source, known: dict[str, Group]) -> None:
    """Takes off the switches that are below none, again and again: what remains is a cycle, or hangs on one."""
    above = Counter(child for group in known.values() for child in group.children)
    free = [name for name in known if not above[name]]
    taken = 0
    while free:
        taken += 1
        for child in known[free.pop()].children:
            above[child] -= 1
            if not above[child]:
                free.append(child)
    if taken == len(known):
        return
    # Upwards from a switch that remained, some switch comes twice.
    parent = {c: name for name, group in known.items() if above[name] for c in group.children if above[c]}
    at = next(name for name in known if above[name])
    seen: dict[str, None] = {}
    while at not in seen:
        seen[at] = None
        at = parent[at]
    cycle = list(seen)[list(seen).index(at) :]
    shown = " below ".join([*cycle[:6], *(["..."] if len(cycle) > 6 else []), at])
    raise source.error(f"switches in a circle: {shown}; a tree has none", line=known[at].line)


def _ratios(source: Source, sizes: Sequence[int], line: int | None) -> Iterable[tuple[int, int]]:
    """Each block size, and how many of the smallest it is."""
    for at, size in enumerate(sizes):
        ratio = size // sizes[0] if sizes[0] > 0 else 0
        if ratio < 1 or size % sizes[0] or ratio & (ratio - 1) or (at and size <= sizes[at - 1]):
            raise source.error(
                f"block sizes {','.join(map(str, sizes[:8]))}: {size} does not fit; expected ascending sizes, each "
                "the first one times a power of two, such as 4,8,16",
                line=line,
            )
        yield size, ratio


def _joined(t: DeviceTopology, below: list[str], size: int, each: int) -> list[str]:
    above = []
    for start in range(0, len(below), each):
        mine = below[start : start + each]
        switch = f"block:{size}:{start // each}"
        t.add_switch(Switch(id=switch, name=f"{size} nodes", kind=Interconnect.NETWORK))
        for one in mine:
            t.add_link(switch, one, _network("block"))
        above.append(switch)
    return above


def _add_nodes(t: DeviceTopology, nodes: Iterable[str]) -> None:
    for node in nodes:
        t.add_device(DeviceInfo(id=f"{node}/cpu:0", node=node, kind=DeviceKind.CPU))
        t.add_nic(Nic(id=f"{node}/nic:0", node=node))
        t.add_link(f"{node}/cpu:0", f"{node}/nic:0", Link())


def _network(path: str) -> Link:
    return Link(interconnect=Interconnect.NETWORK, path=path)


def _note_many(source: Source, what: str, how: str, names: list[str]) -> None:
    if names:
        more = ", ..." if len(names) > 4 else ""
        source.note(f"{len(names)} {what} are {how}: {', '.join(names[:4])}{more}")


def _note_islands(source: Source, edges: list[tuple[str, list[str]]]) -> None:
    """Says so when not all is connected."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while (up := leader.setdefault(name, name)) != name:
            leader[name] = leader.get(up, up)
            name = up
        return name

    for name, others in edges:
        for other in others:
            leader[find(other)] = find(name)
        find(name)
    islands = len({find(name) for name in list(leader)})
    if islands > 1:
        source.note(f"{islands} parts of the network are not connected: links between them are unknown, not slow")

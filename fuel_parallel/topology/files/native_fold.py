"""From a topology to a native file that is short: machines that are alike become one table, and so do links.

What is irregular is listed. Reading what was made gives an equal topology, with its devices in the same order.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fuel_parallel.topology.files.expressions import fold
from fuel_parallel.topology.files.native_fold_links import fold_links
from fuel_parallel.topology.files.native_schema import (
    FORMAT,
    CacheEntry,
    DeviceEntry,
    File,
    NicEntry,
    Node,
    NumaEntry,
    SwitchEntry,
)
from fuel_parallel.topology.files.units import format_rate, format_size
from fuel_parallel.topology.model import AnyPart, Connection, DeviceInfo, DeviceKind, Nic, NumaDomain, Switch
from fuel_parallel.topology.topology import DeviceTopology


def fold_topology(t: DeviceTopology) -> File:
    """The file. Raises `DataError` when a part has no id."""
    parts = t.description().parts
    home = {part.id: _machine_of(part) for part in parts}
    machines = {name: Machine(name) for name in dict.fromkeys(home.values()) if name}
    loose: list[AnyPart] = []
    for part in parts:
        (machines[home[part.id]].parts if home[part.id] else loose).append(part)
    across: list[Connection] = []
    for c in t.connections():
        name = home[c.source] if home[c.source] == home[c.target] else ""
        (machines[name].links if name else across).append(c)
    every = list(machines.values())
    groups = next((g for g in (_alike(every), _in_a_row(every)) if _in_order(g, loose, t)), None)
    if groups is None:  # devices of several machines take turns: they are listed by themselves
        loose = [part for part in parts if isinstance(part, DeviceInfo) or not home[part.id]]
        for machine in every:
            machine.parts = [part for part in machine.parts if not isinstance(part, DeviceInfo)]
        across += [c for machine in every if not machine.parts for c in machine.links]
        groups = _alike([machine for machine in every if machine.parts])
    nodes = [_node(group) for group in groups]
    return File(format=FORMAT, name=t.name, node=nodes, link=fold_links(across), **_tables(loose))


# Machines.


@dataclass
class Machine:
    """A machine, with the parts whose ids begin with its name, and the links between these."""

    name: str
    parts: list[AnyPart] = field(default_factory=list)
    links: list[Connection] = field(default_factory=list)

    def inside(self) -> tuple[tuple[AnyPart, ...], frozenset[Connection]]:
        """What it consists of, without its name: equal for machines that are alike."""
        cut = len(self.name) + 1
        parts = tuple(msgspec.structs.replace(part, id=part.id[cut:], node="") for part in self.parts)
        links = []
        for c in self.links:
            ends = (c.source[cut:], c.target[cut:])
            source, target = ends if c.one_way else sorted(ends)
            links.append(msgspec.structs.replace(c, source=source, target=target))
        return parts, frozenset(links)


def _machine_of(part: AnyPart) -> str:
    """The machine in whose table a part can stand: that which its id begins with."""
    prefix = f"{part.node}/"
    return part.node if part.node and part.id.startswith(prefix) and len(part.id) > len(prefix) else ""


Groups = list[list[Machine]]


def _alike(machines: list[Machine]) -> Groups:
    groups: dict[Any, list[Machine]] = {}
    for machine in machines:
        groups.setdefault(machine.inside(), []).append(machine)
    return list(groups.values())


def _in_a_row(machines: list[Machine]) -> Groups:
    return [list(group) for _, group in itertools.groupby(machines, key=Machine.inside)]


def _in_order(groups: Groups, loose: list[AnyPart], t: DeviceTopology) -> bool:
    """Whether the devices have their order when the groups are read, and then what is in no machine."""
    parts = [part for group in groups for machine in group for part in machine.parts] + loose
    return [part.id for part in parts if isinstance(part, DeviceInfo)] == t.device_ids()


def _node(group: list[Machine]) -> Node:
    parts, links = group[0].inside()
    ordered = sorted(links, key=lambda c: (c.source, c.target))
    return Node(name=fold([machine.name for machine in group]), link=fold_links(ordered), **_tables(parts))


# Parts.


def _tables(parts: Iterable[AnyPart]) -> dict[str, list[Any]]:
    """The entries of each table: neighbours become one where they differ in nothing but what a list can say."""
    tables: dict[str, list[Any]] = {name: [] for _, name, _, _ in _KINDS.values()}
    for kind, (make, name, fixed, listed) in _KINDS.items():
        rows = [(part, make(part)) for part in parts if type(part) is kind]
        for _, run in itertools.groupby(rows, key=lambda row: _fixed(row[1], fixed, listed)):
            mine = list(run)
            entry = mine[0][1]
            for one in listed:
                values = [getattr(row, one) for _, row in mine]
                setattr(entry, one, values[0] if len(set(values)) == 1 else values)
            entry.id = fold([part.id for part, _ in mine])
            tables[name].append(entry)
    return tables


def _fixed(entry: Any, fixed: tuple[str, ...], listed: tuple[str, ...]) -> tuple[Any, ...]:
    """What all of an entry have in common; a list cannot say None, so either all or none have a value."""
    return (*(getattr(entry, one) for one in fixed), *(getattr(entry, one) is None for one in listed))


def _device(part: DeviceInfo) -> DeviceEntry:
    prefix = part.id.rpartition("/")[2].partition(":")[0]
    named = next((kind for kind in DeviceKind if kind.value == prefix), None)
    return DeviceEntry(
        id=part.id,
        node=part.node,
        kind=None if named is part.kind else part.kind,
        name=part.name,
        memory=None if part.memory_bytes is None else format_size(part.memory_bytes),
        tflops=_plain(part.tflops),
        numa=part.numa,
        bus=part.bus,
        cores=part.cores,
    )


def _numa(part: NumaDomain) -> NumaEntry:
    number = re.search(r"([0-9]{1,6})\Z", part.id)
    caches = [CacheEntry(level=c.level, size=format_size(c.bytes), cores=c.cores) for c in part.caches]
    return NumaEntry(
        id=part.id,
        node=part.node,
        index=None if number and int(number[1]) == part.index else part.index,
        cores=part.cores,
        memory=None if part.memory_bytes is None else format_size(part.memory_bytes),
        caches=caches,
    )


def _nic(part: Nic) -> NicEntry:
    speed = None if part.speed_mb_s is None else format_rate(part.speed_mb_s, bits=True)
    return NicEntry(id=part.id, node=part.node, name=part.name, speed=speed, numa=part.numa, bus=part.bus)


def _switch(part: Switch) -> SwitchEntry:
    return SwitchEntry(id=part.id, node=part.node, kind=part.kind, name=part.name, bus=part.bus)


def _plain(number: float | None) -> float | None:
    """312 rather than 312.0: the same number, as people write it."""
    return int(number) if number is not None and abs(number) < 2**53 and number == int(number) else number


# By kind of part: what makes an entry, the table it is in, the fields that are the same for all of it, and those that
# can be lists.
_KINDS: dict[type, tuple[Callable[[Any], Any], str, tuple[str, ...], tuple[str, ...]]] = {
    NumaDomain: (_numa, "numa", ("node", "caches"), ("index", "cores", "memory")),
    DeviceInfo: (_device, "device", ("node", "kind", "name", "memory", "tflops"), ("numa", "bus", "cores")),
    Nic: (_nic, "nic", ("node", "speed"), ("name", "numa", "bus")),
    Switch: (_switch, "switch", ("node", "kind"), ("name", "bus")),
}

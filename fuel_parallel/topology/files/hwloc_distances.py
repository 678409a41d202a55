"""The matrices of hwloc's XML: distances between NUMA nodes, and what NVLink and Infinity Fabric carry.

Distances between NUMA nodes are those of the firmware's table, the SLIT: 10 is near, 20 twice as far. They are no
microseconds, so a link has them as its path, "SLIT 21", and no latency.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from fuel_parallel.topology.files.hwloc_machine import Machine
from fuel_parallel.topology.files.xml import Element, decimal, natural
from fuel_parallel.topology.model import Interconnect, Link, Origin, Switch, mb_s

MOST_OBJECTS, MOST_MATRICES = 512, 64

LATENCY, BANDWIDTH = 4, 8
"""Bits of `kind`."""

FABRICS = {"NVLinkBandwidth": Interconnect.NVLINK, "XGMIBandwidth": Interconnect.INFINITY_FABRIC}


@dataclass(frozen=True)
class Matrix:
    """Values between objects, row by row; None where an object is not in the file."""

    objects: list[Element | None]
    values: list[int]

    def pairs(self) -> list[tuple[Element, Element, int]]:
        """What is said of two different objects."""
        n = len(self.objects)
        return [
            (a, b, self.values[i * n + j])
            for i, a in enumerate(self.objects)
            for j, b in enumerate(self.objects)
            if i != j and a is not None and b is not None
        ]


def between_domains(machine: Machine, root: Element) -> dict[tuple[int, int], int]:
    """The SLIT by the numbers of two NUMA nodes; empty if the file has none."""
    index_of = {domain.element: domain.index for domain in machine.domains}
    old = [element for element in machine.root.walk() if element.name == "distances"]
    for elements in (old, list(root.all("distances2", "distances2hetero"))):
        if len(elements) > MOST_MATRICES:
            line = elements[MOST_MATRICES].line
            raise machine.source.error(f"there are more than {MOST_MATRICES} matrices of distances", line=line)
    found: dict[tuple[int, int], int] = {}
    for element in root.all("distances2", "distances2hetero"):
        kind = natural(machine.source, element, "kind") or 0
        if element.get("type") == "NUMANode" and kind & LATENCY:
            pairs = _matrix(machine, element).pairs()
            found |= {(index_of[a], index_of[b]): value for a, b, value in pairs}
    for element in old:
        found |= _version_1(machine, element)
    return found


def add_fabric(machine: Machine, root: Element) -> None:
    """Links between GPUs, and to NVSwitches and processors. Raises `TopologyFileError`."""
    for element in root.all("distances2", "distances2hetero"):
        name = element.get("name")
        kind = natural(machine.source, element, "kind") or 0
        if name in FABRICS and kind & BANDWIDTH:
            _add(machine, _matrix(machine, element), FABRICS[name])
        elif not (element.get("type") == "NUMANode" and kind & LATENCY):
            what = name or f"between {element.get('type') or 'objects'}s"
            machine.source.note(f"the distances {what[:40]} are left out: no links follow from them", line=element.line)


def _matrix(machine: Machine, element: Element) -> Matrix:
    source = machine.source
    count = natural(source, element, "nbobjs")
    if count is None or not 1 <= count <= MOST_OBJECTS:
        raise source.error(f"a matrix of {count} objects; expected 1 to {MOST_OBJECTS}", line=element.line)
    names = _words(machine, element, "indexes", r"(?:[A-Za-z0-9]{1,20}:)?[0-9]{1,19}")
    values = [int(word) for word in _words(machine, element, "u64values", r"[0-9]{1,19}")]
    if len(names) != count or len(values) != count * count:
        raise source.error(
            f"a matrix of {count} objects has {len(names)} indexes and {len(values)} values; expected {count} and"
            f" {count * count}",
            line=element.line,
        )
    by_os = {e.get("os_index"): e for e in machine.objects.get(element.get("type"), [])}
    table = by_os if element.get("indexing") == "os" else machine.by_gp
    objects = [table.get(name.rpartition(":")[2]) for name in names]
    known = [o for o in objects if o is not None]
    if len(set(known)) != len(known):
        raise source.error("a matrix has an object twice", line=element.line)
    if len(known) < count:
        source.note("a matrix has objects that the file has not; they are left out", line=element.line)
    return Matrix(objects, values)


def _words(machine: Machine, element: Element, name: str, pattern: str) -> list[str]:
    found: list[str] = []
    for child in element.all(name):
        for word in child.text.split():
            if not re.fullmatch(pattern, word):
                raise machine.source.error(f"{word[:40]!r} in <{name}> is no number", line=child.line)
            found.append(word)
    return found


def _version_1(machine: Machine, element: Element) -> dict[tuple[int, int], int]:
    """Relative to `latency_base`, between all objects of one depth, in their order."""
    source = machine.source
    base, count = decimal(source, element, "latency_base"), natural(source, element, "nbobjs")
    values = [decimal(source, child, "value") for child in element.all("latency")]
    nodes = machine.objects.get("NUMANode", [])
    if not base or count != len(nodes) or None in values:
        source.note("distances that are not those of all NUMA nodes are left out", line=element.line)
        return {}
    if len(values) != count * count:
        raise source.error(
            f"distances of {count} objects have {len(values)} values; expected {count * count}", line=element.line
        )
    index = {domain.element: domain.index for domain in machine.domains}
    numbers = [round((value or 0.0) * base) for value in values]
    return {
        (index[a], index[b]): numbers[i * count + j] for i, a in enumerate(nodes) for j, b in enumerate(nodes) if i != j
    }


# What a fabric carries, in MB/s of 10**6 bytes, of all links between two objects together.


def _add(machine: Machine, matrix: Matrix, interconnect: Interconnect) -> None:
    totals: Counter[tuple[str, str]] = Counter()
    for a, b, value in matrix.pairs():
        ends = (_part(machine, a), _part(machine, b)) if value else ("", "")
        if all(ends) and ends[0] != ends[1]:
            totals[ends] += value
    for (source, target), value in totals.items():
        machine.links[source, target] = _link(machine, source, target, value, interconnect)


def _part(machine: Machine, element: Element) -> str:
    """All NVSwitches are one; a processor is its NUMA domain, if that is one."""
    part = machine.parts.get(element, "")
    if part == "nvswitch" and not machine.topology.has(part):
        machine.topology.add_switch(Switch(id=part, kind=Interconnect.NVLINK))
    if not part and element.get("type") in ("Package", "NUMANode"):
        domain = machine.domain_of(machine.masks[element])
        part = "" if domain is None else f"numa:{domain}"
    return part


def _link(machine: Machine, source: str, target: str, value: int, interconnect: Interconnect) -> Link:
    count, path = 1, "XGMI"
    if interconnect is Interconnect.NVLINK:
        # One link of a P100 carries 20 GB/s, of later ones 25 GB/s.
        names = [getattr(machine.topology.part(end), "name", "") for end in (source, target)]
        one = 20_000 if any("P100" in name for name in names) else 25_000
        count = value // one if value % one == 0 else 1
        path = f"NV{count}" if value % one == 0 else "NVLink"
    return Link(
        interconnect=interconnect,
        bandwidth_mb_s=mb_s(value / 1000),
        count=count,
        path=path,
        origin=Origin.STATED,
    )

"""From a native file to its topology: each entry becomes the parts and links that it stands for.

How many these are is counted before any is made. `Mistake` says where in the file something does not hold together.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from fuel_parallel.topology.files import expressions
from fuel_parallel.topology.files.native_entries import (
    MOST,
    OF_LINKS,
    OF_PARTS,
    Change,
    Mistake,
    count_of,
    explained,
    link_of,
    names_of,
    parts_of,
    shown,
)
from fuel_parallel.topology.files.native_schema import File, LinkEntry, Node, Override, Pairs, PartEntry
from fuel_parallel.topology.files.native_yaml import Path
from fuel_parallel.topology.model import AnyPart, Link
from fuel_parallel.topology.topology import DeviceTopology

MOST_NAMES = 4_000_000
"""That expressions stand for, or are held against, all in all."""


def expand(file: File) -> Expansion:
    """All parts and links, with the places that they come from. Raises `Mistake`."""
    found = Expansion(file.name)
    for index, node in enumerate(file.node):
        found.add_node(node, ("node", index))
    for table in TABLES:
        for index, entry in enumerate(getattr(file, table)):
            found.add_entry(entry, (table, index))
    for index, node in enumerate(file.node):
        found.link_node(node, ("node", index))
    for index, link in enumerate(file.link):
        found.add_links(link, ("link", index))
    for index, one in enumerate(file.override):
        found.override(one, ("override", index))
    return found


TABLES = ("numa", "switch", "device", "nic")


class Expansion:
    """Parts by id and links by their ends, and where in the file each comes from."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.parts: dict[str, AnyPart] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.places: dict[str, Path] = {}
        self.link_places: dict[tuple[str, str], Path] = {}
        self.overridden: dict[Path, list[tuple[str, str]]] = {}
        self._machines: dict[Path, list[str]] = {}
        self._inside: dict[Path, list[str]] = {}
        self._spent = 0

    def topology(self) -> DeviceTopology:
        """All of it."""
        topology = DeviceTopology(self.name)
        for part in self.parts.values():
            topology.add(part)
        for (source, target), made in self.links.items():
            topology.add_directed_link(source, target, made)
        return topology

    # Parts.

    def add_node(self, node: Node, path: Path) -> None:
        """The parts of every machine of a [[node]] table."""
        if not any(getattr(node, table) for table in TABLES):
            raise Mistake(path, "there is nothing in this machine; give it a device at least")
        self._spend(count_of(node.name, (*path, "name")), path)
        names = self._machines[path] = names_of(node.name, (*path, "name"), MOST)
        inside: list[tuple[AnyPart, Path]] = []
        for table in TABLES:
            for index, entry in enumerate(getattr(node, table)):
                place = (*path, table, index)
                if entry.node:
                    raise Mistake((*place, "node"), "a part of a [[node]] table is in that machine; leave `node` out")
                self._room(len(self.parts) + len(names) * (len(inside) + count_of(entry.id, (*place, "id"))), place)
                inside += [(part, place) for part in parts_of(entry, place)]
        self._inside[path] = [part.id for part, _ in inside]
        for name in names:
            for part, place in inside:
                self._add(msgspec.structs.replace(part, id=f"{name}/{part.id}", node=name), place)

    def add_entry(self, entry: PartEntry, path: Path) -> None:
        """The parts of an entry outside of nodes."""
        self._room(len(self.parts) + count_of(entry.id, (*path, "id")), path)
        for part in parts_of(entry, path):
            self._add(msgspec.structs.replace(part, node=entry.node), path)

    def _add(self, part: AnyPart, path: Path) -> None:
        if part.id in self.parts:
            raise Mistake((*path, "id"), f"there are two parts {part.id!r}; the first is {shown(self.places[part.id])}")
        self.parts[part.id] = part
        self.places[part.id] = path

    def _room(self, count: int, path: Path) -> None:
        if count > MOST:
            raise Mistake(path, f"with this there are {count} parts or links; a topology has at most {MOST}")

    def _spend(self, names: int, path: Path) -> None:
        self._spent += names
        if self._spent > MOST_NAMES:
            reason = f"expressions up to here stand for more than {MOST_NAMES} names; say less, or say it once"
            raise Mistake(path, reason)

    # Links.

    def link_node(self, node: Node, path: Path) -> None:
        """The links inside of every machine of a [[node]] table."""
        names = self._machines[path]
        for index, entry in enumerate(node.link):
            place = (*path, "link", index)
            made = link_of(entry, place)
            pairs = self._pairs(entry, place, self._inside[path], times=len(names))
            for name in names:
                for a, b in pairs:
                    self._link(f"{name}/{a}", f"{name}/{b}", made, entry.one_way, place)

    def add_links(self, entry: LinkEntry, path: Path) -> None:
        """The links of an entry outside of nodes."""
        made = link_of(entry, path)
        for a, b in self._pairs(entry, path, self.parts):
            self._link(a, b, made, entry.one_way, path)

    def _link(self, a: str, b: str, made: Link, one_way: bool, path: Path) -> None:
        for source, target in ((a, b),) if one_way else ((a, b), (b, a)):
            for end in (source, target):
                if end not in self.parts:
                    raise Mistake((*path, "between"), f"there is no part {end!r}{_similar(end, self.parts)}")
            if (source, target) in self.links:
                first = shown(self.link_places[source, target])
                reason = f"there is a link from {source!r} to {target!r} already: {first}; bundles are one with a count"
                raise Mistake((*path, "between"), reason)
            self.links[source, target] = made
            self.link_places[source, target] = path

    def _pairs(
        self, entry: LinkEntry | Override, path: Path, known: Iterable[str], times: int = 1
    ) -> list[tuple[str, str]]:
        """The ends of each link of an entry, each pair once."""
        place = (*path, "between")
        ends = [self._ends(end, place, known) for end in entry.between or ()]
        if min(map(len, ends)) > 1 and entry.pairs is None:
            reason = f"both ends are several parts, {len(ends[0])} and {len(ends[1])}; expected pairs = "
            raise Mistake(place, reason + '"all" (each with each) or "matching" (first with first, ...)')
        if entry.pairs is Pairs.MATCHING:
            if len(ends[0]) != len(ends[1]):
                reason = f"the ends have {len(ends[0])} and {len(ends[1])} parts; to match they have as many"
                raise Mistake(place, reason)
            found = list(zip(*ends, strict=True))
        else:
            # All pairs of parts with themselves come to this many before each is taken once.
            self._room(len(self.links) // 2 + times * len(ends[0]) * len(ends[1]) // 2, path)
            found = [(a, b) for a in ends[0] for b in ends[1] if a != b or len(ends[0]) == len(ends[1]) == 1]
        self._spend(len(found), path)
        if not entry.one_way:
            found = list({frozenset(pair): pair for pair in reversed(found)}.values())[::-1]
        self._room(len(self.links) // 2 + times * len(found), path)
        strange = next((a for a, b in found if a == b), None)
        if strange is not None:
            raise Mistake(place, f"a link from {strange!r} to itself; what moves inside a part takes no link")
        return found

    def _ends(self, end: str | list[str], path: Path, known: Iterable[str]) -> list[str]:
        found: list[str] = []
        for text in [end] if isinstance(end, str) else end:
            fits = explained(path, partial(expressions.matcher, text))
            if fits is None:
                self._spend(count_of(text, path), path)
                found += names_of(text, path, MOST - len(found))
                continue
            every = list(known)
            self._spend(len(every) * (text.count(",") + 1), path)
            fitting = [name for name in every if fits(name)]
            if not fitting:
                raise Mistake(path, f"{text!r} fits no part")
            found += fitting
        if not found:
            raise Mistake(path, "an end is an empty list; expected at least one part")
        return found

    # Overrides.

    def override(self, one: Override, path: Path) -> None:
        """Changes what is there; there must be something."""
        if (one.part is None) == (one.between is None):
            raise Mistake(path, "an override has either `part` or `between`, and what changes")
        if one.between is not None:
            self._override_links(one, self._changes(one, OF_LINKS, path), path)
        else:
            self._override_parts(one.part or "", self._changes(one, OF_PARTS, path), path)

    def _changes(self, one: Override, table: dict[str, Change], path: Path) -> dict[str, object]:
        """The new values, by the names that the model has for them."""
        given = [field for field, value in msgspec.structs.asdict(one).items() if value is not None]
        given = [field for field in given if field not in ("part", "between", "pairs", "one_way")]
        strange = next((field for field in given if field not in table), None)
        if strange is not None or not given:
            reason = "there is no such field" if strange else "nothing changes"
            place = (*path, strange) if strange else path
            raise Mistake(place, f"{reason} in this override; expected one of {', '.join(table)}")
        new = {}
        for field in given:
            name, parse = table[field]
            new[name] = explained((*path, field), partial(parse, getattr(one, field)))
        return new

    def _override_links(self, one: Override, new: dict[str, object], path: Path) -> None:
        touched = self.overridden[path] = []
        for a, b in self._pairs(one, path, self.parts):
            for ends in ((a, b),) if one.one_way else ((a, b), (b, a)):
                if ends not in self.links:
                    reason = f"there is no link from {ends[0]!r} to {ends[1]!r}; an override changes what is there"
                    raise Mistake((*path, "between"), reason)
                self.links[ends] = msgspec.structs.replace(self.links[ends], **new)
                touched.append(ends)

    def _override_parts(self, text: str, new: dict[str, object], path: Path) -> None:
        for end in self._ends(text, (*path, "part"), self.parts):
            part = self.parts.get(end)
            if part is None:
                raise Mistake((*path, "part"), f"there is no part {end!r}{_similar(end, self.parts)}")
            lacking = next((field for field in new if not hasattr(part, field)), None)
            if lacking is not None:
                field = next(field for field, (name, _) in OF_PARTS.items() if name == lacking)
                raise Mistake((*path, field), f"{end!r} has no {field}: it is a {type(part).__name__}")
            self.parts[end] = msgspec.structs.replace(part, **new)


def _similar(name: str, known: Iterable[str]) -> str:
    some: Sequence[str] = [one for one, _ in zip(known, range(1000), strict=False)]
    near = difflib.get_close_matches(name[:100], some, n=3, cutoff=0.5) or some[:3]
    return f"; there is {', '.join(map(repr, near))}" if near else "; there is none at all"

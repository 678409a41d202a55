"""SLURM's topology.yaml (25.05 and later): several topologies, of which the cluster's default is read.

The file is taken as a stream of events, with the line of each, and never expanded: anchors, tags, keys that come twice
and deep nesting are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fuel_parallel.topology.files import slurm_network
from fuel_parallel.topology.files.hostlist import check_name, expand
from fuel_parallel.topology.files.slurm_network import Group
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.topology import DeviceTopology

LARGEST = 8 << 20
DEEPEST = 16
_SIGN = re.compile(r"^[ \t]*(?:-[ \t]+)?\{?[\"']?topology[\"']?[ \t]*:[ \t]", re.MULTILINE)


@dataclass
class Value:
    """A scalar, list or mapping, and its line."""

    content: str | list[Value] | dict[str, Value]
    line: int


def matches(source: Source) -> bool:
    """Whether some line is `- topology: NAME`."""
    return _SIGN.search(source.text) is not None


def read(source: Source) -> DeviceTopology:
    """The default topology of a topology.yaml; the others are noted. Raises `TopologyFileError`."""
    entries = [_mapping(source, entry, "topology") for entry in _list(source, parse(source), "topologies")]
    if not entries:
        raise source.error("it has no topologies; expected a list of `- topology: NAME` entries")
    names = [_text(source, _key(source, entry, "topology", 1), "topology") for entry in entries]
    kinds = [_kind(source, name, entry) for name, entry in zip(names, entries, strict=True)]
    twice = next((i for i, name in enumerate(names) if name in names[:i]), None) if len(names) < 1000 else 0
    if twice is not None:
        raise source.error(
            f"the topology {names[twice]!r} comes twice, or there are over 1000", line=_line(entries[twice])
        )
    at = _default(source, names, entries)
    others = [f"{name} ({kind})" for i, (name, kind) in enumerate(zip(names, kinds, strict=True)) if i != at]
    if others:
        source.note(f"{names[at]!r} is read; the file also has {', '.join(others[:8])}{', ...' * (len(others) > 8)}")
    return _READERS[kinds[at]](source, names[at], entries[at][kinds[at]])


def parse(source: Source) -> Value:
    """A YAML document of lists, mappings and scalars. Raises `TopologyFileError`."""
    import yaml

    if len(source.text) > LARGEST:
        raise source.error(f"larger than {LARGEST >> 20} MiB; no topology.yaml is")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return _Builder(source).built(yaml.parse(source.text, Loader=loader))
    except yaml.YAMLError as reason:
        mark = getattr(reason, "problem_mark", None)
        problem = getattr(reason, "problem", None) or "not readable"
        raise source.error(f"no YAML: {problem}", line=None if mark is None else mark.line + 1) from None


class _Builder:
    """Puts events together."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.open: list[tuple[Value, Value | None]] = []  # each with the key that waits for its value
        self.root: Value | None = None

    def built(self, events: Iterable[Any]) -> Value:
        for event in events:
            kind, line = type(event).__name__, event.start_mark.line + 1
            if kind == "AliasEvent" or getattr(event, "anchor", None) or getattr(event, "tag", None):
                raise self.source.error("anchors, aliases and tags are not read; write it out", line=line)
            if kind == "DocumentStartEvent" and self.root is not None:
                raise self.source.error("a second document; expected one list of topologies", line=line)
            if kind == "ScalarEvent":
                self.add(Value(event.value, line))
            elif kind in ("SequenceStartEvent", "MappingStartEvent"):
                value = Value([] if kind.startswith("Seq") else {}, line)
                self.add(value)
                self.open.append((value, None))
                if len(self.open) > DEEPEST:
                    raise self.source.error(f"nested more than {DEEPEST} deep", line=line)
            elif kind in ("SequenceEndEvent", "MappingEndEvent"):
                self.open.pop()
        if self.root is None:
            raise self.source.error("it is empty")
        return self.root

    def add(self, value: Value) -> None:
        if not self.open:
            self.root = value
            return
        holder, key = self.open[-1]
        if isinstance(holder.content, list):
            holder.content.append(value)
        elif isinstance(holder.content, dict):
            if key is None:
                name = _text(self.source, value, "a key")
                if name in holder.content:
                    raise self.source.error(f"the key {name[:40]!r} comes twice", line=value.line)
                self.open[-1] = (holder, value)
            else:
                holder.content[str(key.content)] = value
                self.open[-1] = (holder, None)


def _default(source: Source, names: list[str], entries: list[dict[str, Value]]) -> int:
    chosen = []
    for i, entry in enumerate(entries):
        if "cluster_default" in entry and _truth(source, entry["cluster_default"], "cluster_default"):
            chosen.append(i)
    if len(chosen) > 1:
        first, second = chosen[:2]
        raise source.error(
            f"{names[first]!r} and {names[second]!r} are both the cluster's default; one can be",
            line=entries[second]["cluster_default"].line,
        )
    if not chosen and len(names) > 1:
        source.note(f"no topology is the cluster's default; the first one, {names[0]!r}, is taken")
    return chosen[0] if chosen else 0


def _kind(source: Source, name: str, entry: dict[str, Value]) -> str:
    kinds = [key for key in entry if key in _READERS]
    strange = [key for key in entry if key not in _READERS and key not in ("topology", "cluster_default")]
    if len(kinds) != 1 or strange:
        found = " and ".join(strange or kinds)[:80] or "none of them"
        raise source.error(
            f"the topology {name!r} has {found}; expected exactly one of {', '.join(_READERS)}", line=_line(entry)
        )
    return kinds[0]


def _read_tree(source: Source, name: str, value: Value) -> DeviceTopology:
    return slurm_network.tree(source, name, _groups(source, value, "switches", "switch", ("nodes", "children")))


def _read_block(source: Source, name: str, value: Value) -> DeviceTopology:
    given = _mapping(source, value, "block")
    sizes = _list(source, given["block_sizes"], "block_sizes") if "block_sizes" in given else []
    numbers = [_number(source, size, "block_sizes") for size in sizes[:32]]
    line = given["block_sizes"].line if numbers else value.line
    groups = _groups(source, value, "blocks", "block", ("nodes",), ("block_sizes",))
    return slurm_network.blocks(source, name, groups, numbers, line)


def _read_flat(source: Source, name: str, value: Value) -> DeviceTopology:
    raise source.error(
        f"the topology {name!r} is flat: it names no nodes. A list of hosts, such as `n[01-04]`, says more",
        line=value.line,
    )


def _read_ring(source: Source, name: str, value: Value) -> DeviceTopology:
    return slurm_network.rings(source, name, _groups(source, value, "rings", "ring", ("nodes",)))


def _read_torus(source: Source, name: str, value: Value) -> DeviceTopology:
    entries = _list(source, _key(source, _mapping(source, value, "torus3d"), "toruses", value.line), "toruses")
    groups = _groups(source, value, "toruses", "name", ("nodes",), (), ("dims", "placements"))
    for entry, group in zip(entries, groups, strict=True):
        dims = _mapping(source, _key(source, _mapping(source, entry, "torus"), "dims", entry.line), "dims")
        x, y, z = (_number(source, _key(source, dims, axis, entry.line), axis) for axis in "xyz")
        if x * y * z != len(group.nodes):
            raise source.error(
                f"the torus {group.name!r} is {x}x{y}x{z}, which takes {x * y * z} nodes; it has {len(group.nodes)}",
                line=entry.line,
            )
    return slurm_network.tori(source, name, groups)


_READERS: dict[str, Callable[[Source, str, Value], DeviceTopology]] = {
    "tree": _read_tree,
    "block": _read_block,
    "flat": _read_flat,
    "ring": _read_ring,
    "torus3d": _read_torus,
}


def _groups(
    source: Source,
    value: Value,
    key: str,
    name_key: str,
    lists: tuple[str, ...],
    besides: tuple[str, ...] = (),
    ignored: tuple[str, ...] = (),
) -> list[Group]:
    """The entries of a list of switches, blocks, rings or tori."""
    given = _mapping(source, value, key)
    _only(source, given, (key, *besides))
    groups = []
    for item in _list(source, _key(source, given, key, value.line), key):
        entry = _mapping(source, item, name_key)
        _only(source, entry, (name_key, *lists, "link_speed", *ignored))
        name = check_name(
            source, _text(source, _key(source, entry, name_key, item.line), name_key), "switch", line=item.line
        )
        nodes, children = (
            expand(source, _text(source, entry[k], k), line=entry[k].line) if k in entry and k in lists else ()
            for k in ("nodes", "children")
        )
        groups.append(Group(name, item.line, nodes, children))
    return groups


def _only(source: Source, entry: dict[str, Value], known: tuple[str, ...]) -> None:
    for key, value in entry.items():
        if key not in known:
            raise source.error(f"{key[:40]!r} is not known here; expected {', '.join(known)}", line=value.line)


def _key(source: Source, entry: dict[str, Value], key: str, line: int) -> Value:
    if key not in entry:
        raise source.error(f"{key!r} is missing", line=_line(entry) if entry else line)
    return entry[key]


def _line(entry: dict[str, Value]) -> int:
    return min((value.line for value in entry.values()), default=1)


def _list(source: Source, value: Value, what: str) -> list[Value]:
    if not isinstance(value.content, list):
        raise source.error(f"expected a list of {what}", line=value.line)
    return value.content


def _mapping(source: Source, value: Value, what: str) -> dict[str, Value]:
    if not isinstance(value.content, dict):
        raise source.error(f"expected `NAME: VALUE` pairs of {what}", line=value.line)
    return value.content


def _text(source: Source, value: Value, what: str) -> str:
    if not isinstance(value.content, str) or not value.content:
        raise source.error(f"expected {what} to be a word", line=value.line)
    return value.content


def _number(source: Source, value: Value, what: str) -> int:
    text = _text(source, value, what)
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise source.error(f"{what} is {text[:40]!r}; expected a positive number", line=value.line)
    return int(text)


def _truth(source: Source, value: Value, what: str) -> bool:
    text = _text(source, value, what).lower()
    if text not in ("true", "false", "yes", "no", "on", "off"):
        raise source.error(f"{what} is {text[:40]!r}; expected true or false", line=value.line)
    return text in ("true", "yes", "on")

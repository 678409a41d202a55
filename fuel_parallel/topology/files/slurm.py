"""SLURM's topology.conf (tree, block and ring), and the addresses that SLURM gives to running tasks.

A line is `SwitchName=s1 Nodes=n[01-04]`: words in any case, comments after `#`, a backslash at the end goes on in the
next line. `include` is refused: what it includes is not here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from fuel_parallel.topology.files import slurm_network
from fuel_parallel.topology.files.hostlist import check_name, expand
from fuel_parallel.topology.files.slurm_network import Group
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.topology import DeviceTopology

_KINDS = {
    "switchname": ("switches", "nodes", "linkspeed"),
    "blockname": ("nodes",),
    "ringname": ("nodes",),
    "blocksizes": (),
}
_SIGN = re.compile(r"^[ \t]*(?:SwitchName|BlockName|RingName|BlockSizes)[ \t]*=", re.IGNORECASE | re.MULTILINE)
_UNUSED = "LinkSpeed is not used by SLURM and its unit is nowhere defined; bandwidths stay unknown"
_MOST_SIZES = 32

Record = dict[str, str]


def matches(source: Source) -> bool:
    """Whether a line begins with `SwitchName=` or another of the four."""
    return _SIGN.search(source.text) is not None


def read(source: Source) -> DeviceTopology:
    """The topology of a topology.conf. Raises `TopologyFileError`."""
    groups: list[Group] = []
    kinds: dict[str, int] = {}
    sizes: tuple[int, ...] = (1,)
    sizes_line: int | None = None
    for line, record in _records(source):
        kind = next(iter(record))
        kinds.setdefault("blockname" if kind == "blocksizes" else kind, line)
        if len(kinds) > 1:
            first, second = kinds.items()
            raise source.error(
                f"{kind} after {first[0]} in line {first[1]}: a file is of one kind; make a file of each",
                line=second[1],
            )
        if kind == "blocksizes":
            if sizes_line is not None:
                raise source.error(f"BlockSizes again; line {sizes_line} has them already", line=line)
            sizes, sizes_line = _sizes(source, record[kind], line), line
        else:
            groups.append(_group(source, kind, record, line))
    if "blockname" in kinds:
        return slurm_network.blocks(source, "slurm", groups, sizes, sizes_line)
    build = slurm_network.rings if "ringname" in kinds else slurm_network.tree
    return build(source, "slurm", groups)


def from_address(addresses: Mapping[str, str], pattern: str = "") -> DeviceTopology:
    """The tree that tasks see: of each node the value of SLURM_TOPOLOGY_ADDR, such as `root.leaf.node`.

    `pattern` is SLURM_TOPOLOGY_ADDR_PATTERN, `switch.switch.node`: with it, an address whose names have dots of their
    own is refused and not misread. A level with several switches, `s[0-1].leaf.node`, hangs below all of them. Raises
    `TopologyFileError`.

    >>> t = from_address({"n1": "root.a.n1", "n2": "root.b.n2"}, "switch.switch.node")
    >>> [s.id for s in t.switches], t.nodes
    (['root', 'a', 'b'], ['n1', 'n2'])
    """
    source = Source("SLURM_TOPOLOGY_ADDR", "")
    nodes: dict[str, dict[str, None]] = {}
    children: dict[str, dict[str, None]] = {}
    alone: list[str] = []
    for node, address in addresses.items():
        above: Sequence[str] = ()
        for level in _levels(source, node, address, pattern):
            here = expand(source, level, key=node)
            for switch in here:
                children.setdefault(switch, {})
            for parent in above:
                children[parent].update(dict.fromkeys(here))
            above = here
        if not above:
            alone.append(node)
        for switch in above:
            nodes.setdefault(switch, {})[check_name(source, node, "node")] = None
    if alone and children:
        raise source.error(f"{alone[0]!r} has no switch, but others have; these are of different jobs", key=alone[0])
    if alone:
        raise source.error("no switches in it; it has them where slurm.conf says TopologyPlugin=topology/tree")
    groups = [Group(name, None, tuple(nodes.get(name, ())), tuple(below)) for name, below in children.items()]
    return slurm_network.tree(source, "slurm", groups)


def _levels(source: Source, node: str, address: str, pattern: str) -> list[str]:
    """The switches of an address, from the top."""
    parts, kinds = address.split("."), pattern.split(".") if pattern else []
    if kinds and (len(parts) != len(kinds) or kinds[-1] != "node" or set(kinds[:-1]) - {"switch"}):
        raise source.error(
            f"{address!r} does not have the pattern {pattern!r}; names with dots in them cannot be told apart", key=node
        )
    if parts[-1] != node:
        raise source.error(f"{address!r} ends with {parts[-1]!r}; expected the node's own name {node!r}", key=node)
    return parts[:-1]


def _records(source: Source) -> Iterator[tuple[int, Record]]:
    """The lines that say something, as words and values; the first word says what the line is of."""
    noted = False
    for line, text in _joined_lines(source):
        record: Record = {}
        if re.match(r"include\s", text, re.IGNORECASE):
            raise source.error("it includes another file, which is not read; put its lines here", line=line)
        for word in text.split():
            name, equals, value = word.partition("=")
            name, value = name.lower(), value.strip("\"'")
            if not equals:
                raise source.error(f"{word[:40]!r} is no NAME=VALUE; lists have no blanks in them", line=line)
            allowed: Sequence[str] = _KINDS[next(iter(record))] if record else tuple(_KINDS)
            if name not in allowed:
                raise source.error(
                    f"{word[:40]!r} is not known here; expected {' or '.join(allowed) or 'nothing more'}", line=line
                )
            if name in record or not value:
                raise source.error(f"{name} {'comes twice' if value else 'has no value'}", line=line)
            record[name] = value
        if record:
            if "linkspeed" in record and not noted:
                noted = True
                source.note(_UNUSED, line=line)
            yield line, record


def _joined_lines(source: Source) -> Iterator[tuple[int, str]]:
    """Without comments; lines that end with a backslash together with the next one, by the number of the first."""
    parts: list[str] = []
    first = 0
    for number, text in enumerate(source.lines, 1):
        text = text.partition("#")[0].rstrip()
        first = first if parts else number
        parts.append(text.removesuffix("\\"))
        if not text.endswith("\\"):
            yield first, " ".join(parts).strip()
            parts = []
    if parts:
        raise source.error("the last line ends with a backslash, but nothing follows; the file is cut", line=first)


def _group(source: Source, kind: str, record: Record, line: int) -> Group:
    name = check_name(source, record[kind], kind.removesuffix("name"), line=line)
    listed: Callable[[str], tuple[str, ...]] = lambda key: (  # noqa: E731
        expand(source, record[key], line=line) if key in record else ()
    )
    return Group(name, line, listed("nodes"), listed("switches"))


def _sizes(source: Source, text: str, line: int) -> tuple[int, ...]:
    words = text.split(",")
    if len(words) > _MOST_SIZES or not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise source.error(f"BlockSizes={text[:40]}: expected numbers such as 4,8,16", line=line)
    return tuple(map(int, words))

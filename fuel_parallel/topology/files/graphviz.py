"""A topology in Graphviz' language DOT: a cluster for each machine, links labelled with what they are and carry."""

from __future__ import annotations

from collections.abc import Iterator

from fuel_parallel.topology.drawing_style import DEVICE, LINK_COLORS, NIC, NUMA, SWITCH
from fuel_parallel.topology.model import AnyPart, Connection, DeviceInfo, Nic, NumaDomain, gb_s
from fuel_parallel.topology.topology import DeviceTopology


def write(topology: DeviceTopology) -> str:
    """The text of a DOT file; `dot -Tsvg` draws it. Links of unknown bandwidth are dashed and labelled `?`."""
    return "\n".join(_lines(topology)) + "\n"


def _lines(t: DeviceTopology) -> Iterator[str]:
    yield f"graph {_quoted(t.name or 'topology')} {{"
    yield "  node [shape=box, style=filled, fontname=Helvetica];"
    yield "  edge [fontname=Helvetica, fontsize=9];"
    parts = t.description().parts
    by_node: dict[str, list[AnyPart]] = {}
    for part in parts:
        by_node.setdefault(part.node, []).append(part)
    for number, node in enumerate(t.nodes):
        yield f"  subgraph cluster_{number} {{"
        yield f"    label={_quoted(node)};"
        for part in by_node[node]:
            yield f"    {_part(part)}"
        yield "  }"
    for part in by_node.get("", []):
        yield f"  {_part(part)}"
    for connection in t.connections():
        yield f"  {_edge(connection)}"
    yield "}"


def _part(part: AnyPart) -> str:
    fill = next((fill for kind, fill in _FILLS if isinstance(part, kind)), SWITCH)
    label = part.id.removeprefix(f"{part.node}/") if part.node else part.id
    return f"{_quoted(part.id)} [label={_quoted(label)}, fillcolor={_quoted(fill)}];"


def _edge(x: Connection) -> str:
    rate = "?" if x.link.bandwidth_mb_s is None else f"{gb_s(x.link.bandwidth_mb_s):.4g} GB/s"
    label = " ".join(word for word in (x.link.path, rate) if word)
    words = [f"label={_quoted(label)}", f"color={_quoted(LINK_COLORS[x.link.interconnect])}"]
    words += ["style=dashed"] * (x.link.bandwidth_mb_s is None) + ["dir=forward"] * x.one_way
    return f"{_quoted(x.source)} -- {_quoted(x.target)} [{', '.join(words)}];"


def _quoted(text: str) -> str:
    """A string of DOT: quotes are escaped; a backslash would begin an escape of its labels."""
    kept = "".join(c if c >= " " else " " for c in text)
    return '"' + kept.replace("\\", "\\\\").replace('"', '\\"') + '"'


_FILLS: tuple[tuple[type, str], ...] = ((DeviceInfo, DEVICE), (NumaDomain, NUMA), (Nic, NIC))

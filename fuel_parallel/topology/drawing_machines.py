"""Machines drawn from inside: rows of parts, network switches above, links between and below them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from fuel_parallel.topology.canvas import FAINT, Box, Canvas, Line, Shape, Text, fitting
from fuel_parallel.topology.drawing_style import COLORS, DEVICE, LINK_COLORS, NIC, NUMA, SWITCH, link_text, link_width
from fuel_parallel.topology.model import (
    AnyPart,
    Connection,
    DeviceInfo,
    DeviceKind,
    Interconnect,
    Link,
    Nic,
    NumaDomain,
)
from fuel_parallel.topology.topology import DeviceTopology

_PART, _HIGH, _GAP, _ROW = 74.0, 36.0, 14.0, 78.0
_PAD, _BETWEEN, _WIDEST = 20.0, 36.0, 1640.0
_STEP = _PART + _GAP
_MOST_WORDS = 4
_CARDS, _CPUS, _DOMAINS, _BRIDGES, _DEVICES = range(5)
"""Rows from the top; NVLink's switches come below."""


@dataclass(frozen=True)
class Look:
    """The rank of each device, the coordinate that colours it, and the axis of that coordinate; all may be empty."""

    ranks: dict[str, int]
    colors: dict[str, int]
    axis: str


@dataclass
class _Machine:
    """A machine's rows of parts, where in its box each is, and how large that is."""

    node: str
    rows: list[list[AnyPart]]
    middles: dict[str, float]
    words: list[str]
    arcs: float
    x: float = 0
    y: float = 0

    @property
    def width(self) -> float:
        widest = max((len(row) for row in self.rows), default=1)
        return max(widest * _STEP, 190) + 2 * _PAD

    @property
    def height(self) -> float:
        return 34 + len(self.rows) * _ROW - (_ROW - _HIGH) + self.arcs + 16 * len(self.words) + _PAD


def draw_machines(c: Canvas, t: DeviceTopology, look: Look, top: float) -> float:
    """Draws all machines; returns where the picture ends."""
    levels = network_levels(t)
    machines = [_machine(t, node) for node in ([*t.nodes] or [""])]
    if t.nodes and any(not d.node for d in t.devices):
        machines.append(_machine(t, ""))
    top += len(levels) * _ROW
    bottom = _arrange(c, machines, top)
    places = _places(c, levels, machines, top)
    for machine in machines:
        c.add(Box(machine.x, machine.y, machine.width, machine.height, "#fbfdff", "#cbd5e1", 10))
        c.add(
            Text(
                machine.x + _PAD,
                machine.y + 22,
                fitting(machine.node or "this machine", machine.width, 12),
                12,
                bold=True,
            )
        )
        for i, words in enumerate(reversed(machine.words)):
            c.add(Text(machine.x + _PAD, machine.y + machine.height - 12 - 16 * i, words, 10, color=FAINT))
    for connection in t.connections():
        c.add(*_line(connection, places))
    for part in t.description().parts:
        if part.id in places:
            c.add(*_part(part, places[part.id], look))
    return bottom


def network_levels(t: DeviceTopology) -> list[list[str]]:
    """The switches outside of machines, from the top: those farthest from machines first."""
    outside = (
        {s.id for s in t.switches if not s.node}
        if t.nodes
        else {s.id for s in t.switches if s.kind is Interconnect.NETWORK}
    )
    at = [s for s in outside if any(end not in outside for end in t.links_of(s))]
    level = dict.fromkeys(at, 0)
    for switch in at:  # grows while it is walked over
        for end in t.links_of(switch):
            if end in outside and end not in level:
                level[end] = level[switch] + 1
                at.append(end)
    highest = max(level.values(), default=-1)
    rows = [[s.id for s in t.switches if level.get(s.id) == n] for n in range(highest, -1, -1)]
    lone = [s.id for s in t.switches if s.id in outside and s.id not in level]
    return [row for row in [lone, *rows] if row]


def _machine(t: DeviceTopology, node: str) -> _Machine:
    outside = {name for row in network_levels(t) for name in row}
    parts = [p for p in t.description().parts if p.node == node and p.id not in outside]
    others = any(isinstance(p, DeviceInfo) and p.kind is not DeviceKind.CPU for p in parts)
    rows: list[list[AnyPart]] = [[] for _ in range(6)]
    for part in parts:
        rows[_row(part, others)].append(part)
    inside = [x for x in t.connections() if _inside(x, t, node)]
    counts = Counter(link_text(x.link) for x in inside)
    words = [f"{n} x {words}" for words, n in counts.most_common(_MOST_WORDS)]
    if len(counts) > _MOST_WORDS:
        words.append(f"and {len(counts) - _MOST_WORDS} other kinds of links")
    middles = _middles(t, rows)
    last = {p.id for p in next((row for row in reversed(rows) if row), [])}
    spans = [abs(middles[x.source] - middles[x.target]) for x in inside if {x.source, x.target} <= last]
    kept = [row for row in rows if row]
    return _Machine(node, kept, middles, words, _sag(max(spans, default=0) / _STEP) + (8 if words else 0))


def _middles(t: DeviceTopology, rows: list[list[AnyPart]]) -> dict[str, float]:
    """Where in a machine's width each part is: devices in order, others above or below what they are linked to."""
    room = max(max(map(len, rows)) * _STEP, 190)
    devices = rows[_DEVICES]
    found = {p.id: room / 2 + (i - (len(devices) - 1) / 2) * _STEP for i, p in enumerate(devices)}
    for row in (rows[_BRIDGES], rows[_DOMAINS], rows[_CPUS], rows[_CARDS], rows[_DEVICES + 1]):
        even = {p.id: (i + 0.5) * room / len(row) for i, p in enumerate(row)}
        wanted = {p.id: _mean([found[e] for e in t.links_of(p.id) if e in found], even[p.id]) for p in row}
        row.sort(key=lambda p: wanted[p.id])  # sorted at once
        found.update(_apart([p.id for p in row], wanted, room))
    if rows[_CARDS] and rows[_BRIDGES]:
        _make_way(rows, found, room)
    return found


def _apart(row: list[str], wanted: dict[str, float], room: float) -> dict[str, float]:
    """As near to where they want to be as boxes that do not overlap can be."""
    found = dict(wanted)
    for left, right in itertools.pairwise(row):
        found[right] = max(found[right], found[left] + _STEP)
    edge = room + _STEP / 2
    for name in reversed(row):
        edge = found[name] = min(found[name], edge - _STEP)
    return {name: found[name] for name in row}


def _make_way(rows: list[list[AnyPart]], found: dict[str, float], room: float) -> None:
    """Domains and CPUs stand between cards and bridges; they step aside where lines would seem to end at them."""
    lines = [found[p.id] for p in rows[_CARDS]]
    for row in (rows[_DOMAINS], rows[_CPUS]):
        middles = [found[p.id] for p in row]
        hidden = any(abs(x - line) < _PART / 2 for x in middles for line in lines)
        if hidden and max(middles) + _STEP / 2 <= room:
            found.update({p.id: found[p.id] + _STEP / 2 for p in row})


def _row(part: AnyPart, others: bool) -> int:
    if isinstance(part, DeviceInfo):
        return _CPUS if others and part.kind is DeviceKind.CPU else _DEVICES
    if isinstance(part, NumaDomain):
        return _DOMAINS
    if isinstance(part, Nic):
        return _CARDS
    return _DEVICES + 1 if part.kind is Interconnect.NVLINK else _BRIDGES


def _inside(x: Connection, t: DeviceTopology, node: str) -> bool:
    ends = [t.part(x.source), t.part(x.target)]
    if not t.nodes:
        return not any(getattr(end, "kind", None) is Interconnect.NETWORK for end in ends)
    return all(end.node == node and (node or isinstance(end, DeviceInfo)) for end in ends)


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _arrange(c: Canvas, machines: list[_Machine], top: float) -> float:
    """Puts machines next to each other, in as many rows as it takes."""
    x, y, tallest, widest = 24.0, top, 0.0, 0.0
    for machine in machines:
        if x > 24 and x + machine.width > _WIDEST:
            x, y, tallest = 24.0, y + tallest + _BETWEEN, 0.0
        machine.x, machine.y = x, y
        x += machine.width + _BETWEEN
        widest, tallest = max(widest, x - _BETWEEN + 24), max(tallest, machine.height)
    c.width = max(c.width, widest)
    return y + tallest


def _places(
    c: Canvas, levels: list[list[str]], machines: list[_Machine], top: float
) -> dict[str, tuple[float, float, float]]:
    """The middle of each part, and its width."""
    found: dict[str, tuple[float, float, float]] = {}
    for n, row in enumerate(levels):
        step = (c.width - 48) / len(row)
        for i, name in enumerate(row):
            found[name] = 24 + (i + 0.5) * step, top - (len(levels) - n) * _ROW + _HIGH / 2, min(step - 8, 120.0)
    for machine in machines:
        for n, parts in enumerate(machine.rows):
            for part in parts:
                y = machine.y + 34 + n * _ROW + _HIGH / 2
                found[part.id] = machine.x + _PAD + machine.middles[part.id], y, _PART
    return found


def _line(x: Connection, places: dict[str, tuple[float, float, float]]) -> list[Shape]:
    if x.source not in places or x.target not in places:
        return []
    (x1, y1, _), (x2, y2, _) = places[x.source], places[x.target]
    title = f"{x.source} {'to' if x.one_way else 'and'} {x.target}: {link_text(x.link)}"
    sag = 0.0
    if y1 == y2:
        sag, y1, y2 = _sag(abs(x2 - x1) / _STEP) * 4 / 3, y1 + _HIGH / 2, y2 + _HIGH / 2
    return [Line(x1, y1, x2, y2, *_stroke(x.link), sag=sag, title=title)]


def _sag(span: float) -> float:
    """How deep an arc hangs that passes over so many parts."""
    return 0.0 if not span else 8 + 9 * min(span, 12)


def _stroke(link: Link) -> tuple[str, float, bool]:
    return LINK_COLORS[link.interconnect], link_width(link.bandwidth_mb_s), link.bandwidth_mb_s is None


def _part(part: AnyPart, place: tuple[float, float, float], look: Look) -> list[Shape]:
    x, y, width = place
    rank = look.ranks.get(part.id)
    if isinstance(part, DeviceInfo):
        fill = (
            COLORS[look.colors[part.id] % len(COLORS)] if rank is not None else DEVICE if not look.axis else "#f8fafc"
        )
        below = f"rank {rank}" if rank is not None else _size(part.memory_bytes) or part.name
    elif isinstance(part, NumaDomain):
        fill, below = NUMA, part.cores and f"cores {part.cores}"
    else:
        fill, below = (NIC, part.name) if isinstance(part, Nic) else (SWITCH, part.name)
    name = part.id.removeprefix(f"{part.node}/") if part.node else part.id
    below = "" if below == name or name.endswith(f":{below}") else below
    said = f"{part.id} {getattr(part, 'name', '')} {part.bus if hasattr(part, 'bus') else ''}".strip()
    shapes: list[Shape] = [Box(x - width / 2, y - _HIGH / 2, width, _HIGH, fill, "#64748b", 5, title=said)]
    shapes.append(Text(x, y + (-2 if below else 4), fitting(name, width - 6, 10.5), 10.5, "middle", bold=True))
    if below:
        shapes.append(
            Text(x, y + 11, fitting(below, width - 6, 9.5), 9.5, "middle", FAINT if rank is None else "#0f172a")
        )
    return shapes


def _size(memory: int | None) -> str:
    return "" if memory is None else f"{memory / 2**30:.0f} GiB"

"""Pictures of a graph: Graphviz text, and SVG by our own layout. Colours tell the kinds of ops apart.

Where there is more than one device, each has a colour too: that of the band at the left of its boxes. A copy has both
colours, and lines between devices are thick.

Numbers written in the script are part of the box that uses them, so that the picture shows what flows.
"""

from __future__ import annotations

import re
from html import escape

from fuel_parallel.lazy.layout import arrange
from fuel_parallel.lazy.outline import Entry

_GREY = ("#f3f4f6", "#6b7280")
COLOURS: dict[str, tuple[str, str]] = {
    "data": ("#ffffff", "#374151"),
    "creation": _GREY,
    "random": ("#fef9c3", "#a16207"),
    "elementwise": ("#dbeafe", "#2563eb"),
    "binary": ("#dbeafe", "#2563eb"),
    "contraction": ("#ffedd5", "#ea580c"),
    "reductions": ("#dcfce7", "#16a34a"),
    "ordering": ("#dcfce7", "#16a34a"),
    "indexing": ("#ccfbf1", "#0d9488"),
    "manipulation": _GREY,
    "neural": ("#ede9fe", "#7c3aed"),
    "collectives": ("#dc2626", "#7f1d1d"),
    "program": ("#e0e7ff", "#4f46e5"),
}
"""Fill and border by category."""

NAMES = {
    "data": "values",
    "creation": "shapes and constants",
    "manipulation": "shapes and constants",
    "random": "random numbers",
    "elementwise": "element by element",
    "binary": "element by element",
    "contraction": "products",
    "reductions": "reductions, order",
    "ordering": "reductions, order",
    "indexing": "indexing",
    "neural": "neural functions",
    "collectives": "across ranks",
    "program": "regions",
}

DEVICES = ("#111827", "#0891b2", "#ca8a04", "#9333ea", "#16a34a", "#db2777")
"""Of devices, in the order in which they are met; the first is for the CPU."""

_LONGEST_LABEL = 44
_CHARACTER = 6.7
_HEIGHT = 46.0
_MARGIN = 20.0
_BAND = 5


class _Boxes:
    """The entries that get a box of their own, and the lines between them."""

    def __init__(self, entries: list[Entry]) -> None:
        inside = {i for i, e in enumerate(entries) if e.is_constant and not e.is_output}
        shown = [i for i in range(len(entries)) if i not in inside]
        place = {number: box for box, number in enumerate(shown)}
        self.numbers = shown
        self.entries = [entries[i] for i in shown]
        self.edges = [(place[i], place[n]) for n in shown for i in entries[n].inputs if i in place]
        self.labels = [self._label(entries, n, inside) for n in shown]

    @staticmethod
    def _label(entries: list[Entry], number: int, inside: set[int]) -> tuple[str, str]:
        entry = entries[number]
        written = [_round(entries[i].attributes[0].removeprefix("value=")) for i in entry.inputs if i in inside]
        detail = ", ".join(filter(None, [*written, _essence(entry)]))
        title = f"{entry.op}  {detail}" if detail else entry.op
        where = entry.place if entry.source else "" if entry.device == "cpu" else f"on {entry.device}"
        return _cut(title), _cut(f"{entry.result} {where}".rstrip())


def _essence(entry: Entry) -> str:
    """The attributes that the shapes do not tell already, and that are not switched off."""
    if entry.category not in ("reductions", "ordering", "neural", "collectives"):
        return ""
    told = ("keepdims=", "comm=")
    return ", ".join(part for part in entry.attributes if not part.startswith(told) and not part.endswith("=False"))


def _round(number: str) -> str:
    """A number in as many digits as a picture needs."""
    return f"{float(number):.5g}" if re.fullmatch(r"-?\d+\.\d{5,}", number) else number


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "…"


def _colours(entry: Entry) -> tuple[str, str]:
    return COLOURS.get(entry.category, _GREY)


def _tooltip(number: int, entry: Entry) -> str:
    state = "has its value" if entry.has_value else "not computed yet"
    facts = [
        f"#{number} {entry.op}",
        entry.result,
        ", ".join(entry.attributes),
        entry.place,
        state,
        f"built at {entry.line}",
    ]
    return "\n".join(filter(None, facts))


def _device_colours(entries: list[Entry]) -> dict[str, str]:
    """The colour of each device; none if there is only one."""
    names = dict.fromkeys(name for e in entries for name in (e.source, e.device) if name)
    ordered = sorted(names, key=lambda name: name != "cpu")
    return {name: DEVICES[n % len(DEVICES)] for n, name in enumerate(ordered)} if len(ordered) > 1 else {}


# Graphviz.


def to_dot(entries: list[Entry]) -> str:
    """The graph in Graphviz's language: `dot -Tpdf graph.dot` draws it. Devices are clusters."""
    boxes = _Boxes(entries)
    devices = _device_colours(boxes.entries)
    lines = ["digraph {", '  node [shape=box, style="rounded,filled", fontname="monospace", fontsize=11];']
    nodes: dict[str, list[str]] = {}
    for number, entry, label in zip(boxes.numbers, boxes.entries, boxes.labels, strict=True):
        fill, border = _colours(entry)
        text = "#ffffff" if entry.category == "collectives" else "#111827"
        pen = 3 if entry.is_output or entry.category == "collectives" else 1
        nodes.setdefault(entry.device, []).append(
            f"  n{number} [label={_quote(chr(10).join(label))}, tooltip={_quote(_tooltip(number, entry))}, "
            f'fillcolor="{fill}", color="{border}", fontcolor="{text}", penwidth={pen}];'
        )
    for n, (device, mine) in enumerate(nodes.items()):
        if devices:
            head = f"  subgraph cluster_{n} {{ label={_quote(device)}; fontname=monospace; "
            mine = [f'{head}color="{devices[device]}"; penwidth=2;', *(f"  {line}" for line in mine), "  }"]
        lines += mine
    for a, b in boxes.edges:
        wide = " [penwidth=3]" if boxes.entries[a].device != boxes.entries[b].device else ""
        lines.append(f"  n{boxes.numbers[a]} -> n{boxes.numbers[b]}{wide};")
    return "\n".join([*lines, "}"]) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


# SVG.


def to_svg(entries: list[Entry]) -> str:
    """The graph as a picture that stands alone."""
    boxes = _Boxes(entries)
    devices = _device_colours(boxes.entries)
    widths = [max(len(line) for line in label) * _CHARACTER + 22 for label in boxes.labels]
    layout = arrange(widths, _HEIGHT, boxes.edges)
    legend, legend_width = _legend(boxes.entries, devices, layout.height + 40)
    width = max(layout.width, legend_width) + 2 * _MARGIN
    height = layout.height + 58 + 2 * _MARGIN
    shift = (width - 2 * _MARGIN - layout.width) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{-_MARGIN} {-_MARGIN} {width:.0f} {height:.0f}" '
        'font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="11">',
        f'<rect x="{-_MARGIN}" y="{-_MARGIN}" width="100%" height="100%" fill="#ffffff"/>',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" '
        'markerWidth="8.4" markerHeight="8.4" orient="auto">'
        '<path d="M0,0.8 L7.5,4 L0,7.2 z" fill="#9ca3af"/></marker></defs>',
        f'<g transform="translate({shift:.1f} 0)">',
        '<g fill="none" stroke="#9ca3af" stroke-width="1.2">',
    ]
    for (a, b), passed in layout.lines.items():
        start = (layout.x[a], layout.y[a] + _HEIGHT / 2)
        end = (_entry_point(layout.x[a] if not passed else passed[-1][0], layout.x[b], widths[b]), layout.y[b])
        device, other = boxes.entries[a].device, boxes.entries[b].device
        wide = "" if device == other else f' stroke="{devices[other]}" stroke-width="2.6"'
        parts.append(_curve([start, *passed, (end[0], end[1] - _HEIGHT / 2)], wide))
    parts.append("</g>")
    for box, entry in enumerate(boxes.entries):
        tooltip = _tooltip(boxes.numbers[box], entry)
        parts.append(_box(layout.x[box], layout.y[box], widths[box], boxes.labels[box], entry, tooltip, devices))
    return "\n".join([*parts, "</g>", *legend, "</svg>"]) + "\n"


def _entry_point(come_from: float, x: float, width: float) -> float:
    """Where a line meets the upper edge of a box: towards the side that it comes from."""
    reach = width / 2 - 14
    return x + max(-reach, min(reach, (come_from - x) * 0.3))


def _curve(points: list[tuple[float, float]], style: str = "") -> str:
    x, y = points[0]
    path = [f"M{x:.1f},{y:.1f}"]
    for next_x, next_y in points[1:]:
        bend = (next_y - y) / 2
        path.append(f"C{x:.1f},{y + bend:.1f} {next_x:.1f},{next_y - bend:.1f} {next_x:.1f},{next_y:.1f}")
        x, y = next_x, next_y
    return f'<path d="{" ".join(path)}" marker-end="url(#arrow)"{style}/>'


def _box(
    x: float, y: float, width: float, label: tuple[str, str], entry: Entry, tooltip: str, devices: dict[str, str]
) -> str:
    fill, border = _colours(entry)
    across = entry.category == "collectives"
    pen = 2.5 if entry.is_output else 1.8 if across else 1.2
    dash = (
        ""
        if entry.has_value or entry.is_output or across or entry.category != "creation"
        else ' stroke-dasharray="4 3"'
    )
    title_colour, text_colour = ("#ffffff", "#fee2e2") if across else ("#111827", "#4b5563")
    return (
        f"<g><title>{_text(tooltip)}</title>"
        f'<rect x="{x - width / 2:.1f}" y="{y - _HEIGHT / 2:.1f}" width="{width:.1f}" height="{_HEIGHT:.0f}" '
        f'rx="{4 if not entry.has_value else 14}" fill="{fill}" stroke="{border}" stroke-width="{pen}"{dash}/>'
        f"{_bands(x, y, width, entry, devices)}"
        f'<text x="{x:.1f}" y="{y - 4:.1f}" text-anchor="middle" font-weight="bold" fill="{title_colour}">'
        f"{_text(label[0])}</text>"
        f'<text x="{x:.1f}" y="{y + 12:.1f}" text-anchor="middle" fill="{text_colour}">{_text(label[1])}</text></g>'
    )


def _bands(x: float, y: float, width: float, entry: Entry, devices: dict[str, str]) -> str:
    """The colour of the device at the left edge; of a copy that of its source, and of its target at the right."""
    ends = [(x - width / 2, entry.source or entry.device)]
    if entry.source:
        ends.append((x + width / 2 - _BAND, entry.device))
    return "".join(
        f'<rect x="{at:.1f}" y="{y - _HEIGHT / 2 + 5:.1f}" width="{_BAND}" height="{_HEIGHT - 10:.0f}" '
        f'fill="{devices[name]}"/>'
        for at, name in ends
        if devices
    )


def _legend(entries: list[Entry], devices: dict[str, str], y: float) -> tuple[list[str], float]:
    """One swatch for each kind of op and each device in the picture, and the width of them all."""
    kinds = {NAMES.get(e.category, e.category): _colours(e) for e in sorted(entries, key=lambda e: e.category)}
    kinds.update({name: (colour, colour) for name, colour in devices.items()})
    x, parts = 0.0, []
    for name, (fill, border) in kinds.items():
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="14" height="14" rx="3" fill="{fill}" stroke="{border}"/>')
        parts.append(f'<text x="{x + 20:.1f}" y="{y + 11:.1f}" fill="#4b5563">{_text(name)}</text>')
        x += 20 + len(name) * _CHARACTER + 22
    return parts, x


def _text(text: str) -> str:
    """Escaped, and without characters that XML cannot hold."""
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text))

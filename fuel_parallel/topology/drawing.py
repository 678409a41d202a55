"""A picture of a topology: machines, their devices and switches, and links as thick as their bandwidth.

Up to eight machines are drawn from inside. Of more, each is a box with its devices below the switch that it hangs on,
and the picture says that detail is left out. A bandwidth that is unknown is a dashed line, never a thin one.
"""

from __future__ import annotations

from collections import Counter

from fuel_parallel.errors import ArgumentError
from fuel_parallel.topology.canvas import FAINT, Box, Canvas, Line, Text, fitting, text_width, to_svg
from fuel_parallel.topology.drawing_machines import Look, draw_machines
from fuel_parallel.topology.drawing_overview import draw_overview
from fuel_parallel.topology.drawing_style import COLORS, LINK_COLORS, link_width
from fuel_parallel.topology.model import Interconnect, mb_s
from fuel_parallel.topology.placement import Placement
from fuel_parallel.topology.topology import DeviceTopology

MOST_MACHINES, MOST_PARTS, MOST_ALIKE = 8, 320, 20
"""More machines, or more parts, or more of one kind in a machine than these are drawn from outside only."""


def drawing(topology: DeviceTopology, placement: Placement | None = None, axis: str = "") -> str:
    """The picture as SVG. Raises `ArgumentError` when there is nothing to draw.

    Args:
        topology: What to draw.
        placement: Gives devices their ranks; None: no ranks are shown.
        axis: The axis of the mesh whose coordinate colours the ranks; "" for the outermost of more than one rank.

    >>> from fuel_parallel.topology import DeviceInfo, DeviceKind
    >>> t = DeviceTopology("one")
    >>> t.add_device(DeviceInfo(id="cuda:0", kind=DeviceKind.CUDA))
    >>> drawing(t).startswith("<svg")
    True
    """
    return to_svg(drawing_canvas(topology, placement, axis))


def drawing_canvas(topology: DeviceTopology, placement: Placement | None = None, axis: str = "") -> Canvas:
    """The picture. Raises like `drawing`."""
    if not topology.description().parts:
        raise ArgumentError(f"{topology.name or 'the topology'} is empty; there is nothing to draw")
    look = _look(placement, axis)
    c = Canvas(640, 0)
    c.add(Text(24, 34, topology.name or "topology", 18, bold=True))
    c.add(Text(24, 52, _summary(topology), 11, color=FAINT))
    parts = len(topology.description().parts)
    inside = _fits(topology)
    bottom = draw_machines(c, topology, look, 76) if inside else draw_overview(c, topology, look, 76)
    if not inside:
        said = f"{len(topology.nodes)} machines with {parts} parts: links inside of machines are summed up in words."
        c.add(Text(24, bottom + 16, said, 11, color=FAINT))
        bottom += 22
    bottom = _legend(c, topology, look, bottom + 26)
    c.height = bottom + 16
    return c


def _fits(t: DeviceTopology) -> bool:
    """Whether the inside of machines can be seen in a picture."""
    parts = t.description().parts
    alike = Counter((part.node, type(part)) for part in parts)
    return len(t.nodes) <= MOST_MACHINES and len(parts) <= MOST_PARTS and max(alike.values()) <= MOST_ALIKE


def _look(placement: Placement | None, axis: str) -> Look:
    if placement is None:
        return Look({}, {}, "")
    names = [one.name for one in placement.axes]
    if axis and axis not in names:
        raise ArgumentError(f"there is no axis {axis!r}; the axes are {', '.join(names)}")
    axis = axis or next((one.name for one in placement.axes if one.size > 1), names[0] if names else "")
    ranks = {device: rank for rank, device in enumerate(placement.devices)}
    colours = {device: placement.coordinates(rank).get(axis, 0) for device, rank in ranks.items()}
    return Look(ranks, colours, axis)


def _summary(t: DeviceTopology) -> str:
    counts = (
        (len(t.nodes) or 1, "machine"),
        (len(t), "device"),
        (len(t.nics), "network card"),
        (len(t.switches), "switch"),
    )
    return ", ".join(f"{n} {what}{'' if n == 1 else 'es' if what[-1] == 'h' else 's'}" for n, what in counts if n)


def _legend(c: Canvas, t: DeviceTopology, look: Look, y: float) -> float:
    """What colours and widths mean, in rows."""
    links = {x.link.interconnect: x.link for x in t.connections()}
    unknown = any(x.link.bandwidth_mb_s is None for x in t.connections())
    x = 24.0
    for kind in (kind for kind in Interconnect if kind in links):
        c.add(Line(x, y, x + 26, y, LINK_COLORS[kind], 3))
        name = {Interconnect.UNKNOWN: "unknown kind"}.get(kind, kind.value.replace("_", " "))
        c.add(Text(x + 33, y + 4, name, 11))
        x += 58 + text_width(name, 11)
    if links:
        y, x = y + 22, 24.0
        for rate in (1, 10, 100, 400):
            c.add(Line(x, y, x + 26, y, FAINT, link_width(mb_s(rate))), Text(x + 36, y + 4, f"{rate} GB/s", 11))
            x += 100
        if unknown:
            c.add(Line(x, y, x + 26, y, FAINT, 1.6, dashed=True), Text(x + 33, y + 4, "bandwidth unknown", 11))
    if look.axis:
        y, x = y + 24, 24.0
        values = sorted(set(look.colors.values()))
        for value in values[: len(COLORS)]:
            c.add(Box(x, y - 9, 14, 14, fill=COLORS[value % len(COLORS)], radius=3))
            c.add(Text(x + 20, y + 3, f"{look.axis}={value}", 11))
            x += 36 + text_width(f"{look.axis}={value}", 11)
            if x > max(c.width, 640) - 90:
                x, y = 24.0, y + 20
        if len(values) > len(COLORS):
            c.add(
                Text(x, y + 3, fitting(f"and so on, up to {values[-1]}; colours come again", 400, 11), 11, color=FAINT)
            )
    return y

"""A picture of the bandwidth between each two devices: dark where it is high, hatched where it is unknown."""

from __future__ import annotations

import math

from fuel_parallel.errors import ArgumentError
from fuel_parallel.topology.canvas import FAINT, PAPER, Box, Canvas, Text, fitting, to_svg
from fuel_parallel.topology.model import DeviceInfo, DeviceKind, Link, gb_s
from fuel_parallel.topology.routes import Route
from fuel_parallel.topology.topology import DeviceTopology

LABELLED, MOST = 16, 96
"""Up to so many devices cells have text; up to so many are drawn."""

_LIGHT, _DARK = (224, 242, 254), (12, 74, 110)
_SELF = "#e2e8f0"


def heat_map(topology: DeviceTopology) -> str:
    """The picture as SVG. Raises `ArgumentError` when there are no devices."""
    return to_svg(heat_map_canvas(topology))


def heat_map_canvas(topology: DeviceTopology) -> Canvas:
    """The picture; CPUs are left out where there are other devices."""
    devices = chosen_devices(topology)
    if not devices:
        raise ArgumentError(f"{topology.name or 'the topology'} has no devices to draw")
    shown = devices[:MOST]
    routes = {(a.id, b.id): topology.route(a.id, b.id) for a in shown for b in shown if a is not b}
    rates = {pair: None if route is None else route.bandwidth_mb_s for pair, route in routes.items()}
    known = [rate for rate in rates.values() if rate is not None]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    size = 58.0 if len(shown) <= LABELLED else max(6.0, 720 / len(shown))
    side = 150.0 if len(shown) <= 64 else 40.0
    c = Canvas(max(side + len(shown) * size + 40, 520), len(shown) * size + 172)
    c.add(Text(24, 32, f"Bandwidth between devices of {topology.name or 'the topology'}", 16, bold=True))
    c.add(Text(24, 50, "GB/s one way, from the row's device to the column's", 11, color=FAINT))
    top = 88.0
    for i, a in enumerate(shown):
        if len(shown) <= 64:
            c.add(Text(side - 8, top + (i + 0.62) * size, fitting(a.id, side - 30, 11), min(11, size), "end"))
            if len(shown) <= LABELLED:
                c.add(Text(side + (i + 0.5) * size, top - 8, fitting(a.id, size, 10), 10, "middle"))
        for j, b in enumerate(shown):
            x, y = side + j * size, top + i * size
            words = _words(topology.link(a.id, b.id), routes.get((a.id, b.id)))
            _cell(c, (a.id, b.id), rates.get((a.id, b.id)), words, (x, y, size), (low, high), len(shown) <= LABELLED)
    _scale(c, side, top + len(shown) * size + 22, (low, high), len(known), len(rates) - len(known))
    if len(devices) > MOST:
        c.add(Text(side, c.height - 14, f"The first {MOST} of {len(devices)} devices.", 11, color=FAINT))
    return c


def chosen_devices(topology: DeviceTopology) -> list[DeviceInfo]:
    """All but CPUs; CPUs where there is nothing else."""
    return [d for d in topology.devices if d.kind is not DeviceKind.CPU] or topology.devices


def _words(link: Link | None, route: Route | None) -> str:
    """What a way is made of: what its file calls it, or else its slowest kind of link."""
    if link is not None and link.path:
        return link.path
    return "" if route is None else route.interconnect.value.replace("_", " ")


def _cell(
    c: Canvas,
    pair: tuple[str, str],
    rate: float | None,
    words: str,
    place: tuple[float, float, float],
    span: tuple[float, float],
    labelled: bool,
) -> None:
    (a, b), (x, y, size) = pair, place
    side = size - (1.5 if size > 20 else 0.5)
    if a == b:
        c.add(Box(x, y, side, side, fill=_SELF, radius=3 if labelled else 0, title=a))
        return
    said = "?" if rate is None else f"{gb_s(rate):.3g}"
    title = f"{a} to {b}: {words} {'unknown' if rate is None else said + ' GB/s'}"
    if rate is None:
        c.add(Box(x, y, side, side, hatched=True, radius=3 if labelled else 0, title=title))
    else:
        c.add(Box(x, y, side, side, fill=_shade(rate, *span), radius=3 if labelled else 0, title=title))
    if labelled:
        ink = PAPER if rate is not None and _strength(rate, *span) > 0.45 else "#0f172a"
        c.add(Text(x + side / 2, y + side / 2 + (0 if words else 4), said, 12, "middle", ink, bold=True))
        c.add(Text(x + side / 2, y + side / 2 + 13, fitting(words, side, 8.5), 8.5, "middle", ink))


def _strength(rate: float, low: float, high: float) -> float:
    """From 0 to 1, by its logarithm."""
    return 1.0 if high <= low else math.log(rate / low) / math.log(high / low)


def _shade(rate: float, low: float, high: float) -> str:
    part = _strength(rate, low, high)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(_LIGHT, _DARK, strict=True))


def _scale(c: Canvas, x: float, y: float, span: tuple[float, float], known: int, unknown: int) -> None:
    low, high = span
    if known:
        steps = 24 if high > low else 1
        for step in range(steps):
            rate = low * (high / low) ** (step / max(steps - 1, 1))
            c.add(Box(x + step * 6, y, 6.5, 12, fill=_shade(rate, low, high)))
        ends = f"{gb_s(low):.3g} to {gb_s(high):.3g} GB/s" if high > low else f"{gb_s(low):.3g} GB/s"
        c.add(Text(x + steps * 6 + 8, y + 10, ends, 11, color=FAINT))
    if unknown:
        y += 20 if known else 0
        c.add(Box(x, y, 12, 12, hatched=True), Text(x + 20, y + 10, "unknown, which is not slow", 11, color=FAINT))

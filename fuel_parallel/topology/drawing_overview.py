"""Many machines drawn from outside: each as a box with its devices, in a frame for the switch that it hangs on."""

from __future__ import annotations

import math
from collections import Counter

from fuel_parallel.topology.canvas import FAINT, Box, Canvas, Line, Text, fitting
from fuel_parallel.topology.drawing_machines import Look, network_levels
from fuel_parallel.topology.drawing_style import COLORS, DEVICE, LINK_COLORS, SWITCH, link_text, link_width
from fuel_parallel.topology.heat_map import chosen_devices
from fuel_parallel.topology.model import DeviceInfo, Link
from fuel_parallel.topology.topology import DeviceTopology

MOST_FRAMES, MOST_MACHINES, MOST_DEVICES, MOST_ABOVE = 12, 32, 16, 24
"""So many frames, machines in a frame, devices in a machine and switches in a row above are drawn at most."""

_CELL, _GAP, _PAD, _ROW = 19.0, 12.0, 16.0, 84.0


def draw_overview(c: Canvas, t: DeviceTopology, look: Look, top: float) -> float:
    """Draws frames of machines with the switches above them; returns where the picture ends."""
    frames, linked = _frames(t)
    shown = dict(list(frames.items())[:MOST_FRAMES])
    by_node: dict[str, list[DeviceInfo]] = {}
    for device in chosen_devices(t):
        by_node.setdefault(device.node, []).append(device)
    most = min(max(map(len, by_node.values()), default=1), MOST_DEVICES)
    across = min(most, 8)
    wide, high = max(across * _CELL + 12, 92.0), 26 + math.ceil(most / across) * _CELL + 6
    columns = _columns(shown)
    width = columns * (wide + _GAP) - _GAP + 2 * _PAD
    per_row = max(1, min(len(shown), int(1640 // (width + 28)) or 1))
    c.width = max(c.width, per_row * (width + 28) + 20)
    above = _above(t, frames)
    y = top + len(above) * _ROW
    places: dict[str, tuple[float, float]] = {}
    boxes: list[tuple[str, float, float, float]] = []
    names = list(shown)
    for start in range(0, len(names), per_row):
        row = names[start : start + per_row]
        tall = max(_height(len(frames[name]), columns, high) for name in row)
        for i, name in enumerate(row):
            x = 24 + i * (width + 28)
            places[name] = x + width / 2, y
            boxes.append((name, x, y, tall))
        y += tall + 28
    lines = len(shown) <= per_row  # to a second row of frames they would pass behind the first
    _draw_above(c, t, above, places if lines else {}, top)
    for name, x, at, tall in boxes:
        c.add(Box(x, at, width, tall, "#fbfdff", "#cbd5e1", 10, dashed=not name))
        c.add(Text(x + _PAD, at + 21, _title(name, frames[name], width), 12, bold=True))
        for i, node in enumerate(frames[name][:MOST_MACHINES]):
            left, upper = x + _PAD + i % columns * (wide + _GAP), at + 46 + i // columns * (high + _GAP)
            _draw_machine(c, node, by_node.get(node, []), look, (left, upper, wide, high, across))
        how = _how(linked.get(name), frames[name]) if lines else _how(None, frames[name]) + _below(t, name, frames)
        c.add(Text(x + _PAD, at + 37, fitting(how, width - 2 * _PAD, 10), 10, color=FAINT))
    for words in _words(t, len(frames)):
        c.add(Text(24, y, words, 11, color=FAINT))
        y += 17
    return y


def _frames(t: DeviceTopology) -> tuple[dict[str, list[str]], dict[str, Counter[str]]]:
    """Machines by the first switch outside that they hang on, "" for none; and the links to it, in words."""
    home: dict[str, str] = {}
    linked: dict[str, Counter[str]] = {}
    for part in t.description().parts:
        if part.node:
            home.setdefault(part.node, "")
            for end, link in t.links_of(part.id).items():
                if not t.part(end).node:
                    home[part.node] = home[part.node] or end
                    if home[part.node] == end:
                        linked.setdefault(end, Counter())[link_text(link)] += 1
    frames: dict[str, list[str]] = {}
    for node, switch in home.items():
        frames.setdefault(switch, []).append(node)
    if not frames:  # one machine with many parts
        frames[""] = [""]
    return frames, linked


def _columns(frames: dict[str, list[str]]) -> int:
    largest = min(max(map(len, frames.values())), MOST_MACHINES)
    return max(1, min(8 if len(frames) == 1 else 4, math.ceil(math.sqrt(largest))))


def _height(machines: int, columns: int, high: float) -> float:
    return 46 + math.ceil(min(machines, MOST_MACHINES) / columns) * (high + _GAP) + 4


def _above(t: DeviceTopology, frames: dict[str, list[str]]) -> list[list[str]]:
    """The switches above those of frames, from the top."""
    levels = [[name for name in row if name not in frames] for row in network_levels(t)]
    return [row for row in levels if row]


def _draw_above(
    c: Canvas, t: DeviceTopology, above: list[list[str]], places: dict[str, tuple[float, float]], top: float
) -> None:
    for n, row in enumerate(above):
        shown = row[:MOST_ABOVE]
        step = (c.width - 48) / len(shown)
        for i, name in enumerate(shown):
            places[name] = 24 + (i + 0.5) * step, top + n * _ROW + 15
    shown_above = [name for row in above for name in row[:MOST_ABOVE]]
    for name in shown_above:
        for end, link in t.links_of(name).items():
            if end in places and (end not in shown_above or shown_above.index(end) > shown_above.index(name)):
                (x1, y1), (x2, y2) = places[name], places[end]
                c.add(Line(x1, y1, x2, y2, *_stroke(link), title=f"{name} and {end}: {link_text(link)}"))
    for n, row in enumerate(above):
        wide = min((c.width - 48) / min(len(row), MOST_ABOVE) - 6, 120)
        for name in row[:MOST_ABOVE]:
            x, y = places[name]
            c.add(Box(x - wide / 2, y - 15, wide, 30, SWITCH, "#64748b", 5, title=name))
            c.add(Text(x, y + 4, fitting(name, wide - 6, 10.5), 10.5, "middle", bold=True))
        if len(row) > MOST_ABOVE:
            said = f"and {len(row) - MOST_ABOVE} more"
            c.add(Text(c.width - 24, top + n * _ROW + 46, said, 10, "end", FAINT))


def _stroke(link: Link) -> tuple[str, float, bool]:
    return LINK_COLORS[link.interconnect], min(link_width(link.bandwidth_mb_s), 3.5), link.bandwidth_mb_s is None


def _title(name: str, nodes: list[str], width: float) -> str:
    return fitting(name or ("no switch" if nodes != [""] else "this machine"), width - 2 * _PAD, 12)


def _how(linked: Counter[str] | None, nodes: list[str]) -> str:
    left = f"; {MOST_MACHINES} are drawn" if len(nodes) > MOST_MACHINES else ""
    count = f"{len(nodes)} machine{'s' * (len(nodes) != 1)}{left}"
    return f"{count}, {linked.most_common(1)[0][0]}" if linked else count


def _below(t: DeviceTopology, name: str, frames: dict[str, list[str]]) -> str:
    """The switches above a frame, in words."""
    ends = [end for end in (t.links_of(name) if name else ()) if end not in frames and not t.part(end).node]
    return f", below {', '.join(ends[:2])}{', ...' * (len(ends) > 2)}" if ends else ""


def _draw_machine(
    c: Canvas, node: str, devices: list[DeviceInfo], look: Look, place: tuple[float, float, float, float, int]
) -> None:
    x, y, wide, high, across = place
    c.add(Box(x, y, wide, high, "#ffffff", "#94a3b8", 5, title=f"{node}: {len(devices)} devices"))
    more = f" +{len(devices) - MOST_DEVICES}" if len(devices) > MOST_DEVICES else ""
    c.add(Text(x + 6, y + 15, fitting(node or "this machine", wide - 12 - len(more) * 6, 10) + more, 10))
    for i, device in enumerate(devices[:MOST_DEVICES]):
        rank = look.ranks.get(device.id)
        fill = COLORS[look.colors[device.id] % len(COLORS)] if rank is not None else "#f8fafc" if look.axis else DEVICE
        left, upper = x + 6 + i % across * _CELL, y + 22 + i // across * _CELL
        said = device.id if rank is None else f"{device.id}: rank {rank}"
        c.add(Box(left, upper, _CELL - 3, _CELL - 3, fill, "#94a3b8", 2, title=said))
        if rank is not None:
            size = 8.0 if rank < 1000 else 6.0
            c.add(Text(left + (_CELL - 3) / 2, upper + 11, str(rank), size, "middle"))


def _words(t: DeviceTopology, frames: int) -> list[str]:
    """What the links inside of machines are, and what was not drawn."""
    clustered = bool(t.nodes)
    inside, up, between = Counter[str](), Counter[str](), Counter[str]()
    for x in t.connections():
        nodes = {t.part(end).node for end in (x.source, x.target)}
        if nodes == {""} and clustered:
            between[link_text(x.link)] += 1
        elif "" in nodes and clustered:
            up[link_text(x.link)] += 1
        elif len(nodes) == 1:
            inside[link_text(x.link)] += 1
    words = [f"Inside of machines: {n} x {link}" for link, n in inside.most_common(4)]
    words += [f"From machines to switches: {n} x {link}" for link, n in up.most_common(2)]
    words += [f"Between switches: {n} x {link}" for link, n in between.most_common(2)]
    if frames > MOST_FRAMES:
        words.append(f"The first {MOST_FRAMES} of {frames} groups of machines are drawn.")
    return words

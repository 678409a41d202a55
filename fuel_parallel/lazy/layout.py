"""Where the boxes of a picture of a graph go: in layers by depth, each layer in an order with few crossings.

The method is that of Sugiyama, Tagawa and Toda (1981): layers from longest paths, places in a layer by the mean place
of the neighbours, sweeping down and up; then the horizontal position of each box as near to its neighbours' mean as its
own neighbours in the layer allow. Lines that pass layers are led through them by a point in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

GAP = 26.0
LAYER_GAP = 34.0
_SWEEPS = 8
_LONGEST_LEAD = 60
"""Lines over more layers than this are drawn straight."""


@dataclass(slots=True)
class Point:
    """A box, or a place where a line passes a layer (`box` is -1 then)."""

    box: int
    width: float
    layer: int
    above: list[Point] = field(default_factory=list)
    below: list[Point] = field(default_factory=list)
    order: float = 0.0
    x: float = 0.0


@dataclass(frozen=True, slots=True)
class Layout:
    """Centres of the boxes and, for each line from one box to another, the points that it passes."""

    x: list[float]
    y: list[float]
    lines: dict[tuple[int, int], list[tuple[float, float]]]
    width: float
    height: float


def arrange(widths: Sequence[float], height: float, edges: Sequence[tuple[int, int]]) -> Layout:
    """Lays out boxes of these widths. `edges` lead from lower to higher numbers, which are drawn further down."""
    depth = _depths(len(widths), edges)
    boxes = [Point(i, width, depth[i]) for i, width in enumerate(widths)]
    leads = {edge: _lead(boxes[edge[0]], boxes[edge[1]]) for edge in dict.fromkeys(edges)}
    layers: list[list[Point]] = [[] for _ in range(max(depth, default=-1) + 1)]
    for point in [*boxes, *(point for lead in leads.values() for point in lead)]:
        layers[point.layer].append(point)
    _order(layers)
    _place(layers)
    left = min((p.x - p.width / 2 for layer in layers for p in layer), default=0.0)
    right = max((p.x + p.width / 2 for layer in layers for p in layer), default=0.0)
    middle = [layer * (height + LAYER_GAP) + height / 2 for layer in range(len(layers))]
    return Layout(
        x=[box.x - left for box in boxes],
        y=[middle[box.layer] for box in boxes],
        lines={edge: [(p.x - left, middle[p.layer]) for p in lead] for edge, lead in leads.items()},
        width=right - left,
        height=max(len(layers) * (height + LAYER_GAP) - LAYER_GAP, 0.0),
    )


def _depths(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The layer of each box: below all its inputs, and directly above its first user if it has no inputs."""
    depth = [0] * count
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        depth[target] = max(depth[target], depth[source] + 1)
    fed = {target for _, target in edges}
    users: dict[int, int] = {}
    for source, target in edges:
        users[source] = min(users.get(source, depth[target]), depth[target])
    return [users[i] - 1 if i in users and i not in fed else depth[i] for i in range(count)]


def _lead(source: Point, target: Point) -> list[Point]:
    """The points that lead a line through the layers between its ends; links all of them to each other."""
    passed = range(source.layer + 1, target.layer)
    lead = [Point(-1, 2.0, layer) for layer in passed] if len(passed) <= _LONGEST_LEAD else []
    chain = [source, *lead, target]
    for upper, lower in pairwise(chain):
        upper.below.append(lower)
        lower.above.append(upper)
    return lead


def _order(layers: list[list[Point]]) -> None:
    for layer in layers:
        _number(layer)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            for point in layer:
                neighbours = point.above if down else point.below
                if neighbours:
                    point.order = sum(n.order for n in neighbours) / len(neighbours)
            layer.sort(key=lambda point: point.order)
            _number(layer)


def _number(layer: list[Point]) -> None:
    for place, point in enumerate(layer):
        point.order = float(place) - (len(layer) - 1) / 2


def _place(layers: list[list[Point]]) -> None:
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            wished = []
            for point in layer:
                neighbours = point.above if down else point.below
                neighbours = neighbours or point.above or point.below
                wished.append(sum(n.x for n in neighbours) / len(neighbours) if neighbours else point.x)
            for point, x in zip(layer, _apart(layer, wished), strict=True):
                point.x = x


def _apart(layer: list[Point], wished: list[float]) -> list[float]:
    """Positions in the layer's order, far enough apart, with the least sum of squared distances to the wished ones.

    After the gaps are taken off this is a non-decreasing fit, found by pooling neighbours that are out of order.
    """
    offsets = [0.0]
    for left, right in pairwise(layer):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + GAP)
    pools: list[tuple[float, int]] = []
    for wish, offset in zip(wished, offsets, strict=False):
        total, count = wish - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            total, count = total + pools[-1][0], count + pools[-1][1]
            pools.pop()
        pools.append((total, count))
    fitted = [total / count for total, count in pools for _ in range(count)]
    return [x + offset for x, offset in zip(fitted, offsets, strict=False)]

"""A part of a tensor, computed without the rest where that can be."""

from __future__ import annotations

from fuel_parallel.lazy.node import Node, apply, graph_lock
from fuel_parallel.lazy.ops.creation import FULL, STOP_GRADIENT
from fuel_parallel.lazy.random import RANDOM_BITS, RANDOM_UNIFORM
from fuel_parallel.lazy.tensor import Tensor

Box = tuple[range, ...]


def part_of(x: Tensor, box: Box) -> Tensor:
    """The elements of a box of `x`: those of `x[box]`, bit for bit.

    What is computed element by element from random draws, constants and data is computed for the box alone: a rank that
    takes its part of a weight never draws the whole. Anything else is computed whole and then cut.

    >>> import fuel_parallel.lazy as ft
    >>> from fuel_parallel.lazy.node import topological
    >>> whole = ft.random.Generator(0).normal((4, 6))
    >>> part = part_of(whole, (range(1, 3), range(6)))
    >>> bool(ft.all(part == whole[1:3])), max(node.spec.size for node in topological([part.node]))
    (True, 12)
    """
    with graph_lock:
        return Tensor(_part(x.node, box, {}))


def _part(node: Node, box: Box, made: dict[tuple[int, Box], Node]) -> Node:
    if all(len(span) == extent for span, extent in zip(box, node.spec.shape, strict=True)):
        return node
    key = (node.serial, box)
    if key not in made:
        made[key] = _computed(node, box, made)
    return made[key]


def _computed(node: Node, box: Box, made: dict[tuple[int, Box], Node]) -> Node:
    shape = tuple(map(len, box))
    if node.op is FULL:
        return apply(FULL, (), shape, *node.attrs[1:])
    if node.op is RANDOM_BITS:
        _, whole, start = node.attrs
        first = tuple(at + span.start for at, span in zip(start, box, strict=True))
        return apply(RANDOM_BITS, node.inputs, shape, whole, first)
    if node.op.elementwise or node.op in (RANDOM_UNIFORM, STOP_GRADIENT):
        return apply(node.op, tuple(_part(one, _behind(one, node, box), made) for one in node.inputs), *node.attrs)
    return Tensor(node)[tuple(slice(span.start, span.stop) for span in box)].node


def _behind(source: Node, node: Node, box: Box) -> Box:
    """The box of an input that a box of the node is computed from."""
    shape = source.spec.shape
    spans = list(zip(box, node.spec.shape, strict=True))[len(box) - len(shape) :]
    return tuple(
        range(1) if own == 1 and extent > 1 else span for (span, extent), own in zip(spans, shape, strict=True)
    )

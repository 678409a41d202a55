"""Algebraic clean-ups. Each rule gives the same bits as what it replaces, but for the sign of a zero that is scattered.

A rule looks at one instruction, on new numbers, and answers with a value that it can be replaced by, or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import OPS, Shape, Spec
from fuel_parallel.runtime.graph import Builder, Graph, Instruction


def algebra(graph: Graph) -> Graph:
    """Applies all rules, from the inputs to the outputs."""
    builder = Builder(graph)
    view = _View(builder, graph)
    for i in graph.instructions:
        new = Instruction(i.op, tuple(builder.at[v] for v in i.inputs), i.attrs, i.spec, i.origin)
        for rule in _RULES.get(i.op.name, ()):
            replaced = rule(view, new)
            if replaced is not None:
                builder.at.append(replaced)
                break
        else:
            builder.at.append(builder.add(new.op, new.inputs, new.attrs, new.spec, new.origin))
    return builder.finish()


class _View:
    """What is known of the new graph's values."""

    def __init__(self, builder: Builder, graph: Graph) -> None:
        self.builder = builder
        self.leaves = graph.leaves

    def made_by(self, value: int, name: str) -> Instruction | None:
        """The instruction behind a value if it is of that op."""
        if value >= 0:
            return None
        instruction = self.builder.instructions[-value - 1]
        return instruction if instruction.op.name == name else None

    def constant(self, value: int) -> Any:
        """The constant of that number, or None if the value is none."""
        return self.builder.constants[value - len(self.leaves)] if value >= len(self.leaves) else None

    def is_constant(self, value: int, number: float) -> bool:
        """Whether the value is a constant, all of whose elements are this number."""
        constant = self.constant(value)
        return (
            constant is not None and bool(constant.size) and constant.size <= 4096 and bool(np.all(constant == number))
        )

    def replace(self, old: Instruction, op: str, inputs: tuple[int, ...], *attrs: Any) -> int:
        return self.builder.add(OPS[op], inputs, attrs, old.spec, old.origin)


Rule = Callable[[_View, Instruction], int | None]


def _reshape(view: _View, i: Instruction) -> int | None:
    (source,) = i.inputs
    if view.builder.spec(source) is i.spec:
        return source
    inner = view.made_by(source, "reshape")
    if inner is None:
        return None
    same = view.builder.spec(inner.inputs[0]) is i.spec
    return inner.inputs[0] if same else view.replace(i, "reshape", inner.inputs, *i.attrs)


def _permute(view: _View, i: Instruction) -> int | None:
    inner = view.made_by(i.inputs[0], "permute_dims")
    if inner is None:
        return None
    axes = tuple(inner.attrs[0][a] for a in i.attrs[0])
    if axes == tuple(range(len(axes))):
        return inner.inputs[0]
    return view.replace(i, "permute_dims", inner.inputs, axes)


def _slice(view: _View, i: Instruction) -> int | None:
    """All of a tensor; or the window of one that is zero outside of it, as the cotangent of a window is."""
    (source,) = i.inputs
    if all(w == (0, 1, extent) for w, extent in zip(i.attrs[0], view.builder.spec(source).shape, strict=True)):
        return source
    inner = view.made_by(source, "unslice")
    return inner.inputs[0] if inner is not None and inner.attrs[1] == i.attrs[0] else None


def _astype(view: _View, i: Instruction) -> int | None:
    inner = view.made_by(i.inputs[0], "astype")
    if inner is None:
        return None
    first, middle, last = view.builder.spec(inner.inputs[0]).dtype, view.builder.spec(i.inputs[0]).dtype, i.spec.dtype
    if dtypes.kind(first) != dtypes.kind(middle) or not np.can_cast(first, middle, "safe"):
        return None
    return inner.inputs[0] if first is last else view.replace(i, "astype", inner.inputs, *i.attrs)


def _neutral(number: float, places: tuple[int, ...]) -> Rule:
    """x * 1, 1 * x, x / 1, x - 0: bit for bit x. (x + 0 is not: it turns -0.0 into 0.0.)"""

    def rule(view: _View, i: Instruction) -> int | None:
        for place in places:
            other = i.inputs[1 - place]
            if view.is_constant(i.inputs[place], number) and view.builder.spec(other) is i.spec:
                return other
        return None

    return rule


def _twice(name: str) -> Rule:
    def rule(view: _View, i: Instruction) -> int | None:
        inner = view.made_by(i.inputs[0], name)
        return None if inner is None else inner.inputs[0]

    return rule


def _whole_constant(view: _View, i: Instruction) -> int | None:
    """An operand `full(shape)` that only repeats one number: a 0-d constant says the same."""
    inputs = list(i.inputs)
    for place, value in enumerate(inputs):
        filled = view.made_by(value, "full")
        others = [view.builder.spec(v).shape for p, v in enumerate(inputs) if p != place]
        if filled is not None and filled.spec.shape and others and np.broadcast_shapes(*others) == i.spec.shape:
            literal = filled.attrs[1]
            inputs[place] = view.builder.constant(np.full((), literal.value, dtype=filled.spec.dtype))
    if tuple(inputs) == i.inputs:
        return None
    return view.builder.add(i.op, inputs, i.attrs, i.spec, i.origin)


def _sum_of_windows(view: _View, i: Instruction) -> int | None:
    """Sums of tensors that are each zero outside of a window of their own: the windows side by side.

    The gradient of `split` is such a sum.
    """
    parts = _window_parts(view, i)
    if parts is None:
        return None
    windows = [(part.attrs[1], part.inputs[0]) for part in parts]
    shape = i.spec.shape
    cut = [d for d, extent in enumerate(shape) if any(w[d] != (0, 1, extent) for w, _ in windows)]
    if len(cut) != 1:
        return None
    (axis,) = cut
    windows.sort(key=lambda part: part[0][axis][0])
    end = 0
    for window, _ in windows:
        start, step, count = window[axis]
        if step != 1 or start != end:
            return None
        end += count
    if end != shape[axis]:
        return None
    return view.replace(i, "concat", tuple(value for _, value in windows), axis)


def _window_parts(view: _View, i: Instruction) -> list[Instruction] | None:
    """The windows that are summed, or None if something else is; a sum of very many is not looked through."""
    parts: list[Instruction] = []
    values = list(i.inputs)
    while values:
        value = values.pop()
        window, add = view.made_by(value, "unslice"), view.made_by(value, "add")
        if window is not None:
            parts.append(window)
        elif add is not None:
            values.extend(add.inputs)
        if (window is None and add is None) or len(parts) + len(values) > _MOST_WINDOWS:
            return None
    return parts


_MOST_WINDOWS = 64


def _pick(view: _View, i: Instruction) -> int | None:
    """An element of each row: take_along_axis, or x[arange(n), index]. `pick` can be fused."""
    x, *places, index = i.inputs
    rows = view.builder.spec(x).shape[:-1]
    if i.attrs[0] != tuple(range(len(rows) + 1)) or not _each_row(view, places, index, rows, i.spec.shape):
        return None
    spec = Spec(rows, i.spec.dtype, i.spec.device)
    picked = view.builder.add(OPS["pick"], (x, _reshaped(view, i, index, rows)), (), spec, i.origin)
    return _reshaped(view, i, picked, i.spec.shape)


def _unpick(view: _View, i: Instruction) -> int | None:
    """The gradient of that: no place is added to twice."""
    g, *places, index = i.inputs
    *rows, classes = i.attrs[0]
    shape = tuple(rows)
    if i.attrs[1] != tuple(range(len(rows) + 1)) or not _each_row(
        view, places, index, shape, view.builder.spec(g).shape
    ):
        return None
    inputs = _reshaped(view, i, g, shape), _reshaped(view, i, index, shape)
    return view.replace(i, "unpick", inputs, classes)


def _each_row(view: _View, places: list[int], index: int, rows: Shape, shape: Shape) -> bool:
    """Whether the constants `places` are the position of each row, once and in order, in an indexing to `shape`."""
    known = [view.constant(place) for place in places]
    if not rows or view.builder.spec(index).shape != shape or math.prod(shape) != math.prod(rows):
        return False
    return not any(place is None for place in known) and all(
        np.array_equal(np.broadcast_to(place, shape).reshape(rows), position)
        for place, position in zip(known, np.indices(rows), strict=True)
    )


def _reshaped(view: _View, i: Instruction, value: int, shape: Shape) -> int:
    old = view.builder.spec(value)
    if old.shape == shape:
        return value
    return view.builder.add(OPS["reshape"], (value,), (shape,), Spec(shape, old.dtype, old.device), i.origin)


_RULES: dict[str, tuple[Rule, ...]] = {
    "index": (_pick,),
    "index_add": (_unpick,),
    "reshape": (_reshape,),
    "permute_dims": (_permute,),
    "slice": (_slice,),
    "astype": (_astype,),
    "add": (_sum_of_windows, _whole_constant),
    "subtract": (_neutral(0, (1,)), _whole_constant),
    "multiply": (_neutral(1, (0, 1)), _whole_constant),
    "divide": (_neutral(1, (1,)), _whole_constant),
    "where": (_whole_constant,),
    "negative": (_twice("negative"),),
}

"""How instructions lie over the grid of a region: rows, columns, and what each operand has of them.

A rule looks at one instruction and a group that it might join, and says how its value and its inputs would lie over the
group's grid, or that they do not. A new kind of operation for regions is one rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fuel_parallel.lazy.dtypes import is_half
from fuel_parallel.lazy.node import Shape, Spec
from fuel_parallel.runtime.graph import Instruction
from fuel_parallel.runtime.kernels import fuses
from fuel_parallel.runtime.program import Extent


@dataclass(eq=False)
class Group:
    """A region in the making: the grid, and how each known value lies over it."""

    rows: int
    columns: int
    members: list[int] = field(default_factory=list)
    extents: dict[int, Extent] = field(default_factory=dict)
    periods: dict[int, int] = field(default_factory=dict)
    waits_for: set[int] = field(default_factory=set)


def grid_of(shape: Shape) -> tuple[int, int]:
    """A shape as rows and columns."""
    return math.prod(shape[:-1]), shape[-1]


_ROW_REDUCTIONS = ("sum", "mean", "max", "min")


def may_fuse(i: Instruction, specs: list[Spec]) -> bool:
    """Whether there is a rule for the instruction."""
    device = i.spec.device
    if device != "cpu" and (any(specs[v].device != device for v in i.inputs) or not fuses(device)):
        return False
    # Halves are summed in float32; blocks of partial sums would be rounded on the way.
    return i.op.elementwise or (i.op.name in _RULES and not (i.op.name in _ROW_REDUCTIONS and is_half(i.spec.dtype)))


Laid = tuple[Extent, dict[int, tuple[Extent, int]]]
"""How a value lies, and for each input how it does and after how many rows it repeats."""


def lay(i: Instruction, spec: Spec, specs: list[Spec], group: Group) -> Laid | None:
    """How the instruction's value and inputs lie over the group's grid, or None if they do not."""
    if any(group.extents.get(v) in (Extent.COLUMN_SUM, Extent.TOTAL) for v in i.inputs):
        # These are whole only after the last block.
        return None
    rule = _lay_elementwise if i.op.elementwise else _RULES[i.op.name]
    return rule(i, spec, specs, group)


def _extent(value: int, specs: list[Spec], group: Group) -> Extent | None:
    """How a value lies over the grid: as it is known to, or as its shape says."""
    known = group.extents.get(value)
    return known or (Extent.FULL if _is_full(specs[value].shape, group) else None)


def _lay_reshape(i: Instruction, spec: Spec, specs: list[Spec], group: Group) -> Laid | None:
    """A form with the same rows and columns, or the same rows: nothing moves. Only behind what it can be fused with."""
    (source,) = i.inputs
    extent = group.extents.get(source)
    if extent is Extent.ROW or (extent is Extent.FULL and _is_full(spec.shape, group)):
        return extent, {source: (extent, 0)}
    return None


def _lay_broadcast(i: Instruction, spec: Spec, specs: list[Spec], group: Group) -> Laid | None:
    (source,) = i.inputs
    if source not in group.extents or not _is_full(spec.shape, group):
        return None
    laid = _against(specs[source].shape, spec.shape, group.extents[source], group)
    return None if laid is None or laid[0] is Extent.PERIODIC else (Extent.FULL, {source: laid})


def _lay_reduction(i: Instruction, spec: Spec, specs: list[Spec], group: Group) -> Laid | None:
    """Along rows; or sums over all rows, or over everything, which are gathered from block to block."""
    (source,) = i.inputs
    extent, axes = _extent(source, specs, group), i.attrs[0]
    last = len(specs[source].shape) - 1
    if extent not in (Extent.FULL, Extent.ROW):
        return None
    inputs: dict[int, tuple[Extent, int]] = {source: (extent, 0)}
    if i.op.name == "sum" and axes == tuple(range(last + 1)):
        return Extent.TOTAL, inputs
    if extent is Extent.FULL and axes == (last,) and specs[source].shape[last] == group.columns:
        return Extent.ROW, inputs
    if extent is Extent.FULL and i.op.name == "sum" and axes == tuple(range(last)) and last:
        return Extent.COLUMN_SUM, inputs
    return None


def _lay_along_rows(i: Instruction, spec: Spec, specs: list[Spec], group: Group) -> Laid | None:
    (source,) = i.inputs
    along_last = i.op.name == "normalize" or i.attrs[0] == len(spec.shape) - 1
    whole = _extent(source, specs, group) is Extent.FULL and along_last
    return (Extent.FULL, {source: (Extent.FULL, 0)}) if whole else None


def _lay_pick(i: Instruction, spec: Spec, specs: list[Spec], group: Group) -> Laid | None:
    return _lay_with_rows(Extent.ROW, i.inputs[0], i.inputs[1:], specs, group)


def _lay_scale_and_subtract(i: Instruction, spec: Spec, specs: list[Spec], group: Group) -> Laid | None:
    return _lay_with_rows(Extent.FULL, i.inputs[0], i.inputs[1:], specs, group)


def _lay_unpick(i: Instruction, spec: Spec, specs: list[Spec], group: Group) -> Laid | None:
    if not _is_full(spec.shape, group):
        return None
    return _lay_with_rows(Extent.FULL, None, i.inputs, specs, group)


def _lay_with_rows(
    result: Extent, whole: int | None, rows: tuple[int, ...], specs: list[Spec], group: Group
) -> Laid | None:
    """A result from one value over the whole grid, if any, and values with one element a row."""
    inputs: dict[int, tuple[Extent, int]] = {}
    if whole is not None:
        if _extent(whole, specs, group) is not Extent.FULL:
            return None
        inputs[whole] = Extent.FULL, 0
    for v in rows:
        if math.prod(specs[v].shape) != group.rows or group.extents.get(v, Extent.ROW) is not Extent.ROW:
            return None
        inputs[v] = Extent.ROW, 0
    return result, inputs


def _is_full(shape: Shape, group: Group) -> bool:
    return bool(shape) and grid_of(shape) == (group.rows, group.columns)


def _lay_elementwise(i: Instruction, spec: Spec, specs: list[Spec], group: Group) -> Laid | None:
    known = group.extents
    rowwise = any(known.get(v) is Extent.ROW for v in i.inputs) and math.prod(spec.shape) == group.rows
    if rowwise:
        inputs = {}
        for v in i.inputs:
            if specs[v].shape == spec.shape and known.get(v, Extent.ROW) is Extent.ROW:
                inputs[v] = (Extent.ROW, 0)
            elif math.prod(specs[v].shape) == 1 and known.get(v, Extent.SCALAR) is Extent.SCALAR:
                inputs[v] = (Extent.SCALAR, 0)
            else:
                return None
        return Extent.ROW, inputs
    if not _is_full(spec.shape, group):
        return None
    inputs = {}
    for v in i.inputs:
        laid = _against(specs[v].shape, spec.shape, known.get(v), group)
        if laid is None:
            return None
        inputs[v] = laid
    return Extent.FULL, inputs


def _against(shape: Shape, whole: Shape, known: Extent | None, group: Group) -> tuple[Extent, int] | None:
    """How an operand of `shape` lies over the grid when it is broadcast to `whole`, which is the grid."""
    padded = (1,) * (len(whole) - len(shape)) + shape
    found: tuple[Extent, int] | None = None
    if padded == whole:
        found = Extent.FULL, 0
    elif math.prod(shape) == 1:
        found = Extent.SCALAR, 0
    elif padded[-1] == 1 and padded[:-1] == whole[:-1]:
        found = Extent.ROW, 0
    elif padded[-1] == whole[-1] and math.prod(padded[:-1]) == 1:
        found = Extent.COLUMN, 0
    elif padded[-1] == whole[-1]:
        lead = next(d for d, extent in enumerate(padded) if extent != 1)
        if padded[lead:] == whole[lead:]:
            found = Extent.PERIODIC, math.prod(padded[:-1])
    if found is None or (known is not None and known is not found[0]):
        return None
    return found


_RULES: dict[str, Callable[[Instruction, Spec, list[Spec], Group], Laid | None]] = {
    "reshape": _lay_reshape,
    "broadcast_to": _lay_broadcast,
    "softmax": _lay_along_rows,
    "log_softmax": _lay_along_rows,
    "normalize": _lay_along_rows,
    "pick": _lay_pick,
    "unpick": _lay_unpick,
    "scale_and_subtract": _lay_scale_and_subtract,
    **dict.fromkeys(_ROW_REDUCTIONS, _lay_reduction),
}

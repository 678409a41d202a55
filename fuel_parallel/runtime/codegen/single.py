"""One op as a generated kernel, for devices that compile: the op becomes a region of one operation.

Elementwise ops see all elements as one column; those on rows get the reduced axes moved to the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuel_parallel.lazy.node import Attrs, Op, Shape, Spec
from fuel_parallel.runtime.codegen.dialect import Dialect
from fuel_parallel.runtime.codegen.expressions import is_expressed
from fuel_parallel.runtime.codegen.launch import kernel_or_reason, launch
from fuel_parallel.runtime.program import Extent, Operation, Program

Run = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Single:
    """A program, and how inputs and the result are laid out for it.

    `spread` are the shapes to which inputs are broadcast, `order` is that of the axes of the first input, with `back`
    for the result; None where nothing changes.
    """

    program: Program
    spread: tuple[Shape | None, ...]
    order: tuple[int, ...] | None = None
    back: tuple[int, ...] | None = None


def generated(op: Op, inputs: tuple[Spec, ...], attrs: Attrs, spec: Spec, dialect: Dialect) -> Run | None:
    """The function that computes an op by a generated kernel, called as the op's own kernel; None if there is none."""
    if op.variadic or not inputs or not spec.size or any(not x.size for x in inputs):
        return None
    single = _single(op, inputs, attrs, spec)
    if single is None or isinstance(kernel_or_reason(single.program, dialect), str):
        return None

    def run(xp: Any, *arguments: Any) -> Any:
        arrays = list(arguments[: len(inputs)])
        if single.order is not None:
            arrays[0] = arrays[0].transpose(single.order)
        for n, shape in enumerate(single.spread):
            if shape is not None:
                arrays[n] = xp.broadcast_to(arrays[n], shape)
        ((_, shape),) = single.program.outputs
        out = xp.empty(shape, dtype=spec.dtype)
        if not launch(xp, [out], arrays, single.program):
            raise RuntimeError(f"{op.name} had a kernel when the plan was made, and has none now")
        return (out if single.back is None else out.transpose(single.back)).reshape(spec.shape)

    return run


def _single(op: Op, inputs: tuple[Spec, ...], attrs: Attrs, spec: Spec) -> Single | None:
    if op.elementwise and is_expressed(op.name):
        return _elementwise(op, inputs, attrs, spec)
    if op.name in ("sum", "mean", "max", "min", "prod", "any", "all"):
        return _reduction(op, inputs[0], attrs[0], spec)
    if op.name in ("argmax", "argmin"):
        return _reduction(op, inputs[0], attrs[:1], spec)
    if op.name in ("tril", "triu"):
        shape = spec.shape
        return _on_rows(op, inputs, (*attrs, shape[-2]), shape, (Extent.FULL,), Extent.FULL, spec)
    if op.name in ("softmax", "log_softmax"):
        return _along_axis(op, inputs[0], attrs, spec)
    if op.name == "normalize":
        return _on_rows(op, inputs, attrs, inputs[0].shape, (Extent.FULL,), Extent.FULL, spec)
    if op.name == "pick":
        return _on_rows(op, inputs, attrs, inputs[0].shape, (Extent.FULL, Extent.ROW), Extent.ROW, spec)
    if op.name == "unpick":
        return _on_rows(op, inputs, attrs, spec.shape, (Extent.ROW, Extent.ROW), Extent.FULL, spec)
    if op.name == "scale_and_subtract":
        extents = (Extent.FULL, Extent.ROW, Extent.ROW, Extent.ROW)
        return _on_rows(op, inputs, attrs, spec.shape, extents, Extent.FULL, spec)
    return None


def _elementwise(op: Op, inputs: tuple[Spec, ...], attrs: Attrs, spec: Spec) -> Single:
    extents = tuple(Extent.SCALAR if x.size == 1 < spec.size else Extent.FULL for x in inputs)
    spread = tuple(
        None if extent is Extent.SCALAR or x.size == spec.size else spec.shape
        for x, extent in zip(inputs, extents, strict=True)
    )
    program = _program(op, inputs, attrs, spec.size, 1, extents, Extent.FULL, spec.shape, spec)
    return Single(program, spread)


def _reduction(op: Op, x: Spec, axes: tuple[int, ...], spec: Spec) -> Single:
    kept = tuple(a for a in range(len(x.shape)) if a not in axes)
    columns = math.prod(x.shape[a] for a in axes)
    shape = tuple(x.shape[a] for a in kept)
    program = _program(op, (x,), (), x.size // columns, columns, (Extent.FULL,), Extent.ROW, shape, spec)
    return Single(program, (None,), _unless_sorted((*kept, *axes)))


def _along_axis(op: Op, x: Spec, attrs: Attrs, spec: Spec) -> Single:
    (axis,) = attrs
    order = (*(a for a in range(len(x.shape)) if a != axis), axis)
    back = tuple(order.index(a) for a in range(len(order)))
    columns = x.shape[axis]
    shape = tuple(x.shape[a] for a in order)
    program = _program(op, (x,), (1,), x.size // columns, columns, (Extent.FULL,), Extent.FULL, shape, spec)
    return Single(program, (None,), _unless_sorted(order), _unless_sorted(back))


def _on_rows(
    op: Op, inputs: tuple[Spec, ...], attrs: Attrs, grid: Shape, extents: tuple[Extent, ...], extent: Extent, spec: Spec
) -> Single | None:
    rows, columns = math.prod(grid[:-1]), grid[-1]
    sizes = {Extent.FULL: rows * columns, Extent.ROW: rows}
    if any(x.size != sizes[e] for x, e in zip(inputs, extents, strict=True)):
        return None
    program = _program(op, inputs, attrs, rows, columns, extents, extent, spec.shape, spec)
    return Single(program, (None,) * len(inputs))


def _program(
    op: Op,
    inputs: tuple[Spec, ...],
    attrs: Attrs,
    rows: int,
    columns: int,
    extents: tuple[Extent, ...],
    extent: Extent,
    shape: Shape,
    spec: Spec,
) -> Program:
    operation = Operation(op, tuple(range(len(inputs))), attrs, spec.dtype, extent)
    kinds = tuple((each, 0) for each in extents)
    return Program(
        rows, columns, kinds, tuple(x.dtype for x in inputs), (operation,), ((len(inputs), shape),), block_rows=1
    )


def _unless_sorted(order: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if order == tuple(range(len(order))) else order

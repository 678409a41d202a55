"""The op that a region is: it runs the region's program on the device at hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuel_parallel.lazy.node import Op, define
from fuel_parallel.runtime.blocks import run_blocks
from fuel_parallel.runtime.codegen.launch import compiles, launch
from fuel_parallel.runtime.program import Extent, Program, kernel_on_rows, not_inferred


def _region_kernel(xp: Any, arrays: Any, program: Program) -> tuple[Any, ...]:
    """Runs a region; gives its outputs."""
    outputs = [xp.empty(shape, dtype=program.dtype_of(register)) for register, shape in program.outputs]
    region_into(xp, outputs, arrays, program)
    return tuple(outputs)


def region_into(xp: Any, outputs: list[Any], arrays: Any, program: Program, in_place: bool = False) -> None:
    """Runs a region into given memory: as one generated kernel where there is one, on the CPU by blocks.

    `in_place` says that outputs may lie where inputs lie, as the memory plan allows it.
    """
    if compiles(xp) and launch(xp, outputs, arrays, program, in_place):
        return
    if xp is np:
        run_blocks(program, arrays, outputs)
        return
    grid = program.on_grid
    inputs = [xp.asarray(a).reshape(grid(kind)) for a, (kind, _) in zip(arrays, program.inputs, strict=True)]
    results = [
        out.reshape(grid(program.extent_of(register)))
        for out, (register, _) in zip(outputs, program.outputs, strict=True)
    ]
    _run_whole(xp, program, inputs, results)


def _run_whole(xp: Any, program: Program, inputs: list[Any], outputs: list[Any]) -> None:
    """Runs a region as one block, each operation on whole arrays."""
    registers = [
        xp.concatenate([a] * (program.rows // period)) if kind is Extent.PERIODIC else a
        for a, (kind, period) in zip(inputs, program.inputs, strict=True)
    ]
    for operation in program.operations:
        arguments = [registers[v] for v in operation.inputs]
        if operation.extent is Extent.COLUMN_SUM:
            result = arguments[0].sum(axis=0, keepdims=True)
        elif operation.extent is Extent.TOTAL:
            result = arguments[0].sum()
        elif operation.op.name == "broadcast_to":
            result = xp.broadcast_to(arguments[0], (program.rows, program.columns))
        else:
            result = kernel_on_rows(operation.op)(xp, *arguments, *operation.attrs)
        registers.append(result)
    for out, (register, _) in zip(outputs, program.outputs, strict=True):
        out[...] = registers[register]


REGION = define(
    Op(
        "region",
        not_inferred,
        _region_kernel,
        variadic=True,
        attr_names=("program",),
        shapes="of the outputs of program",
    )
)
ITEM = define(
    Op("item", not_inferred, lambda xp, x, index: x[index], attr_names=("index",), shapes="of one output of a region")
)

"""A region: a chain of operations that is run block of rows by block of rows, so that each array passes memory once.

All values of a region lie over one grid of `rows` x `columns`. A value covers the whole grid (FULL), has one element a
row (ROW), one a column (COLUMN), one at all (SCALAR), or repeats after some rows (PERIODIC); the last three are read
only. Sums over rows (COLUMN_SUM) and over everything (TOTAL) are accumulated from block to block.

One `Program` describes a region on every device. On the CPU its operations run on blocks that fit the second-level
cache, numpy's ufuncs writing into a small scratch. Where there is no such cache to fit, it runs as one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from fuel_parallel.lazy.dtypes import DType, is_half
from fuel_parallel.lazy.node import Attrs, Op, Shape, Spec, define

BLOCK_ELEMENTS = 16384
"""Elements of a block: four or five float32 blocks fit half a megabyte of cache."""


class Extent(Enum):
    """How a value lies over the grid."""

    FULL = "full"
    ROW = "row"
    COLUMN = "column"
    SCALAR = "scalar"
    PERIODIC = "periodic"
    COLUMN_SUM = "column sum"
    TOTAL = "total"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a region, on registers: inputs first, then one for each operation."""

    op: Op
    inputs: tuple[int, ...]
    attrs: Attrs
    dtype: DType
    extent: Extent


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """A region. `outputs` are (register, shape) of the values that leave it."""

    rows: int
    columns: int
    inputs: tuple[tuple[Extent, int], ...]
    input_dtypes: tuple[DType, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[tuple[int, Shape], ...]
    block_rows: int

    def dtype_of(self, register: int) -> DType:
        """The dtype of an operation's register."""
        return self.operations[register - len(self.inputs)].dtype

    def __repr__(self) -> str:
        names = " ".join(o.op.name for o in self.operations)
        return f"<region {self.rows}x{self.columns}: {names}>"


def _row_reduction(name: str) -> Callable[..., Any]:
    def run(xp: Any, x: Any, *attrs: Any) -> Any:
        return getattr(x, name)(axis=1, keepdims=True)

    return run


def _pick(xp: Any, x: Any, index: Any) -> Any:
    return x[xp.arange(x.shape[0]), index[:, 0]][:, None]


def _unpick(xp: Any, g: Any, index: Any, classes: int) -> Any:
    result = xp.zeros((g.shape[0], classes), dtype=g.dtype)
    result[xp.arange(g.shape[0]), index[:, 0]] = g[:, 0]
    return result


def _scale_and_subtract(xp: Any, e: Any, rows: Any, g: Any, index: Any) -> Any:
    result = e * rows
    result[xp.arange(e.shape[0]), index[:, 0]] -= g[:, 0]
    return result


def _mean(xp: Any, x: Any, *attrs: Any) -> Any:
    return x.sum(axis=1, keepdims=True) / x.dtype.type(x.shape[1])


def _same(xp: Any, x: Any, *attrs: Any) -> Any:
    return x


BLOCK_KERNELS: dict[str, Callable[..., Any]] = {
    "sum": _row_reduction("sum"),
    "max": _row_reduction("max"),
    "min": _row_reduction("min"),
    "mean": _mean,
    "pick": _pick,
    "unpick": _unpick,
    "scale_and_subtract": _scale_and_subtract,
    "reshape": _same,
}


def reusable(program: Program, free: set[int]) -> list[tuple[int, int]]:
    """Pairs (output, input register in `free`) of equal form, where the output may be written over the input.

    Both cover the whole grid, and no operation reads a block of the input after the output's block was written.
    """
    first = len(program.inputs)
    last_read = {v: first + p for p, o in enumerate(program.operations) for v in o.inputs}
    pairs: list[tuple[int, int]] = []
    taken: set[int] = set()
    for output, (register, _) in enumerate(program.outputs):
        operation = program.operations[register - first]
        if operation.extent is not Extent.FULL:
            continue
        for source in sorted(free):
            fits = program.inputs[source][0] is Extent.FULL and program.input_dtypes[source] == operation.dtype
            if fits and source not in taken and last_read.get(source, -1) <= register:
                taken.add(source)
                pairs.append((output, source))
                break
    return pairs


def _region_kernel(xp: Any, arrays: Any, program: Program) -> tuple[Any, ...]:
    """Runs a region; gives its outputs."""
    outputs = [xp.empty(shape, dtype=program.dtype_of(register)) for register, shape in program.outputs]
    region_into(xp, outputs, arrays, program)
    return tuple(outputs)


def region_into(xp: Any, outputs: list[Any], arrays: Any, program: Program) -> None:
    """Runs a region into given memory: as one generated kernel where CuPy can compile it, else block by block."""
    if xp.__name__ == "cupy":
        from fuel_parallel.runtime.codegen.launch import launch

        if launch(xp, outputs, arrays, program):
            return
    grid = [_on_grid(xp, a, kind, program) for a, (kind, _) in zip(arrays, program.inputs, strict=True)]
    run_blocks(xp, program, grid, outputs)


def _on_grid(xp: Any, array: Any, extent: Extent, program: Program) -> Any:
    if extent is Extent.SCALAR:
        return xp.asarray(array).reshape(())
    if extent is Extent.COLUMN:
        return array.reshape(1, program.columns)
    if extent is Extent.ROW:
        return array.reshape(program.rows, 1)
    return array.reshape(-1, program.columns)


def run_blocks(xp: Any, program: Program, grid: list[Any], outputs: list[Any]) -> None:
    """Runs all blocks. `grid` are the inputs as matrices, `outputs` the arrays to fill."""
    rows, step = program.rows, program.block_rows if xp is np else program.rows
    first = len(program.inputs)
    targets: dict[int, list[Any]] = {}
    for (register, _), out in zip(program.outputs, outputs, strict=True):
        extent = program.operations[register - first].extent
        if extent in (Extent.COLUMN_SUM, Extent.TOTAL):
            out.fill(0)
            targets.setdefault(register, []).append(
                out.reshape((1, program.columns) if extent is Extent.COLUMN_SUM else ())
            )
        else:
            width = 1 if extent is Extent.ROW else program.columns
            targets.setdefault(register, []).append(out.reshape(rows, width))
    calls = _calls(xp, program, min(step, rows))
    registers: list[Any] = [None] * (first + len(calls))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        for register, (extent, period) in enumerate(program.inputs):
            registers[register] = _block(grid[register], extent, period, start, stop)
        for register, call in enumerate(calls, first):
            registers[register] = call(registers, stop - start, targets.get(register), start, stop)


def _block(array: Any, extent: Extent, period: int, start: int, stop: int) -> Any:
    if extent in (Extent.FULL, Extent.ROW):
        return array[start:stop]
    if extent is Extent.PERIODIC:
        # Blocks are cut so that each lies within one period, or is a whole number of them.
        begin = start % period
        if begin + stop - start <= period:
            return array[begin : begin + stop - start]
        return (
            np.concatenate([array] * ((stop - start) // period))
            if isinstance(array, np.ndarray)
            else _tiled(array, (stop - start) // period)
        )
    return array


def _tiled(array: Any, count: int) -> Any:
    import cupy

    return cupy.concatenate([array] * count)


Call = Callable[[list[Any], int, Any, int, int], Any]


def _calls(xp: Any, program: Program, block_rows: int) -> list[Call]:
    """A function for each operation, with its scratch; scratch is given on when its value is not read any more."""
    first = len(program.inputs)
    last_use = {v: i for i, o in enumerate(program.operations) for v in o.inputs}
    aliases: dict[int, int] = {}
    free: dict[tuple[DType, int], list[Any]] = {}
    owned: dict[int, Any] = {}
    calls: list[Call] = []
    for position, operation in enumerate(program.operations):
        register = first + position
        leaves_region = any(r == register for r, _ in program.outputs)
        scratch = None
        writes = _can_write(xp, operation)
        if writes and not leaves_region:
            width = 1 if operation.extent is Extent.ROW else program.columns
            pool = free.setdefault((operation.dtype, width), [])
            scratch = pool.pop() if pool else xp.empty((block_rows, width), dtype=operation.dtype)
            owned[register] = ((operation.dtype, width), scratch)
        elif operation.op.name in _MAY_ALIAS:
            aliases[register] = aliases.get(operation.inputs[0], operation.inputs[0])
        calls.append(_call(xp, operation, program.columns, scratch, writes))
        for value in {aliases.get(v, v) for v in operation.inputs}:
            living = max(last_use.get(r, -1) for r in (value, *[a for a, s in aliases.items() if s == value]))
            if living <= position and value in owned:
                key, array = owned.pop(value)
                free[key].append(array)
    return calls


def _can_write(xp: Any, operation: Operation) -> bool:
    return (
        xp is np
        and operation.op.ufunc != ""
        and operation.extent in (Extent.FULL, Extent.ROW)
        and not is_half(operation.dtype)
    )


_MAY_ALIAS = ("reshape", "broadcast_to", "positive", "real", "floor", "ceil", "trunc", "round")
"""Operations whose kernel may give back its input: the input's scratch must live as long."""


def _call(xp: Any, operation: Operation, columns: int, scratch: Any, writes: bool) -> Call:
    op, inputs, attrs = operation.op, operation.inputs, operation.attrs
    if operation.extent in (Extent.COLUMN_SUM, Extent.TOTAL):
        return _accumulate(inputs[0], operation)
    if writes:
        function = getattr(np, op.ufunc)

        def write(registers: list[Any], n: int, targets: Any, start: int, stop: int) -> Any:
            # A value that leaves the region is written to its place at once.
            out = targets[0][start:stop] if targets else scratch[:n]
            function(*[registers[v] for v in inputs], out=out)
            for other in targets[1:] if targets else ():
                other[start:stop] = out
            return out

        return write
    kernel = BLOCK_KERNELS.get(op.name, op.kernel)
    spreads = op.name == "broadcast_to"

    def compute(registers: list[Any], n: int, targets: Any, start: int, stop: int) -> Any:
        if spreads:
            result = xp.broadcast_to(registers[inputs[0]], (n, columns))
        else:
            result = kernel(xp, *[registers[v] for v in inputs], *attrs)
        for out in targets or ():
            out[start:stop] = result
        return result

    return compute


def _accumulate(source: int, operation: Operation) -> Call:
    columns = operation.extent is Extent.COLUMN_SUM

    def add(registers: list[Any], n: int, targets: Any, start: int, stop: int) -> None:
        for out in targets or ():
            if columns:
                out += registers[source].sum(axis=0, keepdims=True)
            else:
                out += registers[source].sum()

    return add


def _no_inference(*_: Any) -> Spec:
    raise RuntimeError("a region is made by a pass, which knows its specs")


REGION = define(Op("region", _no_inference, _region_kernel, variadic=True, attr_names=("program",)))
ITEM = define(Op("item", _no_inference, lambda xp, x, index: x[index], attr_names=("index",)))

"""The description of a region: operations that are run block of rows by block of rows; each array passes memory once.

All values of a region lie over one grid of `rows` x `columns`. A value covers the whole grid (FULL), has one element a
row (ROW), one a column (COLUMN), one at all (SCALAR), or repeats after some rows (PERIODIC); the last three are read
only. Sums over rows (COLUMN_SUM) and over everything (TOTAL) are accumulated from block to block.

One `Program` describes a region on every device. On the CPU its operations run on blocks that fit the second-level
cache (see `blocks`). Where there is no such cache to fit, it runs as one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Attrs, Op, Shape, Spec, define

BLOCK_ELEMENTS = 32768
"""Elements of a block, 128 KiB in float32: few enough for the caches next to a core, and calls hardly count."""


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


@dataclass(frozen=True, eq=False)
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
        """The dtype of a register."""
        first = len(self.inputs)
        return self.input_dtypes[register] if register < first else self.operations[register - first].dtype

    def extent_of(self, register: int) -> Extent:
        """How an operation's register lies over the grid."""
        return self.operations[register - len(self.inputs)].extent

    def on_grid(self, extent: Extent) -> Shape:
        """The shape of a value over the grid: a matrix, a vector if rows are of no account, or a scalar."""
        if extent in (Extent.SCALAR, Extent.TOTAL):
            return ()
        if self.is_flat:
            return (-1,)
        return (self.rows, 1) if extent is Extent.ROW else (-1, self.columns)

    @cached_property
    def is_flat(self) -> bool:
        """Whether rows are of no account, so that all values are vectors."""
        kinds = {kind for kind, _ in self.inputs} | {o.extent for o in self.operations}
        return self.columns == 1 and kinds <= {Extent.FULL, Extent.SCALAR}

    def __repr__(self) -> str:
        names = " ".join(o.op.name for o in self.operations)
        return f"<region {self.rows}x{self.columns}: {names}>"


def reusable(program: Program, free: Sequence[set[int]]) -> list[tuple[int, int]]:
    """Pairs (output, input register) of equal form, where the output may be written over the input.

    `free` are for each output the registers that it may be written over as far as the graph is concerned. Both cover
    the whole grid, and no operation reads a block of the input after the output's block was written.
    """
    first = len(program.inputs)
    last_read = {v: first + p for p, o in enumerate(program.operations) for v in o.inputs}
    pairs: list[tuple[int, int]] = []
    taken: set[int] = set()
    for output, (register, _) in enumerate(program.outputs):
        operation = program.operations[register - first]
        if operation.extent is not Extent.FULL:
            continue
        for source in sorted(free[output]):
            fits = program.inputs[source][0] is Extent.FULL and program.input_dtypes[source] == operation.dtype
            if fits and source not in taken and last_read.get(source, -1) <= register:
                taken.add(source)
                pairs.append((output, source))
                break
    return pairs


def kernel_on_rows(op: Op) -> Callable[..., Any]:
    """The kernel of an operation on blocks, where it differs from that on whole arrays."""
    return _BLOCK_KERNELS.get(op.name, op.kernel)


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


_BLOCK_KERNELS: dict[str, Callable[..., Any]] = {
    "sum": _row_reduction("sum"),
    "max": _row_reduction("max"),
    "min": _row_reduction("min"),
    "mean": _mean,
    "pick": _pick,
    "unpick": _unpick,
    "scale_and_subtract": _scale_and_subtract,
    "reshape": _same,
}


def not_inferred(*_: Any) -> Spec:
    """In place of the inference of ops that are made for a plan and not by a script."""
    raise RuntimeError("made by a pass or the memory plan, which knows its spec")


def _row_dot(xp: Any, x: Any, y: Any, kind: str) -> Any:
    return _BLOCK_KERNELS[kind](xp, x * y)


ROW_DOT = define(
    Op("row_dot", not_inferred, _row_dot, attr_names=("kind",), shapes="[rows, columns], [rows, columns] -> [rows, 1]")
)
"""The `sum` or `mean` along rows of a product."""

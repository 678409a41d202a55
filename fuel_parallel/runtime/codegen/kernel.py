"""One kernel in C for a region, and a second one for the last step of its sums over rows.

There are two arrangements. A region without reductions along rows has one thread for an element, in a grid-stride
loop. One with reductions has a group of threads for a row (a few for a short row, up to 1024 for a long one), and
passes over the row once for each level of reductions.

**Traffic.** Each input and each output passes global memory once, if what a later pass reads again fits into the
registers of the row's threads: 32 words a thread, 32768 a row at most, for all such values together. Of what does not
fit, that is held which saves most reads; the rest is computed again from the inputs in each pass that needs it, which
reads them once a pass, mostly from the second-level cache. Sums over rows or over everything are added up in registers
and leave one partial result a block, which the second kernel adds up.

**Order.** Which elements are added, and in which order, follows from the shape alone: results are the same on every
run and on every device with the same arithmetic. There are no atomic operations.

The number of rows is an argument, so that regions that differ in nothing else share one compiled kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.runtime.codegen.arrangement import FULL_LIKE, Arrangement, Limits, arrange
from fuel_parallel.runtime.codegen.dialect import CUDA, Dialect
from fuel_parallel.runtime.codegen.lowering import (
    Accumulation,
    Body,
    Element,
    Load,
    Pick,
    RowReduction,
    Value,
    lower,
)
from fuel_parallel.runtime.codegen.sums import SumWriter
from fuel_parallel.runtime.program import Extent, Program

ENTRY = "region"
"""Name of the first kernel in the source."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The source, and how it is launched.

    The first kernel takes the inputs of the region, the outputs numbered `direct`, a workspace for each of
    `workspaces` (dtype, whether it has a row of columns for each partial result), and the number of rows. The second
    one, which is there if `workspaces` are, takes the workspaces, the outputs numbered `summed`, the number of blocks
    of the first, and the number of partial rows.

    `replaceable` are pairs (output, input register) of which the output may lie right where the input lies, if pointers
    are not declared to be the only ones: no thread reads an element of that input after another, or it itself, may have
    written it.
    """

    source: str
    arrangement: Arrangement
    columns: int
    direct: tuple[int, ...]
    summed: tuple[int, ...]
    workspaces: tuple[tuple[DType, bool], ...]
    wide_positions: bool
    replaceable: frozenset[tuple[int, int]]

    def blocks(self, rows: int) -> int:
        """Blocks of the first kernel."""
        return self.arrangement.blocks(rows, self.columns)

    def partial_rows(self, rows: int) -> int:
        """Partial results of a sum over rows."""
        return self.arrangement.partial_rows(rows, self.columns)

    def finish_blocks(self) -> int:
        """Blocks of the second kernel."""
        return -(-self.columns // 32) if any(by_column for _, by_column in self.workspaces) else 1


def kernel_for(program: Program, dialect: Dialect = CUDA, limits: Limits | None = None) -> Kernel:
    """The kernel of a region; raises `Unsupported` with a reason if it cannot be one."""
    body = lower(program)
    # A grid-stride loop may step past the end by as much as one grid, which is far below the other half.
    wide = program.rows * program.columns >= 2**30
    return _KernelWriter(body, arrange(body, limits or Limits()), dialect, wide).kernel()


class _KernelWriter(SumWriter):
    """Writes both kernels of a region."""

    def __init__(self, body: Body, arrangement: Arrangement, dialect: Dialect, wide: bool) -> None:
        super().__init__(body, arrangement, dialect)
        self.wide = wide
        self.direct = [(o, v) for o, (v, _) in enumerate(body.outputs) if not isinstance(self.values[v], Accumulation)]

    def kernel(self) -> Kernel:
        """The source, and what a launch must know."""
        self._first_kernel()
        if self.accumulations:
            self.second_kernel()
        dialect = self.dialect
        halves = [dialect.halves.strip()] if any(dtypes.is_half(v.dtype) for v in self.values) else []
        position = dialect.types[dtypes.int64 if self.wide else dtypes.int32]
        head = f"typedef {position} position;\n#define COLUMNS {self.body.columns}"
        parts = [dialect.preamble.strip(), *halves, head, *self.definitions(), "\n".join(self.lines)]
        return Kernel(
            source="\n\n".join(parts) + "\n",
            arrangement=self.at,
            columns=self.body.columns,
            direct=tuple(o for o, _ in self.direct),
            summed=tuple(o for o, _ in self.summed),
            workspaces=tuple(
                (self.computed_dtype(self.values[n].dtype), self.values[n].extent is Extent.COLUMN_SUM)
                for n in self.accumulations
            ),
            wide_positions=self.wide,
            replaceable=frozenset(self._replaceable()),
        )

    def _replaceable(self) -> Iterator[tuple[int, int]]:
        """Outputs of the whole grid that are written, element by element, in the last pass that reads the input."""
        reads = {v.register: n for n, v in enumerate(self.values) if isinstance(v, Load) and v.extent is Extent.FULL}
        for output, written in self.direct:
            value = self.values[written]
            for register, n in reads.items():
                last = max((level for level, one in enumerate(self.at.passes) if n in one), default=0)
                if value.extent is Extent.FULL and value.level >= last:
                    yield output, register

    # The first kernel.

    def _first_kernel(self) -> None:
        dialect = self.dialect
        pointers = [(f"in{register}", dtype, True) for register, dtype in enumerate(self.body.input_dtypes)]
        pointers += [(f"out{o}", self.values[v].dtype, False) for o, v in self.direct]
        parameters = self.parameters([*pointers, *self.partials(is_input=False)], ["rows"])
        bounds = dialect.launch_bounds.format(threads=self.at.threads)
        self.open(f"{dialect.kernel} {bounds} {ENTRY}({parameters})")
        self.line(f"const int thread = (int){dialect.thread};")
        self.line(f"const position block = (position){dialect.block};")
        if any(isinstance(v, RowReduction) or v.extent is Extent.TOTAL for v in self.values):
            self.declare_exchange(self.at.threads)
        for n, value in enumerate(self.values):
            if isinstance(value, Load) and value.extent is Extent.SCALAR:
                self.line(f"const {self.type_of(n)} v{n} = {self.load(value)};")
        self.declare_sums()
        if self.at.by_rows:
            self._rows()
        else:
            self._elements()
        self.leave_partial_sums()
        self.close()

    def _elements(self) -> None:
        """One thread for an element."""
        dialect, threads = self.dialect, self.at.threads
        step = f"(position){dialect.blocks} * {threads}"
        self.open(f"for (position i = block * {threads} + thread; i < rows * COLUMNS; i += {step})")
        if self.at.needs_column:
            self.line("const position row = i / COLUMNS;")
            self.line("const int column = (int)(i % COLUMNS);")
        for n, value in enumerate(self.values):
            if isinstance(value, Load) and value.extent is not Extent.SCALAR:
                self.line(f"const {self.type_of(n)} v{n} = {self.load(value)};")
            elif isinstance(value, Element):
                self.line(f"const {self.type_of(n)} v{n} = {self.element(value)};")
            elif isinstance(value, Accumulation):
                once = "if (column == 0) " if self.values[value.inputs[0]].extent is Extent.ROW else ""
                self.line(once + self.added(n, f"v{n}"))
        for o, v in self.direct:
            value = self.values[v]
            once, place = ("if (column == 0) ", "row") if value.extent is Extent.ROW else ("", "i")
            self.line(f"{once}out{o}[{place}] = {self.stored(value.dtype, self.name_of(v))};")
        self.close()

    def _rows(self) -> None:
        """A group of threads for a row."""
        at, dialect = self.at, self.dialect
        self.line(f"const int lane = thread % {at.lanes};")
        self.line(f"const int group = thread / {at.lanes};")
        for n, value in enumerate(self.values):
            if isinstance(value, Pick):
                self.line(f"{dialect.shared} {self.type_of(n)} s{n}[{at.block_rows}];")
            elif isinstance(value, RowReduction) and at.lanes > 32:
                self.line(f"{dialect.shared} {self.type_of(n)} s{n}[{at.threads // 32}];")
        step = f"(position){dialect.blocks} * {at.block_rows}"
        self.open(f"for (position first = block * {at.block_rows}; first < rows; first += {step})")
        self.line("const position row = first + group;")
        self.line("const bool active = row < rows;" if at.block_rows > 1 else "const bool active = true;")
        for n in sorted(at.held):
            self.line(f"{self.type_of(n)} v{n}[{at.steps}];")
        barriers = [self._pass(level) for level in range(at.levels)]
        if sum(barriers) == 1:
            # With two barriers a row, none can write what another still reads.
            self.line(dialect.barrier)
        self.close()

    def _pass(self, level: int) -> bool:
        """All that can be computed after `level` reductions. Whether it holds a barrier."""
        values, at = self.values, self.at
        self._row_values(level)
        gathered = [
            n for n, v in enumerate(values) if isinstance(v, RowReduction | Pick) and v.level == level + 1
        ]  # fmt: skip
        sums = [n for n in self.accumulations if values[n].level == level and self._source(n).extent in FULL_LIKE]
        outputs = [(o, v) for o, v in self.direct if values[v].level == level and values[v].extent in FULL_LIKE]
        for n in gathered:
            value = values[n]
            start = self.identity(value.name, value.dtype) if isinstance(value, RowReduction) else "0"
            self.line(f"{self.type_of(n)} r{n} = {start};")
            if isinstance(value, Pick):
                index, wide = self.name_of(value.inputs[1]), self.dialect.types[dtypes.int64]
                self.line(f"const {wide} i{n} = {index} < 0 ? ({wide}){index} + COLUMNS : ({wide}){index};")
        if at.passes[level]:
            self._over_columns(level, gathered, sums, outputs)
        return self._gather(gathered)

    def _source(self, n: int) -> Value:
        return self.values[self.values[n].inputs[0]]

    def _row_values(self, level: int) -> None:
        for n, value in enumerate(self.values):
            if value.level != level or value.extent is not Extent.ROW:
                continue
            if isinstance(value, Load):
                self.line(f"const {self.type_of(n)} v{n} = active ? {self.load(value)} : 0;")
            elif isinstance(value, Element):
                self.line(f"const {self.type_of(n)} v{n} = {self.element(value)};")
        for o, v in self.direct:
            if self.values[v].level == level and self.values[v].extent is Extent.ROW:
                stored = self.stored(self.values[v].dtype, self.name_of(v))
                self.line(f"if (active && lane == 0) out{o}[row] = {stored};")
        for n in self.accumulations:
            value = self.values[n]
            if value.level == level and self._source(n).extent is Extent.ROW:
                self.line(f"if (active && lane == 0) {self.added(n, f'v{n}')}")

    def _over_columns(self, level: int, gathered: list[int], sums: list[int], outputs: list[tuple[int, int]]) -> None:
        at, values = self.at, self.values
        if at.held or at.sums_in_registers:
            # Unrolled, so that what is held is in registers.
            self.line(self.dialect.unroll)
        self.open(f"for (int k = 0; k < {at.steps}; ++k)")
        self.line(f"const int column = lane + k * {at.lanes};")
        conditions = (["active"] if at.block_rows > 1 else []) + (
            ["column < COLUMNS"] if self.body.columns % at.lanes else []
        )
        self.open(f"if ({' && '.join(conditions) or 'true'})")
        for n in at.passes[level]:
            value = values[n]
            text = self.load(value) if isinstance(value, Load) else ""
            if isinstance(value, Element):
                text = self.element(value)
            self.line(f"{self.name_of(n)} = {text};" if n in at.held else f"const {self.type_of(n)} v{n} = {text};")
        for n in gathered:
            value, source = values[n], self.name_of(values[n].inputs[0])
            if isinstance(value, RowReduction):
                self.line(f"r{n} = {self.combined(value.name, value.dtype, f'r{n}', source)};")
            else:
                self.line(f"if (column == i{n}) r{n} = {source};")
        for n in sums:
            self.add_to_sum(n)
        for o, v in outputs:
            self.line(f"out{o}[row * COLUMNS + column] = {self.stored(values[v].dtype, self.name_of(v))};")
        self.close()
        self.close()

    def _gather(self, gathered: list[int]) -> bool:
        """From the threads' parts of a row to the row's value, in every thread of the row."""
        at, barrier = self.at, False
        for n in gathered:
            value = self.values[n]
            if isinstance(value, Pick):
                wide = self.dialect.types[dtypes.uint64]
                self.line(f"if (lane == (int)(({wide})i{n} % {at.lanes})) s{n}[group] = r{n};")
                barrier = True
            elif isinstance(value, RowReduction):
                self.line(f"r{n} = {self.across_threads(value.name, value.dtype, f'r{n}', min(at.lanes, 32))};")
                if at.lanes > 32:
                    self.line(f"if (thread % 32 == 0) s{n}[thread / 32] = r{n};")
                    barrier = True
        if barrier:
            self.line(self.dialect.barrier)
        for n in gathered:
            value, text = self.values[n], f"r{n}"
            if isinstance(value, Pick):
                text = f"s{n}[group]"
            elif isinstance(value, RowReduction) and at.lanes > 32:
                warps = at.lanes // 32
                part = f"s{n}[group * {warps} + thread % {warps}]"
                text = self.across_threads(value.name, value.dtype, part, warps)
            self.line(f"const {self.type_of(n)} v{n} = {text};")
        return barrier

"""One kernel in C for a region, and a second one for the last step of its sums over rows.

There are two arrangements. A region without reductions along rows has one thread for an element, in a grid-stride
loop. One with reductions has a group of threads for a row (a few for a short row, up to 1024 for a long one), and
passes over the row once for each level of reductions.

**Traffic.** Each input and each output passes global memory once, if what a later pass reads again fits into the
registers of the row's threads: about 32768 words a row for all such values together. In longer rows the later passes
compute it again from the inputs, which are then read once a pass, mostly from the second-level cache. Sums over rows
or over everything are added up in registers, and leave one partial result a block; the second kernel adds these.

**Order.** Which elements are added, and in which order, follows from the shape alone: results are the same on every
run and on every device with the same arithmetic. There are no atomic operations.

The number of rows is an argument, so that regions that differ in nothing else share one compiled kernel.
"""

from __future__ import annotations

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
from fuel_parallel.runtime.codegen.writer import Writer
from fuel_parallel.runtime.region import Extent, Program

ENTRY, FINISH = "region", "region_finish"
"""Names of the two kernels in the source."""

FINISH_THREADS = 256
"""Of the second kernel: 32 columns by 8 parts of the partial results."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The source, and how it is launched.

    The first kernel takes the inputs of the region, the outputs numbered `direct`, a workspace for each of
    `workspaces` (dtype, whether it has a row of columns for each partial result), and the number of rows. The second
    one, which is there if `workspaces` are, takes the workspaces, the outputs numbered `summed`, the number of blocks
    of the first, and the number of partial rows.
    """

    source: str
    arrangement: Arrangement
    columns: int
    direct: tuple[int, ...]
    summed: tuple[int, ...]
    workspaces: tuple[tuple[DType, bool], ...]
    wide_positions: bool

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


class _KernelWriter(Writer):
    """Writes both kernels of a region."""

    def __init__(self, body: Body, arrangement: Arrangement, dialect: Dialect, wide: bool) -> None:
        super().__init__(body, arrangement, dialect)
        self.wide = wide
        self.accumulations = [n for n, v in enumerate(self.values) if isinstance(v, Accumulation)]
        outputs = list(enumerate(v for v, _ in body.outputs))
        self.direct = [(o, v) for o, v in outputs if not isinstance(self.values[v], Accumulation)]
        self.summed = [(o, v) for o, v in outputs if isinstance(self.values[v], Accumulation)]

    def kernel(self) -> Kernel:
        """The source, and what a launch must know."""
        self._first_kernel()
        if self.accumulations:
            self._second_kernel()
        dialect = self.dialect
        halves = [dialect.halves.strip()] if any(dtypes.is_half(v.dtype) for v in self.values) else []
        position = "long long" if self.wide else "int"
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
        )

    def _parameters(self, pointers: list[tuple[str, DType, bool]], counts: list[str]) -> str:
        """The parameters of a kernel: (name, dtype, whether it is only read), then counts."""
        texts = []
        for name, dtype, is_input in pointers:
            pointer = self.dialect.const_pointer if is_input else self.dialect.pointer
            texts.append(f"{pointer.format(type=self.dialect.storage(dtype))} {name}")
        return ", ".join([*texts, *[f"const position {count}" for count in counts]])

    def _partials(self, is_input: bool) -> list[tuple[str, DType, bool]]:
        return [(f"partial{n}", self.computed_dtype(self.values[n].dtype), is_input) for n in self.accumulations]

    # The first kernel.

    def _first_kernel(self) -> None:
        dialect = self.dialect
        pointers = [(f"in{register}", dtype, True) for register, dtype in enumerate(self.body.input_dtypes)]
        pointers += [(f"out{o}", self.values[v].dtype, False) for o, v in self.direct]
        parameters = self._parameters([*pointers, *self._partials(is_input=False)], ["rows"])
        bounds = dialect.launch_bounds.format(threads=self.at.threads)
        self.open(f"{dialect.kernel} {bounds} {ENTRY}({parameters})")
        self.line(f"const int thread = (int){dialect.thread};")
        self.line(f"const position block = (position){dialect.block};")
        for n, value in enumerate(self.values):
            if isinstance(value, Load) and value.extent is Extent.SCALAR:
                self.line(f"const {self.type_of(n)} v{n} = {self.load(value)};")
        self._declare_sums()
        if self.at.by_rows:
            self._rows()
        else:
            self._elements()
        self._leave_partial_sums()
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
                self.line(once + self._added(n, f"v{n}"))
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
                index = self.name_of(value.inputs[1])
                self.line(f"const long long i{n} = {index} < 0 ? (long long){index} + COLUMNS : (long long){index};")
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
                self.line(f"if (active && lane == 0) {self._added(n, f'v{n}')}")

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
            self._add_to_sum(n)
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
                self.line(f"if (lane == (int)((unsigned long long)i{n} % {at.lanes})) s{n}[group] = r{n};")
                barrier = True
            elif isinstance(value, RowReduction):
                across = self.across_threads(value.name, value.dtype)
                self.line(f"r{n} = {across}(r{n}, {min(at.lanes, 32)});")
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
                across = self.across_threads(value.name, value.dtype)
                text = f"{across}(s{n}[group * {warps} + thread % {warps}], {warps})"
            self.line(f"const {self.type_of(n)} v{n} = {text};")
        return barrier

    # Sums over rows and over everything.

    def _added(self, n: int, name: str) -> str:
        value = self.values[n]
        return f"{name} = {self.combined('add', value.dtype, name, self.name_of(value.inputs[0]))};"

    def _declare_sums(self) -> None:
        for n in self.accumulations:
            if self.values[n].extent is Extent.TOTAL:
                self.line(f"{self.type_of(n)} v{n} = 0;")
            elif self.at.sums_in_registers:
                self.line(f"{self.type_of(n)} v{n}[{self.at.steps}] = {{0}};")

    def _add_to_sum(self, n: int) -> None:
        value = self.values[n]
        if value.extent is Extent.TOTAL:
            self.line(self._added(n, f"v{n}"))
        elif self.at.sums_in_registers:
            self.line(self._added(n, f"v{n}[k]"))
        else:
            place = f"partial{n}[(block * {self.at.block_rows} + group) * COLUMNS + column]"
            source = self.name_of(value.inputs[0])
            added = self.combined("add", value.dtype, place, source)
            self.line(f"{place} = first == block * {self.at.block_rows} ? {source} : {added};")

    def _leave_partial_sums(self) -> None:
        """One partial result a block, at the end of the first kernel."""
        at, dialect = self.at, self.dialect
        for n in self.accumulations:
            dtype = self.values[n].dtype
            if self.values[n].extent is Extent.TOTAL:
                self.line(f"{dialect.shared} {self.type_of(n)} s{n}[{at.threads // 32}];")
                self._total(n, at.threads)
                self.line(f"if (thread == 0) partial{n}[block] = v{n};")
            elif at.sums_in_registers and at.block_rows == 1:
                self.line(dialect.unroll)
                self.open(f"for (int k = 0; k < {at.steps}; ++k)")
                self.line(f"const int column = lane + k * {at.lanes};")
                self.line(f"if (column < COLUMNS) partial{n}[block * COLUMNS + column] = v{n}[k];")
                self.close()
            elif at.sums_in_registers:
                self.line(f"{dialect.shared} {self.type_of(n)} s{n}[{at.threads}];")
                self.line(dialect.unroll)
                self.open(f"for (int k = 0; k < {at.steps}; ++k)")
                self.line(f"const int column = lane + k * {at.lanes};")
                self.line(f"s{n}[thread] = v{n}[k];")
                self.line(dialect.barrier)
                self.open("if (group == 0 && column < COLUMNS)")
                self.open(f"for (int g = 1; g < {at.block_rows}; ++g)")
                self.line(f"v{n}[k] = {self.combined('add', dtype, f'v{n}[k]', f's{n}[g * {at.lanes} + lane]')};")
                self.close()
                self.line(f"partial{n}[block * COLUMNS + column] = v{n}[k];")
                self.close()
                self.line(dialect.barrier)
                self.close()

    def _total(self, n: int, threads: int) -> None:
        """The sum of all threads' `v{n}`, in the first of them."""
        dtype, warps = self.values[n].dtype, threads // 32
        across = self.across_threads("add", dtype)
        self.line(f"v{n} = {across}(v{n}, 32);")
        self.line(f"if (thread % 32 == 0) s{n}[thread / 32] = v{n};")
        self.line(self.dialect.barrier)
        self.line(f"v{n} = {across}(s{n}[thread % {warps}], {warps});")

    def _second_kernel(self) -> None:
        dialect = self.dialect
        outputs = [(f"out{o}", self.values[v].dtype, False) for o, v in self.summed]
        parameters = self._parameters([*self._partials(is_input=True), *outputs], ["blocks", "partial_rows"])
        bounds = dialect.launch_bounds.format(threads=FINISH_THREADS)
        self.line()
        self.open(f"{dialect.kernel} {bounds} {FINISH}({parameters})")
        self.line(f"const int thread = (int){dialect.thread};")
        if any(self.values[n].extent is Extent.COLUMN_SUM for n in self.accumulations):
            self.line(f"const int column = (int){dialect.block} * 32 + thread % 32;")
        for n in self.accumulations:
            value = self.values[n]
            places = [o for o, v in self.summed if v == n]
            if value.extent is Extent.TOTAL:
                self._finish_total(n, places)
            else:
                self._finish_columns(n, places)
        self.close()

    def _finish_total(self, n: int, outputs: list[int]) -> None:
        dtype, dialect = self.values[n].dtype, self.dialect
        self.line(f"{dialect.shared} {self.type_of(n)} s{n}[{FINISH_THREADS // 32}];")
        self.line(f"{self.type_of(n)} v{n} = 0;")
        self.open(f"for (position p = thread; p < blocks; p += {FINISH_THREADS})")
        self.line(f"v{n} = {self.combined('add', dtype, f'v{n}', f'partial{n}[p]')};")
        self.close()
        self._total(n, FINISH_THREADS)
        for o in outputs:
            self.line(f"if (thread == 0 && {dialect.block} == 0) out{o}[0] = {self.stored(dtype, f'v{n}')};")

    def _finish_columns(self, n: int, outputs: list[int]) -> None:
        """Thread t adds every eighth partial row from t / 32 on, then the first 32 threads add the eight sums."""
        dtype, dialect, parts = self.values[n].dtype, self.dialect, FINISH_THREADS // 32
        self.line(f"{dialect.shared} {self.type_of(n)} s{n}[{FINISH_THREADS}];")
        self.line(f"{self.type_of(n)} v{n} = 0;")
        self.open(f"for (position p = thread / 32; column < COLUMNS && p < partial_rows; p += {parts})")
        self.line(f"v{n} = {self.combined('add', dtype, f'v{n}', f'partial{n}[p * COLUMNS + column]')};")
        self.close()
        self.line(f"s{n}[thread] = v{n};")
        self.line(dialect.barrier)
        self.open("if (thread < 32 && column < COLUMNS)")
        self.open(f"for (int part = 1; part < {parts}; ++part)")
        self.line(f"v{n} = {self.combined('add', dtype, f'v{n}', f's{n}[part * 32 + thread]')};")
        self.close()
        for o in outputs:
            self.line(f"out{o}[column] = {self.stored(dtype, f'v{n}')};")
        self.close()

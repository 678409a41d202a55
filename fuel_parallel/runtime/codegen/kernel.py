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
from fuel_parallel.runtime.codegen.expressions import Vocabulary
from fuel_parallel.runtime.codegen.lowering import (
    Accumulation,
    Body,
    Constant,
    Element,
    Load,
    Pick,
    RowReduction,
    Value,
    lower,
)
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
    return _Writer(body, arrange(body, limits or Limits()), dialect, wide).kernel()


class _Writer:
    """Writes the source of one kernel."""

    def __init__(self, body: Body, arrangement: Arrangement, dialect: Dialect, wide: bool) -> None:
        self.body, self.values, self.at, self.dialect, self.wide = body, body.values, arrangement, dialect, wide
        self.vocabulary = Vocabulary(dialect)
        self.functions: dict[str, str] = {}
        self.lines: list[str] = []
        self.depth = 0
        self.accumulations = [n for n, v in enumerate(self.values) if isinstance(v, Accumulation)]
        outputs = list(enumerate(self.body.outputs))
        self.direct = [(o, v) for o, (v, _) in outputs if not isinstance(self.values[v], Accumulation)]
        self.summed = [(o, v) for o, (v, _) in outputs if isinstance(self.values[v], Accumulation)]

    def kernel(self) -> Kernel:
        self._first_kernel()
        if self.accumulations:
            self._second_kernel()
        definitions = [*self.vocabulary.definitions.values(), *self.functions.values()]
        position = "long long" if self.wide else "int"
        head = f"typedef {position} position;\n#define COLUMNS {self.body.columns}\n"
        halves = [self.dialect.halves.strip()] if any(dtypes.is_half(v.dtype) for v in self.values) else []
        source = "\n\n".join([self.dialect.preamble.strip(), *halves, head, *definitions, "\n".join(self.lines)]) + "\n"
        workspaces = tuple(
            (self._computed(self.values[n].dtype), self.values[n].extent is Extent.COLUMN_SUM)
            for n in self.accumulations
        )
        direct, summed = tuple(o for o, _ in self.direct), tuple(o for o, _ in self.summed)
        return Kernel(source, self.at, self.body.columns, direct, summed, workspaces, self.wide)

    # Lines and names.

    def _line(self, text: str = "") -> None:
        self.lines.append("    " * self.depth + text if text else "")

    def _open(self, text: str) -> None:
        self._line(f"{text} {{")
        self.depth += 1

    def _close(self) -> None:
        self.depth -= 1
        self._line("}")

    def _type(self, n: int) -> str:
        return self.dialect.types[self.values[n].dtype]

    def _computed(self, dtype: DType) -> DType:
        return dtypes.float32 if dtypes.is_half(dtype) else dtype

    def _name(self, n: int) -> str:
        value = self.values[n]
        if isinstance(value, Constant):
            return self.dialect.literal(value.number, value.dtype)
        return f"v{n}[k]" if n in self.at.held else f"v{n}"

    def _loaded(self, dtype: DType, text: str) -> str:
        return f"load_{dtype.name}({text})" if dtypes.is_half(dtype) else text

    def _stored(self, dtype: DType, text: str) -> str:
        return f"store_{dtype.name}({text})" if dtypes.is_half(dtype) else text

    def _combined(self, name: str, dtype: DType, a: str, b: str) -> str:
        computed = self._computed(dtype)
        return self.vocabulary.express(name, (a, b), (computed, computed), computed)

    def _element(self, value: Element) -> str:
        inputs = value.inputs
        return self.vocabulary.express(
            value.name, [self._name(v) for v in inputs], [self.values[v].dtype for v in inputs], value.dtype
        )

    def _load(self, value: Load) -> str:
        position = {
            Extent.SCALAR: "0",
            Extent.ROW: "row",
            Extent.COLUMN: "column",
            Extent.FULL: "row * COLUMNS + column" if self.at.by_rows else "i",
            Extent.PERIODIC: f"(row % {value.period}) * COLUMNS + column",
        }[value.extent]
        return self._loaded(value.dtype, f"in{value.register}[{position}]")

    # The first kernel.

    def _first_kernel(self) -> None:
        dialect = self.dialect
        parameters = [
            f"{dialect.const_pointer.format(type=dialect.storage(dtype))} in{register}"
            for register, dtype in enumerate(self.body.input_dtypes)
        ]
        parameters += [
            f"{dialect.pointer.format(type=dialect.storage(self.values[v].dtype))} out{o}" for o, v in self.direct
        ]
        parameters += [f"{dialect.pointer.format(type=self._type(n))} partial{n}" for n in self.accumulations]
        bounds = dialect.launch_bounds.format(threads=self.at.threads)
        self._open(f"{dialect.kernel} {bounds} {ENTRY}({', '.join([*parameters, 'const position rows'])})")
        self._line(f"const int thread = (int){dialect.thread};")
        self._line(f"const position block = (position){dialect.block};")
        for n, value in enumerate(self.values):
            if isinstance(value, Load) and value.extent is Extent.SCALAR:
                self._line(f"const {self._type(n)} v{n} = {self._load(value)};")
        self._declare_sums()
        if self.at.by_rows:
            self._rows()
        else:
            self._elements()
        self._leave_partial_sums()
        self._close()

    def _elements(self) -> None:
        """One thread for an element."""
        dialect, threads = self.dialect, self.at.threads
        step = f"(position){dialect.blocks} * {threads}"
        self._open(f"for (position i = block * {threads} + thread; i < rows * COLUMNS; i += {step})")
        if self.at.needs_column:
            self._line("const position row = i / COLUMNS;")
            self._line("const int column = (int)(i % COLUMNS);")
        for n, value in enumerate(self.values):
            if isinstance(value, Load) and value.extent is not Extent.SCALAR:
                self._line(f"const {self._type(n)} v{n} = {self._load(value)};")
            elif isinstance(value, Element):
                self._line(f"const {self._type(n)} v{n} = {self._element(value)};")
            elif isinstance(value, Accumulation):
                once = "if (column == 0) " if self.values[value.inputs[0]].extent is Extent.ROW else ""
                self._line(once + self._added(n, f"v{n}"))
        for o, v in self.direct:
            value = self.values[v]
            once, place = ("if (column == 0) ", "row") if value.extent is Extent.ROW else ("", "i")
            self._line(f"{once}out{o}[{place}] = {self._stored(value.dtype, self._name(v))};")
        self._close()

    def _rows(self) -> None:
        """A group of threads for a row."""
        at, dialect = self.at, self.dialect
        self._line(f"const int lane = thread % {at.lanes};")
        self._line(f"const int group = thread / {at.lanes};")
        for n, value in enumerate(self.values):
            if isinstance(value, Pick):
                self._line(f"{dialect.shared} {self._type(n)} s{n}[{at.block_rows}];")
            elif isinstance(value, RowReduction) and at.lanes > 32:
                self._line(f"{dialect.shared} {self._type(n)} s{n}[{at.threads // 32}];")
        step = f"(position){dialect.blocks} * {at.block_rows}"
        self._open(f"for (position first = block * {at.block_rows}; first < rows; first += {step})")
        self._line("const position row = first + group;")
        self._line("const bool active = row < rows;" if at.block_rows > 1 else "const bool active = true;")
        for n in sorted(at.held):
            self._line(f"{self._type(n)} v{n}[{at.steps}];")
        barriers = [self._pass(level) for level in range(at.levels)]
        if sum(barriers) == 1:
            # With two barriers a row, none can write what another still reads.
            self._line(dialect.barrier)
        self._close()

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
            start = self._identity(value.name, value.dtype) if isinstance(value, RowReduction) else "0"
            self._line(f"{self._type(n)} r{n} = {start};")
            if isinstance(value, Pick):
                index = self._name(value.inputs[1])
                self._line(f"const long long i{n} = {index} < 0 ? (long long){index} + COLUMNS : (long long){index};")
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
                self._line(f"const {self._type(n)} v{n} = active ? {self._load(value)} : 0;")
            elif isinstance(value, Element):
                self._line(f"const {self._type(n)} v{n} = {self._element(value)};")
        for o, v in self.direct:
            if self.values[v].level == level and self.values[v].extent is Extent.ROW:
                stored = self._stored(self.values[v].dtype, self._name(v))
                self._line(f"if (active && lane == 0) out{o}[row] = {stored};")
        for n in self.accumulations:
            value = self.values[n]
            if value.level == level and self._source(n).extent is Extent.ROW:
                self._line(f"if (active && lane == 0) {self._added(n, f'v{n}')}")

    def _over_columns(self, level: int, gathered: list[int], sums: list[int], outputs: list[tuple[int, int]]) -> None:
        at, values = self.at, self.values
        if at.held or at.sums_in_registers:
            # Unrolled, so that what is held is in registers.
            self._line(self.dialect.unroll)
        self._open(f"for (int k = 0; k < {at.steps}; ++k)")
        self._line(f"const int column = lane + k * {at.lanes};")
        conditions = (["active"] if at.block_rows > 1 else []) + (
            ["column < COLUMNS"] if self.body.columns % at.lanes else []
        )
        self._open(f"if ({' && '.join(conditions) or 'true'})")
        for n in at.passes[level]:
            value = values[n]
            text = self._load(value) if isinstance(value, Load) else ""
            if isinstance(value, Element):
                text = self._element(value)
            self._line(f"{self._name(n)} = {text};" if n in at.held else f"const {self._type(n)} v{n} = {text};")
        for n in gathered:
            value, source = values[n], self._name(values[n].inputs[0])
            if isinstance(value, RowReduction):
                self._line(f"r{n} = {self._combined(value.name, value.dtype, f'r{n}', source)};")
            else:
                self._line(f"if (column == i{n}) r{n} = {source};")
        for n in sums:
            self._add_to_sum(n)
        for o, v in outputs:
            self._line(f"out{o}[row * COLUMNS + column] = {self._stored(values[v].dtype, self._name(v))};")
        self._close()
        self._close()

    def _gather(self, gathered: list[int]) -> bool:
        """From the threads' parts of a row to the row's value, in every thread of the row."""
        at, barrier = self.at, False
        for n in gathered:
            value = self.values[n]
            if isinstance(value, Pick):
                self._line(f"if (lane == (int)((unsigned long long)i{n} % {at.lanes})) s{n}[group] = r{n};")
                barrier = True
            elif isinstance(value, RowReduction):
                across = self._across_threads(value.name, value.dtype)
                self._line(f"r{n} = {across}(r{n}, {min(at.lanes, 32)});")
                if at.lanes > 32:
                    self._line(f"if (thread % 32 == 0) s{n}[thread / 32] = r{n};")
                    barrier = True
        if barrier:
            self._line(self.dialect.barrier)
        for n in gathered:
            value, text = self.values[n], f"r{n}"
            if isinstance(value, Pick):
                text = f"s{n}[group]"
            elif isinstance(value, RowReduction) and at.lanes > 32:
                warps = at.lanes // 32
                across = self._across_threads(value.name, value.dtype)
                text = f"{across}(s{n}[group * {warps} + thread % {warps}], {warps})"
            self._line(f"const {self._type(n)} v{n} = {text};")
        return barrier

    # Sums over rows and over everything.

    def _added(self, n: int, name: str) -> str:
        value = self.values[n]
        return f"{name} = {self._combined('add', value.dtype, name, self._name(value.inputs[0]))};"

    def _declare_sums(self) -> None:
        for n in self.accumulations:
            if self.values[n].extent is Extent.TOTAL:
                self._line(f"{self._type(n)} v{n} = 0;")
            elif self.at.sums_in_registers:
                self._line(f"{self._type(n)} v{n}[{self.at.steps}] = {{0}};")

    def _add_to_sum(self, n: int) -> None:
        value = self.values[n]
        if value.extent is Extent.TOTAL:
            self._line(self._added(n, f"v{n}"))
        elif self.at.sums_in_registers:
            self._line(self._added(n, f"v{n}[k]"))
        else:
            place = f"partial{n}[(block * {self.at.block_rows} + group) * COLUMNS + column]"
            source = self._name(value.inputs[0])
            added = self._combined("add", value.dtype, place, source)
            self._line(f"{place} = first == block * {self.at.block_rows} ? {source} : {added};")

    def _leave_partial_sums(self) -> None:
        """One partial result a block, at the end of the first kernel."""
        at, dialect = self.at, self.dialect
        for n in self.accumulations:
            dtype = self.values[n].dtype
            if self.values[n].extent is Extent.TOTAL:
                self._line(f"{dialect.shared} {self._type(n)} s{n}[{at.threads // 32}];")
                self._total(n, at.threads)
                self._line(f"if (thread == 0) partial{n}[block] = v{n};")
            elif at.sums_in_registers and at.block_rows == 1:
                self._line(dialect.unroll)
                self._open(f"for (int k = 0; k < {at.steps}; ++k)")
                self._line(f"const int column = lane + k * {at.lanes};")
                self._line(f"if (column < COLUMNS) partial{n}[block * COLUMNS + column] = v{n}[k];")
                self._close()
            elif at.sums_in_registers:
                self._line(f"{dialect.shared} {self._type(n)} s{n}[{at.threads}];")
                self._line(dialect.unroll)
                self._open(f"for (int k = 0; k < {at.steps}; ++k)")
                self._line(f"const int column = lane + k * {at.lanes};")
                self._line(f"s{n}[thread] = v{n}[k];")
                self._line(dialect.barrier)
                self._open("if (group == 0 && column < COLUMNS)")
                self._open(f"for (int g = 1; g < {at.block_rows}; ++g)")
                self._line(f"v{n}[k] = {self._combined('add', dtype, f'v{n}[k]', f's{n}[g * {at.lanes} + lane]')};")
                self._close()
                self._line(f"partial{n}[block * COLUMNS + column] = v{n}[k];")
                self._close()
                self._line(dialect.barrier)
                self._close()

    def _total(self, n: int, threads: int) -> None:
        """The sum of all threads' `v{n}`, in the first of them."""
        dtype, warps = self.values[n].dtype, threads // 32
        across = self._across_threads("add", dtype)
        self._line(f"v{n} = {across}(v{n}, 32);")
        self._line(f"if (thread % 32 == 0) s{n}[thread / 32] = v{n};")
        self._line(self.dialect.barrier)
        self._line(f"v{n} = {across}(s{n}[thread % {warps}], {warps});")

    def _second_kernel(self) -> None:
        dialect = self.dialect
        parameters = [f"{dialect.const_pointer.format(type=self._type(n))} partial{n}" for n in self.accumulations]
        parameters += [
            f"{dialect.pointer.format(type=dialect.storage(self.values[v].dtype))} out{o}" for o, v in self.summed
        ]
        counts = ["const position blocks", "const position partial_rows"]
        bounds = dialect.launch_bounds.format(threads=FINISH_THREADS)
        self._line()
        self._open(f"{dialect.kernel} {bounds} {FINISH}({', '.join([*parameters, *counts])})")
        self._line(f"const int thread = (int){dialect.thread};")
        if any(self.values[n].extent is Extent.COLUMN_SUM for n in self.accumulations):
            self._line(f"const int column = (int){dialect.block} * 32 + thread % 32;")
        for n in self.accumulations:
            value = self.values[n]
            outputs = [o for o, v in self.summed if v == n]
            if value.extent is Extent.TOTAL:
                self._finish_total(n, outputs)
            else:
                self._finish_columns(n, outputs)
        self._close()

    def _finish_total(self, n: int, outputs: list[int]) -> None:
        dtype, dialect = self.values[n].dtype, self.dialect
        self._line(f"{dialect.shared} {self._type(n)} s{n}[{FINISH_THREADS // 32}];")
        self._line(f"{self._type(n)} v{n} = 0;")
        self._open(f"for (position p = thread; p < blocks; p += {FINISH_THREADS})")
        self._line(f"v{n} = {self._combined('add', dtype, f'v{n}', f'partial{n}[p]')};")
        self._close()
        self._total(n, FINISH_THREADS)
        for o in outputs:
            self._line(f"if (thread == 0 && {dialect.block} == 0) out{o}[0] = {self._stored(dtype, f'v{n}')};")

    def _finish_columns(self, n: int, outputs: list[int]) -> None:
        """Thread t adds every eighth partial row from t / 32 on, then the first 32 threads add the eight sums."""
        dtype, dialect, parts = self.values[n].dtype, self.dialect, FINISH_THREADS // 32
        self._line(f"{dialect.shared} {self._type(n)} s{n}[{FINISH_THREADS}];")
        self._line(f"{self._type(n)} v{n} = 0;")
        self._open(f"for (position p = thread / 32; column < COLUMNS && p < partial_rows; p += {parts})")
        self._line(f"v{n} = {self._combined('add', dtype, f'v{n}', f'partial{n}[p * COLUMNS + column]')};")
        self._close()
        self._line(f"s{n}[thread] = v{n};")
        self._line(dialect.barrier)
        self._open("if (thread < 32 && column < COLUMNS)")
        self._open(f"for (int part = 1; part < {parts}; ++part)")
        self._line(f"v{n} = {self._combined('add', dtype, f'v{n}', f's{n}[part * 32 + thread]')};")
        self._close()
        for o in outputs:
            self._line(f"out{o}[column] = {self._stored(dtype, f'v{n}')};")
        self._close()

    # What reductions start from, and how threads combine.

    def _identity(self, name: str, dtype: DType) -> str:
        if name == "add":
            return "0"
        largest = name == "minimum"
        if dtype == dtypes.bool_:
            return "true" if largest else "false"
        if dtypes.kind(dtype) == "real floating":
            return self.dialect.literal(float("inf") if largest else float("-inf"), dtype)
        if dtype in dtypes.UNSIGNED:
            return self.vocabulary.resolve("($T)~($U)0" if largest else "0", dtype)
        top = f"(($U)1 << {8 * dtype.itemsize - 1})"
        return self.vocabulary.resolve(f"($T)~{top}" if largest else f"($T){top}", dtype)

    def _across_threads(self, name: str, dtype: DType) -> str:
        """The function that combines `width` neighbouring threads, a power of two up to 32; all get the result."""
        computed = self._computed(dtype)
        full, kind = f"across_threads_{name}_{computed.name}", self.dialect.types[dtype]
        if full not in self.functions:
            combined = self._combined(name, dtype, "x", "y")
            self.functions[full] = f"""{self.dialect.function} {kind} {full}({kind} x, const int width) {{
    {self.dialect.unroll}
    for (int mask = width / 2; mask > 0; mask /= 2) {{
        const {kind} y = ({kind})shuffle_xor(x, mask);
        x = {combined};
    }}
    return x;
}}"""
        return full

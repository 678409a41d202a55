"""Sums over rows and over everything: in registers, then one partial result a block, then a second kernel.

The second kernel has 256 threads a block: 32 columns by 8 parts of the partial results. Its first block adds up what
was summed over everything.
"""

from __future__ import annotations

from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.runtime.codegen.arrangement import Arrangement
from fuel_parallel.runtime.codegen.dialect import Dialect
from fuel_parallel.runtime.codegen.lowering import Accumulation, Body
from fuel_parallel.runtime.codegen.writer import Writer
from fuel_parallel.runtime.program import Extent

FINISH = "region_finish"
"""Name of the second kernel in the source."""

FINISH_THREADS = 256


class SumWriter(Writer):
    """Writes what the first kernel does for sums, and the second kernel."""

    def __init__(self, body: Body, arrangement: Arrangement, dialect: Dialect) -> None:
        super().__init__(body, arrangement, dialect)
        self.accumulations = [n for n, v in enumerate(self.values) if isinstance(v, Accumulation)]
        self.by_column = [n for n in self.accumulations if self.values[n].extent is Extent.COLUMN_SUM]
        self.summed = [(o, v) for o, (v, _) in enumerate(body.outputs) if isinstance(self.values[v], Accumulation)]

    def parameters(self, pointers: list[tuple[str, DType, bool]], counts: list[str]) -> str:
        """The parameters of a kernel: (name, dtype, whether it is only read), then counts."""
        texts = []
        for name, dtype, is_input in pointers:
            pointer = self.dialect.const_pointer if is_input else self.dialect.pointer
            texts.append(f"{pointer.format(type=self.dialect.storage(dtype))} {name}")
        return ", ".join([*texts, *[f"const position {count}" for count in counts]])

    def partials(self, is_input: bool) -> list[tuple[str, DType, bool]]:
        """The workspaces as parameters."""
        return [(f"partial{n}", self.computed_dtype(self.values[n].dtype), is_input) for n in self.accumulations]

    def _share(self, threads: int) -> None:
        """Shared memory for a value of each thread: one array for all sums of a dtype."""
        for dtype in dict.fromkeys(self.computed_dtype(self.values[n].dtype) for n in self.by_column):
            self.line(f"{self.dialect.shared} {self.dialect.types[dtype]} {self._shared(dtype)}[{threads}];")

    def _shared(self, dtype: DType) -> str:
        return f"shared_{self.computed_dtype(dtype).name}"

    def added(self, n: int, name: str) -> str:
        """The statement that adds the value of a sum to the variable `name`."""
        value = self.values[n]
        return f"{name} = {self.combined('add', value.dtype, name, self.name_of(value.inputs[0]))};"

    def declare_sums(self) -> None:
        """The variables of sums, at the start of the first kernel."""
        for n in self.accumulations:
            if self.values[n].extent is Extent.TOTAL:
                self.line(f"{self.type_of(n)} v{n} = 0;")
            elif self.at.sums_in_registers:
                self.line(f"{self.type_of(n)} v{n}[{self.at.steps}] = {{0}};")

    def add_to_sum(self, n: int) -> None:
        """One more element, in the loop over columns."""
        value = self.values[n]
        if value.extent is Extent.TOTAL:
            self.line(self.added(n, f"v{n}"))
        elif self.at.sums_in_registers:
            self.line(self.added(n, f"v{n}[k]"))
        else:
            place = f"partial{n}[(block * {self.at.block_rows} + group) * COLUMNS + column]"
            source = self.name_of(value.inputs[0])
            added = self.combined("add", value.dtype, place, source)
            self.line(f"{place} = first == block * {self.at.block_rows} ? {source} : {added};")

    def leave_partial_sums(self) -> None:
        """One partial result a block, at the end of the first kernel."""
        at, dialect = self.at, self.dialect
        if at.sums_in_registers and at.block_rows > 1:
            self._share(at.threads)
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
                self.line(dialect.unroll)
                self.open(f"for (int k = 0; k < {at.steps}; ++k)")
                self.line(f"const int column = lane + k * {at.lanes};")
                self.line(f"{self._shared(dtype)}[thread] = v{n}[k];")
                self.line(dialect.barrier)
                self.open("if (group == 0 && column < COLUMNS)")
                self.open(f"for (int g = 1; g < {at.block_rows}; ++g)")
                other = f"{self._shared(dtype)}[g * {at.lanes} + lane]"
                self.line(f"v{n}[k] = {self.combined('add', dtype, f'v{n}[k]', other)};")
                self.close()
                self.line(f"partial{n}[block * COLUMNS + column] = v{n}[k];")
                self.close()
                self.line(dialect.barrier)
                self.close()

    def _total(self, n: int, threads: int) -> None:
        """The sum of all threads' `v{n}`, in the first of them."""
        dtype, warps = self.values[n].dtype, threads // 32
        self.line(f"v{n} = {self.across_threads('add', dtype, f'v{n}', 32)};")
        self.line(f"if (thread % 32 == 0) s{n}[thread / 32] = v{n};")
        self.line(self.dialect.barrier)
        self.line(f"v{n} = {self.across_threads('add', dtype, f's{n}[thread % {warps}]', warps)};")

    def second_kernel(self) -> None:
        """The kernel that adds the partial results."""
        dialect = self.dialect
        outputs = [(f"out{o}", self.values[v].dtype, False) for o, v in self.summed]
        parameters = self.parameters([*self.partials(is_input=True), *outputs], ["blocks", "partial_rows"])
        bounds = dialect.launch_bounds.format(threads=FINISH_THREADS)
        self.line()
        self.open(f"{dialect.kernel} {bounds} {FINISH}({parameters})")
        self.line(f"const int thread = (int){dialect.thread};")
        self._share(FINISH_THREADS)
        if any(self.values[n].extent is Extent.TOTAL for n in self.accumulations):
            self.declare_exchange(FINISH_THREADS)
        if self.by_column:
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
        self.line(f"{self.type_of(n)} v{n} = 0;")
        self.open(f"for (position p = thread / 32; column < COLUMNS && p < partial_rows; p += {parts})")
        self.line(f"v{n} = {self.combined('add', dtype, f'v{n}', f'partial{n}[p * COLUMNS + column]')};")
        self.close()
        self.line(f"{self._shared(dtype)}[thread] = v{n};")
        self.line(dialect.barrier)
        self.open("if (thread < 32 && column < COLUMNS)")
        self.open(f"for (int part = 1; part < {parts}; ++part)")
        self.line(f"v{n} = {self.combined('add', dtype, f'v{n}', f'{self._shared(dtype)}[part * 32 + thread]')};")
        self.close()
        for o in outputs:
            self.line(f"out{o}[column] = {self.stored(dtype, f'v{n}')};")
        self.close()
        self.line(dialect.barrier)

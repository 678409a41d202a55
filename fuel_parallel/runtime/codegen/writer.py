"""Lines of C: names of values, loads, stores, expressions, and what threads combine."""

from __future__ import annotations

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.runtime.codegen.arrangement import Arrangement
from fuel_parallel.runtime.codegen.dialect import Dialect
from fuel_parallel.runtime.codegen.expressions import Vocabulary
from fuel_parallel.runtime.codegen.lowering import Body, Constant, Element, Load
from fuel_parallel.runtime.program import Extent


class Writer:
    """Collects the lines of a source, and the functions that they call.

    The value n of the body is the variable `v<n>`, or `v<n>[k]` where it is held for the thread's k-th column.
    """

    def __init__(self, body: Body, arrangement: Arrangement, dialect: Dialect) -> None:
        self.body, self.values, self.at, self.dialect = body, body.values, arrangement, dialect
        self.vocabulary = Vocabulary(dialect)
        self.functions: dict[str, str] = {}
        self.lines: list[str] = []
        self.depth = 0

    def definitions(self) -> list[str]:
        """All functions that the lines call, each after those that it calls."""
        return [*self.vocabulary.definitions.values(), *self.functions.values()]

    # Lines and names.

    def line(self, text: str = "") -> None:
        """One line at the present depth."""
        self.lines.append("    " * self.depth + text if text else "")

    def open(self, text: str) -> None:
        """A line that opens a block."""
        self.line(f"{text} {{")
        self.depth += 1

    def close(self) -> None:
        """The end of a block."""
        self.depth -= 1
        self.line("}")

    def type_of(self, n: int) -> str:
        """The C type of a value."""
        return self.dialect.types[self.values[n].dtype]

    def computed_dtype(self, dtype: DType) -> DType:
        """The dtype that values of `dtype` have in registers."""
        return dtypes.accumulated_in(dtype)

    def name_of(self, n: int) -> str:
        """The C name of a value."""
        value = self.values[n]
        if isinstance(value, Constant):
            return self.dialect.literal(value.number, value.dtype)
        return f"v{n}[k]" if n in self.at.held else f"v{n}"

    def loaded(self, dtype: DType, text: str) -> str:
        """An element of an array as a value."""
        return f"load_{dtype.name}({text})" if dtypes.is_half(dtype) else text

    def stored(self, dtype: DType, text: str) -> str:
        """A value as an element of an array."""
        return f"store_{dtype.name}({text})" if dtypes.is_half(dtype) else text

    def combined(self, name: str, dtype: DType, a: str, b: str) -> str:
        """Two values combined by an operation."""
        computed = self.computed_dtype(dtype)
        return self.vocabulary.express(name, (a, b), (computed, computed), computed)

    def element(self, value: Element) -> str:
        """The expression of an elementwise operation."""
        inputs = value.inputs
        return self.vocabulary.express(
            value.name, [self.name_of(v) for v in inputs], [self.values[v].dtype for v in inputs], value.dtype
        )

    def load(self, value: Load) -> str:
        """The expression of an input."""
        position = {
            Extent.SCALAR: "0",
            Extent.ROW: "row",
            Extent.COLUMN: "column",
            Extent.FULL: "row * COLUMNS + column" if self.at.by_rows else "i",
            Extent.PERIODIC: f"(row % {value.period}) * COLUMNS + column",
        }[value.extent]
        return self.loaded(value.dtype, f"in{value.register}[{position}]")

    # What reductions start from, and how threads combine.

    def identity(self, name: str, dtype: DType) -> str:
        """What a reduction starts from."""
        if name in ("add", "multiply"):
            return "0" if name == "add" else "1"
        largest = name == "minimum"
        if dtype == dtypes.bool_:
            return "true" if largest else "false"
        if dtypes.kind(dtype) == "real floating":
            return self.dialect.literal(float("inf") if largest else float("-inf"), dtype)
        if dtype in dtypes.UNSIGNED:
            return self.vocabulary.resolve("($T)~($U)0" if largest else "0", dtype)
        top = f"(($U)1 << {8 * dtype.itemsize - 1})"
        return self.vocabulary.resolve(f"($T)~{top}" if largest else f"($T){top}", dtype)

    def across_threads(self, name: str, dtype: DType, x: str, width: int) -> str:
        """The call that combines `width` neighbouring threads, a power of two up to 32; all get the result."""
        computed = self.computed_dtype(dtype)
        full, kind = f"across_threads_{name}_{computed.name}", self.dialect.types[dtype]
        if full not in self.functions:
            combined = self.combined(name, dtype, "x", "y")
            parameters = f"{kind} x, const int width{self.dialect.exchange_parameter}"
            self.functions[full] = f"""{self.dialect.function} {kind} {full}({parameters}) {{
    {self.dialect.unroll}
    for (int mask = width / 2; mask > 0; mask /= 2) {{
        {self.dialect.shuffle.format(type=kind)}
        x = {combined};
    }}
    return x;
}}"""
        return f"{full}({x}, {width}{self.dialect.exchange_argument})"

    def declare_exchange(self, threads: int) -> None:
        """What `across_threads` needs, at the start of a kernel."""
        if self.dialect.exchange:
            self.line(self.dialect.exchange.format(threads=threads))

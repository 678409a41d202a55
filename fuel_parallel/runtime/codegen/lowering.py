"""From a `Program` to values, each by one expression, load or reduction: what a kernel is arranged of.

A value has an extent, and a level: how many reductions along rows must be through before it can be computed. All that
has one level can be computed in one pass over a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.runtime.codegen.expressions import Unsupported
from fuel_parallel.runtime.program import Extent, Operation, Program


@dataclass(frozen=True, slots=True)
class Load:
    """An input of the region. `period`: after how many rows it repeats, 0 if it does not."""

    register: int
    period: int
    dtype: DType
    extent: Extent
    level: int = 0
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Constant:
    """A number that is known when the kernel is made."""

    number: float
    dtype: DType
    extent: Extent = Extent.SCALAR
    level: int = 0
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Element:
    """An expression of other values, on the whole grid or for each row."""

    name: str
    inputs: tuple[int, ...]
    dtype: DType
    extent: Extent
    level: int


@dataclass(frozen=True, slots=True)
class RowReduction:
    """All elements of a row combined by an operation (`add`, `multiply`, `maximum`, `minimum`): one value a row."""

    name: str
    inputs: tuple[int, ...]
    dtype: DType
    level: int
    extent: Extent = Extent.ROW


@dataclass(frozen=True, slots=True)
class Pick:
    """The element of each row at an index: inputs are the elements and the index."""

    inputs: tuple[int, ...]
    dtype: DType
    level: int
    extent: Extent = Extent.ROW


@dataclass(frozen=True, slots=True)
class Accumulation:
    """A sum over rows (COLUMN_SUM) or over everything (TOTAL); no value of the region reads it."""

    inputs: tuple[int, ...]
    dtype: DType
    extent: Extent
    level: int


Value = Load | Constant | Element | RowReduction | Pick | Accumulation


@dataclass(eq=False)
class Body:
    """The values of a region, and which of them leave it: (value, output's dtype), in the order of the outputs."""

    columns: int
    input_dtypes: tuple[DType, ...]
    values: list[Value] = field(default_factory=list)
    outputs: list[tuple[int, DType]] = field(default_factory=list)

    def element(self, name: str, inputs: tuple[int, ...], dtype: DType, extent: Extent) -> int:
        """Adds an elementwise operation."""
        return self._add(Element(name, inputs, dtype, extent, self._level(inputs)))

    def reduce_rows(self, name: str, source: int, dtype: DType) -> int:
        """Adds a reduction along rows."""
        if source_is_not_full(self.values[source]):
            raise Unsupported("a reduction of something other than rows")
        return self._add(RowReduction(name, (source,), dtype, self.values[source].level + 1))

    def pick(self, source: int, index: int, dtype: DType) -> int:
        """Adds the element of each row at an index; negative ones count from the end, one out of bounds gives 0."""
        return self._add(Pick((source, index), dtype, self._level((source, index)) + 1))

    def accumulate(self, source: int, dtype: DType, extent: Extent) -> int:
        """Adds a sum over rows or over everything."""
        return self._add(Accumulation((source,), dtype, extent, self.values[source].level))

    def constant(self, number: float, dtype: DType) -> int:
        """Adds a number."""
        return self._add(Constant(number, dtype))

    def cast(self, source: int, dtype: DType) -> int:
        """A value in another dtype; itself where it has that."""
        value = self.values[source]
        return source if value.dtype == dtype else self.element("astype", (source,), dtype, value.extent)

    def load(self, register: int, extent: Extent, period: int, dtype: DType) -> int:
        """Adds an input."""
        return self._add(Load(register, period, dtype, extent))

    def _level(self, inputs: tuple[int, ...]) -> int:
        return max((self.values[v].level for v in inputs), default=0)

    def _add(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1


def source_is_not_full(value: Value) -> bool:
    """Whether a value has no columns of its own."""
    return value.extent in (Extent.ROW, Extent.SCALAR)


def lower(program: Program) -> Body:
    """The values of a program; `Unsupported` with a reason if it holds something that cannot be expressed."""
    body = Body(program.columns, program.input_dtypes)
    at = [
        body.load(register, extent, period, dtype)
        for register, ((extent, period), dtype) in enumerate(zip(program.inputs, program.input_dtypes, strict=True))
    ]
    for operation in program.operations:
        inputs = tuple(at[v] for v in operation.inputs)
        dtype = operation.dtype
        for value in inputs:
            _refuse_complex(operation.op.name, body.values[value].dtype)
        _refuse_complex(operation.op.name, dtype)
        if operation.extent in (Extent.COLUMN_SUM, Extent.TOTAL):
            at.append(body.accumulate(body.cast(inputs[0], dtype), dtype, operation.extent))
        elif operation.op.name in LOWERINGS:
            at.append(LOWERINGS[operation.op.name](body, inputs, operation))
        else:
            at.append(body.element(operation.op.name, inputs, dtype, operation.extent))
    body.outputs = [(at[register], program.dtype_of(register)) for register, _ in program.outputs]
    return body


def _refuse_complex(name: str, dtype: DType) -> None:
    if dtypes.kind(dtype) == "complex floating":
        raise Unsupported(f"{name} of {dtype.name}: complex numbers are not expressed")


# Operations that are more than one expression. Each rule gives the value of the result.

Lowering = Callable[[Body, tuple[int, ...], Operation], int]


def _identity(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
    """The same value, spread over the grid where it has another extent."""
    source = body.values[inputs[0]]
    if source.extent is operation.extent:
        return inputs[0]
    return body.element("positive", inputs[:1], operation.dtype, operation.extent)


def _row_reduction(name: str) -> Lowering:
    def rule(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
        return body.reduce_rows(name, body.cast(inputs[0], operation.dtype), operation.dtype)

    return rule


def _position(name: str) -> Lowering:
    """The first column of a row's extreme."""

    def rule(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
        (x,) = inputs
        extreme = body.reduce_rows(name, x, body.values[x].dtype)
        at = body.element("extreme_at", (x, extreme), operation.dtype, Extent.FULL)
        return body.reduce_rows("minimum", at, operation.dtype)

    return rule


def _triangle(name: str) -> Lowering:
    """Attributes are the diagonal and how many rows a matrix has."""

    def rule(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
        diagonal, rows = (body.constant(number, dtypes.int64) for number in operation.attrs)
        return body.element(name, (*inputs, rows, diagonal), operation.dtype, Extent.FULL)

    return rule


def _mean(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
    return _mean_of(body, inputs[0], operation.dtype)


def _mean_of(body: Body, source: int, dtype: DType) -> int:
    total = body.reduce_rows("add", source, dtype)
    return body.element("divide", (total, body.constant(body.columns, dtype)), dtype, Extent.ROW)


def _row_dot(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
    product = body.element("multiply", inputs, operation.dtype, Extent.FULL)
    if operation.attrs == ("mean",):
        return _mean_of(body, product, operation.dtype)
    return body.reduce_rows("add", product, operation.dtype)


def _exponentials(body: Body, x: int, dtype: DType) -> tuple[int, int, int]:
    """x less the row's maximum, the exponentials of that, and their sum."""
    top = body.reduce_rows("maximum", x, dtype)
    shifted = body.element("subtract", (x, top), dtype, Extent.FULL)
    e = body.element("exp", (shifted,), dtype, Extent.FULL)
    return shifted, e, body.reduce_rows("add", e, dtype)


def _softmax(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
    wide = dtypes.accumulated_in(operation.dtype)  # rounded once
    _, e, total = _exponentials(body, body.cast(inputs[0], wide), wide)
    return body.cast(body.element("divide", (e, total), wide, Extent.FULL), operation.dtype)


def _log_softmax(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
    wide = dtypes.accumulated_in(operation.dtype)  # rounded once
    shifted, _, total = _exponentials(body, body.cast(inputs[0], wide), wide)
    log = body.element("log", (total,), wide, Extent.ROW)
    return body.cast(body.element("subtract", (shifted, log), wide, Extent.FULL), operation.dtype)


def _normalize(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
    eps, centered = operation.attrs
    wide = dtypes.accumulated_in(operation.dtype)  # rounded once
    x = body.cast(inputs[0], wide)
    if centered:
        x = body.element("subtract", (x, _mean_of(body, x, wide)), wide, Extent.FULL)
    variance = _mean_of(body, body.element("square", (x,), wide, Extent.FULL), wide)
    shifted = body.element("add", (variance, body.constant(eps, wide)), wide, Extent.ROW)
    root = body.element("sqrt", (shifted,), wide, Extent.ROW)
    return body.cast(body.element("divide", (x, root), wide, Extent.FULL), operation.dtype)


def _pick(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
    return body.pick(inputs[0], inputs[1], operation.dtype)


def _unpick(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
    return body.element("at_index", inputs, operation.dtype, Extent.FULL)


def _scale_and_subtract(body: Body, inputs: tuple[int, ...], operation: Operation) -> int:
    e, rows, g, index = inputs
    scaled = body.element("multiply", (e, rows), operation.dtype, Extent.FULL)
    taken = body.element("at_index", (g, index), operation.dtype, Extent.FULL)
    return body.element("subtract", (scaled, taken), operation.dtype, Extent.FULL)


LOWERINGS: dict[str, Lowering] = {
    "reshape": _identity,
    "broadcast_to": _identity,
    "sum": _row_reduction("add"),
    "max": _row_reduction("maximum"),
    "min": _row_reduction("minimum"),
    "prod": _row_reduction("multiply"),
    "any": _row_reduction("maximum"),
    "all": _row_reduction("minimum"),
    "argmax": _position("maximum"),
    "argmin": _position("minimum"),
    "tril": _triangle("lower"),
    "triu": _triangle("upper"),
    "mean": _mean,
    "row_dot": _row_dot,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "normalize": _normalize,
    "pick": _pick,
    "unpick": _unpick,
    "scale_and_subtract": _scale_and_subtract,
}
"""The operations on rows. One that is missing here is looked up in `EXPRESSIONS`."""

"""The C expression of every operation on elements, in one table keyed by the op's name.

Values are numpy's: integers wrap, quotients and remainders of integers follow the sign of the divisor (and are 0 for
a divisor of 0), maximum and minimum hand NaN on, halves round to even. 16-bit floats are computed in float and rounded
after each operation, as the array modules do, so that an overflow to infinity is seen by what reads it.

In a template `$0`, `$1`, `$2` are the operands, which are names, so they need no parentheses. `$T` is the C type in
which the operand is computed, `$U` an unsigned type in which its sums and products wrap, `$bits` its width; `$row` and
`$column` are the element's place in a grid of `$columns`. Other names are math functions of the dialect, `CONSTANTS`,
or `FUNCTIONS`, for the operand's dtype. The operand that decides is the last one, or the one that the expression names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.runtime.codegen.dialect import Dialect


class Unsupported(Exception):
    """Why a region cannot be a kernel, in words. It is run another way, so no user meets this."""


@dataclass(frozen=True, slots=True)
class Expression:
    """Templates of one operation by kind of operand; one that is missing is not expressed.

    `exact` says that a 16-bit result needs no rounding, for it has no more bits than the operands. `decides` is the
    operand whose dtype picks the template.
    """

    floating: str = ""
    integral: str = ""
    boolean: str = ""
    exact: bool = False
    decides: int = -1

    @property
    def has_place(self) -> bool:
        """Whether it depends on where the element is in the grid."""
        return "$column" in self.floating or "$row" in self.floating


def _same(template: str, decides: int = -1) -> Expression:
    return Expression(template, template, template, True, decides)


def _function(name: str, exact: bool = False) -> Expression:
    return Expression(f"${name}($0)", exact=exact)


def _rounding(name: str) -> Expression:
    return Expression(f"${name}($0)", "$0", exact=True)


def _compared(sign: str) -> Expression:
    return _same(f"$0 {sign} $1")


_SIGN = "($T)(($0 > 0) - ($0 < 0))"
_SIGMOID = "(1 + $tanh($0 / 2)) / 2"

EXPRESSIONS: dict[str, Expression] = {
    "positive": _same("$0"),
    "negative": Expression("-$0", "($T)(0 - ($U)$0)", exact=True),
    "abs": Expression("$fabs($0)", "$0 < 0 ? ($T)(0 - ($U)$0) : $0", exact=True),
    "sign": Expression(f"$0 != $0 ? $0 : {_SIGN}", _SIGN, exact=True),
    "square": Expression("$0 * $0", "($T)(($U)$0 * ($U)$0)"),
    "reciprocal": Expression("1 / $0"),
    "real": _same("$0"),
    "imag": Expression(),
    "conj": _same("$0"),
    "signbit": Expression("$copysign(($T)1, $0) < 0"),
    "sqrt": _function("sqrt"),
    "rsqrt": Expression("1 / $sqrt($0)"),
    **{name: _function(name) for name in ("exp", "expm1", "log", "log1p", "log2", "log10", "erf")},
    **{name: _function(name) for name in ("sin", "cos", "tan", "asin", "acos", "atan")},
    **{name: _function(name) for name in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")},
    "floor": _rounding("floor"),
    "ceil": _rounding("ceil"),
    "trunc": _rounding("trunc"),
    "round": _rounding("rint"),
    # Infinity less itself is NaN, which equals nothing.
    "isfinite": Expression("$0 - $0 == 0", "true"),
    "isinf": Expression("$0 == $0 && $0 - $0 != 0", "false"),
    "isnan": Expression("$0 != $0", "false"),
    "logical_not": _same("$0 == 0"),
    "bitwise_invert": Expression("", "($T)~$0", "!$0"),
    "sigmoid": Expression(_SIGMOID),
    "relu": Expression("$0 > 0 || $0 != $0 ? $0 : 0", "$0 > 0 ? $0 : ($T)0", exact=True),
    "silu": Expression(f"$0 * ({_SIGMOID})"),
    "gelu_tanh": Expression("$0 * ((1 + $tanh($0 * ($gelu_cubic * ($0 * $0) + $gelu_scale))) * ($T)0.5)"),
    "gelu_erf": Expression("$0 * (($T)0.5 * (1 + $erf($0 * $sqrt_half)))"),
    "add": Expression("$0 + $1", "($T)(($U)$0 + ($U)$1)", "$0 || $1"),
    "subtract": Expression("$0 - $1", "($T)(($U)$0 - ($U)$1)"),
    "multiply": Expression("$0 * $1", "($T)(($U)$0 * ($U)$1)", "$0 && $1"),
    "divide": Expression("$0 / $1"),
    "floor_divide": Expression("$float_floor_divide($0, $1)", "$integer_floor_divide($0, $1)"),
    "remainder": Expression("$float_remainder($0, $1)", "$integer_remainder($0, $1)"),
    "pow": Expression("$pow($0, $1)", "$integer_pow($0, $1)"),
    "atan2": Expression("$atan2($0, $1)"),
    "hypot": Expression("$hypot($0, $1)"),
    "logaddexp": Expression("$logaddexp($0, $1)"),
    "copysign": Expression("$copysign($0, $1)", exact=True),
    "nextafter": Expression("$nextafter($0, $1)"),
    "maximum": Expression("$0 >= $1 || $0 != $0 ? $0 : $1", "$0 >= $1 ? $0 : $1", "$0 || $1", exact=True),
    "minimum": Expression("$0 <= $1 || $0 != $0 ? $0 : $1", "$0 <= $1 ? $0 : $1", "$0 && $1", exact=True),
    "equal": _compared("=="),
    "not_equal": _compared("!="),
    "less": _compared("<"),
    "less_equal": _compared("<="),
    "greater": _compared(">"),
    "greater_equal": _compared(">="),
    "logical_and": _same("$0 != 0 && $1 != 0"),
    "logical_or": _same("$0 != 0 || $1 != 0"),
    "logical_xor": _same("($0 != 0) != ($1 != 0)"),
    "bitwise_and": Expression("", "($T)($0 & $1)", "$0 && $1"),
    "bitwise_or": Expression("", "($T)($0 | $1)", "$0 || $1"),
    "bitwise_xor": Expression("", "($T)($0 ^ $1)", "$0 != $1"),
    "bitwise_left_shift": Expression("", "($U)$1 < $bits ? ($T)(($U)$0 << $1) : ($T)0"),
    "bitwise_right_shift": Expression("", "($U)$1 < $bits ? ($T)($0 >> $1) : ($T)($0 < 0 ? -1 : 0)"),
    "where": _same("$0 ? $1 : $2"),
    # The rest serve the lowering of operations on rows.
    "at_index": _same("($1 < 0 ? $1 + $columns : $1) == $column ? $0 : 0", decides=0),
    # The column of an element that is the row's extreme, or NaN, as then the extreme is; else one past the last.
    "extreme_at": _same("$0 == $1 || $0 != $0 ? $column : $columns"),
    # In matrices of $1 rows, what is not above, or not below, the diagonal $2.
    "lower": _same("$column <= $row % $1 + $2 ? $0 : ($T)0", decides=0),
    "upper": _same("$column >= $row % $1 + $2 ? $0 : ($T)0", decides=0),
}
"""`real` and `imag` of complex numbers, like everything else of them, are not expressed: such regions are declined."""

NOT_EXPRESSED = dict.fromkeys(("imag", "complex_expm1", "complex_tanh"), "complex numbers are not expressed")
"""Operations of `EXPRESSIONS` without any template, and why."""

CONSTANTS = {
    "gelu_scale": math.sqrt(2 / math.pi),
    "gelu_cubic": math.sqrt(2 / math.pi) * 0.044715,
    "sqrt_half": math.sqrt(0.5),
    "log_of_2": math.log(2),
}

FUNCTIONS: dict[str, str] = {
    "integer_floor_divide": """$T $name($T a, $T b) {
    if (b == 0) return 0;
    if (($T)-1 < 0 && b == ($T)-1) return ($T)(0 - ($U)a);
    return ($T)(a / b - ((a % b != 0) && ((a < 0) != (b < 0))));
}""",
    "integer_remainder": """$T $name($T a, $T b) {
    if (b == 0 || (($T)-1 < 0 && b == ($T)-1)) return 0;
    $T r = ($T)(a % b);
    return (r != 0 && ((r < 0) != (b < 0))) ? ($T)(r + b) : r;
}""",
    # An exponent below 0, which numpy refuses, gives the quotient of integers.
    "integer_pow": """$T $name($T a, $T b) {
    if (b < 0) return a == 1 ? 1 : a == ($T)-1 ? ($T)(b & 1 ? -1 : 1) : ($T)0;
    $U power = 1, base = ($U)a;
    for ($U n = ($U)b; n; n >>= 1) {
        if (n & 1) power *= base;
        base *= base;
    }
    return ($T)power;
}""",
    "float_remainder": """$T $name($T a, $T b) {
    $T r = $fmod(a, b);
    if (b == 0) return r;
    if (r == 0) return $copysign(($T)0, b);
    return ((b < 0) != (r < 0)) ? r + b : r;
}""",
    "float_floor_divide": """$T $name($T a, $T b) {
    if (b == 0) return a / b;
    if (a - a != 0 || b - b != 0) return $floor(a / b);
    $T r = $fmod(a, b);
    $T quotient = (a - r) / b;
    if (r != 0 && ((b < 0) != (r < 0))) quotient -= 1;
    if (quotient == 0) return $copysign(($T)0, a / b);
    $T whole = $floor(quotient);
    return quotient - whole > ($T)0.5 ? whole + 1 : whole;
}""",
    "logaddexp": """$T $name($T a, $T b) {
    if (a == b) return a + $log_of_2;
    $T d = a - b;
    return d > 0 ? a + $log1p($exp(-d)) : d <= 0 ? b + $log1p($exp(d)) : d;
}""",
}


class Vocabulary:
    """Resolves the names in templates for one dialect, and collects the functions that they call for."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.definitions: dict[str, str] = {}

    def express(self, name: str, operands: Sequence[str], operand_dtypes: Sequence[DType], result: DType) -> str:
        """The C expression of an operation, or `Unsupported`."""
        if name == "astype":
            return self._cast(operands[0], operand_dtypes[0], result)
        expression = EXPRESSIONS.get(name)
        decides = operand_dtypes[-1 if expression is None else expression.decides]
        template = "" if expression is None else _template(expression, decides)
        if expression is None or not template:
            raise Unsupported(f"{name} of {decides.name} has no C expression")
        text = self.resolve(template, decides, operands)
        return text if expression.exact else self.rounded(text, result)

    def rounded(self, text: str, dtype: DType) -> str:
        """A float expression as the nearest number of a 16-bit dtype; other dtypes are what they are."""
        return f"load_{dtype.name}(store_{dtype.name}({text}))" if dtypes.is_half(dtype) else text

    def resolve(self, template: str, dtype: DType, operands: Sequence[str] = (), name: str = "") -> str:
        """The template with all its names replaced."""

        def word(found: re.Match[str]) -> str:
            key = found[1]
            if key.isdigit():
                return operands[int(key)]
            if key in ("row", "column", "columns"):
                return "COLUMNS" if key == "columns" else key
            if key == "T":
                return self.dialect.types[dtype]
            if key == "U":
                return self.dialect.types[dtypes.uint64 if dtype.itemsize == 8 else dtypes.uint32]
            if key == "bits":
                return f"{8 * dtype.itemsize}u"
            if key == "name":
                return name
            if key in CONSTANTS:
                return self.dialect.literal(CONSTANTS[key], dtype)
            if key in FUNCTIONS:
                return self._function(key, dtype)
            return self.dialect.math[dtype][key]

        return re.sub(r"\$(\w+)", word, template)

    def _function(self, name: str, dtype: DType) -> str:
        # Halves are computed in float: one definition serves both.
        dtype = dtypes.accumulated_in(dtype)
        full = f"{name}_{dtype.name}"
        if full not in self.definitions:
            body = self.resolve(FUNCTIONS[name], dtype, name=full)
            self.definitions[full] = f"{self.dialect.function} {body}"
        return full

    def _cast(self, operand: str, source: DType, result: DType) -> str:
        for dtype in (source, result):
            if dtype not in self.dialect.types:
                raise Unsupported(f"{dtype.name} has no C type")
        if result == dtypes.bool_:
            return f"{operand} != 0"
        return self.rounded(f"({self.dialect.types[result]}){operand}", result)


def _template(expression: Expression, dtype: DType) -> str:
    return {
        "bool": expression.boolean,
        "integral": expression.integral,
        "real floating": expression.floating,
        "complex floating": "",
    }[dtypes.kind(dtype)]


def has_place(name: str) -> bool:
    """Whether the value of an operation depends on where the element is in the grid."""
    expression = EXPRESSIONS.get(name)
    return expression is not None and expression.has_place


def is_expressed(name: str) -> bool:
    """Whether there is a C expression of the op for some dtype."""
    expression = EXPRESSIONS.get(name)
    return name == "astype" or (
        expression is not None and bool(expression.floating or expression.integral or expression.boolean)
    )

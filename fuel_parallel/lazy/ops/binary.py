"""Functions of two tensors, element by element, with broadcasting and promotion. Each is one entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fuel_parallel.errors import DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import ZERO, Node, Op, Shape, Spec, apply, define
from fuel_parallel.lazy.ops import creation, elementwise
from fuel_parallel.lazy.ops.elementwise import BOOL, INEXACT, INTEGRAL, NUMERIC, REAL, Domain, ufunc
from fuel_parallel.lazy.tensor import Tensor

Binary = Callable[[Any, Any], Tensor]


def broadcast_shapes(function: str, *shapes: Shape) -> Shape:
    """The shape that all shapes broadcast to, or the user's error with all of them in it."""
    if len(shapes) == 2 and shapes[0] == shapes[1]:
        return shapes[0]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        listed = " and ".join(map(str, shapes))
        raise ShapeError(
            f"{function}: shapes {listed} do not broadcast; aligned at the right, extents must be equal or 1"
        ) from None


def operands(function: str, a: Any, b: Any) -> tuple[Node, Node]:
    """Two operands as nodes of one dtype: tensors promote, Python scalars follow the tensor."""
    if not isinstance(a, Tensor):
        a = creation.to_tensor(function, a, b if isinstance(b, Tensor) else None)
    if not isinstance(b, Tensor):
        b = creation.to_tensor(function, b, a)
    x, y = a.node, b.node
    if x.spec.dtype is not y.spec.dtype:
        try:
            common = dtypes.promote(x.spec.dtype, y.spec.dtype)
        except DTypeError as reason:
            raise DTypeError(f"{function}: {reason}") from None
        x, y = creation.astype(a, common).node, creation.astype(b, common).node
    return x, y


def sum_to(g: Tensor, shape: Shape) -> Tensor:
    """The cotangent of an operand of `shape` that was broadcast: summed over the dimensions that were repeated."""
    if g.shape == shape:
        return g
    from fuel_parallel.lazy.ops import manipulation, reductions

    extra = g.ndim - len(shape)
    repeated = [extra + i for i, extent in enumerate(shape) if extent == 1 and g.shape[extra + i] != 1]
    summed = reductions.sum(g, axis=(*range(extra), *repeated), keepdims=False) if extra or repeated else g
    return summed if summed.shape == shape else manipulation.reshape(summed, shape)


def binary(
    name: str,
    domain: Domain,
    kernel: Callable[..., Any],
    vjp: Any,
    summary: str,
    result: DType | None = None,
) -> Binary:
    """Defines an elementwise op of two inputs and returns its public function.

    `vjp` is a pair of functions `(g, y, a, b)`; their results are summed to the operand's own shape here.
    """

    def infer(a: Spec, b: Spec) -> Spec:
        if a.dtype not in domain:
            elementwise.check_domain(name, a.dtype, domain)
        return Spec(broadcast_shapes(name, a.shape, b.shape), result or a.dtype, a.device)

    if vjp:
        of_a, of_b = vjp
        vjp = (
            lambda g, y, a, b: sum_to(of_a(g, y, a, b), a.shape),
            lambda g, y, a, b: sum_to(of_b(g, y, a, b), b.shape),
        )
    shapes = "two that broadcast -> what they broadcast to"
    op = define(elementwise.elementwise_op(name, infer, kernel, vjp, shapes, domain))

    def function(x1: Any, x2: Any, /) -> Tensor:
        return Tensor(apply(op, operands(name, x1, x2)))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = summary
    return function


# Arithmetic.

add = binary("add", NUMERIC + BOOL, ufunc("add"), (lambda g, y, a, b: g, lambda g, y, a, b: g), "a + b.")
subtract = binary("subtract", NUMERIC, ufunc("subtract"), (lambda g, y, a, b: g, lambda g, y, a, b: -g), "a - b.")
multiply = binary(
    "multiply", NUMERIC + BOOL, ufunc("multiply"), (lambda g, y, a, b: g * b, lambda g, y, a, b: g * a), "a * b."
)
_divide = binary(
    "divide", INEXACT, ufunc("divide"), (lambda g, y, a, b: g / b, lambda g, y, a, b: -g * (y / b)), "a / b."
)


def divide(x1: Any, x2: Any, /) -> Tensor:
    """The quotient a / b. Integers are divided as float32.

    >>> divide(creation.asarray([1, 2]), 4).tolist()
    [0.25, 0.5]
    """
    a, b = operands("divide", x1, x2)
    if a.spec.dtype in BOOL + INTEGRAL:
        return _divide(
            creation.astype(Tensor(a), dtypes.default_float), creation.astype(Tensor(b), dtypes.default_float)
        )
    return _divide(Tensor(a), Tensor(b))


def _floor_divide(xp: Any, a: Any, b: Any) -> Any:
    """numpy's, except that with an infinite operand it is the floor of the quotient, as the standard asks."""
    result = xp.floor_divide(a, b)
    if result.dtype.kind != "f":
        return result
    infinite = xp.isinf(a) | xp.isinf(b)
    if xp is np and not infinite.any():  # elsewhere a question to the device, for which the host would wait
        return result
    return xp.where(infinite, xp.floor(xp.divide(a, b)), result)


floor_divide = binary("floor_divide", REAL, _floor_divide, ZERO, "The floor of a / b.")
remainder = binary(
    "remainder",
    REAL,
    ufunc("remainder"),
    (lambda g, y, a, b: g, lambda g, y, a, b: -g * floor_divide(a, b)),
    "a - floor(a / b) * b: the remainder, with the sign of b.",
)


def _pow_vjp_of_base(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # b * a**(b - 1) is NaN at a = b = 0 only through the 0 * inf of its two factors.
    return g * where(b == 0, creation.zeros_like(y), b * pow(a, where(b == 0, creation.ones_like(b), b) - 1))


def _pow_vjp_of_exponent(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return g * y * elementwise.log(where(a == 0, creation.ones_like(a), a))


pow = binary("pow", NUMERIC, ufunc("power"), (_pow_vjp_of_base, _pow_vjp_of_exponent), "a ** b.")
atan2 = binary(
    "atan2",
    dtypes.FLOATING,
    ufunc("arctan2"),
    (lambda g, y, a, b: g * b / (a * a + b * b), lambda g, y, a, b: -g * a / (a * a + b * b)),
    "The angle of the point (b, a), between -pi and pi.",
)
hypot = binary(
    "hypot",
    dtypes.FLOATING,
    ufunc("hypot"),
    (lambda g, y, a, b: g * a / y, lambda g, y, a, b: g * b / y),
    "sqrt(a*a + b*b) without overflow.",
)
logaddexp = binary(
    "logaddexp",
    dtypes.FLOATING,
    ufunc("logaddexp"),
    (lambda g, y, a, b: g * elementwise.exp(a - y), lambda g, y, a, b: g * elementwise.exp(b - y)),
    "log(exp(a) + exp(b)) without overflow.",
)
copysign: Binary = binary(
    "copysign",
    dtypes.FLOATING,
    ufunc("copysign"),
    (
        lambda g, y, a, b: g * copysign(creation.ones_like(y), a * copysign(creation.ones_like(b), b)),
        lambda g, y, a, b: 0 * g,
    ),
    "The magnitude of a with the sign of b.",
)
nextafter = binary(
    "nextafter", (dtypes.float32, dtypes.float64), ufunc("nextafter"), ZERO, "The next float after a towards b."
)


def _share_of(g: Tensor, mine: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The cotangent of one operand of maximum/minimum: whole where it won, half where both are equal."""
    one = creation.ones_like(y)
    return g * where(mine == y, where(a == b, 0.5 * one, one), creation.zeros_like(y))


_SELECT = (lambda g, y, a, b: _share_of(g, a, y, a, b), lambda g, y, a, b: _share_of(g, b, y, a, b))
maximum = binary("maximum", REAL + BOOL, ufunc("maximum"), _SELECT, "The larger of a and b; NaN if either is.")
minimum = binary("minimum", REAL + BOOL, ufunc("minimum"), _SELECT, "The smaller of a and b; NaN if either is.")

# Comparison and logic.

_ANY = BOOL + NUMERIC
equal = binary("equal", _ANY, ufunc("equal"), ZERO, "Whether a == b.", dtypes.bool_)
not_equal = binary("not_equal", _ANY, ufunc("not_equal"), ZERO, "Whether a != b.", dtypes.bool_)
less = binary("less", REAL + BOOL, ufunc("less"), ZERO, "Whether a < b.", dtypes.bool_)
less_equal = binary("less_equal", REAL + BOOL, ufunc("less_equal"), ZERO, "Whether a <= b.", dtypes.bool_)
greater = binary("greater", REAL + BOOL, ufunc("greater"), ZERO, "Whether a > b.", dtypes.bool_)
greater_equal = binary("greater_equal", REAL + BOOL, ufunc("greater_equal"), ZERO, "Whether a >= b.", dtypes.bool_)
logical_and = binary("logical_and", _ANY, ufunc("logical_and"), ZERO, "Whether a and b are non-zero.", dtypes.bool_)
logical_or = binary("logical_or", _ANY, ufunc("logical_or"), ZERO, "Whether a or b is non-zero.", dtypes.bool_)
logical_xor = binary("logical_xor", _ANY, ufunc("logical_xor"), ZERO, "Whether just one is non-zero.", dtypes.bool_)
bitwise_and = binary("bitwise_and", BOOL + INTEGRAL, ufunc("bitwise_and"), ZERO, "a & b.")
bitwise_or = binary("bitwise_or", BOOL + INTEGRAL, ufunc("bitwise_or"), ZERO, "a | b.")
bitwise_xor = binary("bitwise_xor", BOOL + INTEGRAL, ufunc("bitwise_xor"), ZERO, "a ^ b.")
bitwise_left_shift = binary("bitwise_left_shift", INTEGRAL, ufunc("left_shift"), ZERO, "a << b.")
bitwise_right_shift = binary("bitwise_right_shift", INTEGRAL, ufunc("right_shift"), ZERO, "a >> b.")

# Selection.


def _infer_where(condition: Spec, a: Spec, b: Spec) -> Spec:
    if condition.dtype != dtypes.bool_:
        raise DTypeError(f"where: the condition must be bool, but its dtype is {condition.dtype.name}; compare first")
    return Spec(broadcast_shapes("where", condition.shape, a.shape, b.shape), a.dtype, a.device)


WHERE = define(
    Op(
        "where",
        _infer_where,
        lambda xp, condition, a, b: xp.where(condition, a, b),
        (
            lambda g, y, condition, a, b: None,
            lambda g, y, condition, a, b: sum_to(where(condition, g, creation.zeros_like(g)), a.shape),
            lambda g, y, condition, a, b: sum_to(where(condition, creation.zeros_like(g), g), b.shape),
        ),
        elementwise=True,
        aliases=False,
        shapes="three that broadcast, the first bool -> what they broadcast to",
        domain=BOOL,
    )
)


def where(condition: Tensor, x1: Any, x2: Any, /) -> Tensor:
    """`x1` where the condition holds, `x2` elsewhere, broadcast together.

    >>> where(creation.asarray([True, False]), 1.0, -1.0).tolist()
    [1.0, -1.0]
    """
    a, b = operands("where", x1, x2)
    return Tensor(apply(WHERE, (creation.to_tensor("where", condition, Tensor(a)).node, a, b)))


def clip(x: Tensor, /, min: Any = None, max: Any = None) -> Tensor:
    """`x` limited to [min, max]; either end may be left out. Bounds follow the dtype of `x`."""
    if min is not None:
        x = maximum(x, creation.astype(creation.to_tensor("clip", min, x), x.dtype))
    if max is not None:
        x = minimum(x, creation.astype(creation.to_tensor("clip", max, x), x.dtype))
    return x

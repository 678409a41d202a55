"""Functions of one tensor, element by element. Each is one entry: name, domain, kernel, derivative.

The derivative is written as a function `(g, y, x) -> cotangent of x`. A complex cotangent g stands for the change
real(g * dx) of the loss, so that a holomorphic function has the same derivative as over the real numbers. Sixteen-bit
floats are computed in float32 and rounded once.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fuel_parallel.errors import DTypeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import ZERO, Op, Spec, apply, define
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.ops.call import called
from fuel_parallel.lazy.tensor import Tensor

Unary = Callable[[Tensor], Tensor]
Domain = tuple[DType, ...]

BOOL: Domain = (dtypes.bool_,)
INTEGRAL: Domain = (*dtypes.SIGNED, *dtypes.UNSIGNED)
REAL: Domain = (*INTEGRAL, *dtypes.FLOATING)
NUMERIC: Domain = (*REAL, *dtypes.COMPLEX)
INEXACT: Domain = (*dtypes.FLOATING, *dtypes.COMPLEX)


def check_domain(function: str, dtype: DType, domain: Domain) -> None:
    """Raises the user's error when the function does not take the dtype."""
    if dtype not in domain:
        names = ", ".join(d.name for d in domain)
        raise DTypeError(f"{function}: expected one of {names}, but the dtype is {dtype.name}; cast it with astype")


def in_float32(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, run in float32 for inputs of 16 bits and rounded once at the end."""

    def run(xp: Any, *arguments: Any) -> Any:
        first = arguments[0]
        if first.dtype.itemsize != 2 or first.dtype not in (dtypes.float16, dtypes.bfloat16):
            return kernel(xp, *arguments)
        half = first.dtype
        wide = [a.astype(dtypes.float32) if getattr(a, "dtype", None) == half else a for a in arguments]
        result = kernel(xp, *wide)
        return result.astype(half) if result.dtype == dtypes.float32 else result

    return run


def product_in_float32(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`in_float32` for a product of matrices, but where the array module does that itself, without a copy."""
    widened = in_float32(kernel)

    def run(xp: Any, *arguments: Any) -> Any:
        as_they_are = arguments[0].dtype.itemsize == 2 and getattr(xp, "sums_halves_in_float32", False)
        return kernel(xp, *arguments) if as_they_are else widened(xp, *arguments)

    return run


def unary(
    name: str,
    domain: Domain,
    kernel: Callable[..., Any],
    vjp: Any,
    summary: str,
    result: Callable[[DType], DType] | None = None,
    complex_kernel: Callable[..., Any] | None = None,
) -> Unary:
    """Defines an elementwise op of one input and returns its public function.

    With a `complex_kernel` there are two ops: complex numbers have special values of their own there.
    """

    def infer(x: Spec) -> Spec:
        if x.dtype not in domain:
            check_domain(name, x.dtype, domain)
        return x if result is None else Spec(x.shape, result(x.dtype), x.device)

    rule = (vjp,) if callable(vjp) else vjp
    shapes = "[...] -> [...]"
    if complex_kernel:
        others = tuple(d for d in domain if d not in dtypes.COMPLEX)
        op = define(elementwise_op(name, infer, kernel, rule, shapes, others))
        complex_op = define(elementwise_op(f"complex_{name}", infer, complex_kernel, rule, shapes, dtypes.COMPLEX))
    else:
        op = complex_op = define(elementwise_op(name, infer, kernel, rule, shapes, domain))

    def function(x: Tensor, /) -> Tensor:
        if not isinstance(x, Tensor):
            x = creation.to_tensor(name, x)
        return Tensor(apply(op if complex_op is op or x.dtype not in dtypes.COMPLEX else complex_op, (x.node,)))

    function.__name__ = function.__qualname__ = name
    function.__doc__ = summary
    return function


def elementwise_op(
    name: str, infer: Callable[..., Spec], kernel: Callable[..., Any], vjp: Any, shapes: str, domain: Domain
) -> Op:
    """The registry entry of an elementwise op; a kernel that is a ufunc is known as one."""
    name_of_ufunc = getattr(kernel, "ufunc", "")
    return Op(
        name,
        infer,
        in_float32(kernel),
        vjp,
        elementwise=True,
        ufunc=name_of_ufunc,
        aliases=not name_of_ufunc,
        shapes=shapes,
        domain=domain,
    )


def ufunc(name: str) -> Callable[..., Any]:
    """The kernel that calls the array module's function of that name."""

    def kernel(xp: Any, *arrays: Any) -> Any:
        return getattr(xp, name)(*arrays)

    if isinstance(getattr(np, name), np.ufunc):
        kernel.ufunc = name  # type: ignore[attr-defined]
    return kernel


def _to_bool(_: DType) -> DType:
    return dtypes.bool_


def _abs_vjp(g: Tensor, x: Tensor) -> Tensor:
    direction = sign(x)
    return g * (conj(direction) if x.dtype in dtypes.COMPLEX else direction)


def _sign_vjp(g: Tensor, y: Tensor, x: Tensor) -> Tensor | None:
    """Zero for real numbers; a complex sign turns as x turns."""
    if x.dtype not in dtypes.COMPLEX:
        return None
    size = abs(x)
    turned = g - conj(y) * real(g * y).astype(x.dtype)
    return turned / (size + (size == 0).astype(size.dtype)).astype(x.dtype)


# Signs, magnitudes, parts.

positive = unary("positive", NUMERIC, lambda xp, x: x, lambda g, y, x: g, "x itself.")
negative = unary("negative", NUMERIC, ufunc("negative"), lambda g, y, x: -g, "-x.")
abs = unary("abs", NUMERIC, ufunc("abs"), lambda g, y, x: _abs_vjp(g, x), "The absolute value.", dtypes.real_of)
sign: Unary = unary(
    "sign",
    NUMERIC,
    ufunc("sign"),
    lambda g, y, x: _sign_vjp(g, y, x),
    "-1, 0 or 1 by the sign of x; for complex numbers x / abs(x), 0 at 0.",
)
square = unary("square", NUMERIC, ufunc("square"), lambda g, y, x: g * (2 * x), "x * x.")
reciprocal = unary("reciprocal", INEXACT, ufunc("reciprocal"), lambda g, y, x: -g * (y * y), "1 / x.")
real = unary(
    "real", (*REAL, *dtypes.COMPLEX), ufunc("real"), lambda g, y, x: g.astype(x.dtype), "The real part.", dtypes.real_of
)
imag = unary(
    "imag",
    dtypes.COMPLEX,
    ufunc("imag"),
    lambda g, y, x: g.astype(x.dtype) * -1j,
    "The imaginary part.",
    dtypes.real_of,
)
conj: Unary = unary("conj", NUMERIC, ufunc("conj"), lambda g, y, x: conj(g), "The complex conjugate.")
signbit = unary("signbit", dtypes.FLOATING, ufunc("signbit"), ZERO, "Whether the sign bit is set (-0.0 too).", _to_bool)

# Powers, exponentials, logarithms.

sqrt = unary("sqrt", INEXACT, ufunc("sqrt"), lambda g, y, x: g / (2 * y), "The square root.")
rsqrt = unary(
    "rsqrt", dtypes.FLOATING, lambda xp, x: 1 / xp.sqrt(x), lambda g, y, x: g * (-0.5 * (y * y * y)), "1 / sqrt(x)."
)
exp = unary("exp", INEXACT, ufunc("exp"), lambda g, y, x: g * y, "e ** x.")


def _complex_expm1(xp: Any, x: Any) -> Any:
    # numpy's own is NaN at infinities where exp knows better, and -0 at -0, where the standard has 0.
    return xp.where(xp.isfinite(x) & (x != 0), xp.expm1(x), xp.exp(x) - x.dtype.type(1))


expm1 = unary(
    "expm1",
    INEXACT,
    ufunc("expm1"),
    lambda g, y, x: g * (y + 1),
    "e ** x - 1, exact near 0.",
    complex_kernel=_complex_expm1,
)
log = unary("log", INEXACT, ufunc("log"), lambda g, y, x: g / x, "The natural logarithm.")
log1p = unary("log1p", INEXACT, ufunc("log1p"), lambda g, y, x: g / (1 + x), "log(1 + x), exact near 0.")
log2 = unary("log2", INEXACT, ufunc("log2"), lambda g, y, x: g / (x * math.log(2)), "The logarithm to base 2.")
log10 = unary("log10", INEXACT, ufunc("log10"), lambda g, y, x: g / (x * math.log(10)), "The logarithm to base 10.")

# Circular and hyperbolic functions.

sin = unary("sin", INEXACT, ufunc("sin"), lambda g, y, x: g * cos(x), "The sine.")
cos: Unary = unary("cos", INEXACT, ufunc("cos"), lambda g, y, x: -g * sin(x), "The cosine.")
tan = unary("tan", INEXACT, ufunc("tan"), lambda g, y, x: g * (1 + y * y), "The tangent.")
asin = unary("asin", INEXACT, ufunc("arcsin"), lambda g, y, x: g / sqrt(1 - x * x), "The inverse sine.")
acos = unary("acos", INEXACT, ufunc("arccos"), lambda g, y, x: -g / sqrt(1 - x * x), "The inverse cosine.")
atan = unary("atan", INEXACT, ufunc("arctan"), lambda g, y, x: g / (1 + x * x), "The inverse tangent.")
sinh = unary("sinh", INEXACT, ufunc("sinh"), lambda g, y, x: g * cosh(x), "The hyperbolic sine.")
cosh: Unary = unary("cosh", INEXACT, ufunc("cosh"), lambda g, y, x: g * sinh(x), "The hyperbolic cosine.")
tanh = unary(
    "tanh",
    INEXACT,
    ufunc("tanh"),
    lambda g, y, x: g * (1 - y * y),
    "The hyperbolic tangent.",
    complex_kernel=lambda xp, x: _complex_tanh(xp, x),
)
asinh = unary("asinh", INEXACT, ufunc("arcsinh"), lambda g, y, x: g / sqrt(x * x + 1), "The inverse hyperbolic sine.")
acosh = unary("acosh", INEXACT, ufunc("arccosh"), lambda g, y, x: g / sqrt(x * x - 1), "The inverse hyperbolic cosine.")
atanh = unary("atanh", INEXACT, ufunc("arctanh"), lambda g, y, x: g / (1 - x * x), "The inverse hyperbolic tangent.")


def _complex_tanh(xp: Any, x: Any) -> Any:
    # At an infinite real part: 1 by its sign, and a zero with the sign of the imaginary part, not that of its sine.
    limit = xp.empty(x.shape, x.dtype)
    limit.real = xp.copysign(1, x.real)
    limit.imag = xp.copysign(0, x.imag)
    return xp.where(xp.isinf(x.real), limit, xp.tanh(x))


def _erf(xp: Any, x: Any) -> Any:
    if xp.__name__ == "cupy":
        from cupyx.scipy import special
    else:
        from scipy import special
    return special.erf(x)


erf = unary(
    "erf",
    dtypes.FLOATING,
    _erf,
    lambda g, y, x: g * (2 / math.sqrt(math.pi) * exp(-(x * x))),
    "The error function, 2/sqrt(pi) times the integral of exp(-t**2) from 0 to x.",
)

# Rounding: the derivative is zero wherever it exists.


def _rounding(name: str) -> Callable[..., Any]:
    return lambda xp, x: x if x.dtype.kind in "iu" else getattr(xp, name)(x)


floor = unary("floor", REAL, _rounding("floor"), ZERO, "The largest integer not above x, in the dtype of x.")
ceil = unary("ceil", REAL, _rounding("ceil"), ZERO, "The smallest integer not below x, in the dtype of x.")
trunc = unary("trunc", REAL, _rounding("trunc"), ZERO, "x without its fraction, in the dtype of x.")
round = unary("round", NUMERIC, _rounding("round"), ZERO, "The nearest integer, halves to the even one.")

# Tests and bits.

isfinite = unary("isfinite", NUMERIC, ufunc("isfinite"), ZERO, "Whether neither infinite nor NaN.", _to_bool)
isinf = unary("isinf", NUMERIC, ufunc("isinf"), ZERO, "Whether infinite.", _to_bool)
isnan = unary("isnan", NUMERIC, ufunc("isnan"), ZERO, "Whether NaN.", _to_bool)
logical_not = unary("logical_not", (*BOOL, *REAL), ufunc("logical_not"), ZERO, "Whether x is zero or False.", _to_bool)
bitwise_invert = unary("bitwise_invert", (*BOOL, *INTEGRAL), ufunc("invert"), ZERO, "Every bit flipped.")

# Activations.


def _sigmoid(xp: Any, x: Any) -> Any:
    return (1 + xp.tanh(x / 2)) / 2


sigmoid = unary(
    "sigmoid", dtypes.FLOATING, _sigmoid, lambda g, y, x: g * (y * (1 - y)), "1 / (1 + exp(-x)), without overflow."
)
relu = unary(
    "relu",
    REAL,
    lambda xp, x: xp.maximum(x, x.dtype.type(0)),
    lambda g, y, x: g * (x > 0).astype(g.dtype),
    "max(x, 0); the derivative at 0 is 0.",
)


@called
def _silu_backward(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    s = sigmoid(x)
    return g * (s * (1 + x * (1 - s)))


silu = unary(
    "silu",
    dtypes.FLOATING,
    lambda xp, x: x * _sigmoid(xp, x),
    _silu_backward,
    "x * sigmoid(x), also called swish (Elfwing et al., 2017, arXiv:1702.03118).",
)


_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


def _gelu_tanh(xp: Any, x: Any) -> Any:
    inner = x * x
    inner *= _GELU_SCALE * _GELU_CUBIC
    inner += _GELU_SCALE
    inner *= x
    inner = xp.tanh(inner)
    inner += 1
    inner *= 0.5
    inner *= x
    return inner


def _gelu_gate(x: Tensor) -> tuple[Tensor, Tensor]:
    """inner / x, and what x is multiplied by: (1 + tanh(inner)) / 2. Numpy's tanh takes half of the time of exp."""
    slope = (_GELU_SCALE * _GELU_CUBIC) * (x * x) + _GELU_SCALE
    return slope, 0.5 * tanh(x * slope) + 0.5


def gelu_tanh_by_parts(x: Tensor) -> Tensor:
    """The tanh form by elementary operations, which its derivative shares."""
    return x * _gelu_gate(x)[1]


@called
def _gelu_tanh_backward(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    # The derivative of the gate h is h * (1 - h) * (2 inner)', and of 2 inner it is 6 slope - 4 scale.
    slope, h = _gelu_gate(x)
    return g * (h + x * h * (1 - h) * (6 * slope - 4 * _GELU_SCALE))


_LOGIT = (1.59576814, 0.0726697702, -6.73037902e-05, -1.10159803e-04, 7.89513621e-06, -2.64308156e-07, 3.55523651e-09)
"""log(P / (1 - P)) / x as a polynomial in x**2, where P is the normal distribution's cumulative function: the
minimax fit of x * P. In float32 x * P is within 6e-7 of gelu, as near as by float32's erf, at a quarter of the time."""


def _cumulative(x: Tensor) -> Tensor:
    """The normal distribution's cumulative function; numpy computes exp many times as fast as erf."""
    if x.dtype != dtypes.float32:
        return 0.5 * (1 + erf(x * math.sqrt(0.5)))
    squared = x * x
    slope = squared * -_LOGIT[-1]
    for coefficient in _LOGIT[-2:0:-1]:
        slope = (slope - coefficient) * squared
    return reciprocal(exp((slope - _LOGIT[0]) * x) + 1)


def gelu_erf_by_parts(x: Tensor) -> Tensor:
    """The exact form by elementary operations, which its derivative shares."""
    return x * _cumulative(x)


@called
def _gelu_erf_backward(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    density = exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))
    return g * (_cumulative(x) + x * density)


_gelu_of_tanh = unary("gelu_tanh", dtypes.FLOATING, _gelu_tanh, _gelu_tanh_backward, "gelu, tanh approximation.")
_gelu_of_erf = unary(
    "gelu_erf",
    dtypes.FLOATING,
    lambda xp, x: x * (0.5 * (1 + _erf(xp, x * x.dtype.type(math.sqrt(0.5))))),
    _gelu_erf_backward,
    "gelu, exact.",
)


def gelu(x: Tensor, /, *, approximate: builtins.bool = False) -> Tensor:
    """The product of x and the normal distribution's cumulative function at x.

    See Hendrycks and Gimpel, 2016, arXiv:1606.08415.

    `approximate=True` is the tanh form that GPT-2 uses.

    >>> gelu(creation.asarray([-1.0, 0.0, 1.0])).numpy().round(4).tolist()
    [-0.15870000422000885, 0.0, 0.8413000106811523]
    """
    return (_gelu_of_tanh if approximate else _gelu_of_erf)(x)

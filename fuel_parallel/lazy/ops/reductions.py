"""Reductions over axes: statistics, logic, and the positions of extremes."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from fuel_parallel.errors import AxisError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import ZERO, Op, Shape, Spec, apply, define
from fuel_parallel.lazy.ops import binary, creation, elementwise, manipulation
from fuel_parallel.lazy.ops.elementwise import BOOL, INEXACT, NUMERIC, REAL, Domain, in_float32
from fuel_parallel.lazy.tensor import Tensor

Axis = int | tuple[int, ...] | None
REDUCED = "[...] -> [...] without axis, or with 1 there if keepdims"


def normalize_axis(function: str, axis: int, ndim: int) -> int:
    """A non-negative axis, or the user's error."""
    if not isinstance(axis, int) and not hasattr(axis, "__index__"):
        raise ShapeError(f"{function}: an axis is an int, not {axis!r}")
    axis = axis.__index__()
    if not -ndim <= axis < ndim:
        raise AxisError(f"{function}: axis {axis} is out of bounds for a tensor of {ndim} dimensions")
    return axis % ndim


def normalize_axes(function: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    """All axes that are meant, sorted, or the user's error."""
    if axis is None:
        return tuple(range(ndim))
    if isinstance(axis, tuple | list):
        axes = tuple(sorted(normalize_axis(function, a, ndim) for a in axis))
        if len(set(axes)) != len(axes):
            raise ShapeError(f"{function}: an axis appears twice in {axis}")
        return axes
    return (normalize_axis(function, axis, ndim),)


def reduced_shape(shape: Shape, axes: tuple[int, ...], keepdims: builtins.bool) -> Shape:
    """The shape after `axes` are reduced."""
    if keepdims:
        return tuple(1 if i in axes else extent for i, extent in enumerate(shape))
    return tuple(extent for i, extent in enumerate(shape) if i not in axes)


def _reduction(
    name: str,
    domain: Domain,
    kernel: Callable[..., Any],
    vjp: Any,
    result: Callable[[DType], DType] = lambda d: d,
    needs_elements: builtins.bool = False,
) -> Op:
    def infer(x: Spec, axes: tuple[int, ...], keepdims: builtins.bool) -> Spec:
        elementwise.check_domain(name, x.dtype, domain)
        if needs_elements and any_zero(x.shape[a] for a in axes):
            raise ShapeError(f"{name}: cannot reduce over zero elements (shape {x.shape}, axis {axes})")
        return Spec(reduced_shape(x.shape, axes, keepdims), result(x.dtype), x.device)

    return define(
        Op(
            name,
            infer,
            in_float32(kernel),
            vjp,
            aliases=False,
            attr_names=("axis", "keepdims"),
            shapes=REDUCED,
            domain=domain,
        )
    )


def any_zero(extents: Any) -> builtins.bool:
    """Whether one of the extents is 0."""
    return 0 in tuple(extents)


def _apply(op: Op, x: Any, axis: Axis, keepdims: builtins.bool) -> Tensor:
    x = creation.to_tensor(op.name, x)
    return Tensor(apply(op, (x.node,), normalize_axes(op.name, axis, x.ndim), bool(keepdims)))


def _spread(t: Tensor, x: Tensor, axes: tuple[int, ...], keepdims: builtins.bool) -> Tensor:
    """A reduced tensor, given back the reduced dimensions as 1, so that it broadcasts against `x`."""
    return t if keepdims else manipulation.reshape(t, reduced_shape(x.shape, axes, True))


def _widened(d: DType) -> DType:
    """The dtype of a sum or product: small integers and bools are accumulated in 64 bits, as the standard asks."""
    if d in dtypes.UNSIGNED:
        return dtypes.uint64
    return dtypes.int64 if d in dtypes.SIGNED or d == dtypes.bool_ else d


SUM = _reduction(
    "sum",
    BOOL + NUMERIC,
    lambda xp, x, axes, keepdims: x.sum(axis=axes, keepdims=keepdims),
    (lambda g, y, x, axes, keepdims: manipulation.broadcast_to(_spread(g, x, axes, keepdims), x.shape),),
    _widened,
)
MEAN = _reduction(
    "mean",
    INEXACT,
    lambda xp, x, axes, keepdims: _mean_kernel(xp, x, axes, keepdims),
    (lambda g, y, x, axes, keepdims: _mean_vjp(g, y, x, axes, keepdims),),
)


def _mean_kernel(xp: Any, x: Any, axes: tuple[int, ...], keepdims: builtins.bool) -> Any:
    # Not numpy's own mean, which warns where there is nothing to average: NaN is the answer there.
    return x.sum(axis=axes, keepdims=keepdims) / x.dtype.type(math.prod(x.shape[a] for a in axes))


def _mean_vjp(g: Tensor, y: Tensor, x: Tensor, axes: tuple[int, ...], keepdims: builtins.bool) -> Tensor:
    count = x.size / y.size if y.size else 1
    return manipulation.broadcast_to(_spread(g, x, axes, keepdims) * (1 / count), x.shape)


def _prod_vjp(g: Tensor, y: Tensor, x: Tensor, axes: tuple[int, ...], keepdims: builtins.bool) -> Tensor:
    """The product of all *other* elements, by products from the left and from the right: right with zeros, too."""
    others = tuple(i for i in range(x.ndim) if i not in axes)
    order = (*others, *axes)
    flat = manipulation.reshape(manipulation.permute_dims(x, order), (*(x.shape[i] for i in others), -1))
    before = _exclusive_product(flat)
    after = manipulation.flip(_exclusive_product(manipulation.flip(flat, axis=-1)), axis=-1)
    rest = manipulation.reshape(before * after, tuple(x.shape[i] for i in order))
    inverse = tuple(order.index(i) for i in range(x.ndim))
    return _spread(g, x, axes, keepdims) * manipulation.permute_dims(rest, inverse)


def _exclusive_product(x: Tensor) -> Tensor:
    from fuel_parallel.lazy.ops.ordering import cumulative_prod

    return cumulative_prod(x, axis=-1, include_initial=True)[..., :-1]


PROD = _reduction(
    "prod",
    BOOL + NUMERIC,
    lambda xp, x, axes, keepdims: xp.prod(x, axis=axes, keepdims=keepdims),
    (lambda g, y, x, axes, keepdims: creation.zeros_like(x) if x.size == 0 else _prod_vjp(g, y, x, axes, keepdims),),
    _widened,
)


def _extreme_vjp(g: Tensor, y: Tensor, x: Tensor, axes: tuple[int, ...], keepdims: builtins.bool) -> Tensor:
    """The cotangent goes to the elements that equal the extreme, in equal parts."""
    hits = creation.astype(x == _spread(y, x, axes, keepdims), g.dtype)
    return _spread(g, x, axes, keepdims) * (hits / sum(hits, axis=axes, keepdims=True))


_EXTREME = (_extreme_vjp,)
MAX = _reduction(
    "max", REAL + BOOL, lambda xp, x, axes, keepdims: x.max(axis=axes, keepdims=keepdims), _EXTREME, needs_elements=True
)
MIN = _reduction(
    "min", REAL + BOOL, lambda xp, x, axes, keepdims: x.min(axis=axes, keepdims=keepdims), _EXTREME, needs_elements=True
)
ANY = _reduction(
    "any",
    BOOL + NUMERIC,
    lambda xp, x, axes, keepdims: x.any(axis=axes, keepdims=keepdims),
    ZERO,
    lambda _: dtypes.bool_,
)
ALL = _reduction(
    "all",
    BOOL + NUMERIC,
    lambda xp, x, axes, keepdims: x.all(axis=axes, keepdims=keepdims),
    ZERO,
    lambda _: dtypes.bool_,
)


def sum(x: Tensor, /, *, axis: Axis = None, dtype: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """The sum over `axis` (all axes by default). Small integers are summed in 64 bits.

    >>> sum(creation.ones((2, 3)), axis=0).tolist()
    [2.0, 2.0, 2.0]
    """
    total = _apply(SUM, x if dtype is None else creation.astype(x, dtype), axis, keepdims)
    return total if dtype is None else creation.astype(total, dtype)


def mean(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The arithmetic mean over `axis`; integers are averaged as float32."""
    return _apply(MEAN, x if dtypes.is_inexact(x.dtype) else creation.astype(x, dtypes.default_float), axis, keepdims)


def prod(x: Tensor, /, *, axis: Axis = None, dtype: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """The product over `axis`."""
    total = _apply(PROD, x if dtype is None else creation.astype(x, dtype), axis, keepdims)
    return total if dtype is None else creation.astype(total, dtype)


def max(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The largest element over `axis`; NaN if there is one."""
    return _apply(MAX, x, axis, keepdims)


def min(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """The smallest element over `axis`; NaN if there is one."""
    return _apply(MIN, x, axis, keepdims)


def any(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """Whether any element over `axis` is non-zero."""
    return _apply(ANY, x, axis, keepdims)


def all(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """Whether all elements over `axis` are non-zero."""
    return _apply(ALL, x, axis, keepdims)


def count_nonzero(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """How many elements over `axis` are non-zero."""
    return sum(creation.astype(binary.not_equal(x, 0), dtypes.default_int), axis=axis, keepdims=keepdims)


def var(x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: builtins.bool = False) -> Tensor:
    """The variance over `axis`; the divisor is the count minus `correction`."""
    axes = normalize_axes("var", axis, x.ndim)
    count = 1
    for a in axes:
        count *= x.shape[a]
    deviation = x - mean(x, axis=axes, keepdims=True)
    squares = sum(elementwise.square(deviation), axis=axes, keepdims=keepdims)
    return squares / builtins.max(count - correction, 0.0)


def std(x: Tensor, /, *, axis: Axis = None, correction: float = 0.0, keepdims: builtins.bool = False) -> Tensor:
    """The standard deviation over `axis`: the square root of `var`."""
    return elementwise.sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))


def logsumexp(x: Tensor, /, *, axis: Axis = None, keepdims: builtins.bool = False) -> Tensor:
    """log(sum(exp(x))) over `axis` without overflow."""
    axes = normalize_axes("logsumexp", axis, x.ndim)
    top = creation.stop_gradient(max(x, axis=axes, keepdims=True))
    top = binary.where(elementwise.isfinite(top), top, creation.zeros_like(top))
    total = elementwise.log(sum(elementwise.exp(x - top), axis=axes, keepdims=True)) + top
    return total if keepdims else manipulation.reshape(total, reduced_shape(x.shape, axes, False))


def _position(name: str) -> Op:
    def infer(x: Spec, axis: int, keepdims: builtins.bool) -> Spec:
        elementwise.check_domain(name, x.dtype, REAL + BOOL)
        if x.shape[axis] == 0:
            raise ShapeError(f"{name}: cannot search an axis without elements (shape {x.shape}, axis {axis})")
        return Spec(reduced_shape(x.shape, (axis,), keepdims), dtypes.int64, x.device)

    def kernel(xp: Any, x: Any, axis: int, keepdims: builtins.bool) -> Any:
        return getattr(xp, name)(x, axis=axis, keepdims=keepdims)

    attr_names = ("axis", "keepdims")
    return define(Op(name, infer, in_float32(kernel), ZERO, attr_names=attr_names, shapes=REDUCED, domain=REAL + BOOL))


ARGMAX = _position("argmax")
ARGMIN = _position("argmin")


def _apply_position(op: Op, x: Tensor, axis: int | None, keepdims: builtins.bool) -> Tensor:
    if axis is None:
        if not x.size:
            raise ShapeError(f"{op.name}: cannot search a tensor without elements (shape {x.shape})")
        found = Tensor(apply(op, (manipulation.reshape(x, (-1,)).node,), 0, False))
        return manipulation.reshape(found, (1,) * x.ndim) if keepdims else found
    return Tensor(apply(op, (x.node,), normalize_axis(op.name, axis, x.ndim), bool(keepdims)))


def argmax(x: Tensor, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """The position of the first largest element, in the flattened tensor if no axis is given."""
    return _apply_position(ARGMAX, x, axis, keepdims)


def argmin(x: Tensor, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """The position of the first smallest element, in the flattened tensor if no axis is given."""
    return _apply_position(ARGMIN, x, axis, keepdims)

"""Casting tensors and moving them to other devices, and the dtypes of mixtures."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from fuel_parallel.backends import check_device, move
from fuel_parallel.errors import ArgumentError, DTypeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import ZERO, Op, Spec, apply, copied, define
from fuel_parallel.lazy.tensor import Tensor


def refuse_complex(function: str, source: DType, wanted: DType) -> None:
    """Raises the user's error about complex numbers that are to become real ones."""
    raise DTypeError(f"{function}: {source.name} to {wanted.name} would drop the imaginary part; use real(x) first")


def _infer_astype(x: Spec, dtype: DType) -> Spec:
    if dtypes.kind(x.dtype) == "complex floating" and dtypes.kind(dtype) != "complex floating":
        refuse_complex("astype", x.dtype, dtype)
    return Spec(x.shape, dtype, x.device)


ASTYPE = define(
    Op(
        "astype",
        infer=_infer_astype,
        kernel=lambda xp, x, dtype: x.astype(dtype),
        vjp=(lambda g, y, x, dtype: astype(_real_if(g, x.dtype), x.dtype) if dtypes.is_inexact(dtype) else None,),
        elementwise=True,
        aliases=False,
        attr_names=("dtype",),
        shapes="[...] -> [...]",
    )
)


def _real_if(g: Tensor, dtype: DType) -> Tensor:
    from fuel_parallel.lazy.ops.elementwise import real

    is_complex = dtypes.kind(g.dtype) == "complex floating" and dtypes.kind(dtype) != "complex floating"
    return real(g) if is_complex else g


def astype(x: Tensor, dtype: Any, /, *, copy: builtins.bool = True, device: str | None = None) -> Tensor:
    """`x` in another dtype, or on another device.

    Values are immutable, so where nothing changes the result has the same node and nothing is computed: a handle of its
    own, which `result[key] = v` changes alone, or `x` itself with `copy=False`.
    """
    wanted = dtypes.dtype(dtype)
    cast = x if wanted is x.node.spec.dtype else Tensor(apply(ASTYPE, (x.node,), wanted))
    result = cast if device is None else to_device(cast, device)
    return Tensor(x.node) if copy and result is x else result


COPY = define(
    Op(
        "copy",
        infer=lambda x, device: Spec(x.shape, x.dtype, device),
        kernel=lambda xp, x, device: move(x, device),
        vjp=(lambda g, y, x, device: to_device(g, x.device),),
        attr_names=("device",),
        shapes="[...] -> [...]",
    )
)


def to_device(x: Tensor, device: str | None) -> Tensor:
    """`x` on another device, as a Copy node; `x` itself where it is there already, or no device is named.

    Between two vendors it goes through the host: two Copy nodes.
    """
    if device is None or device == x.device:
        return x
    node = copied(x.node, check_device(device))
    return x if node is x.node else Tensor(node)


def stop_gradient(x: Tensor, /) -> Tensor:
    """The value of `x`, taken as a constant by `grad`."""
    return Tensor(apply(STOP_GRADIENT, (x.node,)))


STOP_GRADIENT = define(
    Op("stop_gradient", infer=lambda x: x, kernel=lambda xp, x: x, vjp=ZERO, shapes="[...] -> [...]")
)


# Dtypes of mixtures.


def result_type(*operands: Any) -> DType:
    """The dtype that the operands promote to; Python scalars are weak.

    >>> result_type(dtypes.float32, 1.5).name, result_type(dtypes.int8, dtypes.int32).name
    ('float32', 'int32')
    """
    known = [o.dtype if isinstance(o, Tensor) else dtypes.dtype(o) for o in operands if not is_python_scalar(o)]
    result: DType | None = None
    for d in known:
        result = d if result is None else dtypes.promote(result, d)
    for o in operands:
        if is_python_scalar(o):
            result = dtypes.of_scalar(o, result)
    if result is None:
        raise ArgumentError("result_type: expected at least one tensor, dtype or scalar")
    return result


def is_python_scalar(o: Any) -> builtins.bool:
    """Whether it is a number without a dtype of its own."""
    return isinstance(o, bool | int | float | complex) and not isinstance(o, np.generic)


def can_cast(from_: Any, to: Any, /) -> builtins.bool:
    """Whether `from_` promotes to `to` without loss of kind or precision."""
    source = from_.dtype if isinstance(from_, Tensor) else dtypes.dtype(from_)
    try:
        return dtypes.promote(source, dtypes.dtype(to)) == dtypes.dtype(to)
    except DTypeError:
        return False

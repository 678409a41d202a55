"""Making tensors: from data, from a formula, and by casting or moving others."""

from __future__ import annotations

import builtins
import math
from functools import lru_cache
from typing import Any

import numpy as np

from fuel_parallel.backends import backend_of, check_device, device_of_dlpack, move
from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import ZERO, Node, Op, Shape, Spec, apply, copied, data_node, define
from fuel_parallel.lazy.tensor import Scalar, Tensor


class Literal:
    """A constant in the attributes of a node: compared by bits, so that -0.0, 0.0, 0 and False are four things."""

    __slots__ = ("bits", "value")

    def __init__(self, value: Scalar, dtype: DType) -> None:
        self.value = value
        # 0.0 and -0.0 are equal, and one key: they are not kept.
        self.bits = (dtype, _bytes_of(value, dtype) if value else _bytes_of.__wrapped__(value, dtype))

    def __hash__(self) -> int:
        return hash(self.bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and self.bits == other.bits

    def __repr__(self) -> str:
        return repr(self.value)


@lru_cache(maxsize=4096, typed=True)
def _bytes_of(value: Scalar, dtype: DType) -> bytes:
    with np.errstate(all="ignore"):
        return np.asarray(value).astype(dtype).tobytes()


def check_shape(function: str, shape: Any) -> Shape:
    """The shape as a tuple of ints, or the user's error."""
    try:
        extents = (int(shape.__index__()),) if hasattr(shape, "__index__") else tuple(int(s.__index__()) for s in shape)
    except (TypeError, AttributeError):
        raise ShapeError(f"{function}: a shape is an int or a tuple of ints, not {shape!r}") from None
    if any(extent < 0 for extent in extents):
        raise ShapeError(f"{function}: extents must not be negative, but the shape is {extents}")
    return extents


# From data.


def asarray(obj: Any, /, *, dtype: Any = None, device: str | None = None, copy: builtins.bool | None = None) -> Tensor:
    """A tensor of an array, a (nested sequence of) Python scalars, or another tensor.

    Data are copied unless `copy=False`, so that what is written into the source later does not change the graph.
    Python floats become float32 and Python ints int64; arrays keep their dtype.

    >>> asarray([1.5, 2.5]).dtype.name, asarray(np.arange(3.0)).dtype.name
    ('float32', 'float64')
    """
    if isinstance(obj, Tensor):
        return astype(obj, obj.dtype if dtype is None else dtype, copy=bool(copy), device=device)
    wanted = None if dtype is None else dtypes.dtype(dtype)
    if isinstance(obj, list | tuple) and any(isinstance(leaf, Tensor) for leaf in _leaves(obj)):
        return _stack_nested(obj, wanted)
    array = obj if isinstance(obj, np.ndarray) else _to_array(obj)
    if wanted is None:
        is_python = isinstance(obj, bool | int | float | complex | list | tuple) and not isinstance(obj, np.generic)
        wanted = _python_default(array.dtype) if is_python and not _holds_numpy(obj) else dtypes.dtype(array.dtype)
    if array.dtype.kind == "c" and dtypes.kind(wanted) != "complex floating":
        _refuse_complex("asarray", array.dtype, wanted)
    if obj is not array and array.size and dtypes.kind(wanted) == "integral":
        for extreme in (array.min(), array.max()):
            _check_bounds(extreme.item(), wanted)
    owned = array.astype(wanted, order="C", copy=copy is not False)
    spec = Spec(owned.shape, wanted)
    result = Tensor(data_node(owned, spec))
    return result if device is None else to_device(result, device)


def _refuse_complex(function: str, source: DType, wanted: DType) -> None:
    raise DTypeError(f"{function}: {source.name} to {wanted.name} would drop the imaginary part; use real(x) first")


def _check_bounds(value: Scalar, wanted: DType) -> None:
    """Raises the user's error when a Python number is not one of an integer dtype."""
    limits = np.iinfo(wanted)
    if isinstance(value, int) and not limits.min <= value <= limits.max:
        raise ArgumentError(f"{value} is out of bounds for {wanted.name} ({limits.min} to {limits.max})")


def _to_array(obj: Any) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(obj)
    except (ValueError, TypeError) as reason:
        raise ShapeError(f"asarray: cannot make one array of {_brief(obj)}: {reason}") from None
    if array.dtype == object or array.dtype.kind in "USmM":
        raise DTypeError(f"asarray: cannot make a tensor of {_brief(obj)}; expected numbers or bools")
    return array


def _brief(obj: Any) -> str:
    text = repr(obj)
    return text if len(text) <= 60 else text[:57] + "..."


def _leaves(obj: Any) -> Any:
    for item in obj:
        if isinstance(item, list | tuple):
            yield from _leaves(item)
        else:
            yield item


def _holds_numpy(obj: Any) -> builtins.bool:
    return isinstance(obj, list | tuple) and any(isinstance(leaf, np.generic | np.ndarray) for leaf in _leaves(obj))


def _stack_nested(obj: Any, dtype: DType | None) -> Tensor:
    from fuel_parallel.lazy.ops.manipulation import stack

    parts = [_stack_nested(o, None) if isinstance(o, list | tuple) else asarray(o) for o in obj]
    common = result_type(*parts) if dtype is None else dtype
    return stack([astype(part, common) for part in parts])


def _python_default(found: DType) -> DType:
    defaults = {"f": dtypes.default_float, "i": dtypes.default_int, "c": dtypes.default_complex}
    return defaults.get(found.kind) or dtypes.dtype(found)


def from_dlpack(x: Any, /, *, device: str | None = None, copy: builtins.bool | None = None) -> Tensor:
    """A tensor of any object that speaks DLPack, on the device where it lies, or on `device`.

    Memory of the object is shared only with `copy=False`, so that what is written into it later does not change the
    graph.

    >>> from_dlpack(np.arange(3)).tolist()
    [0, 1, 2]
    """
    if isinstance(x, Tensor):
        return asarray(x, device=device, copy=copy)
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise DTypeError(
            f"from_dlpack: {type(x).__name__} {_brief(x)} does not speak DLPack; make it a tensor with asarray"
        )
    source = device_of_dlpack(x.__dlpack_device__())
    backend = backend_of(source)
    with backend.running():
        try:
            array = backend.array_module.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as reason:
            raise DTypeError(f"from_dlpack: cannot take {_brief(x)}: {reason}") from None
        # The result of a graph is never written into, so sharing is safe as long as the owner does not write.
        owned = array if copy is False else backend.array_module.array(array, order="C")
    result = Tensor(data_node(backend.settle(owned), Spec(tuple(array.shape), dtypes.dtype(array.dtype), source)))
    if copy is False and device not in (None, source):
        raise ArgumentError(f"from_dlpack: with copy=False a tensor on {source} cannot be given to {device}")
    return to_device(result, device)


# From a formula.

FULL = define(
    Op(
        "full",
        infer=lambda shape, literal, dtype: Spec(shape, dtype),
        kernel=lambda xp, shape, literal, dtype: xp.full(shape, literal.value, dtype=dtype),
        vjp=ZERO,
        attr_names=("shape", "value", "dtype"),
        shapes="-> shape",
    )
)


def scalar_node(value: Scalar, dtype: DType) -> Node:
    """A 0-d constant."""
    return apply(FULL, (), (), Literal(value, dtype), dtype)


def full(shape: Any, fill_value: Scalar | Tensor, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """A tensor of one value everywhere.

    >>> full((2, 2), 0.5).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    extents = check_shape("full", shape)
    if isinstance(fill_value, Tensor):
        from fuel_parallel.lazy.ops.manipulation import broadcast_to

        return broadcast_to(fill_value if dtype is None else astype(fill_value, dtype), extents)
    if not isinstance(fill_value, bool | int | float | complex | np.generic):
        raise DTypeError(f"full: fill_value is a Python scalar or a tensor, not {fill_value!r}")
    wanted = dtypes.of_scalar(fill_value) if dtype is None else dtypes.dtype(dtype)
    value = fill_value.item() if isinstance(fill_value, np.generic) else fill_value
    if dtypes.kind(wanted) == "integral":
        _check_bounds(value, wanted)
    if wanted != dtypes.bool_ and dtypes.of_scalar(value, wanted) != wanted:
        raise DTypeError(
            f"full: fill_value {value!r} does not fit {wanted.name}; choose another dtype or cast the value"
        )
    return to_device(Tensor(apply(FULL, (), extents, Literal(value, wanted), wanted)), device)


def zeros(shape: Any, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """A tensor of zeros, float32 unless told otherwise."""
    return full(shape, 0, dtype=dtypes.default_float if dtype is None else dtype, device=device)


def ones(shape: Any, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """A tensor of ones, float32 unless told otherwise."""
    return full(shape, 1, dtype=dtypes.default_float if dtype is None else dtype, device=device)


def empty(shape: Any, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """The same as `zeros`: a lazy graph has no uninitialised values."""
    return zeros(shape, dtype=dtype, device=device)


def full_like(x: Tensor, /, fill_value: Scalar, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """`full` with the shape and dtype of `x`."""
    return full(x.shape, fill_value, dtype=x.dtype if dtype is None else dtype, device=device or x.device)


def zeros_like(x: Tensor, /, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """`zeros` with the shape and dtype of `x`."""
    return full_like(x, 0, dtype=dtype, device=device)


def ones_like(x: Tensor, /, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """`ones` with the shape and dtype of `x`."""
    return full_like(x, 1, dtype=dtype, device=device)


def empty_like(x: Tensor, /, *, dtype: Any = None, device: str | None = None) -> Tensor:
    """The same as `zeros_like`."""
    return zeros_like(x, dtype=dtype, device=device)


ARANGE = define(
    Op(
        "arange",
        infer=lambda start, step, count, dtype: Spec((count,), dtype),
        kernel=lambda xp, start, step, count, dtype: (
            xp.arange(count, dtype=_wide(dtype)) * step.value + start.value
        ).astype(dtype),
        vjp=ZERO,
        attr_names=("start", "step", "count", "dtype"),
        shapes="-> [count]",
    )
)


def _wide(dtype: DType) -> DType:
    """The dtype to compute a progression in before it is rounded once."""
    return dtypes.int64 if dtypes.kind(dtype) == "integral" else dtypes.float64


def arange(
    start: int | float,
    /,
    stop: int | float | None = None,
    step: int | float = 1,
    *,
    dtype: Any = None,
    device: str | None = None,
) -> Tensor:
    """Evenly spaced values of the half-open interval [start, stop).

    >>> arange(5).tolist(), arange(1, 2, 0.25).tolist()
    ([0, 1, 2, 3, 4], [1.0, 1.25, 1.5, 1.75])
    """
    if stop is None:
        start, stop = 0, start
    if step == 0:
        raise ArgumentError("arange: step must not be 0")
    floating = any(isinstance(v, float) for v in (start, stop, step))
    wanted = dtypes.dtype(dtype) if dtype is not None else dtypes.default_float if floating else dtypes.default_int
    if floating and dtypes.kind(wanted) == "integral":
        raise DTypeError(f"arange: start, stop and step are floats, so dtype must be floating, not {wanted.name}")
    if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
        count = len(range(start, stop, step))
    else:
        count = builtins.max(0, math.ceil((stop - start) / step))
    wide = _wide(wanted)
    return to_device(Tensor(apply(ARANGE, (), Literal(start, wide), Literal(step, wide), count, wanted)), device)


LINSPACE = define(
    Op(
        "linspace",
        infer=lambda start, stop, count, endpoint, dtype: Spec((count,), dtype),
        kernel=lambda xp, start, stop, count, endpoint, dtype: xp.linspace(
            start.value, stop.value, count, endpoint=endpoint
        ).astype(dtype),
        vjp=ZERO,
        attr_names=("start", "stop", "count", "endpoint", "dtype"),
        shapes="-> [count]",
    )
)


def linspace(
    start: complex,
    stop: complex,
    /,
    num: int,
    *,
    dtype: Any = None,
    device: str | None = None,
    endpoint: builtins.bool = True,
) -> Tensor:
    """`num` evenly spaced values from `start` to `stop`."""
    if num < 0:
        raise ArgumentError(f"linspace: num must not be negative, but is {num}")
    is_complex = isinstance(start, complex) or isinstance(stop, complex)
    default = dtypes.default_complex if is_complex else dtypes.default_float
    wanted = default if dtype is None else dtypes.dtype(dtype)
    wide = dtypes.complex128 if is_complex else dtypes.float64
    node = apply(LINSPACE, (), Literal(start, wide), Literal(stop, wide), num, endpoint, wanted)
    return to_device(Tensor(node), device)


EYE = define(
    Op(
        "eye",
        infer=lambda rows, columns, diagonal, dtype: Spec((rows, columns), dtype),
        kernel=lambda xp, rows, columns, diagonal, dtype: xp.eye(rows, columns, k=diagonal, dtype=dtype),
        vjp=ZERO,
        attr_names=("rows", "columns", "diagonal", "dtype"),
        shapes="-> [rows, columns]",
    )
)


def eye(
    n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: str | None = None
) -> Tensor:
    """A matrix with ones on its `k`-th diagonal."""
    rows, columns = check_shape("eye", (n_rows, n_rows if n_cols is None else n_cols))
    wanted = dtypes.default_float if dtype is None else dtypes.dtype(dtype)
    return to_device(Tensor(apply(EYE, (), rows, columns, k, wanted)), device)


def meshgrid(*arrays: Tensor, indexing: str = "xy") -> list[Tensor]:
    """Coordinate tensors of 1-d coordinate vectors, `xy` (columns first) or `ij`."""
    from fuel_parallel.lazy.ops.manipulation import broadcast_to, reshape

    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"meshgrid: indexing is 'xy' or 'ij', not {indexing!r}")
    if any(a.ndim != 1 for a in arrays):
        raise ShapeError(f"meshgrid: expected 1-d tensors, but the shapes are {[a.shape for a in arrays]}")
    place = list(range(len(arrays)))
    if indexing == "xy" and len(arrays) > 1:
        place[0], place[1] = 1, 0
    extents = [0] * len(arrays)
    for a, p in zip(arrays, place, strict=True):
        extents[p] = a.size
    return [
        broadcast_to(reshape(a, tuple(a.size if d == p else 1 for d in range(len(arrays)))), tuple(extents))
        for a, p in zip(arrays, place, strict=True)
    ]


def _infer_triangle(name: str) -> Any:
    def infer(x: Spec, diagonal: int) -> Spec:
        if len(x.shape) < 2:
            raise ShapeError(f"{name}: expected at least 2 dimensions, but x has shape {x.shape}")
        return x

    return infer


TRIL = define(
    Op(
        "tril",
        infer=_infer_triangle("tril"),
        kernel=lambda xp, x, diagonal: xp.tril(x, diagonal),
        vjp=(lambda g, y, x, diagonal: tril(g, k=diagonal),),
        attr_names=("diagonal",),
        shapes="[..., m, n] -> [..., m, n]",
    )
)
TRIU = define(
    Op(
        "triu",
        infer=_infer_triangle("triu"),
        kernel=lambda xp, x, diagonal: xp.triu(x, diagonal),
        vjp=(lambda g, y, x, diagonal: triu(g, k=diagonal),),
        attr_names=("diagonal",),
        shapes="[..., m, n] -> [..., m, n]",
    )
)


def tril(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The elements on and below the `k`-th diagonal, zero elsewhere."""
    return Tensor(apply(TRIL, (x.node,), k))


def triu(x: Tensor, /, *, k: int = 0) -> Tensor:
    """The elements on and above the `k`-th diagonal, zero elsewhere."""
    return Tensor(apply(TRIU, (x.node,), k))


# By casting and moving.


def _infer_astype(x: Spec, dtype: DType) -> Spec:
    if dtypes.kind(x.dtype) == "complex floating" and dtypes.kind(dtype) != "complex floating":
        _refuse_complex("astype", x.dtype, dtype)
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

    >>> result_type(zeros(2), 1.5).name, result_type(dtypes.int8, dtypes.int32).name
    ('float32', 'int32')
    """
    known = [o.dtype if isinstance(o, Tensor) else dtypes.dtype(o) for o in operands if not _is_python_scalar(o)]
    result: DType | None = None
    for d in known:
        result = d if result is None else dtypes.promote(result, d)
    for o in operands:
        if _is_python_scalar(o):
            result = dtypes.of_scalar(o, result)
    if result is None:
        raise ArgumentError("result_type: expected at least one tensor, dtype or scalar")
    return result


def _is_python_scalar(o: Any) -> builtins.bool:
    return isinstance(o, bool | int | float | complex) and not isinstance(o, np.generic)


def can_cast(from_: Any, to: Any, /) -> builtins.bool:
    """Whether `from_` promotes to `to` without loss of kind or precision."""
    source = from_.dtype if isinstance(from_, Tensor) else dtypes.dtype(from_)
    try:
        return dtypes.promote(source, dtypes.dtype(to)) == dtypes.dtype(to)
    except DTypeError:
        return False


def to_tensor(function: str, x: Any, like: Tensor | None = None) -> Tensor:
    """An operand as a tensor: tensors as they are, scalars and numpy arrays on the device of `like`.

    Scalars also take the dtype of `like` where its kind can hold them.
    """
    if isinstance(x, Tensor):
        return x
    device = None if like is None else like.device
    if isinstance(x, bool | int | float | complex) and not isinstance(x, np.generic):
        wanted = dtypes.of_scalar(x, None if like is None else like.dtype)
        if isinstance(x, int) and dtypes.kind(wanted) == "integral" and not isinstance(x, bool):
            return full((), x, dtype=wanted, device=device)
        return to_device(Tensor(scalar_node(x, wanted)), device)
    if isinstance(x, np.ndarray | np.generic):
        return asarray(x, device=device)
    raise DTypeError(
        f"{function}: expected a tensor, a numpy array or a Python scalar, not {type(x).__name__} {_brief(x)}; "
        "make it a tensor with asarray first"
    )

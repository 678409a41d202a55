"""Tensors of data: of arrays, of Python scalars and nests of them, and of what speaks DLPack."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from fuel_parallel.backends import backend_of, device_of_dlpack
from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Spec, data_node
from fuel_parallel.lazy.ops.creation.casting import astype, is_python_scalar, refuse_complex, result_type, to_device
from fuel_parallel.lazy.ops.creation.filling import check_bounds, full, scalar_node
from fuel_parallel.lazy.tensor import Tensor


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
        refuse_complex("asarray", array.dtype, wanted)
    if obj is not array and array.size and dtypes.kind(wanted) == "integral":
        for extreme in (array.min(), array.max()):
            check_bounds(extreme.item(), wanted)
    owned = array.astype(wanted, order="C", copy=copy is not False)
    spec = Spec(owned.shape, wanted)
    result = Tensor(data_node(owned, spec))
    return result if device is None else to_device(result, device)


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


def to_tensor(function: str, x: Any, like: Tensor | None = None) -> Tensor:
    """An operand as a tensor: tensors as they are, scalars and numpy arrays on the device of `like`.

    Scalars also take the dtype of `like` where its kind can hold them.
    """
    if isinstance(x, Tensor):
        return x
    device = None if like is None else like.device
    if is_python_scalar(x):
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

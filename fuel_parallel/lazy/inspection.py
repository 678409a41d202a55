"""What the namespace says about itself: limits of dtypes, defaults, devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.tensor import Tensor


@dataclass(frozen=True, slots=True)
class FloatInfo:
    """Limits of a floating dtype, as the array API standard's `finfo` names them."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True, slots=True)
class IntInfo:
    """Limits of an integer dtype."""

    bits: int
    max: int
    min: int
    dtype: DType


def finfo(type: Any, /) -> FloatInfo:
    """Limits of a floating (or complex) dtype, or of the dtype of a tensor.

    >>> finfo(dtypes.float32).bits
    32
    """
    d = dtypes.real_of(type.dtype if isinstance(type, Tensor) else dtypes.dtype(type))
    info: Any = ml_dtypes.finfo(d)  # type: ignore[no-untyped-call,unused-ignore]
    return FloatInfo(info.bits, float(info.eps), float(info.max), float(info.min), float(info.smallest_normal), d)


def iinfo(type: Any, /) -> IntInfo:
    """Limits of an integer dtype, or of the dtype of a tensor."""
    d = type.dtype if isinstance(type, Tensor) else dtypes.dtype(type)
    info = np.iinfo(d)
    return IntInfo(info.bits, int(info.max), int(info.min), d)


class NamespaceInfo:
    """The standard's inspection object."""

    def capabilities(self) -> dict[str, Any]:
        """What the namespace can do; reading by a mask and shapes that depend on values realize what they ask."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """Where tensors are made when no device is given."""
        return "cpu"

    def devices(self) -> list[str]:
        """The devices that can be used now."""
        from fuel_parallel.backends import available_devices

        return available_devices()

    def default_dtypes(self, *, device: str | None = None) -> dict[str, DType]:
        """The dtypes of tensors made from Python numbers."""
        return {
            "real floating": dtypes.default_float,
            "complex floating": dtypes.default_complex,
            "integral": dtypes.default_int,
            "indexing": dtypes.int64,
        }

    def dtypes(self, *, device: str | None = None, kind: Any = None) -> dict[str, DType]:
        """The standard's dtypes by name, or those of a kind. float16 and bfloat16 are there beside them."""
        return {d.name: d for d in dtypes.ALL if not dtypes.is_half(d) and (kind is None or dtypes.isdtype(d, kind))}


def __array_namespace_info__() -> NamespaceInfo:
    """The standard's inspection object for this namespace."""
    return NamespaceInfo()

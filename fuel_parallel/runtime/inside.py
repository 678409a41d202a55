"""Arrays that look at memory of others: where they lie there, without holding on to it, and how to look there again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuel_parallel.backends.backend import Backend
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Shape


@dataclass(frozen=True, slots=True)
class Inside:
    """An array that begins `offset` bytes into another, the one of `slot`, or its part `part`."""

    slot: int
    part: int
    offset: int
    shape: Shape
    strides: tuple[int, ...]
    dtype: DType

    def look(self, values: list[Any], xp: Any) -> Any:
        """The array, in what the slot holds now. The other one itself where the two do not differ."""
        whole = values[self.slot]
        if self.part >= 0:
            whole = whole[self.part]
        if not self.offset and (whole.shape, whole.strides, whole.dtype) == (self.shape, self.strides, self.dtype):
            return whole
        flat = whole.reshape(-1)
        if flat.dtype != self.dtype:
            flat = flat.view(self.dtype)
        flat = flat[self.offset // self.dtype.itemsize :]
        if self.strides == dense(self.shape, self.dtype):
            return flat[: math.prod(self.shape)].reshape(self.shape)
        return xp.lib.stride_tricks.as_strided(flat, self.shape, self.strides)


def find_inside(array: Any, others: Mapping[int, Any], backend: Backend, arena: range) -> Inside | None:
    """Where the array lies in the memory of `others`, arrays or tuples of them by slot; None if it lies elsewhere.

    In the arena values follow one another: what begins where another did has nothing to do with it. Raises `ValueError`
    where the array lies in one that is not dense: it could not be found there again.
    """
    if not array.size:
        return None
    begin = backend.address(array)
    if begin in arena:
        return None
    for slot, value in others.items():
        for part, whole in enumerate(value) if isinstance(value, tuple) else [(-1, value)]:
            offset = begin - backend.address(whole)
            if not 0 <= offset < max(extent(whole), 1):
                continue
            same = (array.shape, array.strides, array.dtype) == (whole.shape, whole.strides, whole.dtype)
            if not (whole.flags.c_contiguous or (same and not offset)):
                raise ValueError("a result is a view of an array that has gaps")
            return Inside(slot, part, offset, tuple(array.shape), tuple(array.strides), array.dtype)
    return None


def dense(shape: Shape, dtype: DType) -> tuple[int, ...]:
    """The strides of an array without gaps, in the order of its elements."""
    return tuple(math.prod(shape[d + 1 :]) * dtype.itemsize for d in range(len(shape)))


def extent(array: Any) -> int:
    """Bytes from the first element of an array to the end of its last one."""
    if not array.size:
        return 0
    steps = zip(array.shape, array.strides, strict=True)
    return int(sum((n - 1) * stride for n, stride in steps if stride > 0) + array.dtype.itemsize)

"""`x += y` and its kin: the handle is pointed at the result, which must have the shape and dtype of `x`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Self

from fuel_parallel.errors import DTypeError, ShapeError
from fuel_parallel.lazy.node import Node


class InPlace:
    """The operators that rebind a tensor. The value that it had stays what it was."""

    __slots__ = ("node",)
    node: Node

    def __iadd__(self, other: Any) -> Self:
        return self._rebound("+", operator.add, other)

    def __isub__(self, other: Any) -> Self:
        return self._rebound("-", operator.sub, other)

    def __imul__(self, other: Any) -> Self:
        return self._rebound("*", operator.mul, other)

    def __itruediv__(self, other: Any) -> Self:
        return self._rebound("/", operator.truediv, other)

    def __ifloordiv__(self, other: Any) -> Self:
        return self._rebound("//", operator.floordiv, other)

    def __imod__(self, other: Any) -> Self:
        return self._rebound("%", operator.mod, other)

    def __ipow__(self, other: Any) -> Self:
        return self._rebound("**", operator.pow, other)

    def __imatmul__(self, other: Any) -> Self:
        return self._rebound("@", operator.matmul, other)

    def __iand__(self, other: Any) -> Self:
        return self._rebound("&", operator.and_, other)

    def __ior__(self, other: Any) -> Self:
        return self._rebound("|", operator.or_, other)

    def __ixor__(self, other: Any) -> Self:
        return self._rebound("^", operator.xor, other)

    def __ilshift__(self, other: Any) -> Self:
        return self._rebound("<<", operator.lshift, other)

    def __irshift__(self, other: Any) -> Self:
        return self._rebound(">>", operator.rshift, other)

    def _rebound(self, symbol: str, function: Callable[[Any, Any], Any], other: Any) -> Self:
        result, spec = function(self, other), self.node.spec
        if result.dtype != spec.dtype:
            raise DTypeError(
                f"x {symbol}= y: the result is {result.dtype.name} and x is {spec.dtype.name}; "
                f"cast y with astype, or write x = x {symbol} y"
            )
        if result.shape != spec.shape:
            raise ShapeError(
                f"x {symbol}= y: the result has shape {result.shape} and x {spec.shape}; write x = x {symbol} y"
            )
        self.node = result.node
        return self

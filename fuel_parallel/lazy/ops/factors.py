"""What decompositions of matrices share: adjoints, the rule for cotangents, and factors side by side.

An op has one result. A decomposition lays its factors side by side into one vector for each matrix, and the public
function takes them apart again by ops of the graph: whatever mix of factors is used, one kernel runs and one vjp.

Cotangents follow the library's rule, where a complex g stands for the change real(g * dx). Rules for factors are told
in the literature's, real(conj(g) * dx), so they are conjugated on the way in and out.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from fuel_parallel.errors import ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Shape, Spec, define
from fuel_parallel.lazy.ops import creation, elementwise, manipulation
from fuel_parallel.lazy.ops.contraction import matmul
from fuel_parallel.lazy.ops.elementwise import INEXACT, in_float32
from fuel_parallel.lazy.tensor import Tensor


def check_matrix(function: str, x: Spec, square: builtins.bool = False) -> None:
    """Raises the user's error unless `x` is a floating or complex (stack of) matrices."""
    elementwise.check_domain(function, x.dtype, INEXACT)
    if len(x.shape) < 2:
        raise ShapeError(f"{function}: expected (a stack of) matrices, but x has shape {x.shape}")
    if square and x.shape[-1] != x.shape[-2]:
        raise ShapeError(f"{function}: expected square matrices, but x has shape {x.shape}")


def conj(x: Tensor) -> Tensor:
    """The complex conjugate; real tensors as they are."""
    return elementwise.conj(x) if x.dtype in dtypes.COMPLEX else x


def adjoint(x: Tensor) -> Tensor:
    """Transposed and conjugated."""
    return conj(x.mT)


def conjugated(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A rule of the literature as one of the library."""
    return lambda g, *rest: conj(rule(conj(g), *rest))


def eye_like(x: Tensor) -> Tensor:
    """The identity, as wide as `x`."""
    return creation.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def real_part(x: Tensor) -> Tensor:
    """The real part; real tensors as they are."""
    return elementwise.real(x) if x.dtype in dtypes.COMPLEX else x


def hermitian(xp: Any, x: Any) -> Any:
    """The mean of the matrix and its adjoint: the function of all elements that the vjp is the derivative of."""
    return (x + x.swapaxes(-1, -2).conj()) * x.real.dtype.type(0.5)


def within_columns(g: Tensor, q: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The cotangent of the first columns of a unitary matrix, with what the others ask of it, and these columns.

    The others only span what the first ones leave, so that they turn with them: dQ2 = -Q1 dQ1^H Q2.
    """
    first, others = q[..., :rank], q[..., rank:]
    cotangent = g[..., :rank]
    if others.shape[-1]:
        cotangent = cotangent - matmul(others, matmul(adjoint(g[..., rank:]), first))
    return cotangent, first


# Factors side by side.


def unpack(packed: Tensor, shapes: tuple[Shape, ...]) -> list[Tensor]:
    """The factors of these shapes (without the batch) that lie side by side in the last dimension."""
    parts, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        part = packed[..., start : start + size]
        parts.append(manipulation.reshape(part, (*packed.shape[:-1], *shape)))
        start += size
    return parts


def decomposition(
    name: str, shapes: Callable[..., tuple[Shape, ...]], kernel: Callable[..., Any], vjp: Any, square: builtins.bool
) -> Op:
    """An op whose `kernel(xp, x, *attrs)` gives factors of `shapes(rows, columns, *attrs)`, packed."""

    def infer(x: Spec, *attrs: Any) -> Spec:
        check_matrix(name, x, square)
        size = builtins.sum(math.prod(shape) for shape in shapes(*x.shape[-2:], *attrs))
        return Spec((*x.shape[:-2], size), x.dtype, x.device)

    def run(xp: Any, x: Any, *attrs: Any) -> Any:
        return _pack(xp, tuple(kernel(xp, x, *attrs)), x.shape[:-2], x.dtype)

    def rule(g: Tensor, y: Tensor, x: Tensor, *attrs: Any) -> Tensor:
        wanted = shapes(*x.shape[-2:], *attrs)
        result: Tensor = vjp(unpack(g, wanted), unpack(y, wanted), x)
        return result

    words = f"[..., {'n' if square else 'm'}, n] -> [..., elements of all factors]"
    return define(Op(name, infer, in_float32(run), (conjugated(rule),), aliases=False, shapes=words, domain=INEXACT))


def _pack(xp: Any, arrays: tuple[Any, ...], batch: Shape, dtype: Any) -> Any:
    flat = [a.reshape(*batch, math.prod(a.shape[len(batch) :])).astype(dtype, copy=False) for a in arrays]
    return xp.concatenate(flat, axis=-1)

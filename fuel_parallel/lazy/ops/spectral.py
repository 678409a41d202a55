"""Ops of linear algebra: eigenvalues and singular values, and their vectors.

Sources of the derivatives: Giles, *An extended collection of matrix derivative results*, 2008; Wan and Zhang,
arXiv:1909.02659 (complex SVD). Vectors of equal eigenvalues or singular values are not determined, and have no
derivative; the values do.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Shape, Spec, apply, define
from fuel_parallel.lazy.ops import binary, creation, elementwise, manipulation, reductions
from fuel_parallel.lazy.ops.contraction import matmul
from fuel_parallel.lazy.ops.elementwise import INEXACT, in_float32
from fuel_parallel.lazy.ops.factors import (
    adjoint,
    check_matrix,
    conj,
    decomposition,
    hermitian,
    real_part,
    unpack,
    within_columns,
)
from fuel_parallel.lazy.tensor import Tensor


def _scaled(x: Tensor, values: Tensor) -> Tensor:
    """The columns of `x`, each times a real value."""
    return x * creation.astype(manipulation.expand_dims(values, axis=-2), x.dtype)


def _inverse_differences(values: Tensor) -> Tensor:
    """1 / (v_j - v_i) at (i, j), 0 where both are equal."""
    difference = manipulation.expand_dims(values, axis=-2) - manipulation.expand_dims(values, axis=-1)
    equal = difference == 0
    return binary.where(equal, creation.zeros_like(difference), 1 / binary.where(equal, 1.0, difference))


def _eigh_vjp(g: list[Tensor], y: list[Tensor], x: Tensor) -> Tensor:
    (g_values, g_vectors), (values, vectors) = g, y
    mixed = matmul(adjoint(vectors), g_vectors) * creation.astype(
        _inverse_differences(elementwise.real(values)), x.dtype
    )
    inner = mixed + _diagonal_matrix(real_part(g_values), x)
    whole = matmul(matmul(vectors, inner), adjoint(vectors))
    return 0.5 * (whole + adjoint(whole))


def _diagonal_matrix(values: Tensor, x: Tensor) -> Tensor:
    return _scaled(creation.eye(values.shape[-1], dtype=x.dtype, device=x.device), values)


EIGH = decomposition(
    "eigh", lambda n, _: ((n,), (n, n)), lambda xp, x: xp.linalg.eigh(hermitian(xp, x)), _eigh_vjp, True
)


def _infer_values(name: str, square: builtins.bool) -> Callable[..., Spec]:
    def infer(x: Spec) -> Spec:
        check_matrix(name, x, square)
        return Spec((*x.shape[:-2], min(x.shape[-2:])), dtypes.real_of(x.dtype), x.device)

    return infer


def _eigvalsh_vjp(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    vectors = eigh(x)[1]
    return conj(matmul(_scaled(vectors, g), adjoint(vectors)))


EIGVALSH = define(
    Op(
        "eigvalsh",
        _infer_values("eigvalsh", True),
        in_float32(lambda xp, x: xp.linalg.eigvalsh(hermitian(xp, x))),
        (_eigvalsh_vjp,),
        aliases=False,
        shapes="[..., n, n] -> [..., n]",
        domain=INEXACT,
    )
)


def eigh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in rising order and eigenvectors of Hermitian matrices."""
    n = x.shape[-1] if x.ndim else 0
    values, vectors = unpack(Tensor(apply(EIGH, (x.node,))), ((n,), (n, n)))
    return real_part(values), vectors


def _svd_vjp(g: list[Tensor], y: list[Tensor], x: Tensor) -> Tensor:
    g_u, g_s, g_vh = g
    u, s, vh = y
    rank = s.shape[-1]
    g_u, u = within_columns(g_u, u, rank)
    g_v, v = within_columns(adjoint(g_vh), adjoint(vh), rank)
    values = real_part(s)
    inverse = _inverse_differences(values * values)
    of_u, of_v = matmul(adjoint(u), g_u), matmul(adjoint(v), g_v)
    turns = _scaled((of_u - adjoint(of_u)) * creation.astype(inverse, x.dtype), values)
    turns = turns + _scaled_rows((of_v - adjoint(of_v)) * creation.astype(inverse, x.dtype), values)
    inner = turns + _diagonal_matrix(real_part(g_s), x)
    if x.dtype in dtypes.COMPLEX:
        # The phases of the vectors of a pair turn together; this fixes the imaginary part that the diagonal leaves.
        phase = elementwise.imag(reductions.sum(conj(u) * g_u, axis=-2))
        inner = inner + _diagonal_matrix(phase / values, x) * 1j
    result = matmul(matmul(u, inner), adjoint(v))
    if x.shape[-2] > rank:
        rest = g_u - matmul(u, of_u)
        result = result + matmul(_scaled(rest, 1 / values), adjoint(v))
    if x.shape[-1] > rank:
        rest = g_v - matmul(v, of_v)
        result = result + matmul(_scaled(u, 1 / values), adjoint(rest))
    return result


def _scaled_rows(x: Tensor, values: Tensor) -> Tensor:
    return x * creation.astype(manipulation.expand_dims(values, axis=-1), x.dtype)


def _svd_shapes(m: int, n: int, full: builtins.bool) -> tuple[Shape, ...]:
    k = min(m, n)
    return (m, m if full else k), (k,), (n if full else k, n)


SVD = decomposition("svd", _svd_shapes, lambda xp, x, full: xp.linalg.svd(x, full_matrices=full), _svd_vjp, False)


def svd(x: Tensor, full: builtins.bool) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V^H of matrices."""
    packed = Tensor(apply(SVD, (x.node,), full))
    u, s, vh = unpack(packed, _svd_shapes(x.shape[-2], x.shape[-1], full))
    return u, real_part(s), vh


def _svdvals_vjp(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    u, _, vh = svd(x, False)
    return conj(matmul(_scaled(u, g), vh))


SVDVALS = define(
    Op(
        "svdvals",
        _infer_values("svdvals", False),
        in_float32(lambda xp, x: xp.linalg.svd(x, compute_uv=False)),
        (_svdvals_vjp,),
        aliases=False,
        shapes="[..., m, n] -> [..., min(m, n)]",
        domain=INEXACT,
    )
)

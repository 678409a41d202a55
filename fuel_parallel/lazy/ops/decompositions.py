"""Ops of linear algebra: Cholesky and QR, inverses, determinants, and the systems that they solve.

Sources of the derivatives: Giles, *An extended collection of matrix derivative results*, 2008; Walter and Lehmann,
arXiv:1009.6112 (QR); Golub and Pereyra, SIAM J. Numer. Anal. 10, 1973 (pseudoinverse).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuel_parallel.errors import ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Shape, Spec, apply, define
from fuel_parallel.lazy.ops import binary, creation, elementwise, manipulation
from fuel_parallel.lazy.ops.contraction import matmul
from fuel_parallel.lazy.ops.elementwise import INEXACT, in_float32
from fuel_parallel.lazy.ops.factors import (
    adjoint,
    check_matrix,
    conj,
    conjugated,
    decomposition,
    eye_like,
    hermitian,
    real_part,
    unpack,
    within_columns,
)
from fuel_parallel.lazy.tensor import Tensor

# Cholesky.


def _infer_square(name: str) -> Callable[..., Spec]:
    def infer(x: Spec) -> Spec:
        check_matrix(name, x, square=True)
        return x

    return infer


def _half_lower(x: Tensor) -> Tensor:
    """The lower triangle with half the diagonal."""
    return creation.tril(x, k=-1) + 0.5 * x * eye_like(x)


def _cholesky_vjp(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    inner = _half_lower(matmul(adjoint(y), creation.tril(g)))
    whole = solve(adjoint(y), adjoint(solve(adjoint(y), adjoint(inner))))
    return 0.5 * (whole + adjoint(whole))


CHOLESKY = define(
    Op(
        "cholesky",
        _infer_square("cholesky"),
        in_float32(lambda xp, x: xp.linalg.cholesky(hermitian(xp, x))),
        (conjugated(_cholesky_vjp),),
        aliases=False,
        shapes="[..., n, n] -> [..., n, n]",
        domain=INEXACT,
    )
)

# Inverses and systems: these are holomorphic, so that rules are those of real numbers.


def inv(x: Tensor, /) -> Tensor:
    """See `fuel_parallel.lazy.linalg.inv`."""
    return Tensor(apply(INV, (x.node,)))


INV = define(
    Op(
        "inv",
        _infer_square("inv"),
        in_float32(lambda xp, x: xp.linalg.inv(x)),
        (lambda g, y, x: -matmul(matmul(y.mT, g), y.mT),),
        aliases=False,
        shapes="[..., n, n] -> [..., n, n]",
        domain=INEXACT,
    )
)


def _infer_solve(a: Spec, b: Spec) -> Spec:
    check_matrix("solve", a, square=True)
    if b.shape[:-1] != a.shape[:-1]:
        raise ShapeError(f"solve: shapes {a.shape} and {b.shape} do not fit: b needs {a.shape[-1]} rows")
    return b


SOLVE = define(
    Op(
        "solve",
        _infer_solve,
        in_float32(lambda xp, a, b: xp.linalg.solve(a, b)),
        (
            lambda g, y, a, b: -matmul(solve(a.mT, g), y.mT),
            lambda g, y, a, b: solve(a.mT, g),
        ),
        aliases=False,
        shapes="[..., n, n], [..., n, k] -> [..., n, k]",
        domain=INEXACT,
    )
)


def solve(a: Tensor, b: Tensor) -> Tensor:
    """X with a @ X = b, for matrices b of the same stack."""
    return Tensor(apply(SOLVE, (a.node, b.node)))


def _infer_det(x: Spec) -> Spec:
    check_matrix("det", x, square=True)
    return Spec(x.shape[:-2], x.dtype, x.device)


def _corner(x: Tensor) -> Tensor:
    """A number for each matrix, as matrices of one element."""
    return manipulation.reshape(x, (*x.shape, 1, 1))


DET = define(
    Op(
        "det",
        _infer_det,
        in_float32(lambda xp, x: xp.linalg.det(x)),
        (lambda g, y, x: _corner(g * y) * inv(x).mT,),
        aliases=False,
        shapes="[..., n, n] -> [...]",
        domain=INEXACT,
    )
)


def _slogdet_vjp(g: list[Tensor], y: list[Tensor], x: Tensor) -> Tensor:
    g_sign, g_log = g
    if x.dtype not in dtypes.COMPLEX:
        return _corner(g_log) * inv(x).mT
    turn = elementwise.imag(conj(g_sign) * y[0])
    weight = creation.astype(elementwise.real(g_log), x.dtype) - creation.astype(turn, x.dtype) * 1j
    return _corner(weight) * adjoint(inv(x))


SLOGDET = decomposition("slogdet", lambda m, n: ((), ()), lambda xp, x: xp.linalg.slogdet(x), _slogdet_vjp, True)

# QR.


def _qr_vjp(g: list[Tensor], y: list[Tensor], x: Tensor) -> Tensor:
    (g_q, g_r), (q, r) = g, y
    m, n = x.shape[-2:]
    k = min(m, n)
    g_q, q = within_columns(g_q, q, k)
    g_r, r = creation.triu(g_r[..., :k, :]), r[..., :k, :]
    square = r[..., :k]
    if n > k:  # a wide matrix: its last columns are Q times the last columns of R
        g_rest = g_r[..., k:]
        g_q = g_q + matmul(x[..., k:], adjoint(g_rest))
        g_r = g_r[..., :k]
    inner = matmul(square, adjoint(g_r)) - matmul(adjoint(g_q), q)
    low = creation.tril(inner, k=-1)
    mirrored = low + adjoint(low) + creation.astype(real_part(inner), x.dtype) * eye_like(inner)
    first = adjoint(solve(square, adjoint(g_q + matmul(q, mirrored))))
    if n > k:
        return manipulation.concat([first, matmul(q, g_rest)], axis=-1)
    return first


def _qr_shapes(m: int, n: int, mode: str) -> tuple[Shape, ...]:
    k = m if mode == "complete" else min(m, n)
    return (m, k), (k, n)


QR = decomposition("qr", _qr_shapes, lambda xp, x, mode: xp.linalg.qr(x, mode=mode), _qr_vjp, False)


def qr(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Q and R of matrices."""
    q, r = unpack(Tensor(apply(QR, (x.node,), mode)), _qr_shapes(x.shape[-2], x.shape[-1], mode))
    return q, r


# The pseudoinverse.


def _infer_pinv(x: Spec, rtol: Spec) -> Spec:
    check_matrix("pinv", x)
    batch = binary.broadcast_shapes("pinv", x.shape[:-2], rtol.shape)
    if batch != x.shape[:-2]:
        raise ShapeError(f"pinv: rtol of shape {rtol.shape} does not broadcast to the stack {x.shape[:-2]} of x")
    return Spec((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype, x.device)


def _pinv_kernel(xp: Any, x: Any, rtol: Any) -> Any:
    u, s, vh = xp.linalg.svd(x, full_matrices=False)
    kept = s > rtol[..., None] * s.max(axis=-1, keepdims=True, initial=0)
    inverse = xp.where(kept, 1 / xp.where(kept, s, s.dtype.type(1)), s.dtype.type(0))
    return xp.matmul(vh.swapaxes(-1, -2).conj() * inverse[..., None, :], u.swapaxes(-1, -2).conj())


def _pinv_vjp(g: Tensor, y: Tensor, x: Tensor, rtol: Tensor) -> Tensor:
    p_h, g_h = adjoint(y), adjoint(g)
    left = g_h - matmul(matmul(x, y), g_h)
    right = g_h - matmul(matmul(g_h, y), x)
    return matmul(left, matmul(y, p_h)) + matmul(matmul(p_h, y), right) - matmul(matmul(p_h, g), p_h)


PINV = define(
    Op(
        "pinv",
        _infer_pinv,
        in_float32(_pinv_kernel),
        (conjugated(_pinv_vjp), lambda g, y, x, rtol: None),
        aliases=False,
        shapes="[..., m, n], [...] -> [..., n, m]",
        domain=INEXACT,
    )
)

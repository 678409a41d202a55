"""Ops of linear algebra: decompositions of matrices, and the systems that they solve. `lazy.linalg` is made of them.

An op has one result. A decomposition lays its factors side by side into one vector for each matrix, and the public
function takes them apart again by ops of the graph: whatever mix of factors is used, one kernel runs and one vjp.

Cotangents follow the library's rule, where a complex g stands for the change real(g * dx). Rules for factors are told
in the literature's, real(conj(g) * dx), so they are conjugated on the way in and out. Sources: Giles, *An extended
collection of matrix derivative results*, 2008; Walter and Lehmann, arXiv:1009.6112 (QR); Wan and Zhang,
arXiv:1909.02659 (complex SVD); Golub and Pereyra, SIAM J. Numer. Anal. 10, 1973 (pseudoinverse). Factors of equal
eigenvalues or singular values are not determined, and have no derivative; values and inverses do.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from fuel_parallel.errors import ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Shape, Spec, apply, define
from fuel_parallel.lazy.ops import binary, creation, elementwise, manipulation, reductions
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


def _conjugated(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A rule of the literature as one of the library."""
    return lambda g, *rest: conj(rule(conj(g), *rest))


def _eye_like(x: Tensor) -> Tensor:
    return creation.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def _scaled(x: Tensor, values: Tensor) -> Tensor:
    """The columns of `x`, each times a real value."""
    return x * creation.astype(manipulation.expand_dims(values, axis=-2), x.dtype)


# Factors side by side.


def _pack(xp: Any, arrays: tuple[Any, ...], batch: Shape, dtype: Any) -> Any:
    flat = [a.reshape(*batch, math.prod(a.shape[len(batch) :])).astype(dtype, copy=False) for a in arrays]
    return xp.concatenate(flat, axis=-1)


def unpack(packed: Tensor, shapes: tuple[Shape, ...]) -> list[Tensor]:
    """The factors of these shapes (without the batch) that lie side by side in the last dimension."""
    parts, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        part = packed[..., start : start + size]
        parts.append(manipulation.reshape(part, (*packed.shape[:-1], *shape)))
        start += size
    return parts


def _decomposition(
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
    return define(Op(name, infer, in_float32(run), (_conjugated(rule),), aliases=False, shapes=words, domain=INEXACT))


# Cholesky.


def _infer_square(name: str) -> Callable[..., Spec]:
    def infer(x: Spec) -> Spec:
        check_matrix(name, x, square=True)
        return x

    return infer


def _half_lower(x: Tensor) -> Tensor:
    """The lower triangle with half the diagonal."""
    return creation.tril(x, k=-1) + 0.5 * x * _eye_like(x)


def _cholesky_vjp(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    inner = _half_lower(matmul(adjoint(y), creation.tril(g)))
    whole = solve(adjoint(y), adjoint(solve(adjoint(y), adjoint(inner))))
    return 0.5 * (whole + adjoint(whole))


CHOLESKY = define(
    Op(
        "cholesky",
        _infer_square("cholesky"),
        in_float32(lambda xp, x: xp.linalg.cholesky(_hermitian(xp, x))),
        (_conjugated(_cholesky_vjp),),
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


SLOGDET = _decomposition("slogdet", lambda m, n: ((), ()), lambda xp, x: xp.linalg.slogdet(x), _slogdet_vjp, True)

# Eigenvalues and singular values.


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
    inner = mixed + _diagonal_matrix(_real(g_values), x)
    whole = matmul(matmul(vectors, inner), adjoint(vectors))
    return 0.5 * (whole + adjoint(whole))


def _real(x: Tensor) -> Tensor:
    return elementwise.real(x) if x.dtype in dtypes.COMPLEX else x


def _diagonal_matrix(values: Tensor, x: Tensor) -> Tensor:
    return _scaled(creation.eye(values.shape[-1], dtype=x.dtype, device=x.device), values)


EIGH = _decomposition(
    "eigh", lambda n, _: ((n,), (n, n)), lambda xp, x: xp.linalg.eigh(_hermitian(xp, x)), _eigh_vjp, True
)


def _hermitian(xp: Any, x: Any) -> Any:
    """The mean of the matrix and its adjoint: the function of all elements that the vjp is the derivative of."""
    return (x + x.swapaxes(-1, -2).conj()) * x.real.dtype.type(0.5)


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
        in_float32(lambda xp, x: xp.linalg.eigvalsh(_hermitian(xp, x))),
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
    return _real(values), vectors


def _svd_vjp(g: list[Tensor], y: list[Tensor], x: Tensor) -> Tensor:
    g_u, g_s, g_vh = g
    u, s, vh = y
    rank = s.shape[-1]
    g_u, u = _within(g_u, u, rank)
    g_v, v = _within(adjoint(g_vh), adjoint(vh), rank)
    values = _real(s)
    inverse = _inverse_differences(values * values)
    of_u, of_v = matmul(adjoint(u), g_u), matmul(adjoint(v), g_v)
    turns = _scaled((of_u - adjoint(of_u)) * creation.astype(inverse, x.dtype), values)
    turns = turns + _scaled_rows((of_v - adjoint(of_v)) * creation.astype(inverse, x.dtype), values)
    inner = turns + _diagonal_matrix(_real(g_s), x)
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


def _within(g: Tensor, q: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The cotangent of the first columns of a unitary matrix, with what the others ask of it, and these columns.

    The others only span what the first ones leave, so that they turn with them: dQ2 = -Q1 dQ1^H Q2.
    """
    first, others = q[..., :rank], q[..., rank:]
    cotangent = g[..., :rank]
    if others.shape[-1]:
        cotangent = cotangent - matmul(others, matmul(adjoint(g[..., rank:]), first))
    return cotangent, first


def _svd_shapes(m: int, n: int, full: builtins.bool) -> tuple[Shape, ...]:
    k = min(m, n)
    return (m, m if full else k), (k,), (n if full else k, n)


SVD = _decomposition("svd", _svd_shapes, lambda xp, x, full: xp.linalg.svd(x, full_matrices=full), _svd_vjp, False)


def svd(x: Tensor, full: builtins.bool) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and V^H of matrices."""
    packed = Tensor(apply(SVD, (x.node,), full))
    u, s, vh = unpack(packed, _svd_shapes(x.shape[-2], x.shape[-1], full))
    return u, _real(s), vh


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

# QR.


def _qr_vjp(g: list[Tensor], y: list[Tensor], x: Tensor) -> Tensor:
    (g_q, g_r), (q, r) = g, y
    m, n = x.shape[-2:]
    k = min(m, n)
    g_q, q = _within(g_q, q, k)
    g_r, r = creation.triu(g_r[..., :k, :]), r[..., :k, :]
    square = r[..., :k]
    if n > k:  # a wide matrix: its last columns are Q times the last columns of R
        g_rest = g_r[..., k:]
        g_q = g_q + matmul(x[..., k:], adjoint(g_rest))
        g_r = g_r[..., :k]
    inner = matmul(square, adjoint(g_r)) - matmul(adjoint(g_q), q)
    low = creation.tril(inner, k=-1)
    mirrored = low + adjoint(low) + creation.astype(_real(inner), x.dtype) * _eye_like(inner)
    first = adjoint(solve(square, adjoint(g_q + matmul(q, mirrored))))
    if n > k:
        return manipulation.concat([first, matmul(q, g_rest)], axis=-1)
    return first


def _qr_shapes(m: int, n: int, mode: str) -> tuple[Shape, ...]:
    k = m if mode == "complete" else min(m, n)
    return (m, k), (k, n)


QR = _decomposition("qr", _qr_shapes, lambda xp, x, mode: xp.linalg.qr(x, mode=mode), _qr_vjp, False)


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
        (_conjugated(_pinv_vjp), lambda g, y, x, rtol: None),
        aliases=False,
        shapes="[..., m, n], [...] -> [..., n, m]",
        domain=INEXACT,
    )
)

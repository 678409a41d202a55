"""The array API standard's extension `linalg`: `fuel_parallel.lazy.linalg`.

Matrices are the last two dimensions, the others a stack of them; dtypes are floating or complex, and float16 and
bfloat16 are computed in float32. Every function has a derivative wherever its result is one function of its input:
factors of equal eigenvalues or singular values are not, and nor are sizes below the rank. A matrix that is singular,
or not positive definite for `cholesky`, is a `RealizeError` when the node runs.
"""

from __future__ import annotations

import builtins
import math
from typing import Any, NamedTuple

from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import apply
from fuel_parallel.lazy.ops import (
    binary,
    creation,
    decompositions,
    elementwise,
    indexing,
    manipulation,
    reductions,
    spectral,
)
from fuel_parallel.lazy.ops.contraction import matmul, tensordot, vecdot
from fuel_parallel.lazy.ops.decompositions import inv
from fuel_parallel.lazy.ops.factors import adjoint, check_matrix, unpack
from fuel_parallel.lazy.ops.manipulation import matrix_transpose
from fuel_parallel.lazy.ops.reductions import normalize_axes, normalize_axis
from fuel_parallel.lazy.tensor import Tensor

__all__ = [
    "cholesky",
    "cross",
    "det",
    "diagonal",
    "eigh",
    "eigvalsh",
    "inv",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "trace",
    "vecdot",
    "vector_norm",
]


class Eigh(NamedTuple):
    """What `eigh` returns: values `(..., n)` and vectors `(..., n, n)`, one a column."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class QR(NamedTuple):
    """What `qr` returns."""

    Q: Tensor
    R: Tensor


class Slogdet(NamedTuple):
    """What `slogdet` returns."""

    sign: Tensor
    logabsdet: Tensor


class SVD(NamedTuple):
    """What `svd` returns: U, the singular values, and the adjoint of V."""

    U: Tensor
    S: Tensor
    Vh: Tensor


# Decompositions.


def cholesky(x: Tensor, /, *, upper: builtins.bool = False) -> Tensor:
    """The triangular L with L @ L^H = x for a Hermitian positive definite `x`; its adjoint if `upper`.

    >>> cholesky(creation.asarray([[4.0, 2.0], [2.0, 2.0]])).tolist()
    [[2.0, 0.0], [1.0, 1.0]]
    """
    lower = Tensor(apply(decompositions.CHOLESKY, (x.node,)))
    return adjoint(lower) if upper else lower


def eigh(x: Tensor, /) -> Eigh:
    """Eigenvalues (real, rising) and eigenvectors of a Hermitian `x`.

    >>> eigh(creation.asarray([[2.0, 0.0], [0.0, 1.0]])).eigenvalues.tolist()
    [1.0, 2.0]
    """
    return Eigh(*spectral.eigh(x))


def eigvalsh(x: Tensor, /) -> Tensor:
    """The eigenvalues of a Hermitian `x`, real and rising."""
    return Tensor(apply(spectral.EIGVALSH, (x.node,)))


def qr(x: Tensor, /, *, mode: str = "reduced") -> QR:
    """Orthonormal columns Q and an upper triangular R with Q @ R = x.

    For m rows, n columns and k = min(m, n) the shapes are (m, k) and (k, n), or (m, m) and (m, n) if `mode` is
    'complete'.
    """
    if mode not in ("reduced", "complete"):
        raise ArgumentError(f"qr: mode is 'reduced' or 'complete', not {mode!r}")
    check_matrix("qr", x.node.spec)
    return QR(*decompositions.qr(x, mode))


def svd(x: Tensor, /, *, full_matrices: builtins.bool = True) -> SVD:
    """Unitary U and V and falling S >= 0 with U @ diag(S) @ V^H = x.

    For m rows, n columns and k = min(m, n) U is (m, m) and Vh (n, n), or (m, k) and (k, n) without `full_matrices`.
    """
    check_matrix("svd", x.node.spec)
    return SVD(*spectral.svd(x, bool(full_matrices)))


def svdvals(x: Tensor, /) -> Tensor:
    """The singular values of `x`, falling."""
    return Tensor(apply(spectral.SVDVALS, (x.node,)))


# Systems, determinants, inverses.


def solve(x1: Tensor, x2: Tensor, /) -> Tensor:
    """The X with x1 @ X = x2; a 1-d `x2` is one vector, otherwise it holds (stacks of) matrices.

    >>> solve(creation.asarray([[2.0, 0.0], [0.0, 4.0]]), creation.asarray([2.0, 2.0])).tolist()
    [1.0, 0.5]
    """
    a, b = map(Tensor, binary.operands("solve", x1, x2))
    check_matrix("solve", a.node.spec, square=True)
    right = manipulation.expand_dims(b, axis=-1) if b.ndim == 1 else b
    if right.ndim < 2:
        raise ShapeError(f"solve: expected vectors or matrices on the right, but x2 has shape {b.shape}")
    batch = binary.broadcast_shapes("solve", a.shape[:-2], right.shape[:-2])
    found = decompositions.solve(
        manipulation.broadcast_to(a, (*batch, *a.shape[-2:])),
        manipulation.broadcast_to(right, (*batch, *right.shape[-2:])),
    )
    return manipulation.squeeze(found, -1) if b.ndim == 1 else found


def det(x: Tensor, /) -> Tensor:
    """The determinant. Its derivative needs an `x` that can be inverted."""
    return Tensor(apply(decompositions.DET, (x.node,)))


def slogdet(x: Tensor, /) -> Slogdet:
    """The sign (or phase) of the determinant and the logarithm of its magnitude."""
    sign, logarithm = unpack(Tensor(apply(decompositions.SLOGDET, (x.node,))), ((), ()))
    return Slogdet(sign, elementwise.real(logarithm) if x.dtype in dtypes.COMPLEX else logarithm)


def pinv(x: Tensor, /, *, rtol: float | Tensor | None = None) -> Tensor:
    """The Moore-Penrose inverse; singular values up to `rtol` times the largest count as zero.

    `rtol` is the larger extent times the dtype's eps unless told.
    """
    return Tensor(apply(decompositions.PINV, (x.node, _tolerance("pinv", x, rtol).node)))


def matrix_rank(x: Tensor, /, *, rtol: float | Tensor | None = None) -> Tensor:
    """How many singular values are above `rtol` times the largest one: int64."""
    tolerance = _tolerance("matrix_rank", x, rtol)
    values = svdvals(x)
    if not values.shape[-1]:
        return creation.zeros(values.shape[:-1], dtype=dtypes.int64, device=x.device)
    limit = reductions.max(values, axis=-1, keepdims=True) * manipulation.expand_dims(tolerance, axis=-1)
    return reductions.count_nonzero(values > limit, axis=-1)


def _tolerance(function: str, x: Tensor, rtol: float | Tensor | None) -> Tensor:
    check_matrix(function, x.node.spec)
    real = dtypes.real_of(x.dtype)
    if rtol is None:
        from fuel_parallel.lazy.inspection import finfo

        rtol = max(x.shape[-2:]) * finfo(real).eps
    return creation.astype(creation.to_tensor(function, rtol, elementwise.real(x)), real, device=x.device)


def matrix_power(x: Tensor, n: int, /) -> Tensor:
    """`x` times itself, `n` factors; the inverse's power for negative `n`.

    >>> matrix_power(creation.asarray([[1.0, 1.0], [0.0, 1.0]]), 5).tolist()
    [[1.0, 5.0], [0.0, 1.0]]
    """
    check_matrix("matrix_power", x.node.spec, square=True)
    if n < 0:
        return matrix_power(inv(x), -n)
    one = creation.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    result: Tensor | None = None
    while n:
        if n & 1:
            result = x if result is None else matmul(result, x)
        n >>= 1
        x = matmul(x, x) if n else x
    return manipulation.broadcast_to(one, x.shape) if result is None else result


# Products and parts.


def cross(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    """The cross product of vectors of three elements along `axis`.

    >>> cross(creation.asarray([1, 0, 0]), creation.asarray([0, 1, 0])).tolist()
    [0, 0, 1]
    """
    a, b = map(Tensor, binary.operands("cross", x1, x2))
    if not -min(a.ndim, b.ndim) <= axis < min(a.ndim, b.ndim):
        raise ShapeError(f"cross: axis {axis} is out of bounds for shapes {a.shape} and {b.shape}")
    if a.shape[axis] != 3 or b.shape[axis] != 3:
        raise ShapeError(f"cross: shapes {a.shape} and {b.shape} must have extent 3 along axis {axis}")
    a, b = manipulation.broadcast_arrays(a, b)
    place = normalize_axis("cross", axis, a.ndim)
    (a0, a1, a2), (b0, b1, b2) = manipulation.unstack(a, axis=place), manipulation.unstack(b, axis=place)
    return manipulation.stack([a1 * b2 - a2 * b1, a2 * b0 - a0 * b2, a0 * b1 - a1 * b0], axis=place)


def outer(x1: Tensor, x2: Tensor, /) -> Tensor:
    """All products of an element of one vector with one of another: shape (n, m)."""
    if x1.ndim != 1 or x2.ndim != 1:
        raise ShapeError(f"outer: expected two vectors, but the shapes are {x1.shape} and {x2.shape}")
    return manipulation.expand_dims(x1, axis=1) * manipulation.expand_dims(x2, axis=0)


def diagonal(x: Tensor, /, *, offset: int = 0) -> Tensor:
    """The elements (i, i + offset) of each matrix.

    >>> diagonal(creation.asarray([[1, 2], [3, 4]])).tolist()
    [1, 4]
    """
    if x.ndim < 2:
        raise ShapeError(f"diagonal: expected (a stack of) matrices, but x has shape {x.shape}")
    rows, columns = x.shape[-2:]
    count = builtins.max(0, min(rows + min(offset, 0), columns - builtins.max(offset, 0)))
    along = creation.arange(count, device=x.device)
    return indexing.getitem(x, (..., along + builtins.max(0, -offset), along + builtins.max(0, offset)))


def trace(x: Tensor, /, *, offset: int = 0, dtype: Any = None) -> Tensor:
    """The sum of a diagonal; small integers are summed in 64 bits."""
    return reductions.sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


# Norms.


def vector_norm(
    x: Tensor,
    /,
    *,
    axis: int | tuple[int, ...] | None = None,
    keepdims: builtins.bool = False,
    ord: float = 2,
) -> Tensor:
    """sum(abs(x) ** ord) ** (1 / ord) over `axis` (all by default); for ord = inf, -inf and 0 its limits: the largest
    and the smallest magnitude, the number of elements that are not zero.

    >>> vector_norm(creation.asarray([3.0, 4.0])).item()
    5.0
    """
    elementwise.check_domain("vector_norm", x.dtype, elementwise.INEXACT)
    axes = normalize_axes("vector_norm", axis, x.ndim)
    size = elementwise.abs(x)
    if ord == math.inf:
        return reductions.max(size, axis=axes, keepdims=keepdims)
    if ord == -math.inf:
        return reductions.min(size, axis=axes, keepdims=keepdims)
    if ord == 0:
        return creation.astype(reductions.count_nonzero(x, axis=axes, keepdims=keepdims), size.dtype)
    if ord == 1:
        return reductions.sum(size, axis=axes, keepdims=keepdims)
    if ord == 2:
        return _euclidean(x, axes, keepdims)
    return reductions.sum(size**ord, axis=axes, keepdims=keepdims) ** (1 / ord)


def _euclidean(x: Tensor, axes: tuple[int, ...], keepdims: builtins.bool) -> Tensor:
    if x.dtype in dtypes.COMPLEX:
        squares = elementwise.square(elementwise.real(x)) + elementwise.square(elementwise.imag(x))
    else:
        squares = elementwise.square(x)
    return elementwise.sqrt(reductions.sum(squares, axis=axes, keepdims=keepdims))


def matrix_norm(x: Tensor, /, *, keepdims: builtins.bool = False, ord: float | str | None = "fro") -> Tensor:
    """A norm of each matrix.

    | ord | norm |
    |---|---|
    | 'fro' | the root of the sum of squares |
    | 'nuc', 2, -2 | of the singular values the sum, the largest, the smallest |
    | 1, -1 | of the columns' sums of magnitudes the largest, the smallest |
    | inf, -inf | of the rows' sums the largest, the smallest |
    """
    check_matrix("matrix_norm", x.node.spec)
    if ord is None or ord == "fro":
        return _euclidean(x, (x.ndim - 2, x.ndim - 1), keepdims)
    if ord not in ("nuc", 2, -2, 1, -1, math.inf, -math.inf):
        raise ArgumentError(f"matrix_norm: ord is 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, not {ord!r}")
    if ord in ("nuc", 2, -2):
        reduce = {"nuc": reductions.sum, 2: reductions.max, -2: reductions.min}[ord]
        found = reduce(svdvals(x), axis=-1)
    else:
        sums = reductions.sum(elementwise.abs(x), axis=-2 if ord in (1, -1) else -1)
        found = (reductions.max if ord > 0 else reductions.min)(sums, axis=-1)  # type: ignore[operator]
    return manipulation.reshape(found, (*found.shape, 1, 1)) if keepdims else found

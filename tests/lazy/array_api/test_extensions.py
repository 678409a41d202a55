"""The standard's extensions `linalg` and `fft`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy.array_api.agreement import COMPLEX, FLOATS, SOLID, agree, arrays, axis_of, values

TOLERANCE = {"float32": 2e-4, "complex64": 2e-4, "float64": 1e-11, "complex128": 1e-11}
DTYPES = st.sampled_from([*FLOATS, *COMPLEX])
STACKS = st.lists(st.integers(0, 2), max_size=2).map(tuple)


def regular(dtype: str, stack: Any, n: int, seed: int = 0) -> Any:
    return values(dtype, (*stack, n, n), seed) + np.asarray(9 * np.eye(n), dtype)


def hermitian(dtype: str, stack: Any, n: int) -> Any:
    x = regular(dtype, stack, n)
    return np.asarray(x + x.swapaxes(-1, -2).conj())


@settings(max_examples=25)
@given(DTYPES, STACKS, st.integers(1, 3))
def test_square_matrices(dtype: str, stack: Any, n: int) -> None:
    x, tolerance = regular(dtype, stack, n), TOLERANCE[dtype]
    for name in ("det", "inv", "slogdet", "matrix_rank", "pinv", "trace"):
        agree(f"linalg.{name}", x, tolerance=tolerance * (9**n if name == "det" else 1))
    agree("linalg.solve", x, values(dtype, (*stack, n, 2)), tolerance=tolerance)
    agree("linalg.solve", x, values(dtype, (n,)), tolerance=tolerance)
    for power in (-1, 0, 3):
        agree("linalg.matrix_power", x, power, tolerance=tolerance)


@settings(max_examples=25)
@given(DTYPES, STACKS, st.integers(1, 3), st.booleans())
def test_hermitian_matrices(dtype: str, stack: Any, n: int, upper: bool) -> None:
    x, tolerance = hermitian(dtype, stack, n), TOLERANCE[dtype]
    agree("linalg.cholesky", x, upper=upper, tolerance=tolerance)
    agree("linalg.eigvalsh", x, tolerance=tolerance)
    agree(lambda xp, x: xp.linalg.eigh(x).eigenvalues, x, tolerance=tolerance)


def put_together(xp: Any, x: Any, name: str, **options: Any) -> Any:
    """The product of the factors: these themselves have signs and phases that are free."""
    if name == "qr":
        q, r = xp.linalg.qr(x, **options)
        return q.shape, r.shape, q @ r
    u, s, vh = xp.linalg.svd(x, **options)
    k = s.shape[-1]
    return u.shape, vh.shape, s, u[..., :k] * xp.astype(s, x.dtype)[..., None, :] @ vh[..., :k, :]


@settings(max_examples=25)
@given(DTYPES, STACKS, st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_factors(dtype: str, stack: Any, m: int, n: int, full: bool) -> None:
    x, tolerance = values(dtype, (*stack, m, n)), 10 * TOLERANCE[dtype]
    agree(put_together, x, "svd", full_matrices=full, tolerance=tolerance)
    agree(put_together, x, "qr", mode="complete" if full else "reduced", tolerance=tolerance)
    agree("linalg.svdvals", x, tolerance=tolerance)
    for ord in ("fro", "nuc", 1, -1, 2, np.inf, -np.inf):
        agree("linalg.matrix_norm", x, ord=ord, keepdims=full, tolerance=tolerance)


@settings(max_examples=25)
@given(arrays([*FLOATS, *COMPLEX], SOLID), st.sampled_from([0, 1, 2, 3, np.inf, -np.inf]), st.data())
def test_vectors(x: Any, ord: Any, data: st.DataObject) -> None:
    agree("linalg.vector_norm", x, ord=ord, axis=data.draw(axis_of(x)), tolerance=TOLERANCE[x.dtype.name])
    agree("linalg.outer", x.reshape(-1), x.reshape(-1)[:2])
    agree("linalg.cross", x[..., :1] + np.ones(3, x.dtype), x[..., :1] * np.arange(3).astype(x.dtype), tolerance=1e-6)
    agree("linalg.diagonal", x, offset=data.draw(st.integers(-4, 4)))


@pytest.mark.parametrize("name", ["cholesky", "det", "eigh", "eigvalsh", "inv", "qr", "slogdet", "svd", "svdvals"])
def test_what_linalg_refuses(name: str) -> None:
    for x in (values("float32", (3,)), values("int32", (3, 3))):
        agree(f"linalg.{name}", x)


NORM = st.sampled_from(["backward", "ortho", "forward"])


@settings(max_examples=40)
@given(DTYPES, st.integers(2, 6), st.one_of(st.none(), st.integers(2, 7)), st.sampled_from([0, 1, -1]), NORM)
def test_transforms(dtype: str, n: int, length: Any, axis: int, norm: str) -> None:
    x = values(dtype, (n, 4) if axis == 0 else (2, n))
    real = dtype in FLOATS
    for name in ("rfft", "ihfft") if real else ("fft", "ifft", "irfft", "hfft"):
        agree(f"fft.{name}", x, n=length, axis=axis, norm=norm, tolerance=TOLERANCE[dtype])
    for name in ("rfftn",) if real else ("fftn", "ifftn", "irfftn"):
        agree(f"fft.{name}", x, norm=norm, tolerance=TOLERANCE[dtype])
        agree(f"fft.{name}", x, s=(3, 4), axes=(1, 0), norm=norm, tolerance=TOLERANCE[dtype])
    agree("fft.fft", x, axis=2)
    agree("fft.rfft" if not real else "fft.fft", x, norm="no")


@settings(max_examples=25)
@given(st.integers(1, 9), st.floats(0.25, 4), arrays([*FLOATS, *COMPLEX], SOLID))
def test_frequencies(n: int, d: float, x: Any) -> None:
    for name in ("fftfreq", "rfftfreq"):
        agree(f"fft.{name}", n, d=d, dtype=np.dtype("float64"), tolerance=1e-15)
    agree("fft.fftshift", x)
    agree("fft.ifftshift", x, axes=0)

"""Products over shared dimensions, for any shapes, dtypes and equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DTypeError, FuelError, ShapeError
from fuel_parallel.lazy import dtypes

Array = np.ndarray[Any, Any]
EXTENTS = st.integers(0, 4)
DTYPES = st.sampled_from([ft.int8, ft.uint32, ft.float16, ft.bfloat16, ft.float32, ft.float64, ft.complex64])


def small(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Integers so small that every dtype holds the products exactly."""
    drawn = np.random.default_rng(seed).integers(0, 3, shape)
    return (drawn * (1 - 1j) if dtype in dtypes.COMPLEX else drawn).astype(dtype)


def same(found: ft.Tensor, wanted: Any, dtype: Any) -> None:
    assert found.dtype == found.numpy().dtype == dtype
    assert found.shape == np.shape(wanted)
    np.testing.assert_array_equal(found.numpy().astype(np.asarray(wanted).dtype), wanted)


def wide(x: Array) -> Array:
    return x.astype(np.float64) if dtypes.is_half(x.dtype) else x


@given(
    hnp.mutually_broadcastable_shapes(signature="(n?,k),(k,m?)->(n?,m?)", min_side=0, max_side=3, max_dims=2),
    DTYPES,
)
def test_matmul(shapes: Any, dtype: Any) -> None:
    a, b = (small(dtype, shape, i) for i, shape in enumerate(shapes.input_shapes))
    same(ft.asarray(a) @ ft.asarray(b), np.matmul(wide(a), wide(b)), dtype)


@given(st.lists(EXTENTS, max_size=2), st.lists(EXTENTS, max_size=2), st.lists(EXTENTS, max_size=2), st.randoms())
def test_tensordot(rows: list[int], inner: list[int], columns: list[int], random: Any) -> None:
    a, b = small(ft.float64, (*rows, *inner)), small(ft.float64, (*inner, *columns), 1)
    same(ft.tensordot(ft.asarray(a), ft.asarray(b), axes=len(inner)), np.tensordot(a, b, len(inner)), ft.float64)
    left = [len(rows) + i for i in range(len(inner))]
    right = [i - b.ndim for i in range(len(inner))]
    order = list(range(len(inner)))
    random.shuffle(order)
    axes = ([left[i] for i in order], [right[i] for i in order])
    same(ft.tensordot(ft.asarray(a), ft.asarray(b), axes=axes), np.tensordot(a, b, axes), ft.float64)


@given(hnp.mutually_broadcastable_shapes(signature="(k),(k)->()", min_side=0, max_side=3, max_dims=2), DTYPES)
def test_vecdot_conjugates_the_first(shapes: Any, dtype: Any) -> None:
    a, b = (small(dtype, shape, i) for i, shape in enumerate(shapes.input_shapes))
    same(ft.vecdot(ft.asarray(a), ft.asarray(b)), np.vecdot(wide(a), wide(b)), dtype)


def test_vecdot_along_another_axis() -> None:
    a, b = small(ft.float32, (3, 2)), small(ft.float32, (3, 1), 1)
    same(ft.vecdot(ft.asarray(a), ft.asarray(b), axis=-2), np.sum(a * b, axis=-2), ft.float32)


@st.composite
def equations(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    extents = dict(zip("ijklm", draw(st.tuples(*[EXTENTS] * 5)), strict=True))
    terms = draw(st.lists(st.text("ijklm", max_size=4), min_size=1, max_size=3))
    dots = draw(st.lists(EXTENTS, max_size=2)) if draw(st.booleans()) else None
    named = sorted(set("".join(terms)))
    shapes: list[tuple[int, ...]] = []
    written = []
    for term in terms:
        shape = tuple(extents[letter] for letter in term)
        if dots is None:
            written.append(term)
        else:
            leading = draw(st.integers(0, len(dots)))
            place = draw(st.integers(0, len(term)))
            some = tuple(draw(st.sampled_from((n, 1))) for n in dots[leading:])
            shape = (*shape[:place], *some, *shape[place:])
            written.append(f"{term[:place]}...{term[place:]}")
        shapes.append(shape)
    equation = ",".join(written)
    if draw(st.booleans()):
        kept = draw(st.lists(st.sampled_from(named), unique=True)) if named else []
        equation += "->" + ("..." if dots is not None else "") + "".join(kept)
    return equation, shapes


@given(equations(), DTYPES)
def test_einsum(drawn: tuple[str, list[tuple[int, ...]]], dtype: Any) -> None:
    equation, shapes = drawn
    arrays = [small(dtype, shape, i) for i, shape in enumerate(shapes)]
    wanted = np.einsum(equation, *map(wide, arrays))
    if dtypes.is_half(dtype) and wanted.size and wanted.max() > 200:
        return  # not exact in bfloat16
    same(ft.einsum(equation, *map(ft.asarray, arrays)), wanted, dtype)


def test_operands_promote() -> None:
    assert ft.matmul(ft.ones((2, 2)), ft.asarray([[1, 2], [3, 4]])).dtype == ft.float32
    assert (np.ones((2, 2), dtype=np.float32) @ ft.ones((2, 2))).shape == (2, 2)
    assert ft.einsum("ij,jk", ft.ones((2, 2), dtype=ft.float16), ft.ones((2, 2), dtype=ft.bfloat16)).dtype == ft.float32


@pytest.mark.parametrize("dtype", [ft.float16, ft.bfloat16], ids=lambda d: d.name)
def test_halves_are_accumulated_in_single_precision(dtype: Any) -> None:
    x = ft.ones(4099, dtype=dtype)
    assert float(x @ x) == float(np.float64(4099).astype(dtype))


A, B = ft.zeros((2, 3)), ft.zeros((4, 5))
MISTAKES: list[tuple[Any, type[FuelError], str]] = [
    (lambda: A @ B, ShapeError, r"matmul: shapes \(2, 3\) and \(4, 5\) do not fit: the last extent of the first must"),
    (lambda: A[0] @ B[0], ShapeError, r"matmul: vectors of shapes \(3,\) and \(5,\) must have the same extent"),
    (lambda: A @ B[0, 0], ShapeError, r"must not be 0-d, but the shapes are \(2, 3\) and \(\); use \*"),
    (lambda: A @ 2.0, ShapeError, "must not be 0-d"),
    (
        lambda: ft.zeros((2, 2, 3)) @ ft.zeros((3, 3, 1)),
        ShapeError,
        r"matmul: shapes \(2,\) and \(3,\) do not broadcast",
    ),
    (lambda: (A > 0) @ (A > 0).T, DTypeError, "matmul: expected one of int8, .* but the dtype is bool"),
    (
        lambda: ft.tensordot(A, B),
        ShapeError,
        r"axes \[0, 1\] of shape \(2, 3\) and \[0, 1\] of \(4, 5\) do not pair up",
    ),
    (lambda: ft.tensordot(A, B, axes=3), ArgumentError, r"axes=3 does not fit shapes \(2, 3\) and \(4, 5\)"),
    (lambda: ft.vecdot(A, B), ShapeError, r"vecdot: shapes \(2, 3\) and \(4, 5\) differ along axis -1"),
    (lambda: ft.vecdot(A, A, axis=0), ShapeError, "vecdot: axis 0 must lie between -2 and -1"),
    (lambda: ft.einsum("ij,jk", A), ArgumentError, "'ij,jk' names 2 operands, but 1 tensors were given"),
    (lambda: ft.einsum("ij,jk->ik", A, B), ShapeError, "'j' in 'ij,jk->ik' has extents 3 and 4"),
    (lambda: ft.einsum("ijk", A), ShapeError, "'ijk' in 'ijk' names 3 dimensions, but the tensor has 2"),
    (lambda: ft.einsum("ii", A), ShapeError, "'i' in 'ii' is 2 and 3 in one tensor"),
    (lambda: ft.einsum("ij->k", A), ArgumentError, "every letter right of -> in 'ij->k' must stand once"),
    (lambda: ft.einsum("ij->ii", A), ArgumentError, "must stand once and appear on the left"),
    (lambda: ft.einsum("i+", A), ArgumentError, r"may hold letters, commas, '...' and '->' only"),
]


@pytest.mark.parametrize(("make", "error", "text"), MISTAKES)
def test_mistakes_are_named(make: Any, error: type[FuelError], text: str) -> None:
    with pytest.raises(error, match=text):
        make()

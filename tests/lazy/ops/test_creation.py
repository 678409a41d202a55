"""Tensors from data, formulas and casts."""

from __future__ import annotations

import math
from typing import Any

import array_api_strict
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DeviceError, DTypeError, FuelError, ShapeError
from fuel_parallel.lazy import dtypes

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


@given(SHAPES, st.sampled_from(dtypes.ALL))
def test_arrays_keep_shape_dtype_and_values(shape: tuple[int, ...], dtype: Any) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    found = ft.asarray(array)
    assert (found.shape, found.dtype) == (shape, dtype)
    np.testing.assert_array_equal(found.numpy(), array)


PYTHON: list[tuple[Any, Any]] = [
    (True, ft.bool),
    (3, ft.int64),
    (2.5, ft.float32),
    (1j, ft.complex64),
    ([], ft.float32),
    ([1, 2.5], ft.float32),
    ([[True], [False]], ft.bool),
    ((1, 2j), ft.complex64),
    (np.float64(3), ft.float64),
    ([np.float64(3), np.float64(4)], ft.float64),
    ([np.arange(2, dtype=np.int8)], ft.int8),
]


@pytest.mark.parametrize(("value", "dtype"), PYTHON)
def test_python_numbers_get_the_default_dtypes(value: Any, dtype: Any) -> None:
    found = ft.asarray(value)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.numpy(), np.asarray(value, dtype=dtype))


def test_data_are_copied() -> None:
    source = np.ones(3)
    copied, shared = ft.asarray(source), ft.asarray(source, copy=False)
    source[0] = 7
    assert copied.tolist() == [1.0, 1.0, 1.0]
    assert shared.tolist() == [7.0, 1.0, 1.0]


def test_a_result_never_shares_memory_with_what_can_be_written() -> None:
    source = np.ones((2, 2))
    result = ft.reshape(ft.asarray(source), (4,)).numpy()
    source[:] = 5
    assert result.tolist() == [1.0] * 4


def test_nested_tensors_are_stacked() -> None:
    a, b = ft.asarray([1, 2]), ft.asarray(3.5)
    assert ft.asarray([a, a]).tolist() == [[1, 2], [1, 2]]
    assert ft.asarray([[b, 1], [2, b]]).tolist() == [[3.5, 1.0], [2.0, 3.5]]
    assert ft.asarray([b, b], dtype=ft.float64).dtype == ft.float64


def test_dlpack_goes_both_ways() -> None:
    x = ft.from_dlpack(np.arange(3.0))
    assert x.tolist() == [0.0, 1.0, 2.0]
    assert np.from_dlpack(x + 1).tolist() == [1.0, 2.0, 3.0]
    assert x.__dlpack_device__() == (1, 0)


@given(SHAPES, st.sampled_from(dtypes.ALL))
def test_filled_tensors(shape: tuple[int, ...], dtype: Any) -> None:
    for function, value in ((ft.zeros, 0), (ft.ones, 1), (ft.empty, 0)):
        found = function(shape, dtype=dtype)
        assert (found.shape, found.dtype) == (shape, dtype)
        np.testing.assert_array_equal(found.numpy(), np.full(shape, value, dtype=dtype))
    like = ft.zeros(shape, dtype=dtype)
    for alike, value in ((ft.zeros_like, 0), (ft.ones_like, 1), (ft.empty_like, 0)):
        np.testing.assert_array_equal(alike(like).numpy(), np.full(shape, value, dtype=dtype))
    assert ft.full_like(like, 1, dtype=ft.int16).dtype == ft.int16


def test_full_takes_scalars_of_any_kind_and_tensors() -> None:
    assert ft.full(2, 7).dtype == ft.int64
    assert ft.full((), True).dtype == ft.bool
    assert ft.full((2,), ft.asarray(3.0)).tolist() == [3.0, 3.0]
    assert math.copysign(1, float(ft.full((), -0.0))) == -1.0
    assert ft.full((), 1e300).item() == math.inf


@given(
    st.integers(-20, 20),
    st.integers(-20, 20),
    st.integers(-5, 5).filter(bool),
    st.sampled_from([ft.int64, ft.int8, ft.float32, ft.float64]),
)
def test_arange_of_integers(start: int, stop: int, step: int, dtype: Any) -> None:
    wanted = np.arange(start, stop, step, dtype=dtype)
    np.testing.assert_array_equal(ft.arange(start, stop, step, dtype=dtype).numpy(), wanted)
    assert ft.arange(stop).dtype == ft.int64


@given(st.floats(-10, 10), st.floats(-10, 10), st.floats(0.25, 3), st.booleans())
def test_arange_of_floats(start: float, stop: float, step: float, down: bool) -> None:
    step = -step if down else step
    wanted = np.arange(start, stop, step)
    found = ft.arange(start, stop, step, dtype=ft.float64)
    assert found.dtype == ft.float64
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-12)


def test_arange_is_exact_for_large_integers() -> None:
    big = 2**60 + 1
    assert ft.arange(big, big + 3).tolist() == [big, big + 1, big + 2]
    assert ft.arange(0, 2**63 - 1, 2**62 - 1).shape == (3,)


@given(st.floats(-5, 5), st.floats(-5, 5), st.integers(0, 9), st.booleans())
def test_linspace(start: float, stop: float, num: int, endpoint: bool) -> None:
    wanted = np.linspace(start, stop, num, endpoint=endpoint)
    np.testing.assert_array_equal(ft.linspace(start, stop, num, endpoint=endpoint, dtype=ft.float64).numpy(), wanted)


def test_linspace_of_complex_numbers() -> None:
    assert ft.linspace(0, 2j, 3).tolist() == [0j, 1j, 2j]


@given(st.integers(0, 4), st.integers(0, 4), st.integers(-5, 5), st.sampled_from(dtypes.ALL))
def test_eye_and_triangles(rows: int, columns: int, k: int, dtype: Any) -> None:
    np.testing.assert_array_equal(
        ft.eye(rows, columns, k=k, dtype=dtype).numpy(), np.eye(rows, columns, k, dtype=dtype)
    )
    x = np.ones((2, rows, columns), dtype=dtype)
    np.testing.assert_array_equal(ft.tril(ft.asarray(x), k=k).numpy(), np.tril(x, k))
    np.testing.assert_array_equal(ft.triu(ft.asarray(x), k=k).numpy(), np.triu(x, k))


@pytest.mark.parametrize("indexing", ["xy", "ij"])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_meshgrid(indexing: Any, count: int) -> None:
    vectors = [np.arange(n + 2.0) for n in range(count)]
    found = ft.meshgrid(*map(ft.asarray, vectors), indexing=indexing)
    for got, wanted in zip(found, np.meshgrid(*vectors, indexing=indexing), strict=True):
        np.testing.assert_array_equal(got.numpy(), wanted)


@given(st.sampled_from(dtypes.ALL), st.sampled_from(dtypes.ALL))
def test_casts(source: Any, target: Any) -> None:
    x = np.array([0, 1, 5]).astype(source)
    if source in dtypes.COMPLEX and target not in dtypes.COMPLEX:
        with pytest.raises(DTypeError, match=f"{source.name} to {target.name} would drop the imaginary part"):
            ft.astype(ft.asarray(x), target)
        with pytest.raises(DTypeError, match=f"{source.name} to {target.name} would drop the imaginary part"):
            ft.asarray(x, dtype=target)
        return
    for found in (ft.astype(ft.asarray(x), target), ft.asarray(x, dtype=target)):
        assert found.dtype == target
        np.testing.assert_array_equal(found.numpy(), x.astype(target))


def test_a_copy_is_a_handle_of_its_own_and_costs_nothing() -> None:
    x = ft.zeros(3)
    assert ft.astype(x, ft.float32, copy=False) is x
    assert ft.asarray(x) is x
    for copied in (ft.astype(x, ft.float32), ft.asarray(x, copy=True), ft.from_dlpack(x, copy=True)):
        assert copied.node is x.node
        copied[0] = 1.0
        assert (copied.tolist(), x.tolist()) == ([1.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    assert ft.to_device(x, "cpu") is x


def test_tensors_move_with_asarray_and_astype(other_device: str) -> None:
    x = ft.arange(3)
    assert ft.asarray(x, device=other_device).device == other_device
    assert ft.astype(x, ft.float32, device=other_device).device == other_device
    assert x.to_device(other_device).tolist() == [0, 1, 2]
    assert ft.zeros_like(x.to_device(other_device)).device == other_device


def test_names_agree_with_the_reference_implementation() -> None:
    for name in ("arange", "eye", "linspace", "ones", "tril"):
        assert hasattr(array_api_strict, name)
        assert getattr(ft, name).__doc__


MISTAKES: list[tuple[Any, type[FuelError], str]] = [
    (lambda: ft.zeros((2, -1)), ShapeError, r"full: extents must not be negative, but the shape is \(2, -1\)"),
    (lambda: ft.zeros((2, 1.5)), ShapeError, r"a shape is an int or a tuple of ints, not \(2, 1.5\)"),
    (lambda: ft.zeros("ab"), ShapeError, "a shape is an int or a tuple of ints, not 'ab'"),
    (lambda: ft.asarray([[1], [2, 3]]), ShapeError, r"cannot make one array of \[\[1\], \[2, 3\]\]"),
    (lambda: ft.asarray(["a"]), DTypeError, r"cannot make a tensor of \['a'\]; expected numbers or bools"),
    (lambda: ft.asarray([None]), DTypeError, r"cannot make a tensor of \[None\]"),
    (lambda: ft.asarray([300], dtype=ft.uint8), ArgumentError, "300 is out of bounds for uint8 .0 to 255."),
    (lambda: ft.asarray(-1, dtype=ft.uint64), ArgumentError, "-1 is out of bounds for uint64"),
    (lambda: ft.full(2, 300, dtype=ft.int8), ArgumentError, "300 is out of bounds for int8 .-128 to 127."),
    (lambda: ft.asarray([1], dtype=ft.int8) + 200, ArgumentError, "200 is out of bounds for int8"),
    (lambda: ft.full(2, "a"), DTypeError, "fill_value is a Python scalar or a tensor, not 'a'"),  # type: ignore[arg-type]
    (lambda: ft.full(2, 1j, dtype=ft.float32), DTypeError, "full: fill_value 1j does not fit float32"),
    (lambda: ft.full(2, 1.5, dtype=ft.int32), DTypeError, "full: fill_value 1.5 does not fit int32"),
    (lambda: ft.arange(1, 5, 0), ArgumentError, "arange: step must not be 0"),
    (lambda: ft.arange(1.5, 5, dtype=ft.int32), DTypeError, "dtype must be floating, not int32"),
    (lambda: ft.linspace(0, 1, -2), ArgumentError, "num is a whole number of at least 0, not -2"),
    (lambda: ft.eye(-1), ShapeError, "eye: extents must not be negative"),
    (lambda: ft.tril(ft.zeros(3)), ShapeError, r"tril: expected at least 2 dimensions, but x has shape \(3,\)"),
    (lambda: ft.meshgrid(ft.zeros((2, 2))), ShapeError, r"expected 1-d tensors, but the shapes are \[\(2, 2\)\]"),
    (lambda: ft.meshgrid(ft.zeros(2), indexing="yx"), ArgumentError, "indexing is 'xy' or 'ij', not 'yx'"),
    (lambda: ft.zeros(2, device="gpu:0"), DeviceError, "unknown device 'gpu:0'; expected a kind \\(cpu, cuda"),
    (lambda: ft.zeros(2, device=0), ArgumentError, "a device is named by a string"),  # type: ignore[arg-type]
    (lambda: ft.zeros(2) + "a", DTypeError, "add: expected a tensor, a numpy array or a Python scalar, not str 'a'"),
    (lambda: ft.add(ft.zeros(2), [1, 2]), DTypeError, "not list .*make it a tensor with asarray first"),
    (lambda: ft.result_type(), ArgumentError, "expected at least one tensor, dtype or scalar"),
]


@pytest.mark.parametrize(("make", "error", "text"), MISTAKES)
def test_mistakes_are_named(make: Any, error: type[FuelError], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_operands_on_two_devices_are_refused(other_device: str) -> None:
    with pytest.raises(DeviceError, match=r"add: operands are on cpu and other:0; move them to one device with x.to"):
        ft.ones(2) + ft.ones(2, device=other_device)

"""Promotion: the standard's table within a kind, the higher kind between kinds, and Python scalars that give way."""

from __future__ import annotations

import enum
from typing import Any

import array_api_strict
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DTypeError
from fuel_parallel.lazy import dtypes

any_dtype = st.sampled_from(dtypes.ALL)
KINDS = ("bool", "integral", "real floating", "complex floating")
SCALARS: list[Any] = [True, 3, 2.5, 1j]


def strict(d: dtypes.DType) -> Any:
    return getattr(array_api_strict, d.name, None)


@given(any_dtype, any_dtype)
def test_promotion_is_that_of_the_standard_wherever_it_has_one(a: dtypes.DType, b: dtypes.DType) -> None:
    if strict(a) is None or strict(b) is None:  # float16, bfloat16
        return
    try:
        wanted = array_api_strict.result_type(strict(a), strict(b))
    except TypeError:
        return
    assert strict(dtypes.promote(a, b)) == wanted


@given(any_dtype, any_dtype)
def test_promotion_does_not_depend_on_the_order(a: dtypes.DType, b: dtypes.DType) -> None:
    try:
        assert dtypes.promote(a, b) is dtypes.promote(b, a)
    except DTypeError:
        with pytest.raises(DTypeError):
            dtypes.promote(b, a)


@given(any_dtype, any_dtype)
def test_between_kinds_the_higher_kind_keeps_its_precision(a: dtypes.DType, b: dtypes.DType) -> None:
    low, high = sorted((a, b), key=lambda d: KINDS.index(dtypes.kind(d)))
    if dtypes.kind(low) != dtypes.kind(high):
        wanted = dtypes.complex128 if (low, high) == (dtypes.float64, dtypes.complex64) else high
        assert dtypes.promote(a, b) is wanted


@given(any_dtype, st.sampled_from(SCALARS))
def test_a_scalar_takes_the_dtype_of_the_tensor_if_its_kind_can_hold_it(d: dtypes.DType, scalar: Any) -> None:
    found = ft.result_type(d, scalar)
    kind_of_scalar = KINDS[SCALARS.index(scalar)]
    if KINDS.index(dtypes.kind(d)) >= KINDS.index(kind_of_scalar):
        assert found is d
    else:
        assert dtypes.kind(found) == kind_of_scalar
        wanted = {3: ft.int64, 2.5: ft.float32, 1j: ft.complex128 if d == ft.float64 else ft.complex64}[scalar]
        assert found is wanted


@pytest.mark.parametrize("d", dtypes.ALL, ids=lambda d: d.name)
def test_a_sum_with_a_scalar_has_the_promoted_dtype(d: dtypes.DType) -> None:
    for scalar in SCALARS:
        x = ft.asarray([0, 1], dtype=d)
        built = x + scalar
        assert built.dtype is ft.result_type(x, scalar)
        assert (scalar + x).dtype is built.dtype
        assert built.numpy().dtype == built.dtype


def test_half_precisions_meet_in_float32() -> None:
    assert dtypes.promote(ft.float16, ft.bfloat16) is ft.float32


def test_uint64_and_a_signed_integer_have_no_common_dtype() -> None:
    with pytest.raises(DTypeError, match=r"add: int8 and uint64 have no common integer dtype; cast one of them"):
        ft.asarray([1], dtype=ft.int8) + ft.asarray([1], dtype=ft.uint64)


@pytest.mark.parametrize("name", ["longlong", "intc", "ulonglong", ">f4", "<i2", "single"])
def test_each_dtype_is_one_object(name: str) -> None:
    assert any(ft.dtype(np.dtype(name)) is d for d in dtypes.ALL)
    assert any(ft.asarray(np.ones(2, dtype=name)).dtype is d for d in dtypes.ALL)


def test_other_byte_orders_are_converted() -> None:
    assert ft.asarray(np.arange(3, dtype=">f4")).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("wrong", ["float128", "string", object, np.dtype("M8[s]"), [("a", "f4")], 7])
def test_unknown_dtypes_are_refused_with_the_choices(wrong: Any) -> None:
    with pytest.raises(DTypeError, match=r"is not a dtype of this library; expected one of bool, int8, .*complex128"):
        ft.dtype(wrong)


def test_enumerations_of_integers_are_integers() -> None:
    level = enum.IntEnum("level", "LOW HIGH")
    assert (ft.asarray([1.0]) * level.HIGH).tolist() == [2.0]


@given(any_dtype)
def test_kinds_are_those_of_the_standard(d: dtypes.DType) -> None:
    if strict(d) is not None:
        for kind in ("bool", "signed integer", "unsigned integer", "integral", "real floating", "numeric"):
            assert ft.isdtype(d, kind) == array_api_strict.isdtype(strict(d), kind)
    assert ft.isdtype(d, ("bool", "numeric"))
    assert ft.isdtype(d, d)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ArgumentError, match="unknown kind 'floating'; expected a dtype or one of 'bool', "):
        ft.isdtype(ft.float32, "floating")


def test_limits_of_dtypes() -> None:
    assert ft.finfo(ft.float32).eps == 2.0**-23
    assert ft.finfo(ft.complex128).dtype is ft.float64
    assert (ft.finfo(ft.bfloat16).bits, ft.finfo(ft.bfloat16).eps) == (16, 2.0**-7)
    assert (ft.iinfo(ft.uint8).max, ft.iinfo(ft.zeros(2, dtype=ft.int16)).min) == (255, -32768)


def test_the_namespace_describes_itself() -> None:
    info = ft.__array_namespace_info__()
    assert ft.zeros(1).__array_namespace__() is ft
    assert info.default_dtypes()["real floating"] is ft.zeros(1).dtype
    assert set(info.dtypes(kind="integral")) == {d.name for d in (*dtypes.SIGNED, *dtypes.UNSIGNED)}
    assert info.default_device() in info.devices()
    assert info.capabilities()["boolean indexing"]


@given(any_dtype, any_dtype)
def test_can_cast_agrees_with_promotion(a: dtypes.DType, b: dtypes.DType) -> None:
    try:
        assert ft.can_cast(a, b) == (dtypes.promote(a, b) is b)
    except DTypeError:
        assert not ft.can_cast(a, b)

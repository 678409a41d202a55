"""Copies through kept pinned memory have the right values whatever is written meanwhile, and take little of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_cuda
import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in import StandInMemory

import fuel_parallel.lazy as ft
from fuel_parallel.backends import backend_of, check_device
from fuel_parallel.backends.staging import SLOTS, Staging

DTYPES = [np.bool_, np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex128]


@pytest.fixture
def cupy() -> Iterator[Any]:
    with fake_cupy.installed() as module:
        yield module


def values(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 2 if dtype is np.bool_ else 100, shape).astype(dtype)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=8),
    st.sampled_from([1, 16, 48, 1 << 12]),
)
@settings(max_examples=60)
def test_arrays_go_there_and_back(copies: list[tuple[int, Any, bool]], slot_bytes: int) -> None:
    memory = StandInMemory("plain:0")
    staging = Staging(memory, slot_bytes)
    sent = []
    for number, (size, dtype, turned) in enumerate(copies):
        host = values((size, 3), dtype, number)
        host = host.T if turned else host
        array = memory.array_module.empty(host.shape, host.dtype)
        staging.to_device(array, host)
        sent.append((array, host.copy()))
        host[...] = 0  # it is the caller's again
    for array, wanted in sent:
        found = np.empty(wanted.shape, wanted.dtype)
        staging.to_host(found, array)
        np.testing.assert_array_equal(found, wanted)
    # A slot holds one element at least.
    assert memory.pinned_bytes <= SLOTS * 2 * max(slot_bytes, 1 << 12)


def test_a_large_array_goes_through_little_pinned_memory() -> None:
    memory = StandInMemory("plain:0")
    staging = Staging(memory, 1 << 12)
    host = values((1 << 16,), np.float64, 0)
    array = memory.array_module.empty(host.shape, host.dtype)
    staging.to_device(array, host)
    found = np.empty_like(host)
    staging.to_host(found, array)
    np.testing.assert_array_equal(found, host)
    assert memory.pinned_bytes == SLOTS << 12


def test_a_copy_to_the_device_waits_for_a_slot_only(cupy: Any) -> None:
    backend = backend_of(check_device("cuda:0"))
    stream = fake_cuda.current_stream()
    stream.synchronize()
    waits, host = stream.waits, np.arange(1000.0)
    arrays = [backend.from_host(host) for _ in range(SLOTS)]
    assert stream.waits == waits
    assert len(stream.queue) == SLOTS
    arrays.append(backend.from_host(host))
    assert len(stream.queue) == SLOTS  # the first slot was waited for
    for array in arrays:
        np.testing.assert_array_equal(backend.to_host(array), host)


def test_tensors_without_dimensions_or_elements_keep_their_shapes(cupy: Any) -> None:
    for shape in [(), (0,), (3, 0), (1,)]:
        x = ft.asarray(np.ones(shape), device="cuda:0")
        assert (x + 1).realize().node.value.shape == shape
        assert x.numpy().shape == shape


def test_what_is_kept_of_a_larger_array_is_copied(cupy: Any) -> None:
    x = ft.asarray(np.arange(10.0), device="cuda:0").realize()
    row = x[:2].realize()
    assert row.node.value.flags.owndata
    np.testing.assert_array_equal(row.numpy(), [0.0, 1.0])

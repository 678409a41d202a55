"""Ops on rows as kernels of their own, in CUDA C on the host: logic, products, positions of extremes, triangles."""

from __future__ import annotations

import numpy as np
import pytest

import fuel_parallel.lazy as ft
from fuel_parallel.runtime.codegen.arrangement import Limits
from fuel_parallel.runtime.codegen.single import _single

LANES = Limits(threads=64, lanes=64, columns_per_lane=1)


def values(shape, dtype):
    x = np.random.default_rng(0).integers(-3, 4, shape)
    return x.astype(dtype) if np.dtype(dtype).kind != "f" else np.where(x == 3, np.nan, x).astype(dtype)


CASES = [
    (lambda x: ft.argmax(x, axis=-1), (9, 70), np.float32),
    (lambda x: ft.argmin(x, axis=1), (2, 11, 3), np.int8),
    (lambda x: ft.argmax(x, axis=0), (5, 4), np.bool_),
    (lambda x: ft.any(x, axis=(0, 2)), (2, 3, 40), np.float64),
    (lambda x: ft.all(x, axis=-1), (6, 130), np.int32),
    (lambda x: ft.prod(x, axis=1), (4, 33), np.int16),
    (lambda x: ft.prod(x), (2, 5), np.float64),
    (lambda x: ft.tril(x, k=-1), (2, 5, 4), np.float32),
    (lambda x: ft.triu(x, k=2), (3, 7), np.int64),
    (lambda x: ft.tril(x), (4, 4), np.bool_),
]


@pytest.mark.parametrize(("build", "shape", "dtype"), CASES)
@pytest.mark.parametrize("limits", [None, LANES], ids=["short", "lanes"])
def test_it_gives_what_numpy_gives(build, shape, dtype, limits, on_host):
    x = values(shape, dtype)
    node = build(ft.asarray(x)).node
    wanted = build(ft.asarray(x)).numpy()
    array = x.reshape(node.inputs[0].spec.shape) if node.op.name != "reshape" else x
    single = _single(node.op, (node.inputs[0].spec,), node.attrs, node.spec)
    assert single is not None
    ordered = array if single.order is None else array.transpose(single.order)
    (found,) = on_host(single.program, [np.ascontiguousarray(ordered)], limits)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)

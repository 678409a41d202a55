"""OpenCL: arrays come and go whole, generated kernels agree with numpy, and mistakes are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import DeviceError, RealizeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan

NUMBERS = [d for d in dtypes.ALL if dtypes.kind(d) in ("integral", "real floating")]


def random(shape: tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).normal(size=shape) * 3
    return (np.abs(values) if np.dtype(dtype).kind == "u" else values).astype(dtype)


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 2)], ids=str)
def test_arrays_come_back_as_they_went(opencl: str, dtype: Any, shape: tuple[int, ...]) -> None:
    x = random(shape).astype(dtype)
    there = ft.asarray(x).to(opencl)
    assert there.numpy().tobytes() == x.tobytes()
    assert ft.flip(there.realize()).numpy().tobytes() == np.ascontiguousarray(np.flip(x)).tobytes()


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_every_number_is_computed_in_as_by_numpy(opencl: str, dtype: Any) -> None:
    a, b = (ft.asarray(random((3, 17), dtype, seed)) for seed in (1, 2))

    def results(x: ft.Tensor, y: ft.Tensor) -> list[ft.Tensor]:
        return [x * y + x, ft.maximum(x, y), x > y, ft.sum(x, axis=0), ft.max(y, axis=1), ft.astype(x, ft.float32) / 3]

    for here, there in zip(results(a, b), results(a.to(opencl), b.to(opencl)), strict=True):
        assert (there.device, there.dtype) == (opencl, here.dtype)
        np.testing.assert_allclose(
            there.numpy().astype(np.float64),
            here.numpy().astype(np.float64),
            rtol=2e-2 if dtypes.is_half(dtype) else 1e-5,
        )


@pytest.mark.parametrize("dtype", [ft.float16, ft.bfloat16, ft.float32, ft.float64, ft.int32], ids=str)
@pytest.mark.parametrize(
    "shapes", [((1, 1), (1, 1)), ((17, 33), (33, 5)), ((3, 1, 2, 4), (2, 4, 3)), ((2, 0), (0, 3))], ids=str
)
def test_products_agree(opencl: str, dtype: Any, shapes: Any) -> None:
    a, b = (ft.asarray(random(shape, np.float64, seed)).astype(dtype) for seed, shape in enumerate(shapes))
    found = ft.matmul(a.to(opencl), b.to(opencl))
    wanted = ft.matmul(a, b).numpy().astype(np.float64)
    tolerance = {2: 5e-2, 4: 1e-5, 8: 1e-13}[dtype.itemsize]
    np.testing.assert_allclose(found.numpy().astype(np.float64), wanted, rtol=tolerance, atol=tolerance * 10)


@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 150), seed=st.integers(0, 9))
def test_regions_agree_with_the_cpu(opencl: str, rows: int, columns: int, seed: int) -> None:
    values = random((rows, columns), np.float64, seed)

    def results(x: ft.Tensor) -> list[ft.Tensor]:
        y = ft.softmax(x, axis=-1) * ft.tanh(x)
        return [y, ft.sum(y, axis=0), ft.sum(y), ft.layer_norm(x), ft.grad(ft.sum(y * y), x)]

    here, there = results(ft.asarray(values)), results(ft.asarray(values).to(opencl).realize())
    fp.realize(there)
    for mine, theirs in zip(there, here, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-9, atol=1e-12)


def test_a_chain_is_one_generated_kernel(opencl: str) -> None:
    x = ft.asarray(random((64, 65))).to(opencl).realize()
    plan = make_plan(trace([ft.sum(ft.exp(x) * x - x, axis=-1).node])[0], ("fusion",))
    assert [(step.op.name, step.spec.device) for step in plan.steps] == [("region", opencl), ("item", opencl)]


def test_an_index_out_of_bounds_is_found(opencl: str) -> None:
    x = ft.asarray(random((4, 3))).to(opencl)
    assert x[ft.asarray([-1, 0], device=opencl)].tolist() == x.numpy()[[-1, 0]].tolist()
    with pytest.raises(RealizeError, match="an index is out of bounds for axis 0 with size 4"):
        x[ft.asarray([1, 4], device=opencl)].realize()


def test_operands_on_two_devices_are_both_named(opencl: str) -> None:
    with pytest.raises(DeviceError, match=f"add: operands are on cpu and {opencl}; move them to one device"):
        ft.ones(2) + ft.ones(2, device=opencl)


def test_there_is_no_dlpack_capsule(opencl: str) -> None:
    with pytest.raises(DeviceError, match=r"x\.to\('cpu'\)"):
        ft.ones(2, device=opencl).__dlpack__()


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 12),
    count=st.integers(0, 30),
    inner=st.integers(1, 4),
    outer=st.integers(1, 3),
    dtype=st.sampled_from([np.float64, np.float32, np.float16, np.int64]),
    seed=st.integers(0, 99),
)
def test_rows_are_added_in_the_order_of_their_indices(
    opencl: str, rows: int, count: int, inner: int, outer: int, dtype: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    index = rng.integers(-rows, rows, count)
    g = rng.integers(-4, 5, (outer, count, inner)).astype(dtype)

    def total(device: str) -> Any:
        from fuel_parallel.lazy.node import OPS, apply

        nodes = [ft.asarray(x).to(device).node for x in (g, index)]
        return ft.Tensor(apply(OPS["index_add"], tuple(nodes), (outer, rows, inner), (1,)))

    wanted = np.zeros((outer, rows, inner))
    np.add.at(wanted, (slice(None), index), g)
    found = total(opencl)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8, np.uint16, np.bool_], ids=str)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_running_sums_and_products_agree(opencl: str, dtype: Any, axis: int) -> None:
    x = random((2, 3, 5), np.float64).astype(dtype)
    for function in (ft.cumulative_sum, ft.cumulative_prod):
        here, there = function(ft.asarray(x), axis=axis), function(ft.asarray(x).to(opencl), axis=axis)
        assert (there.dtype, there.device) == (here.dtype, opencl)
        np.testing.assert_allclose(there.numpy().astype(np.float64), here.numpy().astype(np.float64), rtol=2e-3)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_axes_without_elements(opencl: str, shape: tuple[int, ...]) -> None:
    x = ft.zeros(shape, device=opencl)
    assert ft.any(x, axis=1).tolist() == [False] * shape[0]
    assert ft.prod(x, axis=1).tolist() == [1.0] * shape[0]
    assert ft.cumulative_sum(x, axis=1).shape == shape
    assert ft.tril(x).shape == shape


@settings(max_examples=15, deadline=None)
@given(
    m=st.integers(1, 20),
    k=st.integers(0, 20),
    n=st.integers(1, 20),
    lead=st.sampled_from([(), (2,), (3, 1)]),
    turned=st.tuples(st.booleans(), st.booleans()),
)
def test_products_read_turned_operands_as_they_lie(
    opencl: str, m: int, k: int, n: int, lead: tuple[int, ...], turned: tuple[bool, bool]
) -> None:
    shapes = [(*lead, m, k), (k, n)]
    arrays = [random(shape, np.float64, seed) for seed, shape in enumerate(shapes)]

    def there(x: Any, is_turned: bool) -> ft.Tensor:
        return ft.asarray(np.swapaxes(x, -1, -2)).to(opencl).mT if is_turned else ft.asarray(x).to(opencl)

    a, b = map(there, arrays, turned)
    np.testing.assert_allclose((a @ b).numpy(), arrays[0] @ arrays[1], rtol=1e-12, atol=1e-12)
    # The same operands for other readers, and once more for a product.
    np.testing.assert_array_equal((a + 0).numpy(), arrays[0])
    np.testing.assert_array_equal(b.numpy(), arrays[1])
    np.testing.assert_array_equal(b.mT.numpy(), arrays[1].T)


def test_a_turned_operand_of_a_product_is_not_copied(opencl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fuel_parallel.backends import backend_of

    x = ft.asarray(random((5, 3))).to(opencl).realize()
    module = backend_of(opencl).array_module
    monkeypatch.setattr(module, "copy", lambda *_: pytest.fail("copied"))
    product = (x.mT @ x).realize()
    monkeypatch.undo()
    np.testing.assert_allclose(product.numpy(), x.numpy().T @ x.numpy())
    turned = ft.permute_dims(x, (1, 0)).realize()
    assert not turned.node.value.turned, "what leaves the plan holds its own elements"

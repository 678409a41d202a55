"""Products by cuBLAS are numpy's, for operands and results that lie in memory as they please."""

from __future__ import annotations

import ctypes
import types

import numpy as np
import pytest
import stand_in
import stand_in_cublas
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_cublas import Cupy

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import backends
from fuel_parallel.backends.cublas import Cublas, CupyWithProducts
from fuel_parallel.errors import ArgumentError, DeviceError, RealizeError
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import PlanCache, make_plan

pytestmark = pytest.mark.skipif(stand_in_cublas.COMPILER is None, reason=stand_in_cublas.NO_COMPILER)

DTYPES = [ft.float16, ft.bfloat16, ft.float32, ft.float64, ft.complex64, ft.complex128]
TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "complex64": 1e-5}


@pytest.fixture
def cupy():
    return Cupy(stand_in.ArrayModule(guarded=False))


@pytest.fixture
def xp(cupy):
    return CupyWithProducts(cupy, stand_in_cublas.library())


@pytest.fixture
def device():
    with stand_in.installed(stand_in.StandInMemory("products:0"), stand_in_cublas.Backend) as memory:
        yield memory.device


@pytest.fixture(autouse=True)
def usual_precision(monkeypatch):
    monkeypatch.setattr("fuel_parallel.backends.precision._chosen", "")
    monkeypatch.delenv("FUEL_MATMUL_PRECISION", raising=False)


def seen():
    return stand_in_cublas.library().seen


def numbers(shape, dtype, seed=0):
    draw = np.random.default_rng(seed)
    values = draw.normal(size=shape)
    return (values + 1j * draw.normal(size=shape) if dtype.kind == "c" else values).astype(dtype)


def on_stand_in(cupy, values):
    """An array of the stand-in that lies as numpy's does: axes in the same order, steps, repetitions, gaps."""
    low, high = np.lib.array_utils.byte_bounds(values)
    size = high - low if values.size else 0
    whole = cupy.module.new(np.frombuffer(ctypes.string_at(low, size), np.uint8))
    stand_in.current().synchronize()
    start = values.ctypes.data - low if size else 0
    view = np.ndarray(values.shape, values.dtype, whole.values.data, start, values.strides if size else None)
    return stand_in.Array(whole.block, view, whole.module)


@st.composite
def lying_anyhow(draw, shape, dtype, writable=False):
    """An array of a shape in memory: axes in some order, with steps and gaps, repeated, backwards."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from([1, 1, 2])) for _ in shape]
    gaps = [draw(st.sampled_from([0, 0, 3])) for _ in shape]
    repeated = [not writable and extent > 1 and draw(st.integers(0, 5)) == 0 for extent in shape]
    backwards = [not writable and draw(st.integers(0, 7)) == 0 for _ in shape]
    axes = list(zip(shape, steps, gaps, repeated, strict=True))
    extents = [1 if again else extent * step + gap for extent, step, gap, again in axes]
    base = numbers([extents[axis] for axis in order], dtype, draw(st.integers(0, 99)))
    x = base.transpose([order.index(axis) for axis in range(len(shape))])
    index = tuple(
        slice(None) if again else slice(gap, gap + extent * step, step)
        for extent, step, gap, again in zip(shape, steps, gaps, repeated, strict=True)
    )
    x = x[index]
    if any(repeated):
        x = np.lib.stride_tricks.as_strided(x, shape, [0 if r else s for r, s in zip(repeated, x.strides, strict=True)])
    return x[tuple(slice(None, None, -1) if b else slice(None) for b in backwards)]


@st.composite
def products(draw):
    """Two operands and memory for the result."""
    dtype = draw(st.sampled_from(DTYPES))
    rows, inner, columns = (draw(st.sampled_from([0, 1, 2, 3, 5])) for _ in range(3))
    batch = draw(st.lists(st.sampled_from([1, 2, 3, 0]), max_size=3))

    def operand(matrix):
        own = [1 if draw(st.booleans()) else extent for extent in batch][draw(st.integers(0, len(batch))) :]
        return draw(lying_anyhow((*own, *matrix), dtype))

    left, right = operand((rows, inner)), operand((inner, columns))
    shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), rows, columns)
    return left, right, draw(lying_anyhow(shape, dtype, writable=True))


def wanted(left, right):
    wide = np.float32 if left.dtype.itemsize == 2 else left.dtype
    return np.matmul(left.astype(wide), right.astype(wide)).astype(left.dtype)


def assert_close(found, expected):
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    wide = np.float32 if found.dtype.itemsize == 2 else found.dtype
    tolerance = TOLERANCES.get(found.dtype.name, 1e-12)
    np.testing.assert_allclose(found.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance)


@given(products())
@settings(max_examples=400, deadline=None)
def test_a_product_is_that_of_numpy_however_its_operands_lie(case):
    left, right, memory = case
    cupy = Cupy(stand_in.ArrayModule(guarded=False))
    xp = CupyWithProducts(cupy, stand_in_cublas.library())
    a, b = on_stand_in(cupy, left), on_stand_in(cupy, right)
    assert_close(xp.matmul(a, b).get(), wanted(left, right))
    out = on_stand_in(cupy, memory)
    around = out.block.bytes.copy()
    assert xp.matmul(a, b, out=out) is out
    assert_close(out.get(), wanted(left, right))
    out.values[...] = memory  # what it held before: nothing beside it was written
    assert np.array_equal(out.block.bytes, around)
    assert cupy.left_to_cupy == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transposes_and_repeated_operands_are_not_copied(cupy, xp, dtype):
    heads = numbers((2, 7, 3, 4), dtype).transpose(0, 2, 1, 3)  # [batch, heads, length, dim] of [batch, length, ...]
    cases = [
        (numbers((3, 5), dtype).T, numbers((4, 3), dtype).T, 1, 1),
        (numbers((6, 2, 3), dtype), numbers((3, 4), dtype), 1, 1),  # one product of all rows
        (numbers((6, 2, 3), dtype).swapaxes(-1, -2), numbers((2, 4), dtype), 1, 6),
        (numbers((2, 3), dtype), numbers((6, 3, 4), dtype), 1, 6),
        (heads, heads.swapaxes(-1, -2), 2, 3),
        (numbers((2, 1, 5, 4), dtype), heads.swapaxes(-1, -2), 2, 3),
        (numbers((5, 4), dtype)[:, :3], numbers((8, 4), dtype)[2:5], 1, 1),
        (numbers((5, 4), dtype)[:, 1:2], numbers((1, 8), dtype)[:, ::2], 1, 1),  # a column, a row
        (numbers((5, 6), dtype)[:, ::2], numbers((3, 4), dtype), 1, 1),  # neither rows nor columns: this one is copied
    ]
    for number, (left, right, calls, batch) in enumerate(cases):
        cupy.copies, before = 0, seen().products
        found = xp.matmul(on_stand_in(cupy, left), on_stand_in(cupy, right)).get()
        assert_close(found, wanted(left, right))
        assert (seen().products - before, seen().batch) == (calls, batch), number
        assert cupy.copies == (number == len(cases) - 1), number


def test_many_batches_that_are_no_stride_apart_are_copied_once(cupy, xp):
    left, right = numbers((40, 1, 2, 3), ft.float64), numbers((40, 3, 3, 2), ft.float64)
    before = seen().products
    assert_close(xp.matmul(on_stand_in(cupy, left), on_stand_in(cupy, right)).get(), wanted(left, right))
    assert (seen().products - before, seen().batch, cupy.copies) == (1, 120, 1)


def test_vectors_and_what_cublas_does_not_know(cupy, xp):
    matrix, stack, vector = (numbers(shape, ft.float32) for shape in ((3, 4), (2, 4, 3), (4,)))
    for left, right in ((matrix, vector), (vector, stack), (vector, vector)):
        found = xp.matmul(on_stand_in(cupy, left), on_stand_in(cupy, right))
        np.testing.assert_allclose(found.get(), np.matmul(left, right), rtol=1e-5)
    assert cupy.left_to_cupy == 0
    whole = np.arange(12).reshape(3, 4)
    assert xp.matmul(on_stand_in(cupy, whole), on_stand_in(cupy, whole.T.copy())).tolist() == (whole @ whole.T).tolist()
    assert cupy.left_to_cupy == 1


def test_float32_is_exact_unless_tf32_is_asked_for(cupy, xp, monkeypatch):
    left, right = numbers((8, 64), ft.float32), numbers((64, 8), ft.float32, seed=1)
    exact = left.astype(np.float64) @ right.astype(np.float64)

    def error():
        product = xp.matmul(on_stand_in(cupy, left), on_stand_in(cupy, right)).get()
        return np.abs(product.astype(np.float64) - exact).max()

    assert fp.matmul_precision() == "highest"
    assert error() < 1e-5
    assert seen().compute == 68
    assert fp.matmul_precision("high") == "high"
    assert 1e-4 < error() < 1e-1
    assert seen().compute == 77
    for dtype, compute in ((ft.float64, 70), (ft.float16, 68), (ft.bfloat16, 68), (ft.complex64, 77)):
        xp.matmul(on_stand_in(cupy, left.astype(dtype)), on_stand_in(cupy, right.astype(dtype)))
        assert seen().compute == compute
    monkeypatch.setenv("FUEL_MATMUL_PRECISION", "highest")
    assert fp.matmul_precision() == "high"  # what the script says holds


def test_a_precision_that_is_none_is_an_error(monkeypatch):
    with pytest.raises(
        ArgumentError, match="matmul_precision: unknown precision 'tf32'; expected one of highest, high"
    ):
        fp.matmul_precision("tf32")
    monkeypatch.setenv("FUEL_MATMUL_PRECISION", "fast")
    with pytest.raises(ArgumentError, match="FUEL_MATMUL_PRECISION: unknown precision 'fast'"):
        ft.ones(2).realize()
    monkeypatch.setenv("FUEL_MATMUL_PRECISION", "high")
    assert fp.matmul_precision() == "high"


def test_halves_are_summed_in_float32(cupy, xp):
    # 4096 + 1 is 4096 in both halves: added one by one in 16 bits the ones would be lost.
    for dtype in (ft.float16, ft.bfloat16):
        left = np.array([[4096.0] + [1.0] * 4096], dtype)
        assert xp.matmul(on_stand_in(cupy, left), on_stand_in(cupy, np.ones((4097, 1), dtype))).get() == 8192
        assert seen().math_mode == 16


def test_each_stream_has_a_workspace_and_captures_have_one_together(cupy, xp):
    a = on_stand_in(cupy, numbers((2, 2), ft.float32))
    xp.matmul(a, a)
    assert (cupy.allocations, seen().workspace_bytes, seen().stream) == (1, 4 << 20, stand_in.current().ptr)
    cupy.capturing = True
    with pytest.raises(DeviceError, match="nothing is set aside for matrix products that are captured"):
        xp.matmul(a, a)
    xp.products.prepare()
    memory = stand_in.StandInMemory()
    for _ in range(2):
        with memory.running(memory.new_stream()):
            xp.matmul(a, a)
            assert (cupy.allocations, seen().stream) == (2, stand_in.current().ptr)


def test_hopper_gets_the_larger_workspace():
    for capability, size in (("80", 4 << 20), ("90", 32 << 20), ("120", 32 << 20)):
        cupy = Cupy(stand_in.ArrayModule(guarded=False), capability)
        a = on_stand_in(cupy, numbers((2, 2), ft.float32))
        Cublas(cupy, stand_in_cublas.library()).matmul(a, a)
        assert seen().workspace_bytes == size


def test_a_missing_library_is_named_with_a_remedy(cupy):
    class WithoutToolkit:
        @property
        def cublas_handle(self):
            raise ImportError('Failure finding "libcublas.so.13"\nand more')

    cupy.cuda.Device = WithoutToolkit
    a = on_stand_in(cupy, numbers((2, 2), ft.float32))
    remedy = r'cuBLAS.* is not there: Failure finding "libcublas.so.13"; install .*cupy-cuda13x\[ctk\]'
    with pytest.raises(DeviceError, match=remedy):
        CupyWithProducts(cupy).matmul(a, a)
    cupy.cuda.Device = lambda: types.SimpleNamespace(cublas_handle=1)
    cupy.cuda.runtime.runtimeGetVersion = lambda: 99010
    with pytest.raises(DeviceError, match=r"libcublas\.so\.99"):  # which nobody has loaded
        CupyWithProducts(cupy).matmul(a, a)


def test_a_failure_of_cublas_names_the_line_of_the_script(device, monkeypatch):
    def fails(*_: object) -> int:
        return 13

    library = backends.backend_of(device).array_module.products._library
    monkeypatch.setattr(library, "cublasGemmEx", fails)
    x = ft.asarray(np.ones((2, 2))).to(device)
    with pytest.raises(RealizeError, match=r"cublasGemmEx .* failed with status 13 \(execution failed\)") as error:
        (x @ x).realize()
    assert "test_cublas.py" in str(error.value)


def test_products_of_a_device_run_by_cublas_and_halves_are_not_widened(device):
    x, y = (numbers(shape, ft.float16) for shape in ((4, 6), (6, 3)))
    a, b = (ft.asarray(values).to(device).realize() for values in (x, y))
    before = seen().products
    assert_close((a @ b).numpy(), wanted(x, y))
    ends = ft.asarray(np.array([1, 4])).to(device)
    matrices = ft.asarray(np.stack([y, y])).to(device)
    assert_close(ft.grouped_matmul(a, matrices, ends).numpy(), wanted(x, y))
    assert_close(ft.einsum("ij,jk->ki", a, b).numpy(), wanted(x, y).T)
    assert seen().products - before == 4


def test_the_precision_is_part_of_the_plan(device):
    def graph():
        x = ft.ones((2, 2)).to(device).realize()
        return trace([(x @ x).node])[0]

    plans, there = PlanCache(), graph()
    exact = plans.plan_for(there)
    fp.matmul_precision("high")
    fast = plans.plan_for(there)
    assert plans.made == 2
    assert "float32 products in TF32" in str(fast)
    assert "TF32" not in str(exact)
    here = trace([(ft.ones((2, 2)).realize() @ ft.ones((2, 2)).realize()).node])[0]
    assert not make_plan(here).in_tf32  # a device without it


def test_the_stand_in_refuses_what_cublas_refuses(cupy, xp):
    a = on_stand_in(cupy, numbers((2, 3), ft.float32))
    xp.matmul(a, on_stand_in(cupy, numbers((3, 2), ft.float32)))
    library = stand_in_cublas.library()
    handle, one = cupy.cuda.Device().cublas_handle, ctypes.addressof(ctypes.c_float(1))
    matrix = (a.data.ptr, 0)
    usual = [handle, 0, 0, 2, 2, 2, one, *matrix, 2, *matrix, 2, one, *matrix, 2, 68, -1]
    for place, value in ((9, 1), (12, 1), (16, 1), (17, 70), (8, 2)):
        assert library.cublasGemmEx(*usual[:place], value, *usual[place + 1 :]) in (7, 15)
    library.cublasSetStream_v2(handle, 1)
    assert library.cublasGemmEx(*usual) == 1  # the workspace is gone

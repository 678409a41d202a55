"""Products by the real cuBLAS, where there is a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.backends import available_devices, backend_of

DEVICE = next((name for name in available_devices() if name.startswith("cuda")), "")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not DEVICE, reason="CuPy sees no CUDA device")]

DTYPES = [ft.float16, ft.bfloat16, ft.float32, ft.float64, ft.complex64, ft.complex128]
TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-5, "complex64": 2e-5}


@pytest.fixture
def xp():
    backend = backend_of(DEVICE)
    with backend.running():
        yield backend.array_module


@pytest.fixture(autouse=True)
def usual_precision(monkeypatch):
    monkeypatch.setattr("fuel_parallel.backends.precision._chosen", "")
    monkeypatch.delenv("FUEL_MATMUL_PRECISION", raising=False)


def numbers(shape, dtype, seed=0):
    draw = np.random.default_rng(seed)
    values = draw.normal(size=shape)
    return (values + 1j * draw.normal(size=shape) if dtype.kind == "c" else values).astype(dtype)


def layouts(dtype):
    """Pairs of operands: in order, transposed, parts of larger ones, vectors, batches in any order, empty sums."""
    heads = numbers((2, 7, 3, 4), dtype).transpose(0, 2, 1, 3)
    return [
        (numbers((65, 33), dtype), numbers((33, 129), dtype)),
        (numbers((33, 65), dtype).T, numbers((129, 33), dtype).T),
        (numbers((65, 40), dtype)[:, 3:36], numbers((80, 129), dtype)[5:38]),
        (numbers((1, 33), dtype), numbers((33, 5), dtype)),
        (numbers((9, 33), dtype), numbers((33, 1), dtype)),
        (numbers((6, 9, 33), dtype), numbers((33, 5), dtype)),
        (heads, heads.swapaxes(-1, -2)),
        (numbers((2, 1, 5, 4), dtype), heads.swapaxes(-1, -2)),
        (numbers((4, 8), dtype)[:, ::2], numbers((4, 3), dtype)),
        (numbers((3, 0), dtype), numbers((0, 4), dtype)),
        (numbers((4000, 1, 2, 3), dtype), numbers((20, 3, 2), dtype)),  # many in a batch
    ]


def on_device(xp, values):
    """The array, with the strides that it has on the host."""
    if not values.size:
        return xp.empty(values.shape, values.dtype)
    base = values
    while isinstance(base.base, np.ndarray):
        base = base.base
    memory = xp.asarray(base).data + (values.ctypes.data - base.ctypes.data)
    return xp.ndarray(values.shape, values.dtype, memory, strides=values.strides)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_numpy(xp, dtype):
    wide = np.float32 if dtype.itemsize == 2 else dtype
    tolerance = TOLERANCES.get(dtype.name, 1e-12)
    for number, (left, right) in enumerate(layouts(dtype)):
        wanted = np.matmul(left.astype(wide), right.astype(wide)).astype(dtype).astype(wide)
        found = xp.matmul(on_device(xp, left), on_device(xp, right)).get().astype(wide)
        scale = max(1.0, float(np.abs(wanted).max(initial=0)))
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * scale, err_msg=str(number))


def test_float32_is_exact_unless_tf32_is_asked_for(xp):
    left, right = numbers((256, 1024), ft.float32), numbers((1024, 256), ft.float32, seed=1)
    exact = left.astype(np.float64) @ right.astype(np.float64)

    def error():
        return np.abs(xp.matmul(xp.asarray(left), xp.asarray(right)).get() - exact).max()

    assert error() < 1e-3
    fp.matmul_precision("high")
    if backend_of(DEVICE).has_tf32:
        assert 5e-3 < error() < 1


def test_halves_are_summed_in_float32(xp):
    for dtype in (ft.float16, ft.bfloat16):
        left = xp.asarray(np.array([[4096.0] + [1.0] * 4096], dtype))
        assert xp.matmul(left, xp.asarray(np.ones((4097, 1), dtype))).get() == 8192


def test_a_product_is_captured_and_played_again(xp):
    a, b = (xp.asarray(numbers((64, 64), ft.float32, seed)) for seed in (0, 1))
    out = xp.empty((64, 64), np.float32)
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()
    with stream:
        xp.products.prepare()
        stream.begin_capture(xp.cuda.runtime.streamCaptureModeThreadLocal)
        xp.matmul(a, b, out=out)
        graph = stream.end_capture()
        for factor in (1, 2):
            a *= factor
            graph.launch(stream)
            stream.synchronize()
            np.testing.assert_allclose(out.get(), a.get() @ b.get(), rtol=1e-4, atol=1e-4)


def test_the_result_is_the_same_on_every_run(xp):
    a, b = (xp.asarray(numbers((300, 4000), ft.float32, seed)) for seed in (0, 1))
    digests = {xp.matmul(a, b.T).get().tobytes() for _ in range(10)}
    assert len(digests) == 1

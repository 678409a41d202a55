"""Generated kernels on a real GPU, where there is one."""

from __future__ import annotations

import numpy as np
import pytest

import fuel_parallel.lazy as ft
from fuel_parallel.backends import available_devices, backend_of
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.codegen.launch import launch
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan

DEVICE = next((name for name in available_devices() if name.startswith(("cuda", "rocm"))), "")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not DEVICE, reason="no CUDA or ROCm device")]


def array(*shape, seed=0):
    return ft.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def gradients_of_softmax():
    x = array(500, 1000)
    y = ft.softmax(x)
    return [y, ft.grad(ft.sum(y * y), x)]


def gradients_of_a_norm():
    x, g, w = array(600, 768), array(600, 768, seed=1), array(768, seed=2)
    return ft.grad(ft.sum(ft.layer_norm(x, w) * g), [x, w])


def cross_entropy_of_a_large_vocabulary():
    x = array(20, 50257)
    loss = ft.cross_entropy(x, ft.asarray(np.arange(20) * 7))
    return [loss, ft.grad(loss, x)]


def gelu_and_sums():
    x = array(3000, 40)
    y = ft.gelu(x, approximate=True)
    return [y, ft.sum(y), ft.sum(y, axis=0), ft.max(y, axis=-1)]


def integers():
    x = ft.asarray(np.random.default_rng(0).integers(-100, 100, size=(200, 40)).astype(np.int8))
    return [x // 7 + x % 5, ft.sum(x * x, axis=-1), ft.sum(x > 3)]


@pytest.mark.parametrize(
    "make", [gradients_of_softmax, gradients_of_a_norm, cross_entropy_of_a_large_vocabulary, gelu_and_sums, integers]
)
def test_device_and_host_agree(make):
    graph, leaves, _ = trace([t.node for t in make()])
    plan = make_plan(graph, tuple(passes.PASSES))
    values = [*[leaf.value for leaf in leaves], *plan.constants, *[None] * len(plan.steps)]
    backend = backend_of(DEVICE)
    for step in plan.steps:
        arguments = [values[slot] for slot in step.inputs]
        run = [arguments] if step.op.variadic else arguments
        values[step.output] = step.kernel(np, *run, *step.attrs)
        if step.op.name != "region":
            continue
        (program,) = step.attrs
        with backend.running():
            xp = backend.array_module
            inputs = [xp.asarray(a) for a in arguments]
            once, again = ([xp.empty(shape, program.dtype_of(r)) for r, shape in program.outputs] for _ in range(2))
            assert launch(xp, once, inputs, program)
            assert launch(xp, again, inputs, program)
        for mine, same, theirs in zip(once, again, values[step.output], strict=True):
            assert backend.to_host(mine).tobytes() == backend.to_host(same).tobytes()
            np.testing.assert_allclose(backend.to_host(mine), theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize(("queries", "keys", "dim", "causal"), [(700, 700, 64, True), (100, 900, 128, False)])
def test_attention_on_the_device_is_that_of_the_host(queries, keys, dim, causal, dtype):
    rng = np.random.default_rng(0)
    shapes = ((2, queries, 6, dim), (2, keys, 2, dim), (2, keys, 2, dim))
    arrays = [ft.asarray(rng.normal(size=shape)).astype(dtype).numpy() for shape in shapes]
    mask = rng.random((2, 1, 1, keys)) < 0.9

    def results(device):
        xs = [ft.asarray(a).to(device) for a in arrays]
        heads = [ft.permute_dims(x, (0, 2, 1, 3)) for x in xs]
        y = ft.scaled_dot_product_attention(*heads, mask=ft.asarray(mask).to(device), causal=causal)
        return [t.numpy() for t in (y, *ft.grad(ft.sum(ft.square(ft.astype(y, ft.float32))), xs))]

    rtol = {8: 1e-10, 4: 2e-4, 2: 3e-2}[arrays[0].itemsize]
    for once, again, wanted in zip(results(DEVICE), results(DEVICE), results("cpu"), strict=True):
        assert once.tobytes() == again.tobytes()
        np.testing.assert_allclose(once.astype(float), wanted.astype(float), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_attention_over_pages_on_the_device_is_that_of_the_host(stored):
    rng = np.random.default_rng(0)
    lengths, counts = np.array([300, 40, 700]), [1, 40, 129]
    table = rng.permutation(90).reshape(2, 45)[[0, 1, 0]].astype(np.int32)
    where = [ft.asarray(x) for x in (table, lengths, np.cumsum([0, *counts]))]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((170, 8, 64), (90, 16, 2, 64), (90, 16, 2, 64))]
    scales = {}
    if stored == "int8":
        arrays[1:] = [np.round(x * 40).clip(-127, 127).astype(np.int8) for x in arrays[1:]]
        scales = {name: rng.random((90, 16, 2)).astype(np.float32) for name in ("key_scales", "value_scales")}

    def result(device):
        own = {name: ft.asarray(x).to(device) for name, x in scales.items()}
        return ft.paged_attention(*(ft.asarray(x).to(device) for x in arrays), *where, **own).numpy()

    np.testing.assert_allclose(result(DEVICE), result("cpu"), rtol=2e-4, atol=2e-4)

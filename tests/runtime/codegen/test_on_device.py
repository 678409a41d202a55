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

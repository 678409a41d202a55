"""CUDA's compilers take every kind of generated kernel, without a word and without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

import cuda_compilers
import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import OPS, Spec
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.codegen.dialect import CUDA
from fuel_parallel.runtime.codegen.expressions import NOT_EXPRESSED
from fuel_parallel.runtime.codegen.launch import CUDA_OPTIONS, kernel_or_reason
from fuel_parallel.runtime.codegen.single import _single
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan
from fuel_parallel.runtime.program import Extent, Operation, Program

REAL = (dtypes.bool_, *dtypes.SIGNED, *dtypes.UNSIGNED, *dtypes.FLOATING)
ELEMENTWISE = sorted(op.name for op in OPS.values() if op.elementwise and op.name not in ("astype", *NOT_EXPRESSED))


@pytest.fixture(params=["nvrtc", "nvcc"])
def compiler(request: pytest.FixtureRequest) -> cuda_compilers.Compile:
    found = cuda_compilers.nvrtc() if request.param == "nvrtc" else cuda_compilers.nvcc()
    if found is None:
        pytest.skip(cuda_compilers.NO_NVRTC if request.param == "nvrtc" else cuda_compilers.NO_NVCC)
    return found


@pytest.fixture
def nvrtc() -> cuda_compilers.Compile:
    found = cuda_compilers.nvrtc()
    if found is None:
        pytest.skip(cuda_compilers.NO_NVRTC)
    return found


def array(*shape, dtype=dtypes.float32):
    return ft.asarray(np.random.default_rng(0).normal(size=shape).astype(dtype))


def regions(*tensors) -> Iterator[Program]:
    """The programs of a plan."""
    plan = make_plan(trace([t.node for t in tensors])[0], tuple(passes.PASSES))
    yield from (step.attrs[0] for step in plan.steps if step.op.name == "region")


def of_rows(dtype) -> Iterator[Program]:
    """Softmax, norms, losses, sums in every direction, with gradients; and a row that is too long to be held."""
    x, weight, bias = array(64, 256, dtype=dtype), array(256, dtype=dtype), array(256, dtype=dtype)
    index = ft.asarray(np.arange(64) % 7)
    for y in (ft.softmax(x), ft.log_softmax(x), ft.gelu(x) * ft.softmax(x), ft.rms_norm(x, weight)):
        yield from regions(y, ft.grad(ft.sum(ft.astype(y * y, dtypes.float32)), x))
    normed = ft.layer_norm(x, weight, bias)
    yield from regions(normed, *ft.grad(ft.sum(ft.astype(normed * normed, dtypes.float32)), [x, weight, bias]))
    loss = ft.cross_entropy(x, index)
    yield from regions(loss, ft.grad(loss, x))
    yield from regions(ft.sum(ft.tanh(x), axis=0), ft.sum(ft.tanh(x)), ft.sum(x > 0), ft.max(x * 2, axis=-1))
    yield from regions(ft.softmax(array(2, 40_000, dtype=dtype)))


def of_optimizers(dtype) -> Iterator[Program]:
    """Each optimizer's update of a parameter."""
    for name in ("SGD", "Adam", "AdamW", "Lion"):
        parameters = [fp.Parameter(array(64, 64, dtype=dtype))]
        optimizer = getattr(fp.optim, name)(parameters, lr=1e-3)
        optimizer.update([array(64, 64, dtype=dtype)])
        yield from regions(*parameters)


def of_expressions() -> Iterator[Program]:
    """All elementwise ops on a dtype, in one program for each."""
    for dtype in REAL:
        operations, used = [], 2
        for name in ELEMENTWISE:
            for count in (1, 2):
                try:
                    spec = OPS[name].infer(*[Spec((1000,), dtype)] * count)
                except (fp.FuelError, TypeError):
                    continue
                operations.append(Operation(OPS[name], (0, 1)[:count], (), spec.dtype, Extent.FULL))
        kinds = ((Extent.FULL, 0),) * used
        outputs = tuple((used + n, (1000,)) for n in range(len(operations)))
        yield Program(1000, 1, kinds, (dtype,) * used, tuple(operations), outputs, 1000)


def of_casts() -> Iterator[Program]:
    """Each dtype as every other."""
    for dtype in REAL:
        operations = [Operation(OPS["astype"], (0,), (to,), to, Extent.FULL) for to in REAL if to != dtype]
        outputs = tuple((1 + n, (1000,)) for n in range(len(operations)))
        yield Program(1000, 1, ((Extent.FULL, 0),), (dtype,), tuple(operations), outputs, 1000)


def of_single_ops(dtype) -> Iterator[Program]:
    """What is computed as a kernel of its own where a device has no other."""
    x, y = Spec((6, 40, 50), dtype), Spec((6, 40, 50), dtype)
    rows, indices = Spec((6, 40, 1), dtype), Spec((6, 40), dtypes.int64)
    few = Spec((6, 40), dtype)
    cases = [(name, (x,), ((0, 2), False), Spec((40,), dtype)) for name in ("sum", "mean", "max", "min")]
    cases += [(name, (x,), (1,), x) for name in ("softmax", "log_softmax")]
    cases += [
        ("normalize", (x,), (1e-5, True), x),
        ("pick", (x, indices), (), few),
        ("unpick", (few, indices), (50,), x),
    ]
    cases += [("scale_and_subtract", (x, rows, few, indices), (), x), ("multiply", (x, y), (), x)]
    for name, inputs, attrs, spec in cases:
        single = _single(OPS[name], inputs, attrs, spec)
        assert single is not None, name
        yield single.program


def sources_of(programs) -> dict[str, Program]:
    """One program for each source: those of other sizes share theirs."""
    found = {}
    for program in programs:
        kernel = kernel_or_reason(program, CUDA)
        assert not isinstance(kernel, str), f"{program}: {kernel}"
        found[kernel.source] = program
    return found


def compile_all(nvrtc, architecture, programs):
    found = sources_of(programs)
    for source, program in found.items():
        ptx = nvrtc(source, architecture)
        assert ".visible .entry region" in ptx
        assert f".target {architecture.replace('compute', 'sm')}" in ptx
        # What a thread holds lies in registers, unless it is indexed by what nobody knows when it is compiled. That is
        # slow; only sine and its kin of large numbers need it.
        assert not re.search(r"\.local\s+\.align", ptx) or " sin " in repr(program), program
    return found


@pytest.mark.parametrize("kind", [of_expressions, of_casts], ids=lambda kind: kind.__name__)
def test_every_expression_compiles_without_a_word(nvrtc, kind):
    assert len(compile_all(nvrtc, "compute_80", kind())) == len(REAL)


@pytest.mark.parametrize("dtype", dtypes.FLOATING, ids=str)
def test_every_kind_of_kernel_compiles_without_a_word(nvrtc, dtype):
    found = compile_all(nvrtc, "compute_80", [*of_rows(dtype), *of_optimizers(dtype), *of_single_ops(dtype)])
    assert len(found) > 20


@pytest.mark.parametrize("dtype", [ft.bfloat16, ft.float32], ids=str)
def test_kernels_of_rows_compile_for_hopper(nvrtc, dtype):
    assert len(compile_all(nvrtc, "compute_90", of_rows(dtype))) > 5


@pytest.mark.parametrize("dtype", [ft.float16, ft.float64], ids=str)
def test_both_compilers_take_a_kernel(compiler, dtype):
    x = array(64, 256, dtype=dtype)
    (program, *_) = regions(ft.softmax(x) * ft.gelu(x))
    assert ".entry region" in compiler(kernel_or_reason(program, CUDA).source, "compute_80")


def test_a_product_and_a_sum_stay_two_operations(compiler):
    x, y, z = (array(64, 64) for _ in range(3))
    (program,) = regions(x * y + z)
    source = kernel_or_reason(program, CUDA).source
    separate = compiler(source, "compute_80")
    assert re.search(r"mul(\.rn)?\.f32", separate)
    assert "fma.rn.f32" not in separate
    contracted = compiler(source, "compute_80", tuple(o for o in CUDA_OPTIONS if "fmad" not in o))
    assert "fma.rn.f32" in contracted

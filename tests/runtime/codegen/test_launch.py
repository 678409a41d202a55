"""What the launcher hands to CuPy."""

from __future__ import annotations

import numpy as np

import fuel_parallel.lazy as ft
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.codegen.launch import kernel_or_reason, launch
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan
from fuel_parallel.runtime.region import region_into


def plan_of(*tensors):
    graph, leaves, _ = trace([t.node for t in tensors])
    return make_plan(graph, tuple(passes.PASSES)), leaves


def region_of(*tensors):
    """The one region of a plan, its inputs, and memory for its outputs."""
    plan, leaves = plan_of(*tensors)
    values = [*[leaf.value for leaf in leaves], *plan.constants]
    (step,) = [step for step in plan.steps if step.op.name == "region"]
    (program,) = step.attrs
    outputs = [np.zeros(shape, program.dtype_of(register)) for register, shape in program.outputs]
    return program, [values[slot] for slot in step.inputs], outputs


def ones(*shape, dtype=np.float32):
    return ft.asarray(np.ones(shape, dtype))


def test_an_elementwise_region_is_one_launch(recording_cupy):
    program, arrays, outputs = region_of(ft.tanh(ones(100, 100)) * 2)
    assert launch(recording_cupy, outputs, arrays, program)
    ((name, grid, block, arguments),) = recording_cupy.launches
    assert (name, grid, block) == ("region", (40,), (256,))
    assert [a.shape for a in arguments[:-1]] == [(100, 100), (), (100, 100)]
    assert arguments[2] is outputs[0]
    assert (arguments[-1], arguments[-1].dtype) == (10000, np.int32)


def test_sums_take_a_workspace_and_a_second_launch(recording_cupy):
    x = ones(3000, 512)
    program, arrays, outputs = region_of(ft.sum(ft.tanh(x), axis=0), ft.sum(ft.tanh(x)))
    assert launch(recording_cupy, outputs, arrays, program)
    first, second = recording_cupy.launches
    assert [first[0], second[0]] == ["region", "region_finish"]
    assert first[1:3] == ((512,), (256,))
    assert second[1:3] == ((16,), (256,))
    assert [a.shape for a in first[3]] == [(3000, 512), (512, 512), (512,), ()]
    assert [a.shape for a in second[3]] == [(512, 512), (512,), (512,), (), (), ()]
    assert [int(a) for a in second[3][-2:]] == [512, 512]


def test_what_is_not_contiguous_is_made_so(recording_cupy):
    program, arrays, outputs = region_of(ft.tanh(ones(64, 64)) * ones(64, 64, dtype=np.float32))
    strided = [np.ones((64, 128), np.float32)[:, ::2] if a.ndim else a for a in arrays]
    assert launch(recording_cupy, outputs, strided, program)
    assert all(a.flags.c_contiguous for a in recording_cupy.launches[0][3][:-1])


def test_a_source_is_compiled_once_for_each_device(recording_cupy):
    small = region_of(ft.tanh(ones(30, 100)) * 2)
    large = region_of(ft.tanh(ones(70, 100)) * 2)
    for program, arrays, outputs in (small, large, small):
        assert launch(recording_cupy, outputs, arrays, program)
    assert len(recording_cupy.sources) == 1
    recording_cupy.device = 1
    assert launch(recording_cupy, small[2], small[1], small[0])
    assert len(recording_cupy.sources) == 2


def test_products_and_sums_are_not_contracted(recording_cupy):
    program, arrays, outputs = region_of(ft.tanh(ones(20, 20)) * 3)
    launch(recording_cupy, outputs, arrays, program)
    assert recording_cupy.options == [("-std=c++17", "--fmad=false")]
    recording_cupy.device, recording_cupy.cuda.runtime.is_hip = 2, True
    launch(recording_cupy, outputs, arrays, program)
    assert recording_cupy.options[1] == ("-std=c++17", "-ffp-contract=off")


def test_a_region_that_is_declined_is_run_by_the_array_module(recording_cupy):
    program, arrays, outputs = region_of(ft.exp(ones(20, 20, dtype=np.complex64)) * 2)
    assert kernel_or_reason(program) == "exp of complex64: complex numbers are not expressed"
    assert not launch(recording_cupy, outputs, arrays, program)
    region_into(np, outputs, arrays, program)
    np.testing.assert_allclose(outputs[0], np.exp(1) * 2 * np.ones((20, 20)), rtol=1e-6)


def test_a_region_on_cupy_goes_to_the_launcher(recording_cupy):
    program, arrays, outputs = region_of(ft.tanh(ones(20, 20)) * 4)
    region_into(recording_cupy, outputs, arrays, program)
    assert [name for name, *_ in recording_cupy.launches] == ["region"]

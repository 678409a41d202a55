"""Regions on the CPU: the generated function, its scratch, and what it writes over."""

from __future__ import annotations

import ast
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuel_parallel.lazy as ft
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.blocks import run_blocks, source_of
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan
from fuel_parallel.runtime.program import Extent, reusable
from fuel_parallel.runtime.region import REGION

ALL = tuple(passes.PASSES)


def programs(*tensors):
    graph, _, _ = trace([t.node for t in tensors])
    return [step.attrs[0] for step in make_plan(graph, ALL).steps if step.op is REGION]


def random(*shape, dtype=np.float32):
    return ft.asarray(np.random.default_rng(0).normal(size=shape).astype(dtype))


def scratch_arrays(program):
    return source_of(program).count(" = ks")


def test_the_source_is_python_that_calls_numpy_on_blocks():
    x = random(1000, 64)
    (program,) = programs(ft.tanh(x * 2.0 + random(64)))
    text = source_of(program)
    ast.parse(text)
    assert text.startswith("def region(")
    assert "for start in range(0, 1000, 512):" in text
    assert "np.repeat" in text  # what is repeated is laid out once, before the loop


def test_a_chain_needs_one_scratch_array():
    x = random(1000, 64)
    y = x
    for _ in range(10):
        y = ft.tanh(y * 2.0)
    (program,) = programs(y)
    assert scratch_arrays(program) == 1


def test_values_that_live_at_one_time_have_scratch_of_their_own():
    x = random(1000, 64)
    parts = [ft.tanh(x * float(i)) for i in range(1, 6)]
    (program,) = programs(parts[0] * parts[1] * parts[2] * parts[3] * parts[4])
    assert 2 <= scratch_arrays(program) <= 5


def test_the_sum_of_a_product_along_rows_is_one_operation():
    x, y = random(300, 64), random(300, 64)
    total = ft.sum(x * y, axis=-1, keepdims=True)
    (program,) = programs(y / total)
    assert [o.op.name for o in program.operations].count("row_dot") == 1
    assert "multiply" not in [o.op.name for o in program.operations]
    expected = y.numpy() / (x.numpy() * y.numpy()).sum(-1, keepdims=True)
    np.testing.assert_allclose((y / total).numpy(), expected, rtol=1e-4)


def test_a_product_that_something_else_reads_stays():
    x, y = random(300, 64), random(300, 64)
    product = x * y
    (program,) = programs(product / ft.mean(product, axis=-1, keepdims=True))
    assert "multiply" in [o.op.name for o in program.operations]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.float64, np.complex64, np.float16])
def test_sums_of_every_dtype_over_many_blocks(dtype):
    x = ft.asarray((np.arange(5000 * 16) % 7).reshape(5000, 16).astype(dtype))
    y = x * ft.asarray(np.full(16, 2, dtype))
    wide = np.int64 if np.dtype(dtype).kind == "i" else np.uint64 if np.dtype(dtype).kind == "u" else dtype
    plain = x.numpy().astype(np.complex128) * 2
    tolerance = 1e-2 if dtype is np.float16 else 1e-6
    columns, rows = ft.sum(y, axis=0), ft.sum(y, axis=1)
    assert programs(y, columns, rows)
    assert columns.dtype == rows.dtype == np.dtype(wide)
    np.testing.assert_allclose(rows.numpy(), plain.sum(1), rtol=tolerance)
    if dtype is not np.float16:  # more than its largest
        np.testing.assert_allclose(columns.numpy(), plain.sum(0), rtol=tolerance)


@given(st.integers(4, 40), st.integers(1, 300), st.booleans())
def test_an_output_may_lie_where_an_input_lies(rows, block_rows, reads_late):
    """What `reusable` allows gives the same values as memory of its own."""
    x, y = random(rows, 64), random(rows, 64) + 1
    y = y.realize()
    first = x * 2.0 + y
    (program,) = programs(first, first * x if reads_late else first * y)
    program = replace(program, block_rows=block_rows)
    whole = iter([x.numpy().reshape(-1), y.numpy().reshape(-1)])
    inputs = [next(whole) if kind is Extent.FULL else np.float32(2) for kind, _ in program.inputs]
    apart = [np.empty(rows * 64, np.float32) for _ in program.outputs]
    run_blocks(program, inputs, apart)
    shared = [np.array(array) for array in inputs]
    free = {register for register, (kind, _) in enumerate(program.inputs) if kind is Extent.FULL}
    placed = [np.empty(rows * 64, np.float32) for _ in program.outputs]
    pairs = reusable(program, [free, free])
    for output, register in pairs:
        placed[output] = shared[register]
    run_blocks(program, shared, placed)
    assert pairs
    for expected, found in zip(apart, placed, strict=True):
        np.testing.assert_array_equal(found, expected)

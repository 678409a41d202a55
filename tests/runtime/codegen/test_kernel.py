"""Generated kernels give what the regions give on numpy, for any graph, arrangement of threads and dtype."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.lazy.ops import neural
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.codegen.arrangement import Limits, arrange
from fuel_parallel.runtime.codegen.kernel import kernel_for
from fuel_parallel.runtime.codegen.lowering import lower
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan

ALL = tuple(passes.PASSES)
WITHOUT_EXPANSION = tuple(name for name in passes.PASSES if name != "expand")

# Continuous functions: a last bit that differs must not become a whole number that does.
UNARY = [ft.negative, ft.exp, ft.tanh, ft.square, ft.abs, ft.relu, ft.sigmoid, ft.silu, lambda x: x + 1]
UNARY += [ft.gelu, lambda x: ft.gelu(x, approximate=True), lambda x: ft.astype(ft.astype(x, ft.float32), x.dtype)]
BINARY = [
    ft.add,
    ft.subtract,
    ft.multiply,
    ft.maximum,
    ft.minimum,
    ft.hypot,
    lambda a, b: ft.where(a > b, a, b),
    lambda a, b: a / (1 + b * b),
]
ROWS = [
    ft.softmax,
    ft.log_softmax,
    ft.layer_norm,
    ft.rms_norm,
    lambda x: x - ft.mean(x, axis=-1, keepdims=True),
    lambda x: x / (1 + ft.abs(ft.sum(x, axis=-1, keepdims=True))),
    lambda x: x + ft.reshape(ft.max(x, axis=-1), (*x.shape[:-1], 1)),
    lambda x: x * ft.expand_dims(ft.tanh(ft.min(x, axis=-1)), axis=-1),
    lambda x: ft.reshape(ft.reshape(x, (-1, x.shape[-1])) + 1, x.shape),
]
ENDS = [
    lambda x: x,
    lambda x: ft.sum(x, axis=tuple(range(x.ndim - 1))),
    lambda x: ft.sum(x),
    lambda x: ft.sum(x, axis=-1),
    lambda x: ft.sum(ft.square(ft.sum(x, axis=-1))),
    lambda x: ft.cross_entropy(x, ft.asarray(np.arange(x.size // x.shape[-1]).reshape(x.shape[:-1]) % x.shape[-1])),
]
SHAPES = [(5, 7, 96), (3, 11, 8), (2, 5, 130), (300, 3), (2, 9, 64)]
LIMITS = st.builds(
    Limits,
    threads=st.sampled_from([32, 64]),
    lanes=st.sampled_from([8, 32, 64]),
    columns_per_lane=st.sampled_from([1, 4]),
    row_words=st.sampled_from([0, 640, 32768]),
    blocks=st.sampled_from([3, 1 << 20]),
    blocks_with_total=st.sampled_from([3, 40]),
    blocks_with_column_sum=st.sampled_from([3, 40]),
)


@st.composite
def random_graphs(draw):
    """Tensors of a random graph over one shape, with operands that are broadcast in every way."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    shape = draw(st.sampled_from(SHAPES))
    lead, last = shape[:-1], shape[-1]
    shapes = [shape, shape, (last,), (*lead, 1), (1,), shape[1:], ()]
    pool = [ft.asarray(rng.uniform(-2, 2, size=one)) for one in shapes]
    whole = [0, 1]
    for _ in range(draw(st.integers(2, 10))):
        a = pool[draw(st.sampled_from(whole))]
        kind = draw(st.integers(0, 2))
        if kind == 0:
            made = draw(st.sampled_from(UNARY))(a)
        elif kind == 1:
            made = draw(st.sampled_from(BINARY))(a, pool[draw(st.integers(0, len(pool) - 1))])
        else:
            made = draw(st.sampled_from(ROWS))(a)
        pool.append(ft.clip(made, -50.0, 50.0))
        whole.append(len(pool) - 1)
    chosen = draw(st.lists(st.sampled_from(whole[2:]), min_size=1, max_size=3, unique=True))
    ends = [draw(st.sampled_from(ENDS))(pool[i]) for i in chosen]
    if draw(st.booleans()):
        loss = sum((ft.sum(ft.tanh(e)) for e in ends), ft.asarray(0.0, dtype=ft.float64))
        ends += ft.grad(loss, pool[: len(shapes)])
    return ends


def regions_of(tensors, names=ALL):
    """The regions of a plan, each with its inputs."""
    graph, leaves, _ = trace([t.node for t in tensors])
    plan = make_plan(graph, names)
    values = [*[leaf.value for leaf in leaves], *plan.constants, *[None] * len(plan.steps)]
    found = []
    with np.errstate(all="ignore"):
        for step in plan.steps:
            arguments = [values[slot] for slot in step.inputs]
            if step.op.name == "region":
                found.append((step.attrs[0], arguments))
            run = [arguments] if step.op.variadic else arguments
            values[step.output] = step.kernel(np, *run, *step.attrs)
    return found


def check(tensors, on_host, by_blocks, limits=None, rtol=1e-10, names=ALL):
    """Compares all regions, also where results are written over inputs; gives their kernels."""
    found = regions_of(tensors, names)
    for program, arrays in found:
        results = on_host(program, arrays, limits)
        for mine, same in zip(results, on_host(program, arrays, limits, in_place=True), strict=True):
            assert mine.tobytes() == same.tobytes()
        for mine, theirs in zip(results, by_blocks(program, arrays), strict=True):
            assert mine.dtype == theirs.dtype
            wide = np.float64 if mine.dtype.itemsize == 2 else mine.dtype
            np.testing.assert_allclose(mine.astype(wide), theirs.astype(wide), rtol=rtol, atol=rtol)
    return [kernel_for(program, limits=limits) for program, _ in found]


@given(random_graphs(), LIMITS, st.sampled_from([ALL, WITHOUT_EXPANSION]))
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
def test_random_graphs(on_host, by_blocks, tensors, limits, names):
    check(tensors, on_host, by_blocks, limits, names=names)


def array(*shape, dtype=np.float32, seed=0):
    return ft.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


@pytest.mark.parametrize("columns", [1, 2, 33, 96, 1000, 5000])
def test_softmax_and_its_gradient_with_the_usual_limits(columns, on_host, by_blocks):
    x = array(9, columns) if columns > 28 else array(300, columns)
    y = ft.softmax(x)
    (kernel, *_) = check([y, ft.grad(ft.sum(y * y), x)], on_host, by_blocks, rtol=2e-6)
    assert kernel.arrangement.held or columns == 1


def test_a_long_row_is_computed_again_by_each_pass(on_host, by_blocks):
    x = array(2, 40000)
    (kernel,) = check([ft.softmax(x)], on_host, by_blocks, rtol=2e-6)
    assert not kernel.arrangement.held
    assert kernel.source.count("in0[row * COLUMNS + column]") == 3


def test_what_fits_of_a_row_is_held(on_host, by_blocks):
    """Six values would be held for a row; there is room for three, which are those that save reads."""
    x, g, w = array(3, 8192), array(3, 8192, seed=1), array(8192, seed=2)
    gradients = ft.grad(ft.sum(ft.layer_norm(x, w) * g), [x, w])
    (kernel,) = check(gradients, on_host, by_blocks, rtol=3e-5)
    assert kernel.arrangement.levels > 2
    reads = [kernel.source.count(f"in{register}[row * COLUMNS + column]") for register in range(6)]
    assert set(reads) == {0, 1}


def test_an_input_is_read_once_where_the_row_is_held(on_host, by_blocks):
    x = array(8, 512)
    (kernel,) = check([ft.layer_norm(x)], on_host, by_blocks, rtol=2e-5)
    assert kernel.source.count("in0[row * COLUMNS + column]") == 1


@pytest.mark.parametrize("dtype", [ft.float16, ft.bfloat16], ids=str)
def test_halves(dtype, on_host, by_blocks):
    x = ft.astype(array(12, 96), dtype)
    x = ft.asarray(x.numpy())
    rtol = 0.004 if dtype == ft.float16 else 0.03
    check([ft.softmax(x * 2), ft.layer_norm(x) + 1, ft.gelu(x) * x, ft.log_softmax(x)], on_host, by_blocks, rtol=rtol)


def test_cross_entropy_with_negative_and_unsigned_indices(on_host, by_blocks):
    x = array(40, 30)
    for targets in (np.arange(40) % 30, np.arange(40) % 30 - 30, (np.arange(40) % 30).astype(np.uint8)):
        loss = ft.cross_entropy(x, ft.asarray(targets))
        check([loss, ft.grad(loss, x)], on_host, by_blocks, rtol=2e-6)


@pytest.mark.parametrize("make", [lambda x, i: ft.max(x * 2, axis=-1), lambda x, i: neural.pick(x * 2, i)])
def test_a_block_that_takes_several_rows_keeps_them_apart(make, on_host, by_blocks):
    x, index = array(60, 64), ft.asarray(np.arange(60))
    check([make(x, index)], on_host, by_blocks, Limits(threads=64, lanes=64, columns_per_lane=1, blocks=2))


def test_integers_and_bools(on_host, by_blocks):
    x = ft.asarray(np.random.default_rng(0).integers(-100, 100, size=(20, 40)).astype(np.int8))
    hits = x > 3
    outputs = [ft.sum(x * x, axis=-1), ft.max(x + x, axis=-1), ft.min(x - 1, axis=-1), ft.sum(hits), ft.max(hits)]
    outputs += [ft.sum(x, axis=0), ft.min(ft.astype(x, ft.uint16), axis=-1), ft.max(hits, axis=-1)]
    for one in outputs:
        check([one + 0 if one.dtype != ft.bool else ft.logical_not(one)], on_host, by_blocks)
    check(outputs, on_host, by_blocks)


def test_maximum_of_a_row_hands_nan_on(on_host, by_blocks):
    x = np.random.default_rng(0).normal(size=(6, 100)).astype(np.float32)
    x[2, 70] = np.nan
    x[3] = -np.inf
    x = ft.asarray(x)
    check([ft.max(x, axis=-1), ft.min(x, axis=-1), ft.max(x * 2, axis=-1)], on_host, by_blocks)


def test_many_sums_over_rows_share_their_memory(on_host, by_blocks):
    x = array(50, 40)
    sums = [ft.sum(ft.tanh(x * (i + 1)), axis=0) for i in range(10)] + [ft.sum(x > i, axis=0) for i in range(5)]
    for limits in (Limits(), Limits(columns_per_lane=1), Limits(row_words=0)):
        kernels = check([*sums, ft.sum(x * 3)], on_host, by_blocks, limits, rtol=3e-6)
        assert all(kernel.source.count("float shared_float32[") <= 2 for kernel in kernels)


def test_parameters_of_an_optimizer_share_one_source():
    p = [fp.Parameter(np.ones((64, 64))), fp.Parameter(np.ones(300))]
    optimizer = fp.optim.AdamW(p)
    optimizer.update([ft.asarray(np.ones((64, 64))), ft.asarray(np.ones(300))])
    kernels = [kernel_for(program) for program, _ in regions_of(p + optimizer.means + optimizer.squares)]
    assert len(kernels) == 2
    assert len({kernel.source for kernel in kernels}) == 1


def test_sums_depend_on_the_shape_alone(on_host):
    x = array(700, 40)
    (program, arrays), *_ = regions_of([ft.sum(ft.tanh(x)), ft.sum(ft.tanh(x), axis=0)])
    first, second = on_host(program, arrays), on_host(program, arrays)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))
    assert "atomic" not in kernel_for(program).source


def test_a_pass_for_each_level_of_reductions():
    x = array(8, 512)
    ((program, _),) = regions_of([ft.softmax(x)])
    arrangement = arrange(lower(program), Limits())
    assert arrangement.levels == 3
    assert arrangement.lanes == 128
    assert arrangement.block_rows == 2
    assert arrangement.blocks(rows=9, columns=512) == 5


def test_more_than_two_to_the_thirtieth_elements_are_counted_in_64_bits():
    x = ft.asarray(np.ones((64, 64), np.float32))
    ((program, _),) = regions_of([ft.tanh(x) * 2])
    assert "typedef int position;" in kernel_for(program).source
    large = dataclasses.replace(program, rows=2**30)
    assert "typedef long long position;" in kernel_for(large).source

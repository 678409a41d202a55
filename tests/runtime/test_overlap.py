"""All-reduces start early, end late, and change nothing; gradients are made where they are reduced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import RealizeError
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.execute import execute
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan
from fuel_parallel.runtime.trace import live_bytes

ALL = tuple(passes.PASSES)
WITHOUT = tuple(name for name in ALL if name != "overlap")
SHAPE = (64, 256)


def planned(tensors, names=ALL):
    return make_plan(trace([t.node for t in tensors])[0], names)


def computed(tensors, names=ALL):
    graph, leaves, nodes = trace([t.node for t in tensors])
    return [np.array(v) for v in execute(make_plan(graph, names), [n.value for n in leaves], nodes)]


def network(count=4):
    layers = [fp.Linear(256, 256, ft.random.Generator(i)) for i in range(count)]
    fp.realize(layers)
    x = ft.asarray(np.random.default_rng(1).normal(size=(32, 256)).astype(np.float32))
    for layer in layers:
        x = ft.tanh(layer(x))
    parameters = [p for layer in layers for p in layer.parameters()]
    return parameters, ft.grad(ft.mean(x * x), parameters)


def kinds(plan):
    return [step.op.name for step in plan.steps]


def test_each_bucket_starts_when_its_last_gradient_is_there(late):
    _, gradients = network()
    plan = planned(fp.data_parallel.average_gradients(gradients, late, bucket_bytes=500 << 10))
    starts = [n for n, step in enumerate(plan.steps) if step.op.name == "all_reduce"]
    products = [n for n, step in enumerate(plan.steps) if step.op.name == "matmul"]
    assert len(starts) == 2
    assert sum(n > starts[0] for n in products) == 3  # of the two layers that are left
    assert plan.steps[starts[0] - 1].op.name == "join"
    assert all(plan.steps[n].goes_on for n in starts)


def test_results_are_waited_for_where_they_are_read_and_the_first_bucket_is_used_first(late):
    parameters, gradients = network()
    optimizer = fp.optim.AdamW(parameters)
    fp.realize(optimizer)
    optimizer.update(fp.data_parallel.average_gradients(gradients, late, bucket_bytes=500 << 10))
    plan = planned([*parameters, *optimizer.means])
    first, second = (step.output for step in plan.steps if step.op.name == "all_reduce")
    finishes = {slot: n for n, step in enumerate(plan.steps) for slot in step.finishes}
    assert set(finishes) == {first, second}
    assert first in plan.steps[finishes[first]].inputs
    updates = [n for n, step in enumerate(plan.steps) if step.op.name == "region" and n > finishes[first]]
    assert sum(n < finishes[second] for n in updates) >= 4  # the parameters of the first bucket


def test_collectives_keep_their_order_and_those_that_block_stay_where_they_were(late):
    x = ft.asarray(np.ones(SHAPE))
    a = late.all_reduce(ft.tanh(x))
    b = late.all_gather(ft.sin(x))
    c = late.all_reduce(ft.cos(x) * 2)
    d = late.all_reduce(x[:2])
    plan = planned([a + 1, b, c, d])
    crossing = [step.op.name for step in plan.steps if step.op.crosses_ranks]
    assert crossing == ["all_reduce", "all_gather", "all_reduce", "all_reduce"]
    large, _, other, small = (step for step in plan.steps if step.op.crosses_ranks)
    assert large.goes_on
    assert not small.goes_on
    assert other.reuses


def test_without_the_pass_nothing_goes_on(late):
    _, gradients = network()
    plan = planned(fp.data_parallel.average_gradients(gradients, late), WITHOUT)
    assert not any(step.goes_on or step.finishes for step in plan.steps)


def test_a_plan_tells_what_goes_on_and_where(late):
    _, gradients = network()
    text = str(planned(fp.data_parallel.average_gradients(gradients, late, bucket_bytes=500 << 10)))
    assert "matmul" in text
    assert ": float32[256, 256]   in bucket 0 at 1024" in text
    assert "   in place; goes on; lets go of %" in text
    assert "first\n" in text


@pytest.mark.parametrize("lends", [True, False])
def test_gradients_are_made_in_their_places_of_the_bucket(late, lends):
    late.transport.lends = lends
    _, gradients = network()
    expected = computed(gradients)
    averaged = fp.data_parallel.average_gradients(gradients, late, bucket_bytes=500 << 10)
    plan = planned(averaged)
    assert sum(p.bucket >= 0 for step in plan.steps for p in step.places) == 2 + 8  # two wholes, all of their parts
    for found, gradient in zip(computed(averaged), expected, strict=False):
        np.testing.assert_array_equal(found, gradient)
    assert len(late.transport.lent) == 2 * lends
    for memory, parts in zip(late.transport.lent, (expected[:3:-1], expected[3::-1]), strict=False):
        np.testing.assert_array_equal(memory.view(np.float32), np.concatenate([p.ravel() for p in parts]))


def test_what_is_read_after_the_reduction_is_not_made_in_the_bucket(late):
    x = ft.asarray(np.ones(SHAPE))
    y = ft.tanh(x)
    assert not any(step.reuses for step in planned([late.all_reduce(y), y]).steps)
    assert not any(step.reuses for step in planned([late.all_reduce(y), y @ x.mT]).steps)
    twice = ft.concat([y, y])
    plan = planned([late.all_reduce(twice)])
    assert [step.op.name for step in plan.steps if step.reuses] == ["all_reduce"]
    np.testing.assert_array_equal(computed([late.all_reduce(twice)])[0], np.tanh(np.ones((128, 256))) * 2)


def test_turned_parts_are_put_right(late):
    """A part that is in its place, but read from there in another order."""
    x = ft.asarray(np.arange(128.0 * 128).reshape(128, 128))
    parts = [(x * 2).mT, (x + 1)[::-1], (x * 3).reshape(128, 128)]
    found = computed([late.all_reduce(ft.concat(parts))])[0]
    v = np.arange(128.0 * 128).reshape(128, 128)
    np.testing.assert_array_equal(found, 2 * np.concatenate([(v * 2).T, (v + 1)[::-1], v * 3]))


def test_halves_and_bools_are_reduced_outside_of_buckets(late):
    x = ft.ones((400, 400), dtype=ft.bfloat16) * 2
    plan = planned([late.all_reduce(x), late.all_reduce(ft.ones((400, 400)) > 0)])
    assert not plan.memory.buckets


def test_live_bytes_count_a_bucket_once(late):
    x = ft.asarray(np.ones((64, 128)))
    parts = [ft.reshape(x @ ft.full((128, 128), float(i)), (-1,)) for i in range(4)]
    plan = planned([late.all_reduce(ft.concat(parts))], ("overlap",))
    assert max(live_bytes(plan)) <= 4 * x.nbytes + 4 * 128 * 128 * 8


@pytest.mark.parametrize("names", [ALL, WITHOUT])
def test_progress_is_made_between_kernels_and_all_is_over_at_the_end(late, names):
    _, gradients = network()
    computed(fp.data_parallel.average_gradients(gradients, late, bucket_bytes=200 << 10), names)
    events = late.transport.events
    assert events.count("start") == events.count("wait") == 4
    if names is WITHOUT:
        assert events == ["start", "progress", "wait"] * 4
    else:
        assert "progress" in events[events.index("start") : events.index("wait") - 1]


def test_a_kernel_that_fails_meanwhile_is_told_as_ever(late, monkeypatch):
    monkeypatch.delenv("FUEL_PASSES", raising=False)  # without `overlap` there is no meanwhile

    def fail(*_, **__):
        raise ValueError("no")

    x = ft.asarray(np.ones(SHAPE))
    total = late.all_reduce(ft.tanh(x))
    broken = ft.cumulative_sum(ft.sin(x), axis=0)
    monkeypatch.setattr(np, "cumsum", fail)
    monkeypatch.setattr(np, "cumulative_sum", fail)
    with pytest.raises(RealizeError, match="failed: ValueError: no"):
        fp.realize(total + 1, broken)
    assert late.transport.events[0] == "start"
    assert "wait" not in late.transport.events


@st.composite
def graphs(draw):
    """Collectives, views, concats and elementwise chains in any order, over values that are read again later."""
    rng = np.random.default_rng(draw(st.integers(0, 100)))
    pool = [ft.asarray(rng.uniform(-1, 1, SHAPE)) for _ in range(2)]
    operations = draw(st.lists(st.integers(0, 8), min_size=3, max_size=14))
    picks = draw(st.lists(st.integers(0, 1 << 16), min_size=2 * len(operations), max_size=2 * len(operations)))
    return pool, operations, picks


def build(drawn, comm):
    pool, operations, picks = drawn
    pool = list(pool)
    for n, operation in enumerate(operations):
        a, b = pool[picks[2 * n] % len(pool)], pool[picks[2 * n + 1] % len(pool)]
        flat = [ft.reshape(a * 0.5, (-1,)), ft.reshape(b + 1, (-1,)), ft.reshape(a, (-1,))]
        made = [
            lambda a=a, b=b: comm.all_reduce(a + b, fp.ReduceOp.AVG),
            lambda a=a: comm.all_reduce(a) * 0.25,
            lambda a=a, b=b: a @ ft.tanh(b).mT @ b * 0.01,
            lambda a=a: a[::-1] * 0.5,
            lambda a=a, b=b: ft.tanh(a) - b,
            lambda flat=flat: comm.all_reduce(ft.concat(flat))[: SHAPE[0] * SHAPE[1]].reshape(SHAPE) * 0.1,
            lambda a=a: comm.all_reduce(ft.reshape(ft.sin(a), (256, 64)), fp.ReduceOp.AVG).reshape(SHAPE),
            lambda a=a: comm.all_reduce(ft.exp(a * 0.1)[:3], fp.ReduceOp.AVG)[:1] + a,
            lambda a=a: ft.sum(a, axis=0) * 0.001 + a,
        ][operation]
        pool.append(made())
    return pool[2:]


@given(graphs(), st.booleans(), st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_values_are_the_same_whenever_reductions_happen(late, drawn, lends, data):
    """The input of a reduction under way must not change, nor its result be written over."""
    late.transport.lends = lends
    tensors = build(drawn, late)
    chosen = data.draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3, unique_by=id))
    for found, expected in zip(computed(chosen), computed(chosen, ()), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)

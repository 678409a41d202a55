"""The memory plan: no two living values share bytes, and what was planned is what is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.module import Variable
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.memory import ALIGNMENT
from fuel_parallel.runtime.plan import make_plan
from fuel_parallel.runtime.region import ITEM, REGION


def random_graph(draw):
    pool = [ft.asarray(np.ones((20, 20))), ft.asarray(np.full((20, 20), 0.5))]
    for _ in range(draw(st.integers(2, 20))):
        a, b = (pool[draw(st.integers(0, len(pool) - 1))] for _ in range(2))
        made = [
            ft.tanh(a),
            a + b,
            a.T * 2,
            a @ b,
            ft.reshape(a, (20, 20)),
            a[::-1],
            ft.concat([a, b])[5:25],
            ft.softmax(a),
        ]
        pool.append(draw(st.sampled_from(made)) * 0.1)
    chosen = draw(st.lists(st.integers(2, len(pool) - 1), min_size=1, max_size=3, unique=True))
    return [pool[i] for i in chosen]


@given(st.data(), st.sampled_from([(), tuple(passes.PASSES)]))
@settings(max_examples=80)
def test_places_that_live_at_one_time_do_not_overlap(data, names):
    """Replays the plan: a place may be written only when no value that is still to be read lies in it.

    Or when that value is an input which is read there for the last time, element by element, and lies right there.
    """
    graph, _, _ = trace([t.node for t in random_graph(data.draw)])
    plan = make_plan(graph, names)
    lies_in: dict[int, list[tuple[int, int]]] = {}
    living: set[int] = set()
    regions: set[int] = set()
    for step in plan.steps:
        mine = [(p.offset, p.offset + p.spec.nbytes) for p in step.places if p.offset >= 0]
        in_place = set(step.dies) & set(step.inputs) if step.op is REGION or step.op.elementwise else set()
        for slot in living:
            for start, stop in lies_in[slot] if slot not in regions else []:
                for low, high in mine:
                    assert stop <= low or high <= start or (slot in in_place and (start, stop) == (low, high))
        assert all(low % ALIGNMENT == 0 and high <= plan.memory.arena_bytes for low, high in mine)
        inputs = [lies_in.get(s, []) for s in step.inputs]
        if step.op is ITEM:
            lies_in[step.output] = [r for r in inputs[0][step.attrs[0] : step.attrs[0] + 1] if r[0] >= 0]
        elif step.op is REGION:
            lies_in[step.output] = [(p.offset, p.offset + p.spec.nbytes) for p in step.places]
        else:
            lies_in[step.output] = mine or [r for ranges in inputs for r in ranges if step.op.aliases]
        living.add(step.output)
        regions |= {step.output} if step.op is REGION else set()
        living -= set(step.dies)


@given(st.data())
@settings(max_examples=40)
def test_no_run_takes_more_than_was_planned(data):
    tensors = random_graph(data.draw)
    fp.realize(tensors)
    for t in tensors:
        assert np.isfinite(t.numpy()).all()
    assert fp.memory_stats().peak <= fp.memory_stats().planned


def test_a_chain_of_products_needs_two_places():
    x = ft.asarray(np.ones((64, 64)))
    y = x
    for _ in range(10):
        y = y @ x * 0.01
    plan = make_plan(trace([ft.sum(y).node])[0], tuple(passes.PASSES))
    assert plan.memory.arena_bytes == 2 * x.nbytes


def test_planned_is_what_a_run_takes_when_nothing_is_replaced():
    model = fp.Linear(64, 64, ft.random.Generator(0))
    optimizer = fp.optim.AdamW(model.parameters())
    fp.realize(model, optimizer)
    held = [p.numpy() for p in [*model.parameters(), *optimizer.means, *optimizer.squares, optimizer.step]]
    optimizer.update(ft.grad(ft.sum(model(ft.ones((4, 64)))), model.parameters()))
    fp.realize(model, optimizer)
    assert fp.memory_stats().peak == fp.memory_stats().planned
    assert fp.memory_stats().arena >= 0
    assert all(h.size for h in held)


def test_replaced_parameters_take_no_new_memory(monkeypatch):
    monkeypatch.delenv(passes.VARIABLE, raising=False)  # without fusion there are fewer places to write into
    model = fp.Linear(256, 256, ft.random.Generator(0))
    optimizer = fp.optim.AdamW(model.parameters())
    fp.realize(model, optimizer)
    for _ in range(3):
        optimizer.update(ft.grad(ft.sum(ft.square(model(ft.ones((4, 256))))), model.parameters()))
        fp.realize(model, optimizer)
    stats = fp.memory_stats()
    assert stats.planned - stats.peak >= 3 * model.weight.nbytes


def test_live_bytes_are_those_of_the_values_that_tensors_hold():
    before = fp.memory_stats().live
    x = ft.asarray(np.ones((100, 100)))
    y = (x + 1).realize()
    view = ft.reshape(y, (-1,)).realize()
    assert fp.memory_stats().live - before == 2 * 80_000
    assert view.shape == (10_000,)
    del x, y, view
    assert fp.memory_stats().live == before


def arena_of(tensor, names=tuple(passes.PASSES)):
    return make_plan(trace([tensor.node])[0], names).memory.arena_bytes


def test_results_replace_inputs_that_die():
    x = ft.asarray(np.ones((64, 64)))
    y = x @ x
    for _ in range(5):
        y = (y + 1) @ x
    assert arena_of(ft.sum(y), ()) == 2 * x.nbytes  # each product and its sum lie in one place
    assert arena_of(ft.sum(ft.tanh(x @ x) * 2)) == x.nbytes


def test_an_input_that_is_read_once_more_is_not_replaced():
    x = ft.asarray(np.arange(4096.0).reshape(64, 64))
    y = x @ x
    z = y * 2
    value = ft.sum(z - ft.reshape(ft.reshape(y, (-1,)), (64, 64)))
    assert arena_of(z @ y) == 2 * x.nbytes
    assert value.item() == (x.numpy() @ x.numpy()).sum()


def test_a_view_of_a_variable_keeps_its_old_value():
    x = Variable(ft.asarray(np.ones((64, 64))))
    fp.realize(x)
    view = ft.reshape(x, (-1,))
    x.assign(x * 3 - 1)
    product = ft.reshape(view, (64, 64)) @ x
    fp.realize(x, product)
    assert (x.numpy() == 2).all()
    assert (product.numpy() == 128).all()


@pytest.mark.parametrize("names", [(), tuple(passes.PASSES)])
def test_a_plan_can_be_printed(names):
    text = str(make_plan(trace([ft.sum(ft.tanh(ft.ones((300, 300)) * 2)).node])[0], names))
    assert text.startswith("plan: 0 leaves")
    assert "arena of" in text


@pytest.mark.parametrize("late", [False, True])
def test_a_view_of_an_old_parameter_outlives_the_new_one(late):
    """Read after the update, or asked for: the new value must not be written where the view looks."""
    p = fp.Parameter(np.random.default_rng(0).normal(size=(64, 64)))
    old = p.numpy().copy()
    view = p.mT
    p.assign(ft.tanh(p) * 2)
    result = view @ view if late else view
    fp.realize(p, result)
    np.testing.assert_array_equal(result.numpy(), old.T @ old.T if late else old.T)
    np.testing.assert_allclose(p.numpy(), np.tanh(old) * 2)

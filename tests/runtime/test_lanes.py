"""What the lanes of a plan wait for: enough that every order gives the plan's own values, and nothing besides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import random_devices
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel.lazy as ft
from fuel_parallel.backends import backend_of
from fuel_parallel.runtime import lanes as lanes_module
from fuel_parallel.runtime.arena import arena_of
from fuel_parallel.runtime.execute import _Run, execute
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.lanes import HOST, Lanes, Way, lanes_of
from fuel_parallel.runtime.plan import Plan, make_plan

EXAMPLES = 1500 if os.environ.get("FUEL_STRESS") else 60
ON = ("fusion", "overlap")


@pytest.fixture(autouse=True, scope="module")
def _devices() -> Iterator[None]:
    with random_devices.two_abaci():
        yield


def traced(tensors: list[ft.Tensor]) -> tuple[Plan, list[Any], list[Any]]:
    graph, leaves, computed = trace([t.node for t in tensors])
    return make_plan(graph, ON), [leaf.value for leaf in leaves], computed


def in_order(plan: Plan, leaves: list[Any], computed: list[Any], order: list[int]) -> list[Any]:
    """The outputs when the tasks run one after the other in this order, over the real arena."""
    assert plan.lanes is not None
    # Each run has the leaves to itself, and may write over them.
    own = [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    run = _Run(plan, own, computed, frozenset(range(len(leaves))), set())
    for device, nbytes in plan.memory.arenas.items():
        arena_of(device).at_least(nbytes)
    for number in order:
        task = plan.lanes.tasks[number]
        step = plan.steps[task.step]
        backend = backend_of(step.spec.device)
        with backend.running():
            arguments = [run.values[slot] for slot in step.inputs]
            run.values[step.output] = run._compute(step, backend.array_module, arguments)
    return [backend_of("cpu").settle(np.array(plain(run.values[slot]))) for slot in plan.outputs]


def plain(value: Any) -> np.ndarray[Any, Any]:
    return value.read() if hasattr(value, "read") else np.asarray(value)


def some_order(lanes: Lanes, choose: Any) -> list[int]:
    """Any order that keeps lanes and waits."""
    lines: dict[str, list[int]] = {}
    for number, task in enumerate(lanes.tasks):
        lines.setdefault(task.lane, []).append(number)
    done: list[int] = []
    while any(lines.values()):
        ready = [line for line in lines.values() if line and set(lanes.tasks[line[0]].waits) <= set(done)]
        done.append(choose(ready).pop(0))
    return done


def before(lanes: Lanes, without: tuple[int, int] = (-1, -1)) -> list[set[int]]:
    """For each task all those that come before it, by lanes and waits, with one wait left out."""
    found: list[set[int]] = []
    latest: dict[str, int] = {}
    for number, task in enumerate(lanes.tasks):
        direct = {n for n in task.waits if (number, n) != without} | {latest.get(task.lane, -1)} - {-1}
        found.append(direct.union(*(found[n] for n in direct)))
        latest[task.lane] = number
    return found


@settings(max_examples=EXAMPLES)
@given(random_devices.steps, st.data())
def test_every_order_gives_the_values_of_the_plans_own(program: Any, data: st.DataObject) -> None:
    tensors = random_devices.values_of(program)
    plan, leaves, computed = traced([t for t in tensors if data.draw(st.booleans())] + tensors[-1:])
    if plan.lanes is None:
        return
    wanted = in_order(plan, leaves, computed, list(range(len(plan.lanes.tasks))))
    order = some_order(plan.lanes, lambda ready: data.draw(st.sampled_from(ready)))
    for found, value in zip(in_order(plan, leaves, computed, order), wanted, strict=True):
        np.testing.assert_array_equal(found, value)
    latest = some_order(plan.lanes, lambda ready: max(ready, key=lambda line: line[0]))  # as late as it may be
    for found, value in zip(in_order(plan, leaves, computed, latest), wanted, strict=True):
        np.testing.assert_array_equal(found, value)


@settings(max_examples=EXAMPLES)
@given(random_devices.steps)
def test_no_wait_follows_from_others(program: Any) -> None:
    plan, _, _ = traced(random_devices.values_of(program))
    if plan.lanes is None:
        return
    for number, task in enumerate(plan.lanes.tasks):
        for n in task.waits:
            assert plan.lanes.tasks[n].lane != task.lane
            assert n not in before(plan.lanes, (number, n))[number]


@settings(max_examples=EXAMPLES)
@given(random_devices.steps)
def test_where_nothing_can_run_side_by_side_there_are_no_lanes(program: Any) -> None:
    tensors = random_devices.values_of(program)
    graph, _, _ = trace([t.node for t in tensors])
    plan = make_plan(graph, ON)
    if plan.lanes is not None:
        known = before(plan.lanes)
        assert any(m not in known[n] for n in range(len(known)) for m in range(n))


@settings(max_examples=EXAMPLES)
@given(random_devices.steps)
def test_the_caller_fills_queues_early_and_keeps_the_order_of_each(program: Any) -> None:
    tensors = random_devices.values_of(program)
    graph, _, _ = trace([t.node for t in tensors])
    plan = make_plan(graph, ON)
    specs = graph.specs()[: graph.first]
    lanes = lanes_of(plan.steps, specs, plan.outputs, lambda d: Way.HERE if d == HOST else Way.QUEUED)
    if lanes is None:
        return
    (order,) = lanes.threads.values()
    at = {number: place for place, number in enumerate(order)}
    assert sorted(order) == list(range(len(lanes.tasks)))
    for number, task in enumerate(lanes.tasks):
        assert all(at[n] < at[number] for n in task.waits)
        assert all(at[n] < at[number] for n in range(number) if lanes.tasks[n].lane == task.lane)
        if task.lane == HOST:
            # What could have been queued before the host computes, was.
            rest = [n for n in order[at[number] :] if lanes.tasks[n].lane != HOST]
            done = set(order[: at[number]])
            firsts = {lanes.tasks[n].lane: n for n in sorted(rest, reverse=True)}
            assert all(not set(lanes.tasks[n].waits) <= done for n in firsts.values())


def example(view: bool = False) -> list[ft.Tensor]:
    """A copy of `a`, or of a view of it, to another device; then the arena's place of `a` is used again."""
    x = ft.asarray(np.arange(6.0).reshape(2, 3)).realize()
    a = ft.exp(x)
    there = ft.tanh((ft.permute_dims(a, (1, 0)) if view else a).to("abacus:0"))
    b = ft.exp(x * 2)
    c = ft.exp(ft.flip(ft.flip(b) * 3) + 1)
    return [there, ft.sum(c)]


@pytest.mark.parametrize("view", [False, True])
def test_memory_that_a_copy_reads_is_not_written_before_the_copy(view: bool) -> None:
    plan, leaves, computed = traced(example(view))
    assert plan.lanes is not None
    wanted = in_order(plan, leaves, computed, list(range(len(plan.lanes.tasks))))
    copy = next(n for n, t in enumerate(plan.lanes.tasks) if plan.steps[t.step].op.name == "copy")
    late = some_order(plan.lanes, lambda ready: max(ready, key=lambda line: line[0] != copy))
    for found, value in zip(in_order(plan, leaves, computed, late), wanted, strict=True):
        np.testing.assert_array_equal(found, value)
    assert any(copy in task.waits for task in plan.lanes.tasks if task.lane == HOST)


def test_one_device_has_no_lanes() -> None:
    x = ft.asarray(np.arange(6.0)).realize()
    assert traced([ft.exp(x), ft.sum(x)])[0].lanes is None
    y = x.to("abacus:0").realize()
    assert traced([ft.tanh(y), ft.tanh(ft.tanh(x.to("abacus:0")))])[0].lanes is None


def test_a_chain_over_devices_has_no_lanes() -> None:
    x = ft.asarray(np.arange(6.0)).realize()
    assert traced([ft.exp(ft.tanh(ft.exp(x).to("abacus:0")).to("cpu"))])[0].lanes is None


def test_queues_alone_need_no_lanes() -> None:
    x, y = (ft.asarray(np.arange(6.0)).to(f"abacus:{n}").realize() for n in range(2))
    graph, _, _ = trace([ft.tanh(x).node, ft.tanh(y).node])
    plan = make_plan(graph, ON)
    assert plan.lanes is not None
    assert lanes_of(plan.steps, graph.specs()[: graph.first], plan.outputs, lambda _: Way.QUEUED) is None


def test_lanes_can_be_read() -> None:
    plan, _, _ = traced(example())
    text = str(plan.lanes)
    assert text.startswith("lanes on 2 threads\n")
    assert "abacus:0: step" in text
    assert lanes_module.HOST in text


def test_without_overlap_there_are_no_lanes() -> None:
    graph, _, _ = trace([t.node for t in example()])
    assert make_plan(graph, ("fusion",)).lanes is None
    values = execute(make_plan(graph, ("fusion",)), [n.value for n in trace([t.node for t in example()])[1]], [])
    assert len(values) == 2

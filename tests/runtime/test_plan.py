"""A plan reads only what is there, lets go of each value after its last use, and can be printed and compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import stand_in
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel.lazy as ft
from fuel_parallel import backends
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import Plan, make_plan, plans

UNARY = [
    ft.exp,
    ft.tanh,
    ft.negative,
    lambda x: ft.flip(x, axis=0),
    lambda x: ft.reshape(x, (-1,))[::-1].reshape(x.shape),
]
BINARY = [ft.add, ft.multiply, ft.maximum, lambda a, b: ft.matmul(a, b.mT) @ b, lambda a, b: ft.concat([a, b])[:8]]
PASSES = [(), tuple(passes.PASSES)]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[ft.Tensor], list[ft.Tensor]]:
    """Tensors of a random graph, and those of them that are asked for."""
    tensors = [ft.asarray(np.random.default_rng(i).uniform(-1, 1, (8, 64))) for i in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(0, 15))):
        a, b = (tensors[draw(st.integers(0, len(tensors) - 1))] for _ in range(2))
        tensors.append(draw(st.sampled_from(UNARY))(a) if draw(st.booleans()) else draw(st.sampled_from(BINARY))(a, b))
    lazy = [t for t in tensors if not t.is_realized]
    wanted = draw(st.lists(st.sampled_from(lazy), min_size=1, max_size=4, unique_by=id)) if lazy else []
    return tensors, wanted


def plan_of(tensors: list[ft.Tensor], names: tuple[str, ...]) -> Plan:
    graph, _, _ = trace([t.node for t in tensors])
    return make_plan(graph, names)


@pytest.mark.parametrize("names", PASSES, ids=["no passes", "all passes"])
@settings(max_examples=60)
@given(graphs())
def test_values_are_there_when_they_are_read_and_go_after_their_last_use(names: Any, drawn: Any) -> None:
    _, wanted = drawn
    plan = plan_of(wanted, names)
    alive = set(range(plan.leaves + len(plan.constants)))
    gone: set[int] = set()
    for number, step in enumerate(plan.steps):
        assert set(step.inputs) <= alive
        assert step.output not in alive | gone
        alive.add(step.output)
        assert set(step.dies) <= alive
        later = {slot for after in plan.steps[number + 1 :] for slot in after.inputs}
        assert not set(step.dies) & later
        alive -= set(step.dies)
        gone |= set(step.dies)
        needless = (
            alive - later - set(plan.outputs) - {slot for slot in alive if slot < plan.leaves + len(plan.constants)}
        )
        assert not needless
    assert set(plan.outputs) <= alive


@settings(max_examples=60)
@given(graphs())
def test_values_are_those_of_each_op_by_itself(drawn: Any) -> None:
    tensors, wanted = drawn
    values: dict[Any, Any] = {}
    for tensor in tensors:
        stack = [tensor.node]
        while stack:
            node = stack[-1]
            waiting = [i for i in node.inputs if i not in values]
            if node in values or waiting:
                stack.extend(waiting) if node not in values else stack.pop()
                continue
            inputs = [values[i] for i in node.inputs]
            arguments = (inputs,) if node.op.variadic else inputs
            with np.errstate(all="ignore"):
                values[node] = node.value if node.value is not None else node.op.kernel(np, *arguments, *node.attrs)
            stack.pop()
    nodes = [tensor.node for tensor in wanted]
    ft_values = [tensor.numpy() for tensor in wanted]
    for node, found in zip(nodes, ft_values, strict=True):
        np.testing.assert_allclose(found, values[node], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("names", PASSES, ids=["no passes", "all passes"])
def test_equal_graphs_have_equal_plans(names: Any) -> None:
    def step(start: float) -> list[ft.Tensor]:
        x = ft.asarray(np.full((32, 32), start))
        loss = ft.mean(ft.tanh(x @ x) ** 2)
        return [loss, ft.grad(loss, x)]

    one, two = (trace([t.node for t in step(start)])[0] for start in (1.0, 2.0))
    assert one == two
    assert hash(one) == hash(two)
    assert str(make_plan(one, names)) == str(make_plan(two, names))


def test_a_plan_can_be_read() -> None:
    x = ft.asarray(np.ones((4, 4)))
    text = str(plan_of([ft.exp(x) @ x], ()))
    assert text.startswith("plan: 1 leaves, 0 constants, 2 steps, 1 outputs")
    assert "%1 = exp(%0) : float64[4, 4]" in text
    assert "%2 = matmul(%1, %0) : float64[4, 4]   lets go of " in text


def test_constants_cross_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(passes.VARIABLE, raising=False)
    with stand_in.installed(stand_in.StandInMemory("plain:0")):
        x = ft.asarray(np.arange(6.0)).to("plain:0").realize()

        def step() -> ft.Tensor:
            return ft.tanh(x * 3.0) + ft.arange(6.0, device="plain:0") * 2.0

        wanted = np.tanh(np.arange(6.0) * 3) + np.arange(6.0) * 2
        plan = plans.plan_for(trace([step().node])[0])
        assert not any(s.op.name == "copy" for s in plan.steps)
        assert {plan.device_of(slot) for slot in range(plan.leaves, plan.leaves + len(plan.constants))} == {"plain:0"}
        assert not any(s.op.name == "multiply" and s.spec.shape == () for s in plan.steps)
        np.testing.assert_allclose(step().numpy(), wanted)
        came = []
        new = stand_in.ArrayModule.new
        monkeypatch.setattr(
            backends._found["plain:0"], "from_host", lambda a: came.append(a.shape) or new(x.node.value.module, a)
        )
        for _ in range(2):
            np.testing.assert_allclose(step().numpy(), wanted)
        assert came == [], "they stay where the plan has put them"


def test_what_depends_on_constants_of_a_device_is_folded() -> None:
    with stand_in.installed(stand_in.StandInMemory("plain:0")):
        x = ft.asarray(np.ones((4, 4))).to("plain:0").realize()
        mask = ft.tril(ft.ones((4, 4), dtype=ft.float64, device="plain:0"))
        plan = make_plan(trace([(x + mask).node])[0], ("fold",))
        assert [s.op.name for s in plan.steps] == ["add"]

"""A call is the function that it stands for: same bits, same plan, same gradients; only its graph is built once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.lazy.node import Node, topological
from fuel_parallel.lazy.ops.call import call
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan

built: list[str] = []


def update(p: ft.Tensor, g: ft.Tensor, rate: ft.Tensor, power: int) -> tuple[ft.Tensor, ...]:
    """Results of which one is part of another, one an argument, and one there twice."""
    built.append("update")
    m = p * 0.5 + g**power
    return p - m * rate, m, g, m


def tensors(shape: tuple[int, ...], seed: int) -> list[ft.Tensor]:
    draw = np.random.default_rng(seed)
    return [ft.asarray(draw.normal(size=s)) for s in (shape, shape, ())]


@settings(max_examples=20)
@given(
    shape=st.sampled_from([(), (3,), (32, 16), (0, 2)]),
    power=st.integers(1, 3),
    seed=st.integers(0, 9),
    names=st.sampled_from(["", "none", "-fusion", "-cse"]),
    wanted=st.sets(st.integers(0, 3), min_size=1),
)
def test_a_call_has_the_bits_of_its_function(
    shape: tuple[int, ...], power: int, seed: int, names: str, wanted: set[int]
) -> None:
    arguments = tensors(shape, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUEL_PASSES", names)
        called, written = call(update, arguments, power), update(*arguments, power)
        fp.realize([called[n] for n in wanted], [written[n] for n in wanted])
        for n in wanted:
            np.testing.assert_array_equal(called[n].numpy(), written[n].numpy())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_results_are_computed_one_after_the_other_of_arguments_that_nobody_else_holds(order: tuple[int, ...]) -> None:
    wanted = [t.numpy() for t in update(*tensors((64, 64), 3), 2)]
    called = call(update, tensors((64, 64), 3), 2)
    for n in order:
        np.testing.assert_array_equal(called[n].numpy(), wanted[n])


@pytest.mark.parametrize("names", [(), tuple(passes.PASSES)])
def test_the_plan_is_that_of_the_operations(names: tuple[str, ...]) -> None:
    arguments = tensors((32, 16), 0)
    called, written = (
        make_plan(trace([results[0].node, results[1].node])[0], names)
        for results in (call(update, arguments, 2), update(*arguments, 2))
    )
    assert [step.op for step in called.steps] == [step.op for step in written.steps]
    assert called.memory.arena_bytes == written.memory.arena_bytes


def test_a_call_is_a_node_for_each_result_and_built_once_for_equal_arguments() -> None:
    call(update, tensors((7, 3), 0), 2)
    built.clear()
    for seed in range(3):
        arguments = tensors((7, 3), seed)
        nodes: list[Node] = [t.node for t in call(update, arguments, 2)]
        assert all(node.inputs == tuple(t.node for t in arguments) for node in nodes)
    assert not built
    call(update, tensors((7, 4), 0), 2)
    call(update, tensors((7, 3), 0), 3)
    assert built == ["update"] * 2


def test_calls_of_calls() -> None:
    def twice(p: ft.Tensor, g: ft.Tensor, rate: ft.Tensor) -> tuple[ft.Tensor]:
        first, m, *_ = call(update, [p, g, rate], 2)
        return (call(update, [first, m, rate], 1)[0],)

    arguments = tensors((3,), 1)
    p, m, *_ = update(*arguments, 2)
    wanted = update(p, m, arguments[2], 1)[0].numpy()
    np.testing.assert_array_equal(call(twice, arguments)[0].numpy(), wanted)
    found = ft.grad(ft.sum(call(twice, arguments)[0]), arguments)
    for each, other in zip(found, ft.grad(ft.sum(twice(*arguments)[0]), arguments), strict=True):
        np.testing.assert_allclose(each.numpy(), other.numpy(), rtol=1e-13)


def test_what_is_not_of_its_arguments_is_refused() -> None:
    known = ft.asarray([1.0]).realize()

    def of_something_else(x: ft.Tensor) -> tuple[ft.Tensor]:
        return (x + known,)

    with pytest.raises(RuntimeError, match=r"of_something_else holds .* only compute something of its arguments"):
        call(of_something_else, [ft.asarray([2.0])])


def test_what_is_not_read_is_no_input() -> None:
    def of_the_shape(p: ft.Tensor, g: ft.Tensor, rate: ft.Tensor) -> tuple[ft.Tensor, ...]:
        return ft.ones(p.shape, dtype=g.dtype) * rate, rate

    p, g, rate = tensors((3, 2), 0)
    for result, wanted in zip(call(of_the_shape, [p, g, rate]), of_the_shape(p, g, rate), strict=True):
        assert result.node.inputs == (rate.node,)
        np.testing.assert_array_equal(result.numpy(), wanted.numpy())


def test_the_derivative_of_a_product_does_not_read_the_product() -> None:
    a, b = (ft.asarray(np.random.default_rng(0).normal(size=s)) for s in ((4, 3, 2), (2, 5)))
    product = a @ b
    for gradient in ft.grad(product, [a, b], cotangent=ft.ones_like(product)):
        assert product.node not in topological([gradient.node])


def test_a_variadic_op_is_asked_once_for_all_its_cotangents() -> None:
    query, key, value = (ft.asarray(np.random.default_rng(n).normal(size=(2, 3, 4))) for n in range(3))
    y = ft.scaled_dot_product_attention(query, key, value)
    gradients = ft.grad(ft.sum(y), [query, key, value])
    backward = [n for n in topological([g.node for g in gradients]) if n.op.name == "attention_backward"]
    assert len(backward) == 1

"""`hold` keeps what the backward pass needs, and nothing that is cheap to compute again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuel_parallel.lazy as ft
from fuel_parallel.lazy import effects
from fuel_parallel.lazy.autograd import Pullback
from fuel_parallel.lazy.node import Node
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.pipeline_parallel.run.residuals import to_hold
from fuel_parallel.runtime.realize import hold, realize


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return ft.asarray(np.random.default_rng(seed).standard_normal(shape))


def held_below(tensor: Tensor) -> list[str]:
    """Ops of the nodes below that have a value and are no leaves."""
    found, stack, seen = [], [tensor.node], set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.inputs)
            if node.value is not None and node.inputs:
                found.append(node.op.name)
    return sorted(found)


def residuals(output: Tensor, wrt: list[Tensor]) -> list[str]:
    def choose(computed: list[Node]) -> list[int]:
        with effects.dry_run():
            pullback = Pullback([output], [ft.ones_like(output)], wrt)
            pullback.finish()
            return to_hold(computed, [pullback.cotangent(x) for x in wrt])

    hold([output], choose)
    return held_below(output)


def test_what_is_held_has_a_gradient_and_a_value() -> None:
    x, w = leaf(3, 4), leaf(4, 5, seed=1)
    y = ft.sum(ft.tanh(x @ w))
    (value,) = hold([y], lambda computed: [n for n, node in enumerate(computed) if node.op.name == "tanh"])
    assert held_below(y) == ["tanh"]
    expected = ft.sum(ft.tanh(x @ w))
    assert value == expected.item()
    gradients, dense = ft.grad(y, [x, w]), ft.grad(ft.sum(ft.tanh(x @ w)), [x, w])
    for mine, other in zip(gradients, dense, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.numpy())


def test_a_value_that_is_there_is_given() -> None:
    y = leaf(3) + 1
    realize(y)
    (value,) = hold([y], lambda computed: [])
    np.testing.assert_array_equal(value, y.numpy())


def test_products_are_held_once_and_views_and_sums_are_not() -> None:
    """The bias, the mask of relu and the reshapes are computed again; the product itself is what saves them."""
    x, w, b, v = leaf(8, 4), leaf(4, 16, seed=1), leaf(16, seed=2), leaf(16, 2, seed=3)
    hidden = ft.relu(ft.reshape(x @ w + b, (2, 4, 16)))
    assert residuals(hidden @ v, [x, w, b, v]) == ["matmul"]


def test_transcendental_functions_are_not_computed_again() -> None:
    x, w, v = leaf(8, 4), leaf(4, 16, seed=1), leaf(16, 2, seed=3)
    assert residuals(ft.exp(x @ w) @ v, [x, w, v]) == ["exp"]  # its own derivative
    assert residuals(ft.sin(x @ w) @ v, [x, w, v]) == ["cos", "matmul", "sin"][1:]


def test_nothing_is_held_where_the_backward_needs_nothing() -> None:
    x, w = leaf(8, 4), leaf(4, 3, seed=1)
    assert residuals(x @ w + 1, [x, w]) == []


@given(st.integers(0, 200))
def test_any_choice_gives_the_same_gradients(seed: int) -> None:
    """What is not held is computed again, to the same bits."""
    x, w = leaf(3, 4), leaf(4, 4, seed=1)

    def model() -> Tensor:
        return ft.sum(ft.exp(ft.tanh(x @ w) @ w) * x)

    y = model()
    draw = np.random.default_rng(seed)
    hold([y], lambda computed: [n for n in range(len(computed)) if draw.random() < 0.5])
    for mine, dense in zip(ft.grad(y, [x, w]), ft.grad(model(), [x, w]), strict=True):
        np.testing.assert_allclose(mine.numpy(), dense.numpy(), rtol=1e-14)


@pytest.mark.parametrize("shared", [False, True])
def test_a_backward_pass_in_two_parts(shared: bool) -> None:
    """`through` stops at what only weights lead to; a weight that is used twice gets both its parts."""
    x, w, v = leaf(3, 4), leaf(4, 4, seed=1), leaf(4, 4, seed=2)
    weights = [w, w if shared else v]

    def model() -> Tensor:
        return ft.sum(ft.tanh(ft.tanh(x @ ft.square(weights[0])) @ weights[1].mT))

    y = model()
    pullback = Pullback([y], [ft.ones_like(y)], [x, *weights])
    pullback.through([x])
    slope = pullback.cotangent(x)
    hold([slope, *pullback.passed], lambda computed: list(range(len(computed))))
    pullback.finish()
    dense = ft.grad(model(), [x, *weights])
    for mine, other in zip([slope, *map(pullback.cotangent, weights)], dense, strict=True):
        np.testing.assert_allclose(mine.numpy(), other.numpy(), rtol=1e-14)


def test_a_dry_run_leaves_no_collective_behind() -> None:
    from fuel_parallel import SymbolicComm

    comm = SymbolicComm(0, 2)
    with effects.dry_run():
        comm.all_reduce(ft.ones(3))
        comm.send(ft.ones(3), 1)
    assert effects.take() == []
    kept = comm.all_reduce(ft.ones(3))
    assert [node for node in effects.noted_before(1 << 60) if node.attrs[0] is comm] == [kept.node]

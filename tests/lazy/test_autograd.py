"""What `grad` takes and gives, when it refuses, and what it knows of graphs that were let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import fuel_parallel.lazy as ft
from fuel_parallel.errors import FuelError, GradientError, ShapeError
from fuel_parallel.lazy import node as nodes
from fuel_parallel.lazy.node import History
from fuel_parallel.module import Module, Parameter, Variable
from fuel_parallel.runtime.realize import realize


class Pair(NamedTuple):
    left: ft.Tensor
    right: ft.Tensor


class Affine(Module):
    def __init__(self) -> None:
        self.scale = Parameter(2.0)
        self.shift = Parameter(1.0)


@pytest.fixture
def x() -> ft.Tensor:
    return ft.asarray([1.0, 2.0, 3.0])


def test_gradients_are_lazy_until_they_are_read(x: ft.Tensor) -> None:
    g = ft.grad(ft.sum(x * x), x)
    assert not g.is_realized
    assert g.tolist() == [2.0, 4.0, 6.0]


def test_the_result_has_the_structure_of_what_was_asked_for() -> None:
    a, b, c, d = (ft.asarray(float(i)) for i in range(1, 5))
    loss = a * b * c * d
    found = ft.grad(loss, {"one": [a, (b,)], "two": Pair(c, d)})
    assert found["one"][0].item() == 24.0
    assert found["one"][1][0].item() == 12.0
    assert isinstance(found["two"], Pair)
    assert found["two"].right.item() == 6.0


def test_a_module_gives_a_gradient_for_each_variable_in_order() -> None:
    model = Affine()
    found = ft.grad(model.scale * 3 + model.shift, model)
    assert [g.item() for g in found] == [3.0, 1.0]


def test_what_the_loss_does_not_depend_on_has_gradient_zero(x: ft.Tensor) -> None:
    other = ft.ones((2, 2), dtype=ft.float64)
    g = ft.grad(ft.sum(x), other)
    assert (g.shape, g.dtype) == ((2, 2), ft.float64)
    assert g.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_a_tensor_used_twice_gets_both_parts(x: ft.Tensor) -> None:
    assert ft.grad(ft.sum(x * x + x), x).tolist() == [3.0, 5.0, 7.0]
    assert ft.grad(ft.sum(x), [x, x])[1].tolist() == [1.0, 1.0, 1.0]


def test_an_intermediate_can_be_asked_for_together_with_its_inputs(x: ft.Tensor) -> None:
    middle = x * 2
    of_middle, of_x = ft.grad(ft.sum(middle * middle), [middle, x])
    assert of_middle.tolist() == [4.0, 8.0, 12.0]
    assert of_x.tolist() == [8.0, 16.0, 24.0]


def test_the_loss_itself_can_be_asked_for(x: ft.Tensor) -> None:
    loss = ft.sum(x)
    assert ft.grad(loss, loss).item() == 1.0


def test_a_cotangent_makes_a_vector_jacobian_product(x: ft.Tensor) -> None:
    assert ft.grad(x * x, x, cotangent=ft.asarray([1.0, 0.0, 2.0])).tolist() == [2.0, 0.0, 12.0]


def test_third_derivative() -> None:
    x = ft.asarray(2.0, dtype=ft.float64)
    y = x**4
    for _ in range(3):
        y = ft.grad(y, x)
    assert y.item() == 48.0


def test_stop_gradient_makes_a_constant(x: ft.Tensor) -> None:
    assert ft.grad(ft.sum(ft.stop_gradient(x) * x), x).tolist() == [1.0, 2.0, 3.0]


def test_no_gradient_passes_an_integer(x: ft.Tensor) -> None:
    steps = x.astype(ft.int32).astype(ft.float32)
    assert ft.grad(ft.sum(steps * x), x).tolist() == [1.0, 2.0, 3.0]


def test_value_and_grad_passes_the_rest_through(x: ft.Tensor) -> None:
    def loss(x: ft.Tensor, scale: float, *, shift: float) -> tuple[ft.Tensor, str]:
        return ft.sum(x * x) * scale + shift, "more"

    (value, more), gradient = ft.value_and_grad(loss)(x, 2.0, shift=1.0)
    assert (value.item(), more, gradient.tolist()) == (29.0, "more", [4.0, 8.0, 12.0])


def test_value_and_grad_of_several_arguments() -> None:
    function = ft.value_and_grad(lambda a, b, c: a * b["weight"] * c, argnums=(0, 1))
    value, (of_a, of_b) = function(ft.asarray(2.0), {"weight": ft.asarray(3.0)}, ft.asarray(5.0))
    assert (value.item(), of_a.item(), of_b["weight"].item()) == (30.0, 15.0, 10.0)


def test_writing_into_a_tensor_has_a_gradient(x: ft.Tensor) -> None:
    value = ft.asarray(5.0)
    y = ft.Tensor(x.node)
    y[1] = value * 2
    of_x, of_value = ft.grad(ft.sum(y * y), [x, value])
    assert of_x.tolist() == [2.0, 0.0, 6.0]
    assert of_value.item() == 40.0


MISTAKES: dict[str, tuple[Callable[[ft.Tensor], Any], str]] = {
    "no tensor": (lambda x: ft.grad(3.0, x), "the loss must be a tensor, not float"),  # type: ignore[arg-type]
    "vector": (lambda x: ft.grad(x * 2, x), r"must be a scalar, but has shape \(3,\); reduce it with sum or mean"),
    "integer loss": (lambda x: ft.grad(ft.sum(ft.argsort(x)), x), "must be a floating tensor, not int64"),
    "complex loss": (lambda x: ft.grad(ft.sum(x * 1j), x), "must be a floating tensor, not complex64"),
    "integer wrt": (lambda x: ft.grad(ft.sum(x), ft.arange(3)), "floating tensors, not a int64 tensor"),
    "complex wrt": (lambda x: ft.grad(ft.sum(x), x * 1j), "floating tensors, not a complex64 tensor"),
    "number wrt": (lambda x: ft.grad(ft.sum(x), [x, 1.0]), "floating tensors, not a float"),
    "cotangent": (lambda x: ft.grad(x, x, cotangent=ft.ones(2)), r"like the loss, float32\[3\], not float32\[2\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str, x: ft.Tensor) -> None:
    make, text = MISTAKES[name]
    with pytest.raises(FuelError, match=text) as caught:
        make(x)
    assert isinstance(caught.value, GradientError | ShapeError)


# Released graphs.


def test_a_gradient_through_a_released_graph_is_an_error(x: ft.Tensor) -> None:
    y = x * 2
    y.realize()
    with pytest.raises(GradientError, match=r"was realized before its gradient .*test_autograd\.py:\d+.*stop_gradient"):
        ft.grad(ft.sum(y), x)


def test_reading_the_loss_first_is_the_same_error(x: ft.Tensor) -> None:
    loss = ft.sum(x * x)
    assert loss.item() == 14.0
    with pytest.raises(GradientError, match="Call grad before realize"):
        ft.grad(loss, x)


def test_what_a_released_tensor_does_not_depend_on_is_no_error(x: ft.Tensor) -> None:
    mask = ft.asarray([1.0, 0.0, 1.0]) * 2
    mask.realize()
    assert ft.grad(ft.sum(mask * x), x).tolist() == [2.0, 0.0, 2.0]


def test_a_released_tensor_is_a_constant_behind_stop_gradient(x: ft.Tensor) -> None:
    y = (x * 2).realize()
    assert ft.grad(ft.sum(ft.stop_gradient(y) * x), x).tolist() == [2.0, 4.0, 6.0]


def test_a_released_integer_is_a_constant(x: ft.Tensor) -> None:
    order = ft.argsort(x, descending=True).realize()
    assert ft.grad(ft.sum(x[order] * ft.asarray([1.0, 2.0, 3.0])), x).tolist() == [3.0, 2.0, 1.0]


def test_a_realized_tensor_can_be_asked_for_itself(x: ft.Tensor) -> None:
    y = (x * 2).realize()
    assert ft.grad(ft.sum(y * y), y).tolist() == [4.0, 8.0, 12.0]


def test_history_passes_through_several_releases(x: ft.Tensor) -> None:
    y = (x * 2).realize()
    z = (y + 1).realize()
    with pytest.raises(GradientError, match="its graph was let go"):
        ft.grad(ft.sum(z), x)


@pytest.mark.parametrize("order", ["output first", "variable first", "with an older tensor"])
def test_a_variable_realized_together_with_its_output_is_an_error_not_zero(order: str) -> None:
    older = ft.ones(2) + 1
    weight = Variable(ft.ones(2) * 3)
    output = weight * 2
    together = {"output first": (output, weight), "variable first": (weight, output)}
    realize(*together.get(order, (older, weight, output)))
    with pytest.raises(GradientError, match="its graph was let go"):
        ft.grad(ft.sum(output), weight)


def test_a_realized_variable_is_a_leaf() -> None:
    weight = Parameter(ft.ones(2) * 3)
    for _ in range(3):
        g = ft.grad(ft.sum(weight * weight), weight)
        weight.assign(weight - 0.5 * g)
        realize(weight)
    assert weight.tolist() == [0.0, 0.0]


def test_a_gradient_can_be_taken_again_while_the_graph_lives(x: ft.Tensor) -> None:
    loss = ft.sum(x * x)
    first = ft.grad(loss, x).tolist()
    assert ft.grad(loss, x).tolist() == first


def test_a_long_history_forgets_the_oldest_leaves_on_the_safe_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_HISTORY_LIMIT", 4)
    old = ft.asarray(1.0)
    leaves = [ft.asarray(float(i)).node for i in range(6)]
    history = History.of(leaves)
    assert history.leaves == {leaf.serial for leaf in leaves[2:]}
    assert history.may_hold([leaves[0].serial])
    assert history.may_hold([old.node.serial]), "older than what was forgotten: it may have been one of them"
    assert not history.may_hold([leaves[-1].serial + 1])


def test_backward_nodes_are_booked_on_the_line_of_their_forward_op(x: ft.Tensor) -> None:
    loss = ft.sum(ft.exp(x))
    g = ft.grad(loss, x)
    assert g.node.op.name == "multiply"
    assert g.node.line is not None
    assert loss.node.line is not None
    assert g.node.line[1] == loss.node.line[1]


def test_a_deep_graph_needs_no_deep_stack() -> None:
    x = ft.asarray(1.0)
    y = x
    for _ in range(5_000):
        y = y + 1.0
    g = ft.grad(y, x)
    assert np.asarray(g).item() == 1.0
    assert y.item() == 5_001.0

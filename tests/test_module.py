"""Variables and modules: naming, sharing, rebinding, loading."""

from __future__ import annotations

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError


class Affine(fp.Module):
    def __init__(self) -> None:
        self.scale = fp.Parameter(ft.asarray([2.0, 3.0]))
        self.shift = fp.Parameter(ft.asarray([1.0, 1.0]))
        self.calls = fp.Variable(0)
        self.name = "affine"

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        return x * self.scale + self.shift


class Nest(fp.Module):
    def __init__(self) -> None:
        self.first = Affine()
        self.rest = [Affine(), (Affine(), {"deep": Affine()})]
        self.none = None


def test_a_module_finds_its_variables_by_the_order_and_names_of_its_attributes() -> None:
    assert list(Affine().named_variables()) == ["scale", "shift", "calls"]


def test_only_parameters_are_trained() -> None:
    assert [name for name, _ in Affine().named_parameters()] == ["scale", "shift"]
    assert len(Affine().parameters()) == 2


def test_names_go_through_modules_lists_tuples_and_dicts() -> None:
    names = [name for name, _ in Nest().named_parameters()]
    assert names == [
        "first.scale",
        "first.shift",
        "rest.0.scale",
        "rest.0.shift",
        "rest.1.0.scale",
        "rest.1.0.shift",
        "rest.1.1.deep.scale",
        "rest.1.1.deep.shift",
    ]


def test_a_shared_weight_counts_once_under_its_first_name() -> None:
    nest = Nest()
    nest.rest[0].scale = nest.first.scale  # type: ignore[attr-defined]
    names = [name for name, _ in nest.named_parameters()]
    assert "first.scale" in names
    assert "rest.0.scale" not in names
    assert len({id(p) for p in nest.parameters()}) == len(nest.parameters()) == 7


def test_the_gradient_of_a_shared_weight_is_the_sum_over_its_uses() -> None:
    model = Affine()
    model.shift = model.scale
    x = ft.asarray([5.0, 7.0])
    (gradient,) = ft.grad(model(x).sum(), model.parameters())
    assert gradient.tolist() == [6.0, 8.0]


def test_a_variable_that_is_realized_is_a_leaf_for_the_next_step() -> None:
    p = fp.Parameter(ft.asarray([1.0, 2.0]))
    for _ in range(3):
        loss = (p * p).sum()
        gradient = ft.grad(loss, p)
        p.assign(p - 0.25 * gradient)
        fp.realize(p)
        assert p.is_realized
    assert p.tolist() == [0.125, 0.25]


def test_a_tensor_keeps_the_value_that_a_variable_had_when_it_was_built() -> None:
    p = fp.Variable(1.0)
    before = p * 10
    p.assign(p + 1)
    assert (before.item(), p.item()) == (10.0, 2.0)


def test_realizing_a_module_realizes_all_of_its_variables() -> None:
    model = Affine()
    model.calls.assign(model.calls + 1)
    model.scale.assign(model.scale * 2)
    fp.realize(model)
    assert all(v.is_realized for v in model.named_variables().values())
    assert (model.calls.item(), model.scale.tolist()) == (1, [4.0, 6.0])


def test_assign_takes_no_other_shape() -> None:
    with pytest.raises(ShapeError, match=r"assign: the variable has shape \(2,\), the new value \(3,\)"):
        fp.Variable(ft.zeros(2)).assign(ft.zeros(3))


def test_assign_takes_no_other_dtype() -> None:
    with pytest.raises(DTypeError, match="assign: the variable is float32, the new value float64; use astype"):
        fp.Variable(ft.zeros(2)).assign(ft.zeros(2, dtype=ft.float64))


def test_load_sets_every_variable_and_keeps_its_dtype() -> None:
    model = Affine()
    scale = model.scale
    model.load({"scale": np.array([7.0, 8.0]), "shift": [0.0, 1.0], "calls": 4})
    assert model.scale is scale
    assert (scale.tolist(), scale.dtype.name, model.calls.item()) == ([7.0, 8.0], "float32", 4)


def test_what_a_module_holds_can_be_loaded_into_another() -> None:
    source, target = Nest(), Nest()
    source.first.scale.assign(source.first.scale + 5)
    target.load({name: v.numpy() for name, v in source.named_variables().items()})
    assert target.first.scale.tolist() == [7.0, 8.0]


def test_load_names_what_is_missing_and_what_is_unknown() -> None:
    with pytest.raises(ArgumentError, match=r"load: .*missing: \['calls', 'shift'\], unknown: \['bias'\]"):
        Affine().load({"scale": [1.0, 1.0], "bias": [0.0, 0.0]})


def test_load_refuses_another_shape_and_then_changes_nothing() -> None:
    model = Affine()
    with pytest.raises(ShapeError, match=r"load: shift has shape \(2,\), the value for it \(3,\)"):
        model.load({"scale": [9.0, 9.0], "shift": [0.0, 0.0, 0.0], "calls": 0})
    assert model.scale.tolist() == [2.0, 3.0]


def test_a_module_without_a_call_says_so() -> None:
    class Empty(fp.Module):
        pass

    with pytest.raises(NotImplementedError, match="Empty does not define __call__"):
        Empty()()
    assert Empty().parameters() == []


def test_a_module_shows_its_variables() -> None:
    assert repr(Affine()) == "Affine(\n  scale: float32[2]\n  shift: float32[2]\n  calls: int64[]\n)"


def test_a_module_that_holds_itself_is_walked_once() -> None:
    model = Affine()
    model.parent = model  # type: ignore[attr-defined]
    assert [name for name, _ in model.named_parameters()] == ["scale", "shift"]

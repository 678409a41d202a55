"""The tensor as an object: attributes, conversions, and what never changes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import fuel_parallel.lazy as ft
from fuel_parallel.errors import ShapeError
from fuel_parallel.lazy.tree import flatten, tensors_of, unflatten


def test_attributes_are_known_without_running() -> None:
    x = ft.zeros((2, 3), dtype=ft.float16) + 1
    assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes, x.device) == ((2, 3), ft.float16, 2, 6, 12, "cpu")
    assert not x.is_realized


def test_printing_a_lazy_tensor_computes_nothing() -> None:
    x = ft.ones(2) + 1
    assert repr(x) == "Tensor(shape=(2,), dtype=float32, device=cpu, lazy add)"
    assert not x.is_realized
    assert repr(x.realize()) == "Tensor([2., 2.], shape=(2,), dtype=float32, device=cpu)"


def test_conversions_compute() -> None:
    x = ft.asarray([[2.5]])
    assert (float(x), int(x), bool(x), complex(x), x.item(), x.tolist()) == (2.5, 2, True, 2.5 + 0j, 2.5, [[2.5]])
    assert np.asarray(x * 2).tolist() == [[5.0]]
    assert np.asarray(x, dtype=np.float64).dtype == np.float64
    assert np.array(x).flags.writeable
    assert "abc"[ft.asarray(1)] == "b"


def test_values_are_read_only() -> None:
    value = (ft.ones(3) * 2).numpy()
    with pytest.raises(ValueError, match="read-only"):
        value[0] = 7.0
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(ft.ones(3))[0] = 7.0


@pytest.mark.parametrize("name", ["__float__", "__int__", "__bool__", "__complex__", "item"])
def test_only_one_element_is_a_scalar(name: str) -> None:
    with pytest.raises(ShapeError, match=r"item\(\) needs a tensor of one element, but this one has shape \(2,\)"):
        getattr(ft.ones(2), name)()


def test_what_has_no_length_says_so() -> None:
    for make in (lambda: len(ft.asarray(1.0)), lambda: iter(ft.asarray(1.0))):
        with pytest.raises(TypeError, match="0-d tensor"):
            make()
    with pytest.raises(TypeError, match="only an integer tensor can be used as an index, not float32"):
        [1, 2][ft.asarray(1.0)]


def test_writing_points_the_handle_at_a_new_value_and_keeps_the_old() -> None:
    x = ft.asarray([1.0, 2.0])
    y = x * 10
    other = ft.Tensor(x.node)
    x[0] = 5.0
    assert (x.tolist(), y.tolist(), other.tolist()) == ([5.0, 2.0], [10.0, 20.0], [1.0, 2.0])


def test_tensors_hash_by_identity_and_compare_by_element() -> None:
    x, y = ft.asarray([1, 2]), ft.asarray([1, 3])
    assert len({x, y, x}) == 2
    assert (x == y).tolist() == [True, False]
    assert (x != 1).tolist() == [False, True]
    assert [(x < y).tolist(), (x <= y).tolist(), (x > 1).tolist(), (x >= 2).tolist()] == [
        [False, True],
        [True, True],
        [False, True],
        [False, True],
    ]


def test_numpy_leaves_operators_to_the_tensor() -> None:
    for found in (np.float64(2) * ft.ones(2), np.ones(2) + ft.ones(2), np.ones((2, 2)) @ ft.ones(2)):
        assert isinstance(found, ft.Tensor)
        assert found.tolist() == [2.0, 2.0]


def test_methods_are_the_functions_of_the_namespace() -> None:
    x = ft.asarray([[1.0, 2.0], [3.0, 4.0]])
    assert [x.sum().item(), x.mean().item(), x.max().item(), x.min().item()] == [10.0, 2.5, 4.0, 1.0]
    assert x.sum(0, keepdims=True).tolist() == [[4.0, 6.0]]
    assert x.reshape(-1).tolist() == x.reshape((4,)).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert x.T.tolist() == x.mT.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert x.astype("int8").dtype == ft.int8


def test_a_copy_is_another_handle_on_the_same_value() -> None:
    x = ft.asarray([1.0])
    y = copy.copy(x)
    y[0] = 2.0
    assert (x.tolist(), y.tolist()) == ([1.0], [2.0])


class Box:
    def __init__(self, *tensors: ft.Tensor) -> None:
        self.tensors = tensors

    def __tensors__(self) -> Any:
        return list(self.tensors)


def test_nests_are_taken_apart_and_put_together() -> None:
    a, b, c = ft.ones(1), ft.ones(2), ft.ones(3)
    nest = {"a": a, "rest": [b, (c, 4.0)], "none": None}
    leaves, structure = flatten(nest)
    assert [leaf if not isinstance(leaf, ft.Tensor) else leaf.shape for leaf in leaves] == [(1,), (2,), (3,), 4.0, None]
    rebuilt = unflatten(structure, leaves)
    assert rebuilt["rest"][1] == (c, 4.0)
    assert list(rebuilt) == ["a", "rest", "none"]
    assert tensors_of(Box(a, b), [{"c": c}], 3) == [a, b, c]

"""Copies share the value and nothing else; a pickle is the value."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.comm import IdentityComm, SymbolicComm
from fuel_parallel.data_parallel import shard_parameters
from fuel_parallel.errors import CommunicatorError, RealizeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import lose, topological
from fuel_parallel.lazy.parts import part_of
from fuel_parallel.module import Module, Parameter, Shard, Variable

COPIES: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy]


def pickled(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


class Tied(Module):
    """Two layers, of which the second has the weight of the first."""

    def __init__(self, generator: ft.random.Generator) -> None:
        self.first = fp.Linear(3, 3, generator)
        self.second = fp.Linear(3, 3, generator)
        self.second.weight = self.first.weight

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        return self.second(ft.tanh(self.first(x)))


def tied() -> Tied:
    return Tied(ft.random.Generator(5))


def loss_of(model: Tied) -> ft.Tensor:
    return ft.mean(ft.square(model(ft.ones((2, 3)))))


# Tensors.


@given(
    st.sampled_from(dtypes.ALL).flatmap(
        lambda d: arrays.arrays(np.uint8, arrays.array_shapes(min_dims=0, min_side=0, max_side=4)).map(
            lambda a: a.astype(d)
        )
    )
)
def test_all_ways_keep_every_bit_of_every_dtype(array: np.ndarray[Any, Any]) -> None:
    x = ft.asarray(array)
    for again in (copy.copy(x), copy.deepcopy(x), pickled(x), *[pickle.loads(pickle.dumps(x, p)) for p in range(6)]):
        assert type(again) is ft.Tensor
        assert again.dtype is x.dtype
        assert again.is_realized
        assert again.numpy().tobytes() == array.tobytes()
        assert again.shape == array.shape


@pytest.mark.parametrize("make", COPIES)
def test_copying_computes_nothing(make: Callable[[Any], Any]) -> None:
    x = ft.ones(3) + 1
    again = make(x)
    assert not x.is_realized
    assert not again.is_realized
    assert again.tolist() == [2.0, 2.0, 2.0]


def test_pickling_computes() -> None:
    x = ft.ones(3) + 1
    again = pickled(x)
    assert x.is_realized
    assert again.is_realized
    assert again.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("realize_first", [False, True])
@pytest.mark.parametrize("make", [*COPIES, pickled])
def test_what_is_written_into_a_copy_stays_there(make: Callable[[Any], Any], realize_first: bool) -> None:
    x = ft.arange(3)
    if realize_first:
        x.realize()
    again = make(x)
    again[0] = 7
    assert (x.tolist(), again.tolist()) == ([0, 1, 2], [7, 1, 2])


def test_a_gradient_passes_a_shallow_copy_and_stops_at_a_deep_one() -> None:
    x = ft.asarray([2.0])
    y = x * x
    assert ft.grad(ft.sum(copy.copy(y) * 3), x).tolist() == [12.0]
    assert ft.grad(ft.sum(copy.deepcopy(y) * y), x).tolist() == [16.0]
    deep = copy.deepcopy(y)
    assert ft.grad(ft.sum(deep * y), deep).tolist() == [4.0]


def test_a_value_that_was_lost_cannot_be_pickled() -> None:
    x = ft.ones(3).realize()
    lose(x.node)
    with pytest.raises(RealizeError, match="is lost"):
        pickle.dumps(x)


def test_a_part_of_a_deep_copy_is_drawn_without_the_whole() -> None:
    whole = copy.deepcopy(ft.random.Generator(0).normal((8, 5)))
    part = part_of(whole, (range(2, 4), range(5)))
    assert max(node.spec.size for node in topological([part.node])) == 10
    assert part.tolist() == whole[2:4].tolist()


# Variables, modules, optimizers.


@pytest.mark.parametrize("make", [*COPIES, pickled])
def test_a_variable_keeps_its_kind_and_its_shard(make: Callable[[Any], Any]) -> None:
    shard = Shard((4, 2), (2, 0), owned=(slice(0, 1), slice(None)))
    again = make(Parameter(ft.ones((2, 2)), shard=shard))
    assert type(again) is Parameter
    assert again.shard == shard
    again.assign(again + 1)
    assert again.tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("realize_first", [False, True])
@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_a_module_keeps_its_values_and_what_it_shares(make: Callable[[Any], Any], realize_first: bool) -> None:
    model = tied()
    if realize_first:
        fp.realize(model)
    again = make(model)
    assert again.first.weight is again.second.weight
    assert again.first.weight is not model.first.weight
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("realize_first", [False, True])
def test_a_deep_copy_is_a_teacher_that_its_student_does_not_move(realize_first: bool) -> None:
    student = tied()
    if realize_first:
        fp.realize(student)
    teacher = copy.deepcopy(student)
    alone = ft.grad(loss_of(student), student.parameters())
    gradients = ft.grad(loss_of(student) + loss_of(teacher), student.parameters())
    for one, other in zip(gradients, alone, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    before = [p.numpy().copy() for p in teacher.parameters()]
    optimizer = fp.optim.SGD(student.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.update(ft.grad(loss_of(student), student.parameters()))
        fp.realize(student)
    for p, value, moved in zip(teacher.parameters(), before, student.parameters(), strict=True):
        np.testing.assert_array_equal(p.numpy(), value)
        assert (moved.numpy() != value).any()


@pytest.mark.parametrize("make", [copy.deepcopy, pickled])
def test_a_training_that_was_copied_goes_on_with_the_same_bits(make: Callable[[Any], Any]) -> None:
    def steps(model: Tied, optimizer: fp.optim.AdamW, generator: ft.random.Generator) -> list[Any]:
        losses = []
        for _ in range(3):
            loss = ft.mean(ft.square(model(generator.normal((2, 3)))))
            optimizer.update(ft.grad(loss, model.parameters()))
            fp.realize(loss, model, optimizer)
            losses.append(loss.item())
        return losses

    model = tied()
    state = model, fp.optim.AdamW(model.parameters(), lr=0.1), ft.random.Generator(9)
    steps(*state)
    again = make(state)
    assert steps(*again) == steps(*state)


def test_two_handles_on_one_node_are_two_on_one_leaf_in_a_deep_copy() -> None:
    x = ft.ones(3) + 1
    one, other = copy.deepcopy([ft.Tensor(x.node), Variable(x)])
    assert one.node is other.node
    assert one.node is not x.node


# Communicators.


def test_a_copy_talks_to_the_same_ranks() -> None:
    comm = SymbolicComm(1, 2)
    layer = fp.Linear(4, 4, ft.random.Generator(0))
    layer.comm = comm
    assert copy.deepcopy(layer).comm is comm
    assert copy.copy(comm) is comm
    shard_parameters(layer, comm, whole_elements=1)
    again = copy.deepcopy(layer)
    assert again.weight.shape == (4, 4)
    assert [p.shape for p in again.parameters()] == [p.shape for p in layer.parameters()]


def test_communicators_of_no_running_ranks_can_be_pickled() -> None:
    assert repr(pickled(SymbolicComm(1, 3, "mine"))) == repr(SymbolicComm(1, 3, "mine"))
    assert repr(pickled(IdentityComm("mine"))) == repr(IdentityComm("mine"))
    running: Any = SymbolicComm(1, 3)
    with pytest.raises(CommunicatorError, match=r"cannot be pickled: it is a group of running ranks.*checkpoint"):
        super(SymbolicComm, running).__reduce__()

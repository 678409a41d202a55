"""Nodes remember the line that built them, infer once, and let go of what they do not need."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import traceback
import weakref
from typing import Any

import pytest

import fuel_parallel.lazy as ft
from fuel_parallel.errors import FuelError
from fuel_parallel.lazy import node as nodes
from fuel_parallel.lazy.node import Op, Spec, apply, define, describe_line, topological


def here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_node_knows_the_line_that_built_it() -> None:
    x, line = ft.ones(2), here()
    y, later = ft.softmax(x).sum(), here()
    assert describe_line(x.node.line).endswith(f"test_node.py:{line}")
    assert describe_line(y.node.line).endswith(f"test_node.py:{later}")
    assert describe_line(None) == "<unknown line>"


def test_lines_inside_of_the_package_are_passed_over() -> None:
    loss, line = ft.cross_entropy(ft.zeros((2, 3)), ft.asarray([0, 1])), here()
    lines = {describe_line(node.line) for node in topological([loss.node])}
    assert len(lines) == 1
    assert lines.pop().endswith(f"test_node.py:{line}")


MISTAKES: list[Any] = [
    lambda: ft.ones((2, 3)) @ ft.ones((2, 3)),
    lambda: ft.ones(2) + ft.ones(3),
    lambda: ft.reshape(ft.ones(2), (3,)),
    lambda: ft.ones(2)[2],
    lambda: ft.sum(ft.ones(2), axis=1),
    lambda: ft.log(ft.asarray([1])),
    lambda: ft.concat([ft.ones(2), ft.ones((2, 2))]),
    lambda: ft.grad(ft.ones(2), ft.ones(2)),
]


@pytest.mark.parametrize("make", MISTAKES)
def test_an_error_is_raised_at_the_line_of_the_mistake(make: Any) -> None:
    with pytest.raises(FuelError) as caught:
        make()
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert (__file__, make.__code__.co_firstlineno) in places


def test_equal_specs_are_one_object_also_after_pickling() -> None:
    spec = Spec((2, 3), ft.float32)
    assert spec is Spec((2, 3), ft.float32)
    assert spec is not Spec((2, 3), ft.float64)
    assert pickle.loads(pickle.dumps(spec)) is spec
    assert copy.deepcopy(spec) is spec
    assert (spec.size, spec.nbytes, repr(spec)) == (6, 24, "float32[2, 3]")


def test_shapes_are_inferred_once_for_equal_inputs() -> None:
    calls: list[Any] = []

    def infer(x: Spec, factor: float) -> Spec:
        calls.append((x, factor))
        return x

    op = Op("test_infer", infer, lambda xp, x, factor: x * factor, attr_names=("factor",))
    x = ft.ones(7)
    assert [apply(op, (x.node,), 2.0).spec for _ in range(5)] == [x.node.spec] * 5
    apply(op, (x.node,), 3.0)
    assert [factor for _, factor in calls] == [2.0, 3.0]


def test_what_was_inferred_is_forgotten_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_INFERRED_LIMIT", 10)
    for i in range(50):
        ft.zeros(i) + 1.0
    assert len(nodes._inferred) <= 10


def test_an_op_is_defined_once() -> None:
    with pytest.raises(RuntimeError, match="op 'add' is defined twice"):
        define(Op("add", lambda x: x, lambda xp, x: x))


def test_nodes_are_numbered_in_topological_order() -> None:
    x = ft.ones(2)
    y = ft.exp(x) + x
    z = (y * y + ft.grad(ft.sum(y), x)).node
    order = topological([z])
    assert [node.serial for node in order] == sorted({node.serial for node in order})
    assert all(i.serial < node.serial for node in order for i in node.inputs)
    assert order[-1] is z


def test_what_nothing_holds_is_freed() -> None:
    x = ft.ones(2)
    node = weakref.ref(ft.exp(x * 2).node)
    gc.collect()
    assert node() is None


def test_a_realized_node_lets_its_graph_go() -> None:
    x = ft.ones(2)
    middle = x * 2
    dead = weakref.ref(middle.node)
    y = (middle + 1).realize()
    del middle
    gc.collect()
    assert dead() is None
    assert y.node.inputs == ()
    assert repr(y.node).startswith("<node ")


def test_a_long_chain_is_freed_without_recursion() -> None:
    x = ft.ones(1)
    for _ in range(100_000):
        x = -x
    del x
    gc.collect()

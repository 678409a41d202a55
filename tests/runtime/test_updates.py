"""What changes some elements of a variable does so in place, and nobody who holds the old value ever notices."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import FuelError, RealizeError
from fuel_parallel.lazy import effects
from fuel_parallel.module import Variable
from fuel_parallel.runtime.plan import make_plan, plans

Array = np.ndarray[Any, Any]
ROWS = 6
numbers = st.integers(0, ROWS - 1)


def address(variable: Variable) -> int:
    return int(variable.node.value.ctypes.data)


def own(values: Any) -> Variable:
    """A variable that has its memory to itself."""
    variable = Variable(ft.asarray(values) + 0)
    fp.realize(variable)
    return variable


def write_rows(x: ft.Tensor, rows: Any, value: Any) -> ft.Tensor:
    changed = ft.Tensor(x.node)
    changed[ft.asarray(rows)] = value
    return changed


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", ["rows", "slice", "pages", "page copies", "chain"])
def test_a_write_lies_where_the_variable_lay(kind: str, dtype: str) -> None:
    x = own(np.arange(60).reshape(ROWS, 5, 2).astype(ft.dtype(dtype)))
    whole, before = x.nbytes, address(x)
    new = ft.asarray(np.ones((2, 2)), dtype=dtype)
    for _ in range(2):
        value = ft.Tensor(x.node)
        if kind in ("rows", "chain"):
            value = write_rows(value, [1, 4], new[:, None])
        if kind in ("slice", "chain"):
            value[2:4] = new[:, None]
        if kind in ("pages", "chain"):
            value = ft.write_pages(value, new, ft.asarray([3, 17]))
        if kind in ("page copies", "chain"):
            value = ft.copy_pages(value, ft.asarray([0]), ft.asarray([5]))
        x.assign(value)
        del value
        fp.realize(x)
        assert address(x) == before
        assert fp.memory_stats().peak < whole


READS = [lambda x: x[1:3], lambda x: x * 2, lambda x: x.T, lambda x: x[:, 0], lambda x: x]
"""Of a tensor as of an array: views, the whole, and something computed."""


@settings(max_examples=1000 if os.environ.get("FUEL_STRESS") else 100)
@given(st.data())
def test_values_are_those_of_a_program_that_copies(data: Any) -> None:
    """Writes, and reads of old values before and after them, in any order and in any number of plans."""
    draw = data.draw
    wanted = np.arange(ROWS * 2.0).reshape(ROWS, 2)
    x = own(wanted)
    held: list[tuple[Any, Array]] = []

    def read(handle: ft.Tensor, value: Array) -> None:
        for function in draw(st.lists(st.sampled_from(READS), max_size=2)):
            held.append((function(handle), function(value)))
        if draw(st.integers(0, 3)) == 0:
            held.append((handle.numpy(), value))

    for step in range(draw(st.integers(1, 6))):
        before, old = wanted, ft.Tensor(x.node)  # no variable, which would follow x
        read(old, before)
        kind, row, other = draw(st.integers(0, 3)), draw(numbers), draw(numbers)
        value, wanted = ft.Tensor(x.node), wanted.copy()
        if kind == 0:
            value = write_rows(value, [row], x[other] + step)
            wanted[row] = before[other] + step
        elif kind == 1:
            value[row:, 0] = step
            wanted[row:, 0] = step
        elif kind == 2:
            value = ft.copy_pages(value, ft.asarray([row, other]), ft.asarray([other, row]))
            wanted[other] = wanted[row]
        else:
            value = value + 1
            wanted += 1
        x.assign(value)
        read(old, before)
        del old
        if draw(st.booleans()):
            effects.make_due(x)
        if draw(st.booleans()):
            tensors = [t for t, _ in held if isinstance(t, ft.Tensor)]
            fp.realize(*draw(st.sampled_from([(), (x,), (ft.sum(x),), (x, tensors), (tensors, x)])))
    np.testing.assert_array_equal(x.numpy(), wanted)
    for found, expected in held:
        np.testing.assert_array_equal(np.asarray(found), expected)


def test_a_variable_that_is_due_is_computed_by_the_next_plan_whoever_asks() -> None:
    x, before = own(np.zeros((ROWS, 2))), 0
    for step in range(3):
        made = plans.made
        x.assign(write_rows(x, [step], 1.0))
        effects.make_due(x)
        other = ft.ones(3) * 2 + step
        assert other.numpy()[0] == 2 + step
        assert x.is_realized
        assert not x.node.inputs
        assert x.node.history is None, "what a variable was computed from ends there"
        assert before in (0, address(x))
        before = address(x)
        assert plans.made - made <= (step == 0) + 1
    assert x.numpy()[:, 0].tolist() == [1, 1, 1, 0, 0, 0]


def test_a_plan_says_what_is_written_in_place() -> None:
    from fuel_parallel.runtime.graph import graph_of

    def twice(x: ft.Tensor, new: ft.Tensor) -> list[ft.Tensor]:
        once = write_rows(x, [0], new)
        return [write_rows(once, [1], new)]

    def and_reads(x: ft.Tensor, new: ft.Tensor) -> list[ft.Tensor]:
        return [write_rows(x, [0], new), x + 1]

    specs = [own(np.zeros((3, 2))).node.spec, own(np.zeros((1, 2))).node.spec]
    assert str(make_plan(graph_of(twice, specs))).count("in place") == 2
    assert "in place" not in str(make_plan(graph_of(and_reads, specs)))


def test_a_write_on_another_device_is_in_place_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuel_parallel import backends
    from fuel_parallel.backends.numpy_backend import NumpyBackend

    monkeypatch.setitem(backends._found, "other:0", NumpyBackend())
    x = own(ft.to_device(ft.asarray(np.zeros((2, 3), np.float32)), "other:0"))
    before = address(x)
    x.assign(ft.write_pages(x, ft.ones(1, device="other:0"), ft.asarray([4])))
    fp.realize(x)
    assert address(x) == before
    assert x.numpy().ravel().tolist() == [0, 0, 0, 0, 1, 0]


def test_what_was_being_written_when_a_plan_failed_is_lost() -> None:
    x = own(np.zeros((2, 2)))
    x.assign(ft.write_pages(x, ft.ones(1, dtype=x.dtype), ft.asarray([9])))
    with pytest.raises(FuelError, match="there is no slot 9"):
        fp.realize(x)
    with pytest.raises(RealizeError, match="is lost; load it again"):
        x.numpy()


def test_a_value_that_a_late_collective_still_reads_is_not_written_over(late: Any) -> None:
    x = own(np.ones(32768, np.float32))
    total = late.all_reduce(x)
    x.assign(write_rows(x, [0], 7.0))
    work = ft.sum(ft.sin(ft.asarray(np.ones(100))))
    fp.realize(total, x, work)
    assert x.numpy()[:2].tolist() == [7, 1]
    assert total.numpy()[:2].tolist() == [2, 2]

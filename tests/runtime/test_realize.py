"""One plan for all that is asked for: shared work once, dead work never, in the order of the script."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fuel_parallel.lazy as ft
from fuel_parallel.errors import RealizeError
from fuel_parallel.lazy import effects
from fuel_parallel.lazy.node import Op, apply
from fuel_parallel.module import Module, Parameter
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.realize import realize, references


class Counter:
    """An op that adds one and notes each run of its kernel."""

    def __init__(self, crosses_ranks: bool = False) -> None:
        self.runs: list[str] = []
        self.op = Op("count", self.infer, self.kernel, crosses_ranks=crosses_ranks, has_effect=crosses_ranks)

    def infer(self, x: Any, name: str) -> Any:
        return x

    def kernel(self, xp: Any, x: Any, name: str) -> Any:
        self.runs.append(name)
        return x + 1

    def __call__(self, x: ft.Tensor, name: str) -> ft.Tensor:
        return ft.Tensor(apply(self.op, (x.node,), name))


@pytest.fixture
def count() -> Counter:
    return Counter()


@pytest.fixture
def collective() -> Iterator[Counter]:
    effects._kept.clear()
    effects._noted.clear()
    yield Counter(crosses_ranks=True)
    effects._kept.clear()
    effects._noted.clear()


def test_what_nobody_asked_for_does_not_run(count: Counter) -> None:
    x = ft.ones(3)
    needed, unneeded = count(x, "needed"), count(x, "unneeded")
    realize(needed)
    assert count.runs == ["needed"]
    assert not unneeded.is_realized


def test_shared_work_runs_once(count: Counter) -> None:
    shared = count(ft.ones(3), "shared")
    a, b = shared * 2, shared * 3
    realize(a, [b, {"sum": a + b}])
    assert count.runs == ["shared"]
    assert (a + b).tolist() == [10.0] * 3


def test_a_realized_value_is_not_computed_again(count: Counter) -> None:
    x = count(ft.ones(3), "once")
    realize(x)
    realize(x, x * 2)
    assert x.realize() is x
    assert count.runs == ["once"]


def test_values_between_are_computed_again_when_they_are_asked_for_later(count: Counter) -> None:
    between = count(ft.ones(3), "between")
    realize(between * 2)
    assert not between.is_realized
    assert between.tolist() == [2.0] * 3
    assert count.runs == ["between", "between"]


def test_modules_and_nests_are_realized() -> None:
    class Scale(Module):
        def __init__(self) -> None:
            self.factor = Parameter(ft.ones(2) * 3)

    model, more = Scale(), ft.ones(2) + 1
    realize(model, {"more": [more]}, 3, None)
    assert model.factor.is_realized
    assert more.is_realized


def test_doubling_again_and_again_takes_no_exponential_time() -> None:
    x = ft.asarray(1.0, dtype=ft.float64)
    for _ in range(200):
        x = x + x
    assert x.item() == 2.0**200


# What was read stays as it was.


def held_array(x: ft.Tensor) -> Any:
    return x.numpy()


def held_view(x: ft.Tensor) -> Any:
    return x.numpy()[::2]


def held_by_dlpack(x: ft.Tensor) -> Any:
    return np.from_dlpack(x)


def held_by_memoryview(x: ft.Tensor) -> Any:
    return memoryview(x.numpy())  # type: ignore[arg-type]


@pytest.mark.parametrize("hold", [held_array, held_view, held_by_dlpack, held_by_memoryview])
def test_an_array_that_was_read_does_not_change_when_its_tensor_is_rebound(hold: Callable[[ft.Tensor], Any]) -> None:
    weight = Parameter(ft.asarray(np.ones((64, 64), dtype=np.float32)))
    realize(weight)
    held = hold(weight)
    before = np.array(held)
    for _ in range(3):
        weight.assign(weight * 0.5 + 1)
        realize(weight)
    np.testing.assert_array_equal(np.asarray(held), before)
    assert weight.numpy()[0, 0] == 1.875


def test_another_handle_keeps_the_old_value() -> None:
    weight = Parameter(ft.ones((64, 64)))
    realize(weight)
    old = ft.Tensor(weight.node)
    later = old + 1
    weight.assign(ft.exp(weight) * 2)
    realize(weight)
    assert old.numpy().sum() == 64 * 64
    assert later.numpy().sum() == 2 * 64 * 64


def test_memory_of_the_caller_is_never_written() -> None:
    mine = np.ones((64, 64), dtype=np.float32)
    weight = Parameter(ft.asarray(mine, copy=False))
    weight.assign(weight * 2 + 1)
    realize(weight)
    assert mine.sum() == 64 * 64


def test_two_results_of_one_plan_do_not_share_memory() -> None:
    x = ft.ones((64, 64)).realize()
    a, b = ft.exp(x * 2), ft.exp(x * 3)
    c = ft.reshape(a, (-1,))
    realize(a, b, c)
    before = [t.numpy().copy() for t in (a, b, c)]
    realize(*(ft.tanh(t * 5) + 1 for t in (a, b)))
    realize(ft.sin(ft.ones((64, 64)) * 7))
    for t, wanted in zip((a, b, c), before, strict=True):
        np.testing.assert_array_equal(t.numpy(), wanted)


def test_a_small_result_does_not_keep_a_large_buffer() -> None:
    row = (ft.ones((1000, 1000)) * 2)[0]
    value = row.numpy()
    while isinstance(value.base, np.ndarray):
        value = value.base
    assert value.nbytes < 100_000


# Memory.


def peak_bytes(build: Callable[[], Any]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        realize(build())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "link",
    [lambda x: ft.exp(x) * 0.1, lambda x: ft.flip(x) @ x, lambda x: ft.cumulative_sum(x * 0.01, axis=0)],
    ids=["elementwise", "products", "running sums"],
)
def test_a_long_chain_takes_the_memory_of_a_short_one(link: Callable[[ft.Tensor], ft.Tensor]) -> None:
    size = 256 * 256 * 4
    x = ft.asarray(np.zeros((256, 256), dtype=np.float32))

    def chain() -> ft.Tensor:
        y = x
        for _ in range(60):
            y = link(y)
        return y

    assert peak_bytes(chain) < 8 * size


def test_a_plan_leaves_nothing_behind_but_what_was_asked_for() -> None:
    x = ft.asarray(np.zeros((512, 512), dtype=np.float32))
    realize(ft.exp(x) @ x)  # the arena grows once
    gc.collect()
    tracemalloc.start()
    y = ft.exp(x) @ x
    y.realize()
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 1.5 * y.nbytes


# Failure.


def fails(xp: Any, x: Any) -> Any:
    raise ZeroDivisionError("the kernel's own words")


def test_a_failing_kernel_is_named_with_its_line_and_inputs() -> None:
    op = Op("fragile", lambda x: x, fails)
    x = ft.ones((2, 3))
    y = ft.Tensor(apply(op, (x.node,)))
    wanted = (
        r"fragile\(float32\[2, 3\]\) -> float32\[2, 3\] failed: ZeroDivisionError: the kernel's own words\n"
        r"  built at .*test_realize\.py:\d+"
    )
    with pytest.raises(RealizeError, match=wanted) as caught:
        (y * 2).realize()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_after_a_failure_the_graph_is_as_it_was() -> None:
    broken = [True]

    def kernel(xp: Any, x: Any) -> Any:
        if broken[0]:
            raise OSError("not yet")
        return x + 1

    x = ft.ones(3) * 2
    y = ft.Tensor(apply(Op("flaky", lambda x: x, kernel), (x.node,)))
    with pytest.raises(RealizeError, match="not yet"):
        realize(y, x)
    assert not y.is_realized
    broken[0] = False
    assert y.tolist() == [3.0] * 3


def test_a_value_that_was_being_replaced_when_the_plan_failed_is_lost_not_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(passes.VARIABLE, raising=False)  # without fusion it is another op that replaces it
    weight = Parameter(ft.asarray(np.ones((64, 64), dtype=np.float32)))
    realize(weight)
    kept = Parameter(ft.asarray(np.ones((64, 64), dtype=np.float32)))
    realize(kept)
    held = ft.Tensor(kept.node)
    for parameter in (weight, kept):
        parameter.assign(parameter * 0.5 + 1)
    op = Op("fragile", lambda *specs: specs[0], lambda xp, *arrays: fails(xp, arrays[0]), crosses_ranks=True)
    broken = ft.Tensor(apply(op, (ft.ones(1).node, weight.node, kept.node)))
    with pytest.raises(RealizeError, match="the kernel's own words"):
        realize(weight, kept, broken)
    assert held.numpy().sum() == 64 * 64, "somebody held it, so it was not written into"
    assert kept.numpy()[0, 0] == 1.5
    with pytest.raises(RealizeError, match="is lost; load it again, for example from a checkpoint"):
        weight.numpy()


def test_memory_that_is_not_there_is_named_in_mebibytes() -> None:
    with pytest.raises(RealizeError, match=r"MemoryError.*\(the result alone needs \d+ MiB\)"):
        ft.flip(ft.arange(1 << 50)).realize()


# Collectives: the order of the script, each once.


def test_a_kept_node_runs_with_the_next_plan(collective: Counter) -> None:
    effects.keep(collective(ft.ones(1), "send").node)
    (ft.ones(2) * 2).realize()
    assert collective.runs == ["send"]
    (ft.ones(2) * 3).realize()
    realize()
    assert collective.runs == ["send"]


def test_realizing_nothing_runs_what_is_kept(collective: Counter) -> None:
    effects.keep(collective(ft.ones(1), "send").node)
    realize()
    assert collective.runs == ["send"]


def test_a_collective_takes_older_ones_along_if_somebody_holds_them(collective: Counter) -> None:
    first, dropped, second, third = (collective(ft.ones(1), name) for name in ("first", "dropped", "second", "third"))
    for tensor in (first, dropped, second, third):
        effects.note(tensor.node)
    del dropped, tensor
    second.realize()
    assert collective.runs == ["first", "second"]
    assert not third.is_realized


def test_a_plan_without_collectives_takes_none_along(collective: Counter) -> None:
    waiting = collective(ft.ones(1), "waiting")
    effects.note(waiting.node)
    (ft.ones(2) * 2).realize()
    assert collective.runs == []
    assert not waiting.is_realized


def test_a_collective_runs_once_although_its_value_was_not_asked_for(collective: Counter) -> None:
    reduced = collective(ft.ones(2), "reduce")
    (reduced * 2).realize()
    assert reduced.tolist() == [2.0, 2.0]
    assert collective.runs == ["reduce"]


def test_collectives_run_in_the_order_of_the_script(collective: Counter) -> None:
    names = [str(i) for i in range(20)]
    tensors = [collective(ft.ones(1) * i, name) for i, name in enumerate(names)]
    realize(*reversed(tensors))
    assert collective.runs == names


@pytest.mark.parametrize("size", [1, 1000])
def test_what_a_pending_graph_is_made_of_is_not_replaced(size: int) -> None:
    """`middle` is kept with neither; who asks for `second` computes it again, from a leaf that nobody else holds."""
    middle = ft.asarray(np.full(size, 5.0)) * 2
    first, second = middle * ft.asarray(np.full(size, 3.0)), middle + 1
    del middle
    assert first.tolist() == [30.0] * size
    assert second.tolist() == [11.0] * size


def test_references_are_counted_as_this_python_counts_them():
    held_once, held_twice = object(), object()
    again = [held_twice]
    assert references([object()]) == [0]
    assert references([held_once, held_twice]) == [1, 2]
    assert again

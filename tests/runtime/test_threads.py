"""Threads build and realize at once, and get what one thread would. `FUEL_STRESS=1` goes on a hundred times as long."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import fuel_parallel.lazy as ft
from fuel_parallel.errors import GradientError
from fuel_parallel.lazy import effects
from fuel_parallel.lazy.node import Op, Spec, apply, built_for, line_of, script_line
from fuel_parallel.lazy.outline import outline
from fuel_parallel.lazy.parts import part_of
from fuel_parallel.module import Parameter
from fuel_parallel.optim import SGD
from fuel_parallel.runtime.realize import realize

THREADS = 6
ROUNDS = 2000 if os.environ.get("FUEL_STRESS") else 20


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """The results of functions that begin together, each on a thread of its own."""
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], Any]) -> Any:
        start.wait()
        return function()

    with ThreadPoolExecutor(len(functions)) as pool:
        return [done.result(timeout=120) for done in [pool.submit(run, f) for f in functions]]


class Held:
    """An op whose kernel says that it runs, and goes on when it may."""

    def __init__(self) -> None:
        self.running, self.may_end = threading.Event(), threading.Event()
        self.op = Op("held", infer=lambda x: x, kernel=self.kernel, vjp=(lambda g, y, x: g,))

    def kernel(self, xp: Any, x: Any) -> Any:
        self.running.set()
        assert self.may_end.wait(10)
        return x + 1

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        return ft.Tensor(apply(self.op, (x.node,)))


@pytest.fixture
def held() -> Iterator[Held]:
    op = Held()
    yield op
    op.may_end.set()


def train(seed: int) -> list[float]:
    """Losses of a small fit: forward, backward and update, with regions, reductions and products of many sizes."""
    generator = ft.random.Generator(seed)
    x = generator.normal((40 + seed, 8), dtype=ft.float64)
    y = generator.normal((40 + seed, 3), dtype=ft.float64)
    weight = Parameter(generator.normal((8, 3), dtype=ft.float64))
    optimizer = SGD([weight], lr=0.1)
    losses = []
    for _ in range(ROUNDS):
        loss = ft.mean(ft.square(ft.tanh(x @ weight) - y))
        optimizer.update(ft.grad(loss, [weight]))
        realize(loss, optimizer)
        losses.append(loss.item())
    return losses


def test_threads_that_train_get_the_bits_of_one_that_trains_alone() -> None:
    alone = [train(seed) for seed in range(THREADS)]
    assert at_once(*[lambda seed=seed: train(seed) for seed in range(THREADS)]) == alone


def test_threads_realize_one_graph_in_parts_and_together() -> None:
    for number in range(ROUNDS):
        x = ft.asarray(np.arange(12.0 + number))
        chain = [x]
        for step in range(8):
            chain.append(ft.exp(-chain[-1]) + step)
        expected = [x.numpy()]
        for step in range(8):
            expected.append(np.exp(-expected[-1]) + step)
        values = at_once(*[lambda t=t: (t * 1.0).numpy() for t in chain], lambda chain=chain: realize(chain))
        for value, wanted in zip(values[:-1], expected, strict=True):
            np.testing.assert_allclose(value, wanted)
        assert all(t.is_realized for t in chain)


def test_a_value_is_read_while_its_variable_is_pointed_elsewhere() -> None:
    count = Parameter(ft.zeros((64,), dtype=ft.float64))
    over = threading.Event()
    seen: list[np.ndarray[Any, Any]] = []

    def write() -> None:
        for _ in range(10 * ROUNDS):
            count.assign(count + 1)
            realize(count)
        over.set()

    def read() -> None:
        while not over.is_set():
            seen.append(count.numpy().copy())

    at_once(write, read, read)
    assert all((value == value[0]).all() for value in seen), "a value that was read while it was overwritten"
    assert count.numpy().tolist() == [10.0 * ROUNDS] * 64


# The lock.


def test_a_gradient_waits_for_a_plan_and_then_finds_the_graph_gone(held: Held) -> None:
    x = ft.asarray(np.ones(3))
    loss = ft.sum(held(x))
    with ThreadPoolExecutor(2) as pool:
        run = pool.submit(loss.realize)
        assert held.running.wait(60)
        gradient = pool.submit(ft.grad, loss, x)
        with pytest.raises(TimeoutError):
            gradient.result(timeout=0.05)
        held.may_end.set()
        run.result(timeout=60)
        with pytest.raises(GradientError, match="was realized before its gradient was taken"):
            gradient.result(timeout=60)


@pytest.mark.parametrize(
    "follow",
    [
        pytest.param(lambda x: outline([x])[-1].has_value, id="outline"),
        pytest.param(lambda x: part_of(x, (range(1),)).item() == 2, id="part_of"),
    ],
)
def test_who_follows_a_graph_waits_for_a_plan(held: Held, follow: Callable[[ft.Tensor], bool]) -> None:
    x = held(ft.ones(3))
    with ThreadPoolExecutor(2) as pool:
        pool.submit(x.realize)
        assert held.running.wait(60)
        followed = pool.submit(follow, x)
        with pytest.raises(TimeoutError):
            followed.result(timeout=0.05)
        held.may_end.set()
        assert followed.result(timeout=60)


def test_building_and_reading_wait_for_nobody(held: Held) -> None:
    known = ft.ones(3).realize()
    x = held(ft.ones(3))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(x.realize)
        assert held.running.wait(60)
        assert known.tolist() == [1.0, 1.0, 1.0]
        built = x + known
        assert not x.is_realized
        assert "lazy" in repr(x)
        held.may_end.set()
        assert built.tolist() == [3.0, 3.0, 3.0]


# What a thread leaves for its next plan.


@pytest.fixture
def sends() -> Iterator[Callable[[str], None]]:
    """A function that keeps a node, as `send` does, whose kernel notes its name in the attribute `ran`."""
    op = Op(
        "sent",
        infer=lambda x, name: x,
        kernel=lambda xp, x, name: (send.ran.append(name), x)[1],  # type: ignore[attr-defined]
        vjp=(lambda g, y, x, name: g,),
        crosses_ranks=True,
        has_effect=True,
    )

    def send(name: str) -> None:
        effects.keep(apply(op, (ft.ones(1).node,), name))

    send.ran = []  # type: ignore[attr-defined]
    yield send
    realize()


def test_a_send_waits_for_a_plan_of_its_own_thread(sends: Any) -> None:
    sends("mine")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (ft.ones(2) * 2).realize()).result(timeout=60)
        assert sends.ran == []
        pool.submit(sends, "of the other").result(timeout=60)
        (ft.ones(2) * 3).realize()
        assert sends.ran == ["mine"]
        assert pool.submit(lambda: len(effects.take_differentiable())).result(timeout=60) == 1
    (ft.ones(2) * 4).realize()
    assert sends.ran == ["mine", "of the other"], "who has ended cannot run it any more"


def test_none_of_what_many_threads_keep_is_lost(sends: Any) -> None:
    at_once(*[lambda n=n: [sends(f"{n}.{i}") for i in range(10 * ROUNDS)] for n in range(THREADS)])
    realize()
    assert len(sends.ran) == len(set(sends.ran)) == 10 * ROUNDS * THREADS


# What all graphs share.


def test_nodes_are_booked_on_the_line_of_their_own_thread() -> None:
    line = line_of(sys._getframe())
    inside, looked = threading.Event(), threading.Event()

    def build() -> Any:
        with built_for(line):
            inside.set()
            assert looked.wait(60)
            return script_line()

    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(build)
        assert inside.wait(60)
        own = ft.ones(1).node.line
        looked.set()
        assert own is not None
        assert own != line
        assert building.result(timeout=60) == line


def test_equal_specs_are_one_object_whoever_makes_them() -> None:
    for number in range(10 * ROUNDS):
        specs = at_once(*[lambda number=number: Spec((number, 77), ft.float32, "cpu")] * 2)
        assert specs[0] is specs[1]


def test_threads_that_draw_from_one_generator_share_no_numbers() -> None:
    generator = ft.random.Generator(3)
    drawn = at_once(*[lambda: [generator.bits((1,)) for _ in range(10 * ROUNDS)] for _ in range(THREADS)])
    numbers = ft.concat([bits for one in drawn for bits in one]).tolist()
    assert len(set(numbers)) == len(numbers) == generator.stream == 10 * ROUNDS * THREADS

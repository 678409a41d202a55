"""A plan whose stretches are launched as graphs gives what it gives kernel by kernel, whatever moves meanwhile.

`FUEL_STRESS=1` tries fifty times as many random plans.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import fake_cuda
import fake_cuda_memory
import fake_cupy
import numpy as np
import pytest
from gpt_on_devices import OnDevices, windows
from gpt_on_devices import train as train_gpt
from hypothesis import given, settings
from hypothesis import strategies as st
from train_gpt import Config

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.backends import cuda_graph
from fuel_parallel.errors import RealizeError
from fuel_parallel.module import Variable
from fuel_parallel.runtime import capture, execute, passes, stretch
from fuel_parallel.runtime.arena import arena_of
from fuel_parallel.runtime.plan import Plan, plans

DEVICE = "cuda:0"


@pytest.fixture(autouse=True)
def cupy() -> Iterator[Any]:
    """The stand-in; plans, arenas and graphs are gone afterwards, since they are the stand-in's."""
    with fake_cupy.installed() as module:
        yield module
        plans._plans.clear()
        arena_of(DEVICE).release()


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for each op, and none to compile."""
    monkeypatch.setenv(passes.VARIABLE, "-fusion")


def on_device(values: Any) -> ft.Tensor:
    return ft.asarray(np.asarray(values, np.float64), device=DEVICE).realize()


def chain(x: ft.Tensor, steps: int = 12) -> ft.Tensor:
    """As many kernels."""
    for n in range(steps):
        x = ft.sin(x) if n % 2 else x + n
    return x


def expected(values: Any, steps: int = 12) -> Any:
    """What `chain` gives, by numpy."""
    found = np.asarray(values, np.float64)
    for n in range(steps):
        found = np.sin(found) if n % 2 else found + n
    return found


def last_plan() -> Plan:
    """The plan with stretches that ran last."""
    return next(plan for plan in reversed(plans._plans.values()) if plan.captures is not None)


def graphs() -> list[Any]:
    """The graphs of the plan that ran last."""
    return [s.graph for s in last_plan().captures.stretches if s.graph is not None]  # type: ignore[union-attr]


def launches() -> int:
    """How often the graphs of the plan that ran last were launched."""
    return sum(graph.recording._graph.launched for graph in graphs())


# Random programs.

OPS: dict[str, Callable[..., ft.Tensor]] = {
    "add": lambda a, b: a + b,
    "sine": lambda a, b: ft.sin(a),
    "greater": lambda a, b: ft.where(a > b, a, 0.5),
    "turn": lambda a, b: a.T,
    "rows": lambda a, b: a[::-1, 1:] @ ft.concat([b, b[:2]])[1:6, :],
    "sum": lambda a, b: ft.sum(a, axis=0, keepdims=True) - b,
    "softmax": lambda a, b: ft.softmax(a),
    "take": lambda a, b: a[ft.asarray([3, 0, 1, 1, 2, 4], device=DEVICE)],
    "put": lambda a, b: ft.unstack(ft.stack([a, b]))[1] * a,
    "flat": lambda a, b: ft.reshape(ft.reshape(a, (4, 9)), (6, 6)),
    "host": lambda a, b: ft.tanh(a.to("cpu")).to(DEVICE),
}
Instruction = tuple[str, int, int]


def run(
    program: list[Instruction], outputs: list[int], moves: list[list[int]], assigned: int
) -> list[np.ndarray[Any, Any]]:
    """Runs it once for each of `moves`: which of the two leaves come new. A variable is updated from a value each time.

    All that comes out is looked at in the end: a later run must not have changed it.
    """
    values = np.random.default_rng(0).normal(size=(10, 2, 6, 6))
    leaves = [on_device(values[0, n]) for n in range(2)]
    variable = Variable(on_device(np.ones((6, 6))))
    found: list[ft.Tensor] = []
    for step, moved in enumerate(moves, 1):
        for n in moved:
            leaves[n] = on_device(values[step, n])
        pool = [*leaves, variable + 0.0]
        for name, a, b in program:
            pool.append(OPS[name](pool[a % len(pool)], pool[b % len(pool)]))
        variable.assign(variable * 0.5 + pool[assigned % len(pool)])
        results = [pool[n % len(pool)] for n in outputs]
        fp.realize(results, variable)
        found += [*results, ft.asarray(variable.numpy())]
    return [tensor.numpy() for tensor in found]


@given(
    st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 40), st.integers(0, 40)), min_size=3, max_size=14),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 1), max_size=2), min_size=3, max_size=7),
    st.integers(0, 40),
)
@settings(max_examples=2000 if os.environ.get("FUEL_STRESS") else 40)
def test_a_random_plan_gives_the_same_bits(
    program: list[Instruction], outputs: list[int], moves: list[list[int]], assigned: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(passes.VARIABLE, "-fusion")
        patch.setattr(capture, "LEAST_STEPS", 2)
        patch.setattr(stretch, "STEADY", 2)
        patch.setenv(capture.VARIABLE, "0")
        plain = run(program, outputs, moves, assigned)
        plans._plans.clear()
        patch.delenv(capture.VARIABLE)
        by_graphs = run(program, outputs, moves, assigned)
    for a, b in zip(plain, by_graphs, strict=True):
        np.testing.assert_array_equal(a, b)


# Training.


def losses_of_gpt(steps: int) -> list[float]:
    config = Config(vocabulary=12, dim=16, layers=1, heads=4, context=6, dtype="float64")
    batches = windows(np.arange(60) * 7 % 12, 6, 2, steps, 0)
    return train_gpt(OnDevices(config, fp.DeviceGroup([DEVICE])), batches, 0.5)


def test_a_gpt_learns_the_same_by_graphs(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(passes.VARIABLE, raising=False)
    monkeypatch.setenv(capture.VARIABLE, "0")
    plain = losses_of_gpt(4)
    monkeypatch.delenv(capture.VARIABLE)
    plans._plans.clear()
    assert losses_of_gpt(4) == plain
    assert len(graphs()) == 1  # attention and products are captured as all else
    assert launches() == 2 * len(graphs())  # the first step has another plan, and the second is the first run


def train(model: Any, steps: int) -> tuple[list[float], list[np.ndarray[Any, Any]]]:
    weights = [fp.Parameter(on_device(np.random.default_rng(n).normal(size=(16, 16)))) for n in range(12)]
    optimizer = fp.optim.AdamW(weights, lr=1e-2)
    fp.realize(weights, optimizer)
    losses = []
    for step in range(steps):
        x = ft.asarray(np.random.default_rng(step).normal(size=(4, 16)), device=DEVICE)
        loss = model(x, weights)
        optimizer.update(ft.grad(loss, weights))
        optimizer.lr = 1e-2 / (step + 1)
        fp.realize(loss, weights, optimizer)
        losses.append(loss.item())
    return losses, [w.numpy() for w in weights]


def by_sums(x: ft.Tensor, weights: list[fp.Parameter]) -> ft.Tensor:
    for w in weights:
        x = ft.tanh(ft.sum(x[:, :, None] * w, axis=1))
    return ft.mean(ft.square(x))


def test_parameters_that_are_updated_in_place_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(passes.VARIABLE, raising=False)
    monkeypatch.setenv(capture.VARIABLE, "0")
    plain = train(by_sums, 5)
    monkeypatch.delenv(capture.VARIABLE)
    plans._plans.clear()
    losses, weights = train(by_sums, 5)
    assert losses == plain[0]
    for a, b in zip(weights, plain[1], strict=True):
        np.testing.assert_array_equal(a, b)
    before = [graph.recording for graph in graphs()]
    assert before
    _, update = (s for s in last_plan().captures.stretches)  # type: ignore[union-attr]
    assert len(update.graph.taken) >= 12  # type: ignore[union-attr]
    assert len(update.graph.buffers) == 1, "the scalars of the step, made on the host"  # type: ignore[union-attr]


# What moves.


def test_a_stretch_is_captured_in_the_second_run_and_launched_from_then_on(unfused: None) -> None:
    x = on_device([1.0, 2.0])
    made = fake_cuda.Graph.made
    for turn in range(5):
        y = chain(x).realize()
        assert (len(graphs()), launches()) == (min(turn, 1), turn)
        np.testing.assert_array_equal(y.numpy(), expected([1.0, 2.0]))
    assert fake_cuda.Graph.made == made + 1
    assert str(last_plan()).splitlines()[-1].startswith("one graph: %7 to %18 on cuda:0; 0 of 7 inputs")


def test_what_comes_new_is_copied_in(unfused: None) -> None:
    held = []
    for turn in range(6):
        held.append(on_device([turn, 2.0]))  # none of them is let go of, so each lies elsewhere
        assert chain(held[-1]).realize().numpy()[0] == expected(float(turn))
    assert launches() == 5
    assert [len(graph.buffers) for graph in graphs()] == [1]


def test_what_no_longer_moves_is_read_in_place(unfused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretch, "STEADY", 3)
    xs = [on_device([n, 1.0]) for n in range(2)]
    for turn in range(7):
        chain(xs[min(turn, 1)]).realize()
        if turn == 1:
            assert [len(graph.buffers) for graph in graphs()] == [1]
    assert [len(graph.buffers) for graph in graphs()] == [0]
    assert chain(on_device([7.0, 1.0])).realize().numpy()[0] == expected(7.0)
    assert [len(graph.buffers) for graph in graphs()] == [1]  # and never again


def test_a_leaf_that_is_let_go_of_is_not_read_any_more(unfused: None) -> None:
    for turn in range(5):
        x = on_device([turn, 1.0])
        y = chain(x).realize()
        del x
        others = [on_device([-1.0, -1.0]) for _ in range(turn)]
        assert y.numpy()[0] == expected(float(turn))
        del others


def test_results_outlive_the_next_launch(unfused: None) -> None:
    x = on_device([1.0])
    results = [chain(x).realize() for _ in range(4)]
    assert launches() == 3
    addresses = {r.node.value.data.ptr for r in results}
    assert len(addresses) == 4
    assert all(r.node.value.flags.owndata for r in results)


def test_large_inputs_that_move_are_not_copied(unfused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "BYTES_A_STEP", 1)
    held = []
    for turn in range(8):
        held.append(on_device(np.full(100, float(turn))))
        assert chain(held[-1]).realize().numpy()[0] == expected(float(turn))
    assert not graphs()
    assert "not in a graph: %7 to %18, what it reads is large" in str(last_plan())


def test_another_shape_is_another_plan(unfused: None) -> None:
    for turn in range(6):
        x = on_device(np.full(1 + turn % 2, 0.5))
        assert chain(x).realize().numpy()[0] == expected(0.5)
    assert launches() == 2


def test_an_arena_that_grows_drops_the_graphs_that_work_on_it(unfused: None) -> None:
    x = on_device(np.ones(8))
    for _ in range(3):
        chain(x).realize()
    assert launches() == 2
    small = last_plan()
    chain(on_device(np.ones(5000))).realize()
    assert all(s.graph is None for s in small.captures.stretches)  # type: ignore[union-attr]
    for _ in range(3):
        np.testing.assert_array_equal(chain(x).realize().numpy(), expected(np.ones(8)))
    assert launches() == 2


# What fails.


def test_a_step_that_cannot_be_captured_is_left_out(unfused: None) -> None:
    x = on_device(np.ones((1, 4)))
    for _ in range(5):
        y = chain(x)
        y = chain(ft.concat([y * n for n in range(9)]))  # more than eight: CuPy copies a table
        y.realize()
    assert len(graphs()) == 2
    assert re.search(
        r"not in a graph: concat \(%\d+\), RuntimeError: the current stream is capturing", str(last_plan())
    )
    assert not fake_cupy.current_stream().is_capturing()
    plain = expected(np.ones((1, 4)))
    np.testing.assert_array_equal(y.numpy(), expected(np.concatenate([plain * n for n in range(9)])))


def test_too_little_memory_for_a_graph_is_enough_for_the_kernels(
    unfused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, size: int) -> Any:
        raise fake_cuda_memory.OutOfMemoryError("Out of memory allocating 4,096 bytes")

    x = on_device(np.ones(16))
    for turn in range(4):
        with monkeypatch.context() as patch:
            if turn == 1:
                patch.setattr(fake_cuda_memory.MemoryPool, "malloc", _only_in_captures(full))
            y = chain(x[1:] * 1.5).realize()
    np.testing.assert_array_equal(y.numpy(), expected(np.ones(15) * 1.5))
    assert not graphs()
    assert "OutOfMemoryError: Out of memory allocating 4,096 bytes" in str(last_plan())


def _only_in_captures(refuse: Any) -> Any:
    plain = fake_cuda_memory.MemoryPool.malloc
    return lambda pool, size: (refuse if fake_cupy.current_stream().notes is not None else plain)(pool, size)


def test_graphs_make_room_for_kernels(unfused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = on_device(np.ones(4000))
    for _ in range(2):
        chain(x[1:]).realize()
    small = last_plan()
    assert small.captures.stretches[0].graph.recording.nbytes >= 3999 * 8  # type: ignore[union-attr]
    fake_cuda_memory.default_pool.free_all_blocks()
    # Enough for a result of that size if the graph goes.
    monkeypatch.setattr(fake_cuda_memory.Memory, "most", fake_cuda_memory.Memory.held + 16000)
    np.testing.assert_array_equal((x * 2).realize().numpy(), np.full(4000, 2.0))
    assert small.captures.stretches[0].graph is None  # type: ignore[union-attr]
    with pytest.raises(RealizeError, match=r"(?s)Out of memory allocating.*needs 1 MiB"):
        ft.concat([x] * 40).realize()


def test_a_launch_that_fails_is_replaced_by_kernels(unfused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, stream: Any = None) -> None:
        raise fake_cuda.CUDARuntimeError("cudaErrorUnknown", "unknown error")

    x = on_device([1.0])
    for _ in range(3):
        chain(x).realize()
    monkeypatch.setattr(fake_cuda.Graph, "launch", fail)
    assert chain(x).realize().item() == expected(1.0)
    assert not graphs()
    assert "its launch failed: CUDARuntimeError: cudaErrorUnknown" in str(last_plan())


def test_a_launch_that_finds_no_room_is_tried_again_later(unfused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, xp: Any) -> Any:
        raise fake_cuda_memory.OutOfMemoryError("Out of memory allocating 4,096 bytes")

    x = on_device([1.0])
    for _ in range(3):
        chain(x).realize()
    with monkeypatch.context() as patch:
        patch.setattr(stretch.Made, "room", full)
        assert chain(x).realize().item() == expected(1.0)
        assert not graphs()
    before = launches()
    for _ in range(3):
        assert chain(x).realize().item() == expected(1.0)
    assert len(graphs()) == 1
    assert launches() > before


def test_a_kernel_that_fails_behind_a_graph_is_named(unfused: None) -> None:
    def build(turn: int) -> ft.Tensor:
        y = chain(on_device(np.eye(3)))
        return ft.linalg.cholesky(y - 1e9 if turn == 3 else y * 0 + on_device(np.eye(3)))

    for turn in range(3):
        build(turn * 0).realize()
    with pytest.raises(RealizeError, match=r"(?s)cholesky.*test_capture.py:\d+"):
        build(3).realize()
    assert build(0).realize().numpy().shape == (3, 3)


# Switches and bounds.


def test_graphs_can_be_turned_off(unfused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capture.VARIABLE, "0")
    x = on_device([1.0])
    for _ in range(4):
        chain(x).realize()
    assert not graphs()
    monkeypatch.setenv(capture.VARIABLE, "1")
    for _ in range(3):
        chain(x).realize()
    assert launches() == 2


def test_a_trace_sees_each_kernel(unfused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def timed(plan: Any, computed: Any, compute: Any, thread: str) -> Any:
        def noted(step: Any, xp: Any, arguments: Any) -> Any:
            seen.append(step.op.name)
            return compute(step, xp, arguments)

        return noted

    x = on_device([1.0])
    for _ in range(3):
        chain(x).realize()
    monkeypatch.setattr(execute, "recorder", SimpleNamespace(timed=timed, ran=lambda nbytes: None))
    chain(x).realize()
    assert seen.count("sin") == 6
    assert launches() == 2


def test_memory_of_graphs_is_told_and_let_go_of_with_the_plan(unfused: None) -> None:
    plans._plans.clear()
    gc.collect()
    held = fp.memory_stats().graphs
    x = on_device(np.ones(1000))
    for _ in range(3):
        chain(x[1:]).realize()
    assert fp.memory_stats().graphs - held >= 999 * 8
    plans._plans.clear()
    gc.collect()
    assert fp.memory_stats().graphs == held


def test_of_many_graphs_the_one_that_was_launched_last_but_all_others_is_dropped(
    unfused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretch, "MOST_GRAPHS", 2)
    xs = [on_device(np.ones(n)) for n in (1, 2, 3)]
    kept = []
    for x in xs:
        for _ in range(2):
            chain(x).realize()
        kept.append(last_plan())
    assert [bool(p.captures.stretches[0].graph) for p in kept] == [False, True, True]  # type: ignore[union-attr]
    assert chain(xs[0]).realize().numpy()[0] == expected(1.0)


# Streams, devices, interrupts, and arrays without elements.


def test_a_plan_on_another_stream_begins_after_those_that_share_its_arena(cupy: Any, unfused: None) -> None:
    values = np.arange(6.0)
    a, b = on_device(values), on_device(values * 100)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        first = chain(a).realize()
    second = chain(b).realize()
    np.testing.assert_allclose(second.numpy(), expected(values * 100))
    stream.synchronize()
    np.testing.assert_allclose(first.numpy(), expected(values))


def test_the_last_launch_of_a_dropped_graph_is_waited_for_on_its_own_device(cupy: Any, unfused: None) -> None:
    x = on_device([1.0])
    for _ in range(3):
        y = chain(x).realize()
    (graph,) = graphs()
    stream, launched = fake_cuda._nulls[0], graph.recording._done
    assert stream.done < launched.place
    with cupy.cuda.Device(1):
        graph.recording.__del__()
    assert stream.done >= launched.place
    assert y.item() == expected(1.0)


def test_an_interrupt_right_after_a_launch_does_not_lead_to_a_second_update(
    unfused: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, v = on_device([1.0, 2.0]), Variable(on_device([1.0, 2.0]))

    def step() -> None:
        v.assign(v + chain(x))
        fp.realize(v)

    for _ in range(4):
        step()
    launch = cuda_graph.CudaGraph.launch

    def interrupted(graph: cuda_graph.CudaGraph) -> None:
        launch(graph)
        raise KeyboardInterrupt

    monkeypatch.setattr(cuda_graph.CudaGraph, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step()
    monkeypatch.undo()
    with pytest.raises(RealizeError, match="is lost"):
        v.numpy()


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_of_a_result_stays_on_its_device(number: int) -> None:
    values = np.arange(12.0).reshape(3, 4)
    x = ft.asarray(values, device=f"cuda:{number}").realize()
    np.testing.assert_array_equal(x[:2].numpy(), values[:2])
    np.testing.assert_array_equal(x.T.numpy(), values.T)
    np.testing.assert_allclose(ft.exp(x)[0].numpy(), np.exp(values[0]))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_arrays_without_elements(shape: tuple[int, ...]) -> None:
    x = on_device(np.zeros(shape))
    assert ft.softmax(ft.tanh(x) * 2 + 1).numpy().shape == shape
    assert ft.sum(ft.tanh(x) * 2).item() == 0
    np.testing.assert_array_equal(ft.sum(ft.exp(x) + 1, axis=-1).numpy(), np.zeros(shape[:-1]))

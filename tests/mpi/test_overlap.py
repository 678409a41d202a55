"""All-reduces that go on while ranks compute: order, memory, failure, and ranks that do things at different times."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest
from mpi4py import MPI

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import ReduceOp
from fuel_parallel.comm import in_flight, node_memory, shared_reduction
from fuel_parallel.comm.mpi import MpiComm
from fuel_parallel.errors import RealizeError
from fuel_parallel.runtime import execute as executing
from fuel_parallel.runtime import realize as realizing
from fuel_parallel.runtime import trace

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = world.world_size, world.rank
TOTAL = N * (N + 1) // 2
LARGE = 200_000  # elements; float32 and float64 of them go through shared memory


@pytest.fixture(params=["in shared memory", "by MPI"])
def comm(request, monkeypatch):
    monkeypatch.setenv("FUEL_NODE_LOCAL", "1" if request.param == "in shared memory" else "0")
    made = MpiComm()
    made.all_reduce(ft.ones((LARGE,))).numpy()  # now it knows how its ranks lie
    yield made
    shared_reduction.settle()
    assert not shared_reduction.announced


def grown(monkeypatch):
    """The sizes of windows that the pool grows by from now on."""
    sizes = []
    grow = node_memory.NodeMemory.grow
    monkeypatch.setattr(node_memory.NodeMemory, "grow", lambda self, size: (sizes.append(size), grow(self, size))[1])
    return sizes


def network(seed=0):
    layers = [fp.Linear(256, 256, ft.random.Generator(seed + i)) for i in range(4)]
    optimizer = fp.optim.AdamW([p for layer in layers for p in layer.parameters()], lr=1e-2)
    fp.realize(layers, optimizer)
    return layers, optimizer


def batch(step, rank):
    return np.random.default_rng([step, rank]).normal(size=(16, 256)).astype(np.float32)


def loss_of(layers, x):
    for layer in layers:
        x = ft.tanh(layer(x))
    return ft.mean(x * x)


def test_training_equals_that_on_the_whole_batch(comm):
    mine, optimizer = network()
    alone, optimizer_alone = network()
    for step in range(4):
        loss = loss_of(mine, ft.asarray(batch(step, RANK)))
        parameters = optimizer.parameters
        optimizer.update(fp.data_parallel.average_gradients(ft.grad(loss, parameters), comm, bucket_bytes=500 << 10))
        fp.realize(loss, mine, optimizer)
        whole = np.concatenate([batch(step, rank) for rank in range(N)])
        loss = loss_of(alone, ft.asarray(whole))
        optimizer_alone.update(ft.grad(loss, optimizer_alone.parameters))
        fp.realize(alone, optimizer_alone)
    for p, q in zip(optimizer.parameters, optimizer_alone.parameters, strict=True):
        np.testing.assert_allclose(p.numpy(), q.numpy(), rtol=2e-3, atol=2e-4)
        digests = MPI.COMM_WORLD.allgather(p.numpy().tobytes())
        assert all(digest == digests[0] for digest in digests)


def test_the_trace_of_a_step_shows_the_first_bucket_on_its_way_before_the_last_gradient(comm, monkeypatch, tmp_path):
    monkeypatch.delenv("FUEL_PASSES", raising=False)  # without `overlap` it is not so
    layers, optimizer = network()
    recorder = trace.Recorder(tmp_path / "trace.json")
    monkeypatch.setattr(realizing, "recorder", recorder)
    monkeypatch.setattr(executing, "recorder", recorder)
    gradients = ft.grad(loss_of(layers, ft.asarray(batch(0, RANK))), optimizer.parameters)
    fp.realize(fp.data_parallel.average_gradients(gradients, comm, bucket_bytes=500 << 10))
    events = np.array(recorder.events).reshape(-1, 3)
    names = [recorder._described[number][0] if number >= 0 else "" for number in events[:, 0]]
    reductions = [(began, ended) for name, (_, began, ended) in zip(names, events, strict=True) if "all_reduce" in name]
    products = [began for name, (_, began, _) in zip(names, events, strict=True) if "matmul" in name]
    if N == 1:
        assert not reductions
        return
    assert len(reductions) == 2
    assert len(products) == 3 * 4 - 1  # forward, and backward for weights and inputs
    began, ended = reductions[0]
    after = [product for product in products if product > began]
    assert len(after) == 3  # the gradients of the first two layers' weights, and of what is between them
    assert ended > after[0]


@pytest.mark.mpi(min_size=2)
def test_the_second_step_makes_no_window_and_copies_nothing_in(monkeypatch):
    layers, optimizer = network()
    moved = []
    move = shared_reduction.SharedReduction._move
    monkeypatch.setattr(
        shared_reduction.SharedReduction, "_move", lambda self, room: (moved.append(1), move(self, room))[1]
    )
    sizes = grown(monkeypatch)
    for step in range(5):
        if step == 1:
            sizes.clear()
            moved.clear()
        loss = loss_of(layers, ft.asarray(batch(step, RANK)))
        gradients = ft.grad(loss, optimizer.parameters)
        gradients = fp.data_parallel.average_gradients(gradients, world, bucket_bytes=500 << 10)
        optimizer.update(gradients)
        fp.realize(loss, layers, optimizer)
        gc.collect()
    assert not sizes
    assert not moved


@pytest.mark.mpi(min_size=2)
def test_results_that_a_script_holds_do_not_change_and_memory_is_used_again_when_they_are_gone(monkeypatch):
    x = ft.asarray(np.full(LARGE, RANK + 1.0))
    held = []
    for step in range(6):
        total = world.all_reduce(x * float(step + 1))
        held.append(total.numpy())
        del total
    for step, value in enumerate(held):
        assert (value == TOTAL * (step + 1)).all()
    held.clear()
    gc.collect()
    sizes = grown(monkeypatch)
    for step in range(6):
        held.append(world.all_reduce(x * float(step + 1)).numpy())
    assert not sizes


@pytest.mark.mpi(min_size=2)
def test_one_rank_may_hold_results_for_longer_than_the_others():
    x = ft.asarray(np.full(LARGE, RANK + 1.0))
    held = []
    for step in range(10):
        value = world.all_reduce(x * float(step + 1)).numpy()
        if step % N == RANK:
            held.append((step, value))
        del value
    for step, value in held:
        assert (value == TOTAL * (step + 1)).all()


@pytest.mark.mpi(min_size=2)
def test_where_there_is_no_room_mpi_does_it(monkeypatch):
    monkeypatch.setattr(node_memory, "_has_room", lambda size: RANK != 1)
    held = []
    for step in range(3):
        size = 1_000_003 + step
        x = ft.asarray(np.full(size, RANK + 1, np.int32))
        held.append(world.all_reduce(ft.negative(x)).numpy())
        assert (held[-1] == -TOTAL).all()


@pytest.mark.mpi(min_size=2)
def test_ranks_may_wait_in_any_order_and_at_any_time(comm):
    start = comm.transport.start_all_reduce
    for round_ in range(4):
        xs = [np.full(LARGE + 10 * k, RANK + 1 + k, np.float64) for k in range(6)]
        pending = []
        for k, x in enumerate(xs):
            pending.append(start(x, ReduceOp.AVG if k % 2 else ReduceOp.SUM, reuse=k % 3 == 0))
            if round_ % N == RANK:
                time.sleep(0.002)
                pending[k // 2].progress()
        order = np.random.default_rng([round_, RANK]).permutation(6)
        for k in order:
            total = TOTAL + N * k
            np.testing.assert_array_equal(pending[k].wait(), np.full(LARGE + 10 * k, total / N if k % 2 else total))


@pytest.mark.mpi(min_size=2)
def test_without_shared_memory_it_is_a_nonblocking_reduction_of_mpi(monkeypatch):
    monkeypatch.setenv("FUEL_NODE_LOCAL", "0")
    start = MpiComm().transport.start_all_reduce
    for _ in range(2):
        pending = start(np.full(LARGE, RANK + 1.0), ReduceOp.AVG)
        assert isinstance(pending, in_flight.MpiReduction)
        assert (pending.wait() == TOTAL / N).all()
        assert start(np.ones(10), ReduceOp.SUM).wait()[3] == N


@pytest.mark.mpi(min_size=2)
def test_ranks_may_differ_in_whether_they_give_their_memory_away(comm):
    """Open MPI reduces in place by another algorithm, from four ranks on."""
    start = comm.transport.start_all_reduce
    for round_ in range(2 * N):
        for size in (100, 30_000, LARGE):
            x = np.full(size, RANK + 1.0)
            assert (start(x, ReduceOp.SUM, reuse=round_ % N == RANK).wait() == TOTAL).all()


@pytest.mark.mpi(min_size=2)
def test_more_may_be_under_way_than_can_be_announced_at_once(comm):
    start = comm.transport.start_all_reduce
    pending = [start(np.full(LARGE, float(RANK + k)), ReduceOp.SUM) for k in range(20)]
    for k in reversed(range(20)):
        assert (pending[k].wait() == TOTAL - N + N * k).all()


@pytest.mark.mpi(min_size=2)
def test_all_other_collectives_may_come_between_start_and_wait(comm):
    """On some ranks after the wait: whoever blocks in something else must have done its part before."""
    transport = comm.transport
    others = [
        lambda: transport.all_reduce(np.ones(10), ReduceOp.SUM),
        lambda: transport.all_gather(np.ones(100_000), (100_000,) * N),
        lambda: transport.reduce_scatter(np.ones((N, 50_000)), ReduceOp.SUM, (1,) * N),
        lambda: transport.broadcast(np.ones(100_000), 0),
        lambda: transport.exchange(np.ones(100_000), (RANK + 1) % N, (RANK - 1) % N),
        lambda: transport.reduce(np.ones(100_000), ReduceOp.SUM, 0),
        transport.barrier,
        lambda: transport.all_to_all([np.ones(50_000)] * N, [(50_000,)] * N, N * 400_000),
        lambda: transport.allocate(1 << 20),
    ]
    for number, other in enumerate(others):
        pending = transport.start_all_reduce(np.full(LARGE, RANK + 1.0), ReduceOp.SUM)
        early = number % N == RANK
        if early:
            assert (pending.wait() == TOTAL).all()
        other()
        if not early:
            assert (pending.wait() == TOTAL).all()


@pytest.mark.mpi(min_size=3)
def test_groups_that_overlap_do_not_wait_for_each_other_in_a_circle():
    pairs = [world.split(0 if RANK in (k, (k + 1) % N) else None) for k in range(N)]
    for round_ in range(5):
        started = []
        for k, pair in enumerate(pairs):
            if pair is not None:
                x = np.full(LARGE, float(RANK + round_))
                started.append((k, pair.transport.start_all_reduce(x, ReduceOp.SUM)))
        for k, pending in started[:: 1 if RANK % 2 else -1]:
            assert (pending.wait() == k + (k + 1) % N + 2 * round_).all()


@pytest.mark.mpi(min_size=2)
def test_ranks_may_cut_their_script_differently(comm):
    x = ft.asarray(np.full(LARGE, RANK + 1.0))
    for _ in range(3):
        a = comm.all_reduce(ft.sqrt(x * x))
        b = comm.all_reduce(a * 2.0 + x)
        c = comm.all_reduce(x * 3.0)
        if RANK == 0:
            assert a.numpy()[0] == TOTAL
            fp.realize(b)
        fp.realize(a, b, c)
        assert (b.numpy() == 2 * N * TOTAL + TOTAL).all()
        assert (c.numpy() == 3 * TOTAL).all()


def test_every_dtype_and_op_goes_on_and_comes_back(comm):
    for dtype in (ft.bool, ft.bfloat16, ft.float16, ft.float32, ft.float64, ft.int32, ft.int8, ft.complex128):
        x = ft.astype(ft.asarray(np.arange(400_000) % 3 * (RANK % 2)), dtype)
        for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG):
            kind = np.dtype(dtype).kind
            if (op is ReduceOp.AVG and kind in "bi") or (op is ReduceOp.MAX and kind == "c"):
                continue
            total = comm.all_reduce(ft.reshape(x, (-1, 2)), op)
            fp.realize(total, ft.sum(ft.exp(ft.ones((300, 300)))))
            count = N // 2 if op is ReduceOp.SUM else min(N // 2, 1) if op is ReduceOp.MAX else N // 2 / N
            if N == 1:
                count = 0
            expected = np.arange(400_000) % 3 * count
            np.testing.assert_allclose(
                np.asarray(total.numpy(), np.complex128 if kind == "c" else np.float64).ravel(),
                expected > 0 if kind == "b" else expected,
                rtol=1e-2,
            )


@pytest.mark.mpi(min_size=2)
def test_after_a_kernel_failed_on_all_ranks_the_next_reductions_are_right(comm, monkeypatch):
    def fail(*_, **__):
        raise ValueError("no")

    for round_ in range(3):
        x = ft.asarray(np.full(LARGE, RANK + 1.0))
        total = comm.all_reduce(ft.sqrt(x))
        broken = ft.cumulative_sum(ft.sin(x))
        with monkeypatch.context() as patch:
            patch.setattr(np, "cumsum", fail)
            patch.setattr(np, "cumulative_sum", fail)
            with pytest.raises(RealizeError, match="ValueError: no"):
                fp.realize(total + 1.0, broken)
        del total, broken
        gc.collect()
        y = comm.all_reduce(x * float(round_ + 1))
        assert (y.numpy() == TOTAL * (round_ + 1)).all()
    in_flight.finish_requests()
    assert not in_flight._under_way
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_an_exchange_that_nobody_waits_for_holds_its_memory_until_it_is_through(comm):
    """As a kernel leaves it that fails between two turns of a ring."""
    transport, places = comm.transport, ((RANK + 1) % N, (RANK - 1) % N)
    sent = np.full(LARGE, RANK + 1.0)
    held = weakref.ref(sent)
    transport.start_exchange(sent, *places)
    del sent
    gc.collect()
    assert held() is not None
    received = transport.exchange(np.full(LARGE, RANK + 10.0), *places)
    assert (received == places[1] + 10.0).all()
    in_flight.finish_requests()
    gc.collect()
    assert held() is None
    assert not in_flight._under_way
    comm.barrier()


@pytest.mark.mpi(min_size=2)
def test_reduce_scatters_and_gathers_go_on_between_start_and_wait_in_any_order(comm):
    transport = comm.transport
    rows = [30_000 + 1000 * (r % 2) for r in range(N)]
    ends = np.cumsum(rows)
    wholes = [np.random.default_rng(r).normal(size=(sum(rows), 2)) for r in range(N)]
    total = sum(wholes[1:], wholes[0])
    mine = slice(ends[RANK] - rows[RANK], ends[RANK])
    for round_ in range(4):
        scattered = transport.start_reduce_scatter(wholes[RANK], ReduceOp.SUM, rows)
        reduced = transport.start_all_reduce(np.full(LARGE, RANK + 1.0), ReduceOp.SUM)
        gathered = transport.start_all_gather(np.ascontiguousarray(total[mine]), rows)
        if round_ % N == RANK:
            time.sleep(0.002)
            gathered.progress()
        for pending in [scattered, reduced, gathered][:: 1 if (round_ + RANK) % 2 else -1]:
            pending.wait()
        np.testing.assert_allclose(scattered.wait(), total[mine], rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(gathered.wait(), total)
        assert (reduced.wait() == TOTAL).all()


@pytest.mark.mpi(min_size=2)
def test_a_reduce_scatter_has_the_bits_of_an_all_reduce():
    comm = MpiComm()
    rows = [len(part) for part in fp.partition(LARGE, N)]
    x = np.random.default_rng(RANK).normal(size=LARGE)
    whole = comm.transport.start_all_reduce(x, ReduceOp.AVG).wait()
    mine = fp.partition(LARGE, N)[RANK]
    part = comm.transport.start_reduce_scatter(x, ReduceOp.AVG, rows).wait()
    np.testing.assert_array_equal(part, whole[mine.start : mine.stop])


@pytest.mark.mpi(min_size=2)
def test_where_there_is_no_room_mpi_scatters(monkeypatch):
    monkeypatch.setattr(node_memory, "_has_room", lambda size: RANK != 1)
    for step in range(3):
        size = 1_000_003 + step
        rows = [len(part) for part in fp.partition(size, N)]
        part = world.transport.start_reduce_scatter(np.full(size, RANK + 1, np.int32), ReduceOp.SUM, rows).wait()
        assert part.shape == (rows[RANK],)
        assert (part == TOTAL).all()

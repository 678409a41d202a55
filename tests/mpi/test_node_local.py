"""Collectives in a node's shared memory equal MPI's: every op and dtype, around every size at which the way changes."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import ReduceOp
from fuel_parallel.comm import node_memory
from fuel_parallel.comm.mpi import MpiTransport
from fuel_parallel.comm.node_local import NodeLocalTransport, find_nodes
from fuel_parallel.comm.thresholds import KINDS

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = world.world_size, world.rank
PLAIN_OPS = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
DTYPES = [np.dtype(name) for name in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "c8", "c16")]

# In bytes: below all thresholds, each side of what is small, of a slot, of the pieces of a slot; several pieces.
SIZES = [512, 16 << 10, (64 << 10) - 16, (64 << 10) + 16, (1 << 20) - 16, (1 << 20) + 16, 3_300_032]


@pytest.fixture
def transport():
    """On a communicator of its own, with all arrays from 1 KiB on in shared memory."""
    return transport_of(MPI.COMM_WORLD)


def transport_of(comm):
    made = NodeLocalTransport(MpiTransport(comm.Dup()))
    nodes = made._find_nodes()
    if nodes.memory is not None:
        made.use_thresholds(dict.fromkeys(KINDS, 1024))
    return made


def values(size, dtype, rank):
    """Small integers, so that every order of summing gives the same."""
    rng = np.random.default_rng([rank, size])
    x = rng.integers(0, 3, size=size)
    return (x + 1j * rng.integers(0, 3, size=size)).astype(dtype) if dtype.kind == "c" else x.astype(dtype)


def ops_of(dtype):
    return [op for op in PLAIN_OPS if dtype.kind != "c" or op in (ReduceOp.SUM, ReduceOp.PRODUCT)]


def reduced(xs, op):
    ufunc = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}[op.name]
    return ufunc.reduce(np.stack(xs), axis=0, dtype=xs[0].dtype)


def everyone_has_the_same_bits(array):
    digests = MPI.COMM_WORLD.allgather(array.tobytes())
    return all(digest == digests[0] for digest in digests)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_reductions_equal_numpy_at_all_sizes(transport, dtype):
    for nbytes in SIZES if dtype.name in ("float32", "complex128") else SIZES[:5:2]:
        size = nbytes // dtype.itemsize + 1
        xs = [values(size, dtype, rank) for rank in range(N)]
        mine = fp.partition(size, N)[RANK]
        rows = tuple(map(len, fp.partition(size, N)))
        for op in ops_of(dtype):
            expected = reduced(xs, op)
            x = xs[RANK].copy()
            np.testing.assert_array_equal(transport.all_reduce(x, op), expected)
            np.testing.assert_array_equal(transport.reduce_scatter(x, op, rows), expected[mine.start : mine.stop])
            np.testing.assert_array_equal(x, xs[RANK])
            out = np.zeros_like(x)
            assert transport.all_reduce(x, op, out) is out
            np.testing.assert_array_equal(out, expected)
            assert transport.all_reduce(x, op, x) is x
            np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("nbytes", SIZES)
def test_movement_equals_numpy_at_all_sizes(transport, nbytes):
    for dtype in (np.dtype("f4"), np.dtype("i1"), np.dtype("c16"), np.dtype(ft.bfloat16)):
        size = nbytes // dtype.itemsize
        xs = [values(size, np.dtype("f4"), rank).astype(dtype) for rank in range(N)]
        np.testing.assert_array_equal(transport.all_gather(xs[RANK], (size,) * N), np.concatenate(xs))
        for root in range(N):
            np.testing.assert_array_equal(transport.broadcast(xs[RANK], root), xs[root])


def test_shards_of_unequal_and_of_no_rows(transport):
    rows = tuple(10_000 * (rank % 3) for rank in range(N))
    xs = [values(rows[rank] * 5, np.dtype("f8"), rank).reshape(-1, 5) for rank in range(N)]
    np.testing.assert_array_equal(transport.all_gather(xs[RANK], rows), np.concatenate(xs))
    wholes = [values(sum(rows) * 5, np.dtype("f8"), rank).reshape(-1, 5) for rank in range(N)]
    start = sum(rows[:RANK])
    result = transport.reduce_scatter(wholes[RANK], ReduceOp.SUM, rows)
    np.testing.assert_array_equal(result, sum(wholes)[start : start + rows[RANK]])


@pytest.mark.parametrize("op", PLAIN_OPS)
@pytest.mark.parametrize("nbytes", SIZES[1:])
def test_all_ranks_get_the_same_bits(transport, op, nbytes):
    """Values whose sum depends on the order, zeros of both signs, infinities and NaNs, at odd addresses."""
    size = nbytes // 4
    rng = np.random.default_rng(RANK)
    memory = np.empty(size + 16, np.float32)
    x = memory[RANK : RANK + size]
    x[:] = rng.normal(size=size) * 10.0 ** rng.integers(-6, 6, size=size)
    x[rng.integers(0, size, size // 10)] = 0.0
    x[rng.integers(0, size, size // 10)] = -0.0
    x[rng.integers(0, size, 5)] = np.inf
    x[rng.integers(0, size, 5)] = np.nan
    with np.errstate(all="ignore"):
        result = transport.all_reduce(x, op)
    assert everyone_has_the_same_bits(result)


@pytest.mark.mpi(min_size=2)
def test_sums_are_in_the_order_of_ranks(transport):
    """A sum of floats depends on its order; this one is told, for every size."""
    for nbytes in SIZES[1:]:
        xs = [np.random.default_rng([9, rank]).normal(size=nbytes // 4).astype(np.float32) for rank in range(N)]
        expected = xs[0].copy()
        for x in xs[1:]:
            expected += x
        np.testing.assert_array_equal(transport.all_reduce(xs[RANK], ReduceOp.SUM), expected)


# Arrays that are born in shared memory.


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("nbytes", SIZES[1:])
def test_arrays_born_in_the_window_are_reduced_in_place(transport, nbytes):
    dtype = np.dtype("f4")
    size = nbytes // 4
    xs = [values(size, dtype, rank) for rank in range(N)]
    bucket = transport.allocate(2 * nbytes)
    assert bucket.nbytes == 2 * nbytes
    bucket[:] = 7
    x = bucket[nbytes // 2 : nbytes // 2 + nbytes].view(dtype)  # somewhere inside
    for op in PLAIN_OPS:
        x[:] = xs[RANK]
        np.testing.assert_array_equal(transport.all_reduce(x, op), reduced(xs, op))
        np.testing.assert_array_equal(x, xs[RANK])
        assert transport.all_reduce(x, op, x) is x
        np.testing.assert_array_equal(x, reduced(xs, op))
        rows = tuple(map(len, fp.partition(size, N)))
        x[:] = xs[RANK]
        mine = fp.partition(size, N)[RANK]
        result = transport.reduce_scatter(x, op, rows)
        x[:] = 0  # at once: nobody may still be reading it
        np.testing.assert_array_equal(result, reduced(xs, op)[mine.start : mine.stop])
    MPI.COMM_WORLD.Barrier()
    assert (bucket[: nbytes // 2] == 7).all()
    assert (bucket[nbytes // 2 + nbytes :] == 7).all()


@pytest.mark.mpi(min_size=2)
def test_ranks_may_differ_in_where_their_array_lies_and_where_the_result_goes(transport):
    for size in (30_000, 400_000):
        xs = [values(size, np.dtype("f4"), rank) for rank in range(N)]
        bucket = transport.allocate(8 * size).view(np.float32)
        inside = bucket[100 * RANK : 100 * RANK + size]
        for in_window in (RANK == 0, RANK != 0, True):
            for in_place in (RANK == 0, RANK != 0, False):
                x = inside if in_window else np.empty(size, np.float32)
                x[:] = xs[RANK]
                result = transport.all_reduce(x, ReduceOp.SUM, x if in_place else None)
                if not in_place:
                    x[:] = -1
                np.testing.assert_array_equal(result, sum(xs))


@pytest.mark.mpi(min_size=2)
def test_an_allocation_whose_array_is_gone_everywhere_is_used_again(transport):
    memory = transport._find_nodes().memory
    mapped = []
    kept = transport.allocate(1 << 20)
    for round_ in range(20):
        bucket = transport.allocate(300_000 + 1000 * round_)
        view = bucket.view(np.float32)[5:10]
        if RANK == 0 and round_ % 2:
            held = view  # noqa: F841 - rank 0 holds a view one round longer
        del bucket, view
        gc.collect()
        mapped.append(sum(not window.pooled for window in memory._windows.values()))
    assert max(mapped) <= 4
    assert kept.nbytes == 1 << 20
    assert MPI.COMM_WORLD.allgather(mapped) == [mapped] * N


@pytest.mark.mpi(min_size=2)
def test_more_memory_than_there_is_is_none_on_all_ranks(transport):
    assert transport.allocate(1 << 50) is None
    np.testing.assert_array_equal(transport.all_reduce(np.ones(100_000), ReduceOp.SUM), np.full(100_000, N))


# Many communicators.


@pytest.mark.mpi(min_size=2)
def test_communicators_of_the_same_ranks_share_one_memory():
    x = ft.ones((200, 1000))
    assert world.all_reduce(x).numpy()[0, 0] == N
    split = world.split(0)
    split.all_reduce(x).numpy()
    before = windows_mapped(), len(node_memory._memories)
    for _ in range(20):
        again = world.split(0)
        assert again.all_reduce(x).numpy()[-1, -1] == N
        assert again.transport._nodes.memory is world.transport._nodes.memory
    assert (windows_mapped(), len(node_memory._memories)) == before


def windows_mapped():
    """Shared mappings without a file any more: how both MPIs keep their windows. The guard has memory of its own."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith("(deleted)") and "/memfd:" not in line for line in maps)


@pytest.mark.mpi(min_size=4)
def test_splits_work_side_by_side_and_in_turns():
    half, parity = world.split(RANK // 2), world.split(RANK % 2)
    for round_ in range(10):
        x = ft.asarray(np.full(300_000, float(RANK + round_)))
        in_half, in_parity = half.all_reduce(x), parity.all_reduce(x)
        everyone = world.all_reduce(x)
        fp.realize(in_half, in_parity, everyone)
        first = RANK // 2 * 2
        last = max(rank for rank in range(N) if rank // 2 == RANK // 2)
        assert in_half.numpy()[7] == sum(rank + round_ for rank in range(first, last + 1))
        assert in_parity.numpy()[7] == sum(rank + round_ for rank in range(RANK % 2, N, 2))
        assert everyone.numpy()[-1] == sum(rank + round_ for rank in range(N))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("allocated", [False, True])
def test_kinds_follow_each_other_without_a_barrier(transport, allocated):
    """Ranks that are ahead must not write where others still read: kinds in random order, slow ranks in turns.

    With allocations, arrays lie now here, now there: the place of the next is not to be taken for that of this one.
    """
    rng = np.random.default_rng(3)
    window = transport.allocate(8 * 400_000).view(np.float64) if allocated else np.empty(400_000)
    for round_ in range(400 if allocated else 100):
        size = int(rng.integers(300, 40_000 if round_ % 4 else 400_000))
        kind, inside = int(rng.integers(0, 5)), bool(rng.integers(0, 2))
        x = window[:size] if inside else np.empty(size)
        x[:] = RANK + round_
        total = N * round_ + N * (N - 1) // 2
        if round_ % 7 == 0 and round_ % N == RANK:
            time.sleep(0.002)
        if kind == 0:
            assert (transport.all_reduce(x, ReduceOp.SUM) == total).all()
        elif kind == 1:
            assert (transport.all_reduce(x, ReduceOp.SUM, x) == total).all()
        elif kind == 2:
            rows = tuple(map(len, fp.partition(size, N)))
            assert (transport.reduce_scatter(x, ReduceOp.MAX, rows) == N - 1 + round_).all()
        elif kind == 3:
            gathered = transport.all_gather(x, (size,) * N).reshape(N, size)
            assert (gathered == (np.arange(N) + round_)[:, None]).all()
        else:
            assert (transport.broadcast(x, round_ % N) == round_ % N + round_).all()


@pytest.mark.mpi(min_size=2)
def test_where_the_next_array_lies_is_not_taken_for_where_this_one_does(transport, monkeypatch):
    """Rank 1 looks late, when rank 0 has said already where its next array lies."""
    memory = transport._find_nodes().memory
    published = type(memory).published

    def late(self, size, dtype):
        if RANK:
            time.sleep(0.05)
        return published(self, size, dtype)

    monkeypatch.setattr(type(memory), "published", late)
    inside = transport.allocate(100_000 * 8).view(np.float64)
    inside[:] = 100
    for _ in range(3):
        assert (transport.all_reduce(np.ones(100_000), ReduceOp.SUM) == N).all()
        assert (transport.all_reduce(inside, ReduceOp.SUM) == 100 * N).all()
        rows = tuple(map(len, fp.partition(100_000, N)))
        assert (transport.reduce_scatter(np.ones(100_000), ReduceOp.SUM, rows) == N).all()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_waits_in_shared_memory_still_sends(transport):
    """The message is too large to be sent at once; its sender is in the all-reduce before it is received."""
    if RANK == 0:
        transport.send(np.ones(4_000_000), 1, 5)
    if RANK == 1:
        time.sleep(0.1)
        assert transport.recv((4_000_000,), np.dtype("f8"), 0, 5).sum() == 4_000_000
    assert transport.all_reduce(np.ones(50_000), ReduceOp.SUM)[0] == N


# Nodes.


@pytest.mark.mpi(min_size=4)
def test_across_two_pretended_nodes(monkeypatch):
    monkeypatch.setenv("FUEL_NODE_SIZE", "2")
    transport = transport_of(MPI.COMM_WORLD)
    nodes = transport._find_nodes()
    assert nodes.node_of == (0, 0, 1, 1)
    assert nodes.local_ranks == (0, 1, 0, 1)
    assert nodes.across is not None
    for nbytes in SIZES[1:]:
        size = nbytes // 8 + 1
        xs = [values(size, np.dtype("f8"), rank) for rank in range(N)]
        bucket = transport.allocate(8 * size).view(np.float64)
        for op in PLAIN_OPS:
            np.testing.assert_array_equal(transport.all_reduce(xs[RANK], op), reduced(xs, op))
            for x in (xs[RANK].copy(), bucket):
                x[:] = xs[RANK]
                transport.all_reduce(x, op, x)
                np.testing.assert_array_equal(x, reduced(xs, op))
        for root in range(N):
            np.testing.assert_array_equal(transport.broadcast(xs[RANK], root), xs[root])
        np.testing.assert_array_equal(transport.all_gather(xs[RANK], (size,) * N), np.concatenate(xs))
        rows = tuple(map(len, fp.partition(size, N)))
        mine = fp.partition(size, N)[RANK]
        result = transport.reduce_scatter(xs[RANK], ReduceOp.SUM, rows)
        np.testing.assert_array_equal(result, sum(xs)[mine.start : mine.stop])
        x = np.random.default_rng(RANK).normal(size=size)
        assert everyone_has_the_same_bits(transport.all_reduce(x, ReduceOp.SUM))


@pytest.mark.mpi(min_size=3)
def test_nodes_with_different_numbers_of_ranks_leave_it_to_mpi(monkeypatch):
    monkeypatch.setenv("FUEL_NODE_SIZE", str(N - 1))
    transport = transport_of(MPI.COMM_WORLD)
    assert transport._find_nodes().memory is None
    assert transport.allocate(100) is None
    assert transport.all_reduce(np.ones(100_000), ReduceOp.SUM)[-1] == N


def test_one_rank_that_switches_it_off_switches_it_off_for_all(monkeypatch):
    monkeypatch.setenv("FUEL_NODE_LOCAL", "0" if RANK == 0 else "1")
    assert find_nodes(MPI.COMM_WORLD).memory is None


@pytest.mark.mpi(min_size=2)
def test_the_communicator_of_all_ranks_uses_it():
    assert isinstance(world.transport, NodeLocalTransport)
    assert world.all_reduce(ft.ones((1 << 20,), dtype=ft.bfloat16)).numpy()[5] == N
    assert world.transport._find_nodes().memory is not None

"""Reductions mean what numpy means, with the same bits on all ranks, whoever moves the bytes: MPI, or shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import MpiComm, ReduceOp
from fuel_parallel.comm.mpi import MpiTransport
from fuel_parallel.comm.node_local import NodeLocalTransport
from fuel_parallel.comm.reduction import BY_MPI
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy import dtypes

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = world.world_size, world.rank
SIZES = [0, 1, 3, 1000, 70_001]
UFUNCS = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}


@pytest.fixture(params=["shared memory", "plain MPI", "two ranks a node"])
def comm(request, monkeypatch):
    """A communicator whose bytes go each of the three ways."""
    if request.param == "plain MPI":
        monkeypatch.setenv("FUEL_NODE_LOCAL", "0")
    if request.param == "two ranks a node":
        monkeypatch.setenv("FUEL_NODE_SIZE", "2")
    made = MpiComm()
    if isinstance(made.transport, NodeLocalTransport):
        made.transport._find_nodes()
    return made


def in_order(xs, op):
    """The reduction in the order of ranks; of 16-bit floats in float32."""
    dtype = xs[0].dtype
    wide = [x.astype(np.float32) if dtypes.is_half(dtype) else x for x in xs]
    with np.errstate(all="ignore"):
        total = wide[0].copy()
        for x in wide[1:]:
            total = np.asarray(UFUNCS[ReduceOp.SUM if op is ReduceOp.AVG else op](total, x))
        if op is ReduceOp.AVG:
            total = total / total.dtype.type(len(xs))
        return total.astype(dtype)


def values(size, dtype, rank):
    """Values of all sizes; NaNs in some floats."""
    rng = np.random.default_rng([rank, size])
    kind = dtypes.kind(dtype)
    if kind == "bool":
        return rng.random(size) < 0.5
    if kind == "integral":
        bounds = np.iinfo(dtype)
        return rng.integers(bounds.min, bounds.max, size, dtype=dtype, endpoint=True)
    x = rng.normal(size=size) * 10.0 ** rng.integers(-3, 3, size=size)
    x[rng.random(size) < 0.1] = np.nan
    return (x + 1j * rng.normal(size=size) if kind == "complex floating" else x).astype(dtype)


def ops_of(dtype):
    kind = dtypes.kind(dtype)
    for op in ReduceOp:
        if op is ReduceOp.AVG and kind in ("bool", "integral"):
            continue
        if not (op in (ReduceOp.MIN, ReduceOp.MAX) and kind == "complex floating"):
            yield op


def bits_are_the_same_everywhere(array):
    return len(set(MPI.COMM_WORLD.allgather(array.tobytes()))) == 1


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda d: d.name)
def test_every_dtype_and_op_is_numpys(comm, dtype):
    for size in SIZES:
        xs = [values(size, dtype, rank) for rank in range(N)]
        for op in ops_of(dtype):
            expected = in_order(xs, op)
            rounds = dtypes.is_inexact(dtype) and op not in (ReduceOp.MIN, ReduceOp.MAX)
            ours = dtype not in BY_MPI[op] and dtypes.kind(dtype) != "complex floating" and not spans_nodes(comm)
            compare = near if rounds and not ours else same
            x = ft.asarray(xs[RANK])
            total, on_root, mine = comm.all_reduce(x, op), comm.reduce(x, op, N - 1), comm.reduce_scatter(x, op)
            part = fp.partition(size, N)[RANK]
            compare(total.numpy(), expected)
            compare(on_root.numpy(), expected if RANK == N - 1 else np.zeros_like(expected))
            compare(mine.numpy(), expected[part.start : part.stop])
            assert bits_are_the_same_everywhere(total.numpy())


def same(found, expected):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(as_wide(found), as_wide(expected))


def spans_nodes(comm):
    return isinstance(comm.transport, NodeLocalTransport) and comm.transport._find_nodes().across is not None


def near(found, expected):
    """In another order than that of ranks, or with other instructions: the last digit may differ."""
    assert found.dtype == expected.dtype
    if dtypes.is_half(found.dtype):
        np.testing.assert_allclose(as_wide(found), as_wide(expected), rtol=2**-7)
        return
    scale = np.nanmax(np.abs(expected), initial=1e-30)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * scale)


def as_wide(x):
    return x.astype(np.float32) if dtypes.is_half(x.dtype) else x


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16], ids=lambda d: d.name)
def test_halves_are_within_one_ulp_of_the_true_sum(comm, dtype):
    """2**20 values of each rank, against float64."""
    xs = [np.random.default_rng([5, rank]).normal(size=1 << 20).astype(dtype) for rank in range(N)]
    true = np.sum([x.astype(np.float64) for x in xs], axis=0)
    total = comm.all_reduce(ft.asarray(xs[RANK])).numpy()
    mantissa, smallest = (7, -126) if dtype == dtypes.bfloat16 else (10, -14)
    ulp = np.exp2(np.maximum(np.floor(np.log2(np.abs(true) + 1e-300)), smallest) - mantissa)
    assert (np.abs(total.astype(np.float64) - true) <= ulp).all()
    assert bits_are_the_same_everywhere(total)


def test_averages_of_halves_do_not_overflow_on_the_way(comm):
    x = ft.full((300_000,), 6e4, dtype=ft.float16)
    assert (comm.all_reduce(x, ReduceOp.AVG).numpy() == np.float16(6e4)).all()


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", dtypes.FLOATING, ids=lambda d: d.name)
def test_one_nan_is_enough(comm, dtype, op):
    for size in (1, 200_000):
        x = np.zeros(size, dtype)
        if RANK == N - 1:
            x[-1] = np.nan
        found = comm.all_reduce(ft.asarray(x), op).numpy()
        assert np.isnan(found[-1])
        assert not np.isnan(found[:-1]).any()


def test_integers_overflow_as_in_numpy(comm):
    for size in (2, 300_000):
        x = ft.full((size,), 127, dtype=ft.int8)
        assert (comm.all_reduce(x).numpy() == np.full(N, 127, np.int8).sum(dtype=np.int8)).all()
        big = ft.full((size,), 2**62 + 3, dtype=ft.int64)
        assert (comm.all_reduce(big).numpy() == np.full(N, 2**62 + 3).sum()).all()
        assert (comm.all_reduce(big, ReduceOp.PRODUCT).numpy() == np.full(N, 2**62 + 3).prod()).all()


# Communicators of all kinds.


def test_nested_splits_down_to_one_rank():
    part, members = world, list(range(N))
    while True:
        for dtype in (ft.float32, ft.bfloat16, ft.bool):
            x = ft.asarray(np.full(70_000, RANK + 1)).astype(dtype)
            expected = in_order([np.full(70_000, rank + 1).astype(x.dtype) for rank in members], ReduceOp.SUM)
            same(part.all_reduce(x).numpy(), expected)
            same(part.reduce(x, ReduceOp.MAX, 0).numpy()[:1], as_type(max(members) + 1 if part.is_root else 0, x.dtype))
            same(part.all_gather(x[:3]).numpy(), np.concatenate([np.full(3, r + 1).astype(x.dtype) for r in members]))
        if part.world_size == 1:
            break
        half = (part.world_size + 1) // 2
        mine = part.rank < half
        members = members[:half] if mine else members[half:]
        part = part.split(int(mine))
        assert part.world_size == len(members)


def as_type(value, dtype):
    return np.array([value]).astype(dtype)


def test_a_transport_of_one_rank_reduces_nothing():
    transport = MpiTransport(MPI.COMM_SELF)
    for dtype in dtypes.ALL:
        x = values(10, dtype, 0)
        for op in ops_of(dtype):
            same(transport.all_reduce(x, op), x)
            same(transport.reduce(x, op, 0), x)
            same(transport.reduce_scatter(x, op, (10,)), x)


# Buffers.


def test_views_of_any_order_are_reduced_by_their_elements(comm):
    """MPI sees memory, not elements: rank 0 hands in rows first, the others columns first."""
    for dtype in (np.float32, dtypes.bfloat16):
        whole = np.arange(600 * 400).reshape(600, 400) % 100
        mine = whole.astype(dtype, order="C" if RANK == 0 else "F")
        expected = (whole * N).astype(dtype)
        for x in (ft.asarray(mine), ft.asarray(np.ascontiguousarray(mine.T)).T):
            same(comm.all_reduce(x).numpy(), expected)
            same(comm.reduce_scatter(x[:, ::-1], dim=1).numpy(), part_of(expected[:, ::-1], 1))
            same(comm.all_gather(x[::2], 1).numpy(), np.concatenate([whole[::2].astype(dtype)] * N, axis=1))


def part_of(x, dim):
    part = fp.partition(x.shape[dim], N)[RANK]
    return x.take(np.arange(part.start, part.stop), axis=dim)


def test_input_and_output_may_be_one_array_and_may_not_overlap(comm):
    transport = comm.transport
    for size in (10, 300_000):
        memory = np.ones(size + 8, np.float32)
        x = memory[:size]
        with pytest.raises(ArgumentError, match="overlap without being the same memory; pass out=x"):
            transport.all_reduce(x, ReduceOp.SUM, memory[8:])
        assert (memory == 1).all()
        assert transport.all_reduce(x, ReduceOp.SUM, x) is x
        assert (x == N).all()
        again = memory[:size]  # the same memory, another array
        assert transport.all_reduce(x, ReduceOp.MAX, again) is again
        assert (again == N).all()


def test_buffers_of_another_order_or_kind_are_refused(comm):
    x = np.ones((4, 6), np.float32)
    for wrong in (np.asfortranarray(x), x[:, ::2]):
        with pytest.raises(ArgumentError, match=r"must be C-contiguous.*numpy.ascontiguousarray"):
            comm.transport.all_reduce(wrong, ReduceOp.SUM)
    for out in (np.asfortranarray(x), np.empty((6, 4), np.float32), np.empty((4, 6))):
        with pytest.raises(ArgumentError, match=r"out must be a C-contiguous float32\[4, 6\] like x"):
            comm.transport.all_reduce(x, ReduceOp.SUM, out)

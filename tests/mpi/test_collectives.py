"""Every collective against numpy, for all dtypes and awkward shapes; run under mpiexec with 1 to 4 ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import ReduceOp
from fuel_parallel.errors import ArgumentError, CommunicatorError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = world.world_size, world.rank
SHAPES = [(), (1,), (0,), (5,), (3, 4), (2, 0, 3), (N, 2), (2 * N + 1, 3)]


def data(shape, dtype, rank, seed=0):
    """The values of a rank, known to all: small integers, so that sums are exact in every dtype."""
    rng = np.random.default_rng([seed, rank])
    values = rng.integers(0, 3, size=shape)
    if dtype.kind == "c":
        return (values + 1j * rng.integers(0, 3, size=shape)).astype(dtype)
    return values.astype(dtype)


def everyone(shape, dtype):
    return [data(shape, dtype, rank) for rank in range(N)]


def same(result, expected):
    value = result.numpy()
    assert value.shape == expected.shape
    assert value.dtype == expected.dtype
    np.testing.assert_array_equal(value, expected)


NUMPY_REDUCTION = {
    ReduceOp.SUM: lambda xs: np.sum(xs, axis=0, dtype=xs[0].dtype),
    ReduceOp.PRODUCT: lambda xs: np.prod(xs, axis=0, dtype=xs[0].dtype),
    ReduceOp.MIN: lambda xs: np.min(xs, axis=0),
    ReduceOp.MAX: lambda xs: np.max(xs, axis=0),
    ReduceOp.AVG: lambda xs: np.sum(xs, axis=0, dtype=xs[0].dtype) / xs[0].dtype.type(N),
}


def reduced(xs, op):
    dtype = xs[0].dtype
    wide = [x.astype(np.float32) for x in xs] if dtypes.is_half(dtype) else xs
    return np.asarray(NUMPY_REDUCTION[op](wide)).astype(dtype)


def reductions_of(dtype):
    kind = dtypes.kind(dtype)
    return [
        op
        for op in ReduceOp
        if not (op is ReduceOp.AVG and kind in ("bool", "integral"))
        and not (op in (ReduceOp.MIN, ReduceOp.MAX) and kind == "complex floating")
    ]


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda d: d.name)
def test_reductions_equal_numpy_for_every_dtype_and_shape(dtype):
    for op in reductions_of(dtype):
        for shape in SHAPES:
            xs = everyone(shape, dtype)
            expected = reduced(xs, op)
            x = ft.asarray(xs[RANK])
            same(world.all_reduce(x, op), expected)
            root = N - 1
            same(world.reduce(x, op, root), expected if root == RANK else np.zeros_like(expected))
            for dim in range(len(shape)):
                part = fp.partition(shape[dim], N)[RANK]
                same(world.reduce_scatter(x, op, dim), expected.take(np.arange(part.start, part.stop), axis=dim))


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda d: d.name)
def test_movement_equals_numpy_for_every_dtype_and_shape(dtype):
    for shape in SHAPES:
        xs = everyone(shape, dtype)
        x = ft.asarray(xs[RANK])
        same(world.broadcast(x, N - 1), xs[N - 1])
        same(world.shift(x, 1), xs[(RANK - 1) % N])
        same(world.shift(x, -2), xs[(RANK + 2) % N])
        same(world.shift(x, 1, wrap=False), xs[RANK - 1] if RANK else np.zeros_like(xs[0]))
        for dim in range(len(shape)):
            same(world.all_gather(x, dim), np.concatenate(xs, axis=dim))


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda d: d.name)
def test_shards_of_a_size_that_does_not_divide_are_gathered(dtype):
    for size in (0, 1, N - 1, N + 1, 2 * N + 1):
        whole = data((3, size), dtype, 0)
        part = fp.partition(size, N)[RANK]
        same(world.all_gather(ft.asarray(whole[:, part.start : part.stop]), 1, size=size), whole)
        same(world.shard(ft.asarray(whole), 1), whole[:, part.start : part.stop])


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda d: d.name)
def test_all_to_all_transposes_ranks_and_shards(dtype):
    rows, columns = 2 * N + 1, N + 2
    whole = data((rows, columns), dtype, 0)
    mine, theirs = fp.partition(rows, N)[RANK], fp.partition(columns, N)[RANK]
    by_rows = ft.asarray(whole[mine.start : mine.stop])
    by_columns = world.all_to_all(by_rows, 1, 0, size=rows)
    same(by_columns, whole[:, theirs.start : theirs.stop])
    same(world.all_to_all(by_columns, 0, 1, size=columns), whole[mine.start : mine.stop])
    same(
        world.all_to_all(ft.asarray(data((N, 2), dtype, RANK)), 0, 0),
        np.stack([data((N, 2), dtype, r)[RANK] for r in range(N)]),
    )


@given(st.data())
@settings(max_examples=40)
def test_random_shapes_and_dimensions(draw):
    shape = tuple(draw.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    dim = draw.draw(st.integers(-len(shape), len(shape) - 1))
    op = draw.draw(st.sampled_from([ReduceOp.SUM, ReduceOp.MAX]))
    xs = everyone(shape, dtypes.float64)
    x = ft.asarray(xs[RANK])
    part = fp.partition(shape[dim], N)[RANK]
    gathered, scattered = world.all_gather(x, dim), world.reduce_scatter(x, op, dim)
    fp.realize(gathered, scattered)
    same(gathered, np.concatenate(xs, axis=dim))
    same(scattered, reduced(xs, op).take(np.arange(part.start, part.stop), axis=dim))


def test_inputs_that_are_not_contiguous():
    xs = everyone((4, 6), dtypes.float32)
    x = ft.asarray(xs[RANK])
    same(world.all_reduce(x.T[::-1, ::2]), sum(x.T[::-1, ::2] for x in xs))
    same(world.all_gather(x.T[1:3], 1), np.concatenate([x.T[1:3] for x in xs], axis=1))
    same(world.all_reduce(ft.broadcast_to(x[0, 0], (3, 3))), np.full((3, 3), sum(x[0, 0] for x in xs)))


def test_bfloat16_is_rounded_once():
    values = [np.float32(1.0 + rank * 2**-7) for rank in range(N)]
    x = ft.asarray(values[RANK]).astype(ft.bfloat16)
    total = sum(np.float32(ft.asarray(v).astype(ft.bfloat16).astype(ft.float32).item()) for v in values)
    assert world.all_reduce(x).item() == float(np.asarray(total).astype(dtypes.bfloat16))


def test_a_collective_runs_once_for_all_who_use_it():
    x = ft.asarray(np.full(3, float(RANK + 1)))
    total = world.all_reduce(x)
    a, b = total * 2, total + 1
    fp.realize(a)
    assert total.is_realized or N == 1
    fp.realize(b)
    np.testing.assert_array_equal(b.numpy(), np.full(3, N * (N + 1) / 2 + 1))


def test_realizing_the_younger_collective_first_keeps_the_order_of_the_script():
    first = world.all_reduce(ft.asarray([1.0]))
    second = world.all_reduce(ft.asarray([10.0]))
    fp.realize(*((second, first) if RANK % 2 else (second,)))
    assert (first.item(), second.item()) == (N, 10 * N)


def test_collectives_cut_differently_into_realizes():
    tensors = [world.all_reduce(ft.asarray([float(i)])) for i in range(6)]
    if RANK == 0:
        for t in reversed(tensors):
            t.realize()
    else:
        fp.realize(tensors)
    assert [t.item() for t in tensors] == [float(i * N) for i in range(6)]


def test_split_into_even_and_odd_ranks():
    part = world.split(RANK % 2)
    mine = [rank for rank in range(N) if rank % 2 == RANK % 2]
    assert (part.world_size, part.rank) == (len(mine), mine.index(RANK))
    assert part.all_reduce(ft.asarray(float(RANK))).item() == sum(mine)
    assert part.split(0).all_reduce(ft.asarray(1)).item() == len(mine)


def test_split_by_key_reverses_and_none_stays_out():
    backwards = world.split(0, key=-RANK)
    assert backwards.rank == N - 1 - RANK
    nobody = world.split(None if RANK == 0 else 1)
    assert (nobody is None) == (RANK == 0)


@pytest.mark.parametrize("node_local", ["0", "1"])
def test_all_moves_work_in_a_part_of_a_split(monkeypatch, node_local):
    monkeypatch.setenv("FUEL_NODE_LOCAL", node_local)
    part = world.split(0, key=-RANK)
    xs = everyone((2, N), np.dtype("float32"))[::-1]
    x = ft.asarray(xs[part.rank])
    same(part.shift(x, 1), xs[part.rank - 1])
    same(part.all_to_all(x, 1, 0), np.concatenate([y[:, part.rank : part.rank + 1] for y in xs]))
    same(part.scan(x), np.sum(xs[: part.rank + 1], axis=0, dtype=np.float32))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dim", [0, 1])
def test_all_to_all_with_free_sizes_sends_what_the_table_says(seed, dim):
    """As tokens go to experts: how many is known at run time, and each rank knows its own row."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 4 if seed else 1, size=(N, N))
    sizes = world.all_gather_object([int(count) for count in counts[RANK]])
    assert sizes == counts.tolist()
    dtype = dtypes.ALL[seed * 2]
    xs = [data((int(counts[r].sum()), 3)[:: 1 if dim == 0 else -1], dtype, r) for r in range(N)]
    parts = [np.split(xs[r], np.cumsum(counts[r])[:-1], axis=dim)[RANK] for r in range(N)]
    there = world.all_to_all(ft.asarray(xs[RANK]), dim, dim, sizes=sizes)
    same(there, np.concatenate(parts, axis=dim))
    same(world.all_to_all(there, dim, dim, sizes=list(zip(*sizes, strict=True))), xs[RANK])


def test_sizes_that_do_not_fit_are_named():
    comm = fp.SymbolicComm(0, 2)
    x = ft.ones((3, 4))
    with pytest.raises(
        ShapeError, match=r"sizes\[0\], what this rank sends, sums to 4, but its tensor has an extent of 3"
    ):
        comm.all_to_all(x, 0, 0, sizes=[[1, 3], [0, 0]])
    for table in ([[1, 2]], [[1, 2], [1]], [[4, -1], [0, 0]]):
        with pytest.raises(ArgumentError, match="a table of 2 rows of 2 extents, 0 or more"):
            comm.all_to_all(x, 0, 0, sizes=table)
    with pytest.raises(ArgumentError, match="sizes is a table of ints"):
        comm.all_to_all(x, 0, 0, sizes=[1, 2])
    with pytest.raises(ArgumentError, match="parts along one dimension"):
        comm.all_to_all(x, 0, 1, sizes=[[1, 2], [0, 0]])


@pytest.mark.mpi(min_size=2)
def test_messages_travel_around_the_ring_whoever_sends_first():
    for shape, dtype in [((300, 300), ft.float64), ((), ft.bfloat16), ((0, 2), ft.int8)]:
        x = data(shape, np.dtype(dtype), RANK)
        world.send(ft.asarray(x), (RANK + 1) % N, tag=7)
        received = world.recv(shape, dtype, (RANK - 1) % N, tag=7)
        same(received, data(shape, np.dtype(dtype), (RANK - 1) % N))


@pytest.mark.mpi(min_size=2)
def test_tags_keep_messages_apart():
    if RANK == 0:
        world.send(ft.asarray(1), 1, tag=1)
        world.send(ft.asarray(2), 1, tag=2)
        fp.realize()
    elif RANK == 1:
        later = world.recv((), ft.int64, 0, tag=2)
        assert later.item() == 2
        assert world.recv((), ft.int64, 0, tag=1).item() == 1


@pytest.mark.mpi(min_size=2)
def test_a_message_of_another_size_is_an_error_with_both_sizes():
    if RANK == 0:
        world.send(ft.asarray([1.0, 2.0]), 1)
        world.barrier()
    else:
        if RANK == 1:
            with pytest.raises(CommunicatorError, match=r"float32\[3\] \(12 bytes\) from rank 0, but it sent 8 bytes"):
                world.recv((3,), ft.float32, 0).realize()
            assert world.recv((2,), ft.float32, 0).tolist() == [1.0, 2.0]
        world.barrier()


def test_mistakes_are_named_when_the_node_is_built():
    x = ft.ones((2, 3))
    with pytest.raises(DTypeError, match="average of int64"):
        world.all_reduce(ft.arange(3), ReduceOp.AVG)
    with pytest.raises(DTypeError, match="no order"):
        world.all_reduce(ft.ones(2, dtype=ft.complex64), ReduceOp.MAX)
    with pytest.raises(ArgumentError, match="op is one of"):
        world.all_reduce(x, "sum")
    with pytest.raises(ArgumentError, match=f"root must be a rank from 0 to {N - 1}"):
        world.broadcast(x, root=N)
    with pytest.raises(ShapeError, match="axis 2 is out of bounds"):
        world.all_gather(x, 2)
    with pytest.raises(ShapeError, match="0-d tensor"):
        world.reduce_scatter(ft.asarray(1.0))
    with pytest.raises(ShapeError, match="its shard has 2"):
        world.all_gather(x, 0, size=100 * N)
    with pytest.raises(CommunicatorError, match="this rank itself"):
        world.send(x, RANK)


def test_init_is_idempotent_and_names_the_rank():
    assert fp.init() is world
    assert repr(world).endswith(f"rank {RANK} of {N})")
    assert world.info == fp.CommInfo(RANK, N)
    assert world.is_root == (RANK == 0)


@pytest.mark.mpi(min_size=2)
def test_a_send_that_nobody_realizes_goes_out_at_the_barrier():
    if RANK == 0:
        world.send(ft.asarray([4.0]), 1, tag=3)
    world.barrier()
    if RANK == 1:
        assert world.recv((1,), ft.float32, 0, tag=3).tolist() == [4.0]


@pytest.mark.mpi(min_size=2)
def test_a_send_that_nobody_realizes_goes_out_at_a_split():
    if RANK == 0:
        world.send(ft.asarray([4.0]), 1, tag=3)
    if RANK == 1:
        assert world.recv((1,), ft.float32, 0, tag=3).tolist() == [4.0]
    assert world.split(0).world_size == N

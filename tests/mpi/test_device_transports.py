"""Arrays of a stand-in device over each transport: the values of host arrays, for every collective, dtype and shape."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import stand_in
from fake_nccl import FakeNccl, Streams
from mpi4py import MPI

import fuel_parallel as fp
from fuel_parallel import ReduceOp
from fuel_parallel.comm import background
from fuel_parallel.comm.background import Background
from fuel_parallel.comm.cuda_probe import Verdict
from fuel_parallel.comm.direct import DirectTransport
from fuel_parallel.comm.mpi import MpiTransport
from fuel_parallel.comm.nccl import NcclTransport, new_communicator, reduces
from fuel_parallel.comm.staged import StagedTransport
from fuel_parallel.errors import ArgumentError, CommunicatorError
from fuel_parallel.lazy import dtypes

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
SHAPES = [(), (1,), (0,), (5,), (3, 4), (2, 0, 3), (2 * N + 1, 3), (29,)]
AWARE = Verdict(True, 2, "in a test")
HOST = MpiTransport(MPI.COMM_WORLD.Dup())
APART = MPI.COMM_WORLD.Dup()


def staged(memory, slot_bytes=1 << 20):
    apart = StagedTransport(MpiTransport(APART), memory)
    made = StagedTransport(world.transport if N > 1 else HOST, memory, Background(apart, memory))
    made.slot_bytes = apart.slot_bytes = slot_bytes
    return made


def nccl(memory=None):
    memory = memory or Streams("plain:0", FakeNccl())
    communicator = new_communicator(HOST, memory)
    made = NcclTransport(communicator, memory, StagedTransport(HOST, memory))
    communicator.streams = memory.made
    return made


def direct(memory):
    apart = DirectTransport(APART, memory, StagedTransport(MpiTransport(APART), memory), AWARE)
    return DirectTransport(HOST.comm, memory, StagedTransport(HOST, memory), AWARE, Background(apart, memory))


MAKE = {
    "staged whole": lambda: staged(stand_in.StandInMemory()),
    "staged in pieces": lambda: staged(stand_in.StandInMemory("guarded:0"), 48),
    "direct": lambda: direct(stand_in.StandInMemory()),
    "nccl": nccl,
}


@pytest.fixture(scope="module", params=MAKE)
def transport(request):
    yield MAKE[request.param]()
    background.finish()


def in_large_pieces(transport, monkeypatch):
    """Arrays that are large enough for the thread are not cut into thousands."""
    for one in (transport, getattr(getattr(transport, "background", None), "transport", None)):
        if isinstance(one, StagedTransport) and one.slot_bytes < 30_000:
            monkeypatch.setattr(one, "slot_bytes", 30_000)


def data(shape, dtype, rank):
    """The values of a rank, known to all: small integers, so that sums are exact in every dtype."""
    rng = np.random.default_rng([len(shape), rank])
    values = np.asarray(rng.integers(0, 3, size=shape))
    if dtype.kind == "c":
        return np.asarray(values + 1j * rng.integers(0, 3, size=shape), dtype)
    return values.astype(dtype)


def new(transport, values):
    return transport.memory.array_module.new(values)


def same(result, expected):
    assert isinstance(result, stand_in.Array)
    value = result.get()
    assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_array_equal(value, expected)


def operations(dtype):
    kind = dtypes.kind(dtype)
    for op in ReduceOp:
        if (op is ReduceOp.AVG and kind in ("bool", "integral")) or (
            op in (ReduceOp.MIN, ReduceOp.MAX) and kind == "complex floating"
        ):
            continue
        yield op


def parts(extent):
    return tuple(len(part) for part in fp.partition(extent, N))


def uneven(extent):
    """Rows that `partition` would not give: the last rank has all but one for each of the others."""
    return (*[min(1, extent)] * (N - 1), max(extent - (N - 1) * min(1, extent), 0))


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda d: d.name)
def test_reductions_are_those_of_host_arrays(transport, dtype):
    for op, shape in itertools.product(operations(dtype), SHAPES):
        x = data(shape, dtype, RANK)
        same(transport.all_reduce(new(transport, x), op), HOST.all_reduce(x, op))
        mine = new(transport, x)
        assert transport.all_reduce(mine, op, mine) is mine
        same(mine, HOST.all_reduce(x, op))
        same(transport.start_all_reduce(new(transport, x), op).wait(), HOST.all_reduce(x, op))
        same(transport.start_all_reduce(new(transport, x), op, reuse=True).wait(), HOST.all_reduce(x, op))
        reduced, expected = transport.reduce(new(transport, x), op, N - 1), HOST.reduce(x, op, N - 1)
        assert (reduced is None) == (expected is None) == (RANK != N - 1)
        if expected is not None:
            same(reduced, expected)
        if op is not ReduceOp.AVG:
            for exclusive, reverse in ((False, False), (True, True)):
                how = {"exclusive": exclusive, "reverse": reverse}
                same(transport.scan(new(transport, x), op, **how), HOST.scan(x, op, **how))


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda d: d.name)
@pytest.mark.parametrize("rows_of", [parts, uneven], ids=["partition", "uneven"])
def test_scatters_and_gathers_are_those_of_host_arrays(transport, dtype, rows_of):
    for shape in [(2 * N, 3), (2 * N + 1, 3), (N - 1, 2), (0, 3), (N, 0), (31,)]:
        rows = rows_of(shape[0])
        if sum(rows) != shape[0]:
            continue
        x = data(shape, dtype, RANK)
        for op in operations(dtype):
            same(transport.reduce_scatter(new(transport, x), op, rows), HOST.reduce_scatter(x, op, rows))
        whole = data(shape, dtype, N)
        end = sum(rows[: RANK + 1])
        same(transport.all_gather(new(transport, whole[end - rows[RANK] : end]), rows), whole)


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda d: d.name)
def test_movement_is_that_of_host_arrays(transport, dtype):
    for shape in SHAPES:
        x = data(shape, dtype, RANK)
        for root in {0, N - 1}:
            same(transport.broadcast(new(transport, x), root), data(shape, dtype, root))
        same(transport.exchange(new(transport, x), (RANK + 1) % N, (RANK - 1) % N), data(shape, dtype, (RANK - 1) % N))
        up = RANK + 1 if RANK + 1 < N else None
        received = transport.exchange(new(transport, x), up, RANK - 1 if RANK else None)
        assert (received is None) == (RANK == 0)
        if received is not None:
            same(received, data(shape, dtype, RANK - 1))
        blocks = [new(transport, data((r, *shape), dtype, RANK)) for r in range(N)]
        shapes = [(RANK, *shape)] * N
        most = N * N * max(x.nbytes, 1)
        for rank, block in enumerate(transport.all_to_all(blocks, shapes, most)):
            same(block, data((RANK, *shape), dtype, rank))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda d: d.name)
def test_messages_are_those_of_host_arrays(transport, dtype):
    """Either end may be a host array."""
    after, before = (RANK + 1) % N, (RANK - 1) % N
    for tag, shape in enumerate(SHAPES):
        x = data(shape, dtype, RANK)
        transport.send(new(transport, x), after, tag)
        same(transport.recv(shape, dtype, before, tag), data(shape, dtype, before))
        plain = HOST if isinstance(transport, DirectTransport | NcclTransport) else transport.host
        transport.send(new(transport, x), after, tag)
        np.testing.assert_array_equal(plain.recv(shape, dtype, before, tag), data(shape, dtype, before))
        plain.send(x, after, tag)
        same(transport.recv(shape, dtype, before, tag), data(shape, dtype, before))
    transport.barrier()


def test_what_was_queued_before_is_waited_for(transport, monkeypatch):
    """The memory of an array that was just made is written only when the stream comes to it."""
    in_large_pieces(transport, monkeypatch)
    xp = transport.memory.array_module
    x = new(transport, np.full(1000, RANK + 1, np.float32))
    y = xp.add(x, x)
    y[...] = xp.multiply(y, y)
    total = sum((2 * (rank + 1)) ** 2 for rank in range(N))
    same(transport.all_reduce(y, ReduceOp.SUM), np.full(1000, total, np.float32))
    same(transport.broadcast(xp.add(y, y), 0), np.full(1000, 8, np.float32))
    large = xp.add(new(transport, np.full(40_000, RANK, np.float32)), 1)
    same(transport.start_all_reduce(large, ReduceOp.SUM).wait(), np.full(40_000, N * (N + 1) // 2, np.float32))


def test_many_all_reduces_go_on_at_once_and_end_in_any_order(transport, monkeypatch):
    in_large_pieces(transport, monkeypatch)
    started = []
    for number in range(6):
        x = new(transport, np.full(40_000 + number, number + RANK, np.float32))
        started.append(transport.start_all_reduce(x, ReduceOp.SUM, reuse=number % 2 == 0))
        transport.all_reduce(new(transport, np.ones(3, np.float32)), ReduceOp.SUM)  # others are in between
    for number in (3, 0, 5, 1, 4, 2):
        started[number].progress()
        expected = np.full(40_000 + number, N * number + N * (N - 1) // 2, np.float32)
        same(started[number].wait(), expected)


def test_an_array_that_is_not_given_away_keeps_its_values(transport, monkeypatch):
    in_large_pieces(transport, monkeypatch)
    for size in (5, 40_000):
        values = np.full(size, RANK + 1.0)
        x = new(transport, values)
        transport.all_reduce(x, ReduceOp.SUM)
        transport.start_all_reduce(x, ReduceOp.AVG).wait()
        transport.reduce(x, ReduceOp.SUM, 0)
        transport.broadcast(x, 0)
        transport.reduce_scatter(x, ReduceOp.SUM, parts(size))
        same(x, values)


def test_all_ranks_get_the_same_bits(transport, monkeypatch):
    in_large_pieces(transport, monkeypatch)
    rng = np.random.default_rng(RANK)
    for dtype in (np.float32, dtypes.bfloat16, np.complex64):
        x = rng.normal(size=30_011).astype(dtype)
        for result in (
            transport.all_reduce(new(transport, x), ReduceOp.SUM),
            transport.start_all_reduce(new(transport, x), ReduceOp.AVG).wait(),
        ):
            digests = MPI.COMM_WORLD.allgather(result.get().tobytes())
            assert all(digest == digests[0] for digest in digests)


def test_arrays_that_are_not_contiguous_are_refused(transport):
    x = new(transport, np.ones((4, 6), np.float32))
    with pytest.raises(ArgumentError, match="must be C-contiguous"):
        transport.all_reduce(x[:, ::2], ReduceOp.SUM)
    with pytest.raises(ArgumentError, match=r"out must be a C-contiguous float32\[4, 6\]"):
        transport.all_reduce(x, ReduceOp.SUM, new(transport, np.ones((6, 4), np.float32)))


# What only one of them does.


def test_pieces_are_copied_while_others_are_reduced(monkeypatch):
    """The second piece is on its way from the device before the first is given to the ranks, in memory of its own."""
    memory = stand_in.StandInMemory()
    transport = StagedTransport(HOST, memory)
    transport.slot_bytes = 64
    events = []
    for name in ("copy_to_host", "copy_to_device"):
        method = getattr(memory, name)
        monkeypatch.setattr(memory, name, lambda *a, name=name, method=method: (events.append(name), method(*a))[1])
    reduce = HOST.all_reduce
    monkeypatch.setattr(HOST, "all_reduce", lambda *a: (events.append("all_reduce"), reduce(*a))[1])
    transport.all_reduce(new(transport, np.ones(48, np.float32)), ReduceOp.SUM)
    first, last = ["copy_to_host"], ["all_reduce", "copy_to_device"]
    assert events == [*first, *(first + last) * 2, *last]
    assert memory.pinned_bytes == 2 * 4096
    transport.all_reduce(new(transport, np.ones(48, np.float32)), ReduceOp.SUM)
    assert memory.pinned_bytes == 2 * 4096  # the slots are kept


def test_an_array_as_large_as_many_slots_is_staged_in_pieces_of_them():
    memory = stand_in.StandInMemory("guarded:0")
    transport = StagedTransport(HOST, memory)
    values = np.random.default_rng(RANK).integers(0, 99, 3_500_000).astype(np.int64)
    same(transport.all_reduce(memory.array_module.new(values), ReduceOp.SUM), HOST.all_reduce(values, ReduceOp.SUM))
    assert memory.pinned_bytes <= 4 * (4 << 20)


def test_what_was_staged_on_another_stream_is_not_written_over():
    memory = stand_in.StandInMemory()
    transport = StagedTransport(HOST, memory)
    x, y = (memory.array_module.new(np.full(10, value, np.float32)) for value in (1, 5))
    memory.stream().synchronize()
    other = memory.new_stream()
    first = transport.all_reduce(x, ReduceOp.SUM)
    with memory.running(other):
        second = transport.all_reduce(y, ReduceOp.SUM)
        same(second, np.full(10, 5 * N, np.float32))
    same(first, np.full(10, N, np.float32))


def test_a_stage_that_fails_leaves_the_transport_usable():
    memory = stand_in.StandInMemory()
    transport = StagedTransport(HOST, memory)
    x = memory.array_module.new(np.ones(10, np.float32))
    transport.host = None
    with pytest.raises(AttributeError):
        transport.all_reduce(x, ReduceOp.SUM)
    transport.host = HOST
    same(transport.all_reduce(x, ReduceOp.SUM), np.full(10, N, np.float32))


def test_an_error_in_the_thread_is_raised_where_the_result_is_asked_for():
    memory = stand_in.StandInMemory()
    transport = staged(memory)
    transport.background.transport.host = None
    pending = transport.start_all_reduce(memory.array_module.new(np.ones(40_000, np.float32)), ReduceOp.SUM)
    with pytest.raises(AttributeError, match="all_reduce"):
        pending.wait()


def test_only_a_try_opens_the_way_to_mpi():
    memory = stand_in.StandInMemory("guarded:0")
    with pytest.raises(CommunicatorError, match="MPI is not handed arrays of guarded:0: a try crashed"):
        DirectTransport(HOST.comm, memory, StagedTransport(HOST, memory), Verdict(False, 2, "a try crashed"))


@pytest.mark.parametrize("plain", [HOST, world.transport], ids=["MPI", "the world's"])
def test_a_transport_of_host_arrays_takes_no_array_of_a_device(plain):
    """The memory is one whose address would be a segmentation fault in MPI."""
    if N == 1 and plain is not HOST:
        pytest.skip("one rank alone has no transport")
    for size in (2, 1 << 18):
        x = stand_in.StandInMemory("guarded:0").array_module.new(np.ones(size, np.float32))
        for call in (
            lambda x=x: plain.all_reduce(x, ReduceOp.SUM),
            lambda x=x: plain.start_all_reduce(x, ReduceOp.SUM).wait(),
            lambda x=x: plain.reduce(x, ReduceOp.SUM, 0),
            lambda x=x: plain.broadcast(x, 0),
            lambda x=x: plain.all_gather(x, (x.size,) * N),
            lambda x=x: plain.reduce_scatter(x, ReduceOp.SUM, parts(x.size)),
            lambda x=x: plain.exchange(x, (RANK + 1) % N, (RANK - 1) % N),
            lambda x=x: plain.send(x, (RANK + 1) % N, 0),
        ):
            with pytest.raises((CommunicatorError, TypeError)):
                call()


def test_a_device_transport_takes_no_host_array():
    with pytest.raises(CommunicatorError, match=r"was given a numpy\.ndarray"):
        direct(stand_in.StandInMemory()).all_reduce(np.ones(3), ReduceOp.SUM)


# What NCCL is asked for.


def calls(transport):
    made = list(transport.nccl.calls)
    transport.nccl.calls.clear()
    return made


def test_nccl_meets_by_the_id_of_rank_0():
    transport = nccl()
    communicator = transport.communicator
    assert transport.nccl.ids == (RANK == 0)
    assert (communicator.ranks, communicator.rank) == (N, RANK)
    assert communicator.unique == transport.nccl.get_unique_id()


def test_nccl_reduces_what_it_can_as_promised():
    transport = nccl()

    def noted(dtype, op):
        transport.all_reduce(new(transport, np.ones(6, dtype)), op)
        return calls(transport)

    assert noted(np.float32, ReduceOp.SUM) == [("allReduce", 6, "FLOAT32", "SUM")]
    assert noted(np.float64, ReduceOp.AVG) == [("allReduce", 6, "FLOAT64", "SUM")]
    assert noted(np.int64, ReduceOp.PRODUCT) == [("allReduce", 6, "INT64", "PROD")]
    assert noted(np.uint32, ReduceOp.MAX) == [("allReduce", 6, "UINT32", "MAX")]
    assert noted(np.bool_, ReduceOp.SUM) == [("allReduce", 6, "UINT8", "MAX")]
    assert noted(np.bool_, ReduceOp.PRODUCT) == [("allReduce", 6, "UINT8", "MIN")]
    assert noted(dtypes.bfloat16, ReduceOp.SUM) == [("allReduce", 6, "FLOAT32", "SUM")]
    assert noted(np.complex64, ReduceOp.SUM) == [("allReduce", 12, "FLOAT32", "SUM")]
    for dtype, op in [
        (np.int16, ReduceOp.SUM),
        (np.float32, ReduceOp.MAX),
        (dtypes.bfloat16, ReduceOp.MIN),
        (np.complex128, ReduceOp.PRODUCT),
    ]:
        assert not reduces(op, np.dtype(dtype))
        assert noted(dtype, op) == []  # staged


def test_nccl_averages_in_float32_and_rounds_once():
    transport = nccl()
    x = np.full(3, 1 + RANK / 64, np.float16)
    result = transport.all_reduce(new(transport, x), ReduceOp.AVG)
    expected = np.float32(sum(np.float32(1 + rank / 64) for rank in range(N)) / np.float32(N)).astype(np.float16)
    same(result, np.full(3, expected, np.float16))


def test_nccl_moves_bytes_and_skips_what_is_empty():
    transport = nccl()
    x = new(transport, np.ones((2, 3), dtypes.bfloat16))
    transport.broadcast(x, N - 1)
    assert calls(transport) == [("broadcast", 12, "UINT8", N - 1)]
    transport.all_gather(x, (2,) * N)
    assert calls(transport) == [("allGather", 12, "UINT8")]
    transport.reduce_scatter(new(transport, np.ones((2 * N, 3), np.float32)), ReduceOp.SUM, (2,) * N)
    assert calls(transport) == [("reduceScatter", 6, "FLOAT32", "SUM")]
    empty = new(transport, np.ones((0, 3), np.float32))
    transport.broadcast(empty, 0)
    transport.all_reduce(empty, ReduceOp.SUM)
    transport.all_gather(empty, (0,) * N)
    transport.reduce_scatter(empty, ReduceOp.SUM, (0,) * N)
    assert calls(transport) == []


@pytest.mark.mpi(min_size=2)
def test_nccl_gathers_uneven_rows_by_a_group_of_broadcasts_and_scatters_them_by_reductions():
    transport = nccl()
    rows = (0, 3, *[1] * (N - 2))
    transport.all_gather(new(transport, np.ones((rows[RANK], 2), np.float32)), rows)
    sent = [("broadcast", 8 * count, "UINT8", rank) for rank, count in enumerate(rows) if count]
    assert calls(transport) == [("groupStart",), *sent, ("groupEnd",)]
    transport.reduce_scatter(new(transport, np.ones((sum(rows), 2), np.float32)), ReduceOp.SUM, rows)
    sent = [("reduce", 2 * count, "FLOAT32", "SUM", rank) for rank, count in enumerate(rows) if count]
    assert calls(transport) == [("groupStart",), *sent, ("groupEnd",)]


@pytest.mark.mpi(min_size=2)
def test_nccl_exchanges_blocks_in_one_group_and_keeps_its_own():
    transport = nccl()
    blocks = [new(transport, np.ones(rank, np.float32)) for rank in range(N)]
    transport.all_to_all(blocks, [(RANK,)] * N, 4 * N * N)
    expected = []
    for rank in range(N):
        if rank != RANK:
            expected += [("send", 4 * rank, "UINT8", rank)] * (rank > 0)
            expected += [("recv", 4 * RANK, "UINT8", rank)] * (RANK > 0)
    assert calls(transport) == [("groupStart",), *expected, ("groupEnd",)]


def test_nccl_lets_the_script_go_on():
    """Neither starting nor waiting waits on the host; only reading does."""
    transport = nccl()
    x = new(transport, np.full(50, RANK + 1.0))
    waits = stand_in.DEFAULT.waits
    pending = transport.start_all_reduce(x, ReduceOp.SUM)
    result = pending.wait()
    assert stand_in.DEFAULT.waits == waits
    same(result, np.full(50, N * (N + 1) / 2))

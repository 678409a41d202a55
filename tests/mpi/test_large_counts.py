"""What is too large for one call of MPI goes in pieces: tried with small arrays and a small limit."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mpi4py import MPI

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import MpiComm, ReduceOp
from fuel_parallel.comm import in_flight
from fuel_parallel.errors import CommunicatorError
from fuel_parallel.lazy import dtypes

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = world.world_size, world.rank


@pytest.fixture(params=[16, 48, 1000])
def plain(request, monkeypatch):
    """Ranks on nodes of their own, and so many bytes in a message."""
    monkeypatch.setenv("FUEL_NODE_LOCAL", "0")
    monkeypatch.setattr(in_flight, "LARGEST_MESSAGE", request.param)
    comm = MpiComm()
    if N > 1:
        comm.transport.plain.nonblocking_from = 64
    return comm


def data(shape, dtype, rank):
    return np.random.default_rng(rank).integers(0, 3, shape).astype(dtype)


def same(found, expected):
    np.testing.assert_array_equal(found.numpy().astype(np.complex128), expected.astype(np.complex128))


@pytest.mark.parametrize("dtype", [ft.float64, ft.int8, ft.bfloat16, ft.complex128], ids=lambda d: d.name)
def test_every_collective_in_pieces(plain, dtype):
    for rows in (0, 1, N, 2 * N + 1, 41):
        xs = [data((rows, 3), dtype, rank) for rank in range(N)]
        x = ft.asarray(xs[RANK])
        total = np.sum([y.astype(np.complex128) for y in xs], axis=0)
        part = fp.partition(rows, N)[RANK]
        same(plain.all_reduce(x), total)
        same(plain.reduce(x, ReduceOp.SUM, N - 1), total * (RANK == N - 1))
        same(plain.reduce_scatter(x), total[part.start : part.stop])
        same(plain.broadcast(x, N - 1), xs[-1])
        same(plain.all_gather(x), np.concatenate(xs))
        whole = xs[0]
        mine = ft.asarray(whole[part.start : part.stop])
        same(plain.all_gather(mine, size=rows), whole)
        columns = fp.partition(3, N)[RANK]
        same(plain.all_to_all(mine, 1, 0, size=rows), whole[:, columns.start : columns.stop])
        same(plain.shift(x, 1), xs[RANK - 1])
        same(plain.shift(x, 1, wrap=False), xs[RANK - 1] * bool(RANK))
        same(plain.scan(x), np.sum([y.astype(np.complex128) for y in xs[: RANK + 1]], axis=0))


@pytest.mark.mpi(min_size=2)
def test_messages_in_pieces(plain):
    for size in (0, 1, 100):
        x = np.arange(size) + RANK
        plain.send(ft.asarray(x), (RANK + 1) % N)
        same(plain.recv((size,), ft.int64, (RANK - 1) % N), np.arange(size) + (RANK - 1) % N)


@pytest.mark.mpi(min_size=2)
def test_a_message_of_another_size_is_still_an_error(plain):
    if RANK == 0:
        plain.send(ft.zeros(1, dtype=ft.int8), 1)
        fp.realize()
    if RANK == 1:
        with pytest.raises(CommunicatorError, match=r"float64\[500\] \(4000 bytes\) from rank 0, but it sent 1 bytes"):
            plain.recv((500,), ft.float64, 0).realize()
        assert plain.recv((1,), ft.int8, 0).item() == 0
    plain.barrier()


def test_control_data_in_pieces(plain):
    assert plain.broadcast_object("x" * 500 if RANK == N - 1 else None, N - 1) == "x" * 500
    assert plain.all_gather_object("y" * RANK * 30) == ["y" * rank * 30 for rank in range(N)]


def _bytes_available():
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(not os.environ.get("FUEL_TEST_LARGE"), reason="2**31 bytes a rank: FUEL_TEST_LARGE=1 runs it")
def test_more_than_two_to_the_31_elements(monkeypatch):
    needed = N * 3 * (2**31 + 16)
    if not MPI.COMM_WORLD.allreduce(_bytes_available() > needed, MPI.LAND):
        pytest.skip(f"{N} ranks need {needed >> 30} GiB")
    monkeypatch.setenv("FUEL_NODE_LOCAL", "0")
    transport = MpiComm().transport
    x = np.zeros(2**31 + 16, np.int8)
    x[-1] = RANK + 1
    assert transport.broadcast(x, N - 1)[-1] == N
    assert transport.all_reduce(x, ReduceOp.SUM, x)[-1] == N * (N + 1) // 2
    x[-1] = RANK + 1
    rows = [len(part) for part in fp.partition(x.size, N)]
    assert transport.reduce_scatter(x, ReduceOp.MAX, rows)[-1] == (N if RANK == N - 1 else 0)
    assert transport.exchange(x, (RANK + 1) % N, (RANK - 1) % N)[-1] == (RANK - 1) % N + 1
    flags = x.view(np.bool_)
    flags[-1] = RANK == 0
    assert transport.all_reduce(flags, ReduceOp.SUM, flags)[-1]


def test_the_limit_leaves_room_for_every_dtype():
    assert 2**31 > in_flight.LARGEST_MESSAGE >= max(dtype.itemsize for dtype in dtypes.ALL)

"""Arrays as scripts have them: views, other orders in memory, other byte orders, read-only, sharing memory.

MPI itself sends an array as its bytes lie, refuses some of these, and is silently wrong for others.
"""

from __future__ import annotations

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import MpiComm, ReduceOp
from fuel_parallel.errors import ArgumentError, DTypeError, FuelError

pytestmark = pytest.mark.mpi(min_size=2)
world = fp.init()
N, RANK = world.world_size, world.rank


def values(rank):
    return np.arange(12, dtype=np.float32).reshape(3, 4) + 100 * rank


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


VIEWS = {
    "C order": lambda x: x,
    "Fortran order": np.asfortranarray,
    "a transpose": lambda x: x.T.copy().T,
    "every second column": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "from the end": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "a broadcast row": lambda x: np.broadcast_to(x[:1], x.shape),
    "read-only": read_only,
    "big-endian": lambda x: x.astype(">f4"),
    "not aligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape),
}


@pytest.mark.parametrize("node_local", ["0", "1"])
@pytest.mark.parametrize("how", VIEWS)
def test_an_array_is_its_elements_however_they_lie(monkeypatch, node_local, how):
    """Each rank has another order in memory than the one before: that is where MPI permutes."""
    monkeypatch.setenv("FUEL_NODE_LOCAL", node_local)
    comm = MpiComm()
    plain = [values(rank)[:1] + np.zeros((3, 1), np.float32) for rank in range(N)]
    plain = plain if how == "a broadcast row" else [values(rank) for rank in range(N)]
    x = VIEWS[how](plain[RANK]) if RANK % 2 == 0 else plain[RANK]
    before = x.copy()
    mine = ft.asarray(x)
    np.testing.assert_array_equal(comm.all_reduce(mine).numpy(), np.sum(plain, axis=0))
    np.testing.assert_array_equal(comm.broadcast(mine, 0).numpy(), plain[0])
    np.testing.assert_array_equal(comm.all_gather(mine).numpy(), np.concatenate(plain))
    np.testing.assert_array_equal(comm.shift(mine, 1).numpy(), plain[RANK - 1])
    np.testing.assert_array_equal(comm.all_reduce(mine, ReduceOp.MAX).numpy(), plain[-1])
    comm.send(mine, (RANK + 1) % N)
    np.testing.assert_array_equal(comm.recv((3, 4), ft.float32, (RANK - 1) % N).numpy(), plain[RANK - 1])
    comm.barrier()
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("node_local", ["0", "1"])
@pytest.mark.parametrize("size", [6, 100_000])
def test_memory_that_overlaps_is_refused_on_all_ranks_before_mpi_sees_it(monkeypatch, node_local, size):
    monkeypatch.setenv("FUEL_NODE_LOCAL", node_local)
    transport = MpiComm().transport
    memory = np.ones(size + 2, np.float32)
    with pytest.raises(ArgumentError, match="overlap without being the same memory"):
        transport.all_reduce(memory[:-2], ReduceOp.SUM, memory[2:])
    np.testing.assert_array_equal(memory, 1)
    assert transport.all_reduce(memory, ReduceOp.SUM, memory) is memory
    np.testing.assert_array_equal(memory, N)


@pytest.mark.parametrize(
    "dtype",
    [np.dtype([("a", "f4")]), np.dtype("datetime64[s]"), np.dtype("timedelta64[s]"), np.dtype("S3"), np.dtype(object)],
    ids=str,
)
def test_what_is_no_number_is_refused_by_name(dtype):
    with pytest.raises(FuelError) as caught:
        ft.asarray(np.zeros(3, dtype))
    assert repr(dtype) in str(caught.value)


def test_what_has_no_such_reduction_is_refused_by_name():
    with pytest.raises(DTypeError, match="MAX of complex64 is not defined"):
        world.all_reduce(ft.ones(3, dtype=ft.complex64), ReduceOp.MAX)
    with pytest.raises(DTypeError, match="the average of bool is no bool"):
        world.all_reduce(ft.ones(3, dtype=ft.bool), ReduceOp.AVG)

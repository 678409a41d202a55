"""The guard in place: what differs raises on every rank, what may differ does not, and the ranks can go on."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from mpi4py import MPI

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import ReduceOp
from fuel_parallel.comm.exchange import PIECE, NodeExchange, WireExchange
from fuel_parallel.comm.mpi import MpiComm
from fuel_parallel.errors import CollectiveMismatchError

pytestmark = pytest.mark.mpi(min_size=2)
world = fp.init()
N, RANK = world.world_size, world.rank
LARGE = 200_000  # elements; these go through shared memory, and on while the plan computes


@pytest.fixture(params=["on a node", "between nodes"])
def comm(request, monkeypatch):
    """A communicator whose ranks compare through memory, or by messages."""
    if request.param == "between nodes":
        monkeypatch.setattr("fuel_parallel.comm.guard.share", lambda local, nbytes: None)
    made = MpiComm()
    assert isinstance(made.guard.exchange, NodeExchange if request.param == "on a node" else WireExchange)
    return made


def mismatch(run) -> str:
    with pytest.raises(CollectiveMismatchError) as caught:
        run()
    said = str(caught.value)
    del caught
    gc.collect()  # its traceback holds what was not run, which would run with the next collective
    return said


DIFFERENT = {
    "shape": (lambda c: c.all_reduce(ft.ones(4 + RANK)), "float32[4]", "a short last batch"),
    "large shape": (lambda c: c.all_reduce(ft.ones(LARGE + RANK)), f"float32[{LARGE}]", "a short last batch"),
    "dtype": (lambda c: c.all_reduce(ft.ones(4, dtype=[ft.int32, ft.int64][RANK > 0])), "int64[4]", "another dtype"),
    "op": (lambda c: c.all_reduce(ft.ones(4), [ReduceOp.SUM, ReduceOp.MAX][RANK > 0]), "all_reduce MAX", "op computed"),
    "root": (lambda c: c.broadcast(ft.ones(4), min(RANK, 1)), "root=1", "root computed from the rank"),
    "dimension": (lambda c: c.all_gather(ft.ones((4, 4)), min(RANK, 1)), "dim=1", "dim computed from the rank"),
    "sizes": (
        lambda c: c.all_to_all(
            ft.ones(N), 0, 0, sizes=[[1] * N] * (N - 1) + [[1] * N if RANK else [0, 2] + [1] * (N - 2)]
        ),
        "all_to_all_sizes float32",
        "sizes computed from the rank",
    ),
    "kind": (lambda c: (c.all_reduce if RANK else c.reduce)(ft.ones(4)), "reduce SUM", "an `if` on the rank"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_raises_on_every_rank_and_the_ranks_can_go_on(comm, what: str) -> None:
    build, shown, cause = DIFFERENT[what]
    for _ in range(2):
        said = mismatch(lambda: build(comm).numpy())
        assert shown in said
        assert cause in said
        assert said.count("test_guard.py:") >= 2
        assert len(set(MPI.COMM_WORLD.allgather(said))) == 1
        assert comm.guard.inside == -1
        assert comm.all_reduce(ft.ones(3) * (RANK + 1)).numpy().tolist() == [N * (N + 1) / 2] * 3


def test_a_value_that_one_rank_asks_for_is_named_as_such(comm) -> None:
    loss = comm.all_reduce(ft.ones(()))
    said = mismatch(lambda: loss.item() if RANK == 0 else comm.barrier())
    assert "a value that only rank 0 asked for" in said
    assert "outside of `if rank == 0`" in said
    assert loss.item() == N


def test_another_order_is_named_as_such(comm) -> None:
    def run() -> None:
        sizes = (3, 5) if RANK else (5, 3)
        fp.realize([comm.all_reduce(ft.ones(size)) for size in sizes])

    assert "the same collectives in another order" in mismatch(run)


def test_one_collective_more_is_named_as_such(comm) -> None:
    def run() -> None:
        extra = [comm.all_reduce(ft.ones(7))] if RANK == 0 else []
        fp.realize([*extra, comm.all_reduce(ft.ones(3)), comm.all_reduce(ft.ones(4))])

    assert "rank 0 has one collective more" in mismatch(run)


def test_ranks_that_differ_by_how_many_they_have_published_can_go_on(comm) -> None:
    def run() -> None:
        fp.realize([comm.all_reduce(ft.ones(3)) for _ in range(1 + 700 * RANK)], comm.all_reduce(ft.ones(5)))

    mismatch(run)
    for size in range(1, 5):
        assert comm.all_reduce(ft.ones(size)).numpy().tolist() == [N] * size


def test_a_barrier_and_a_split_are_compared_too(comm) -> None:
    said = mismatch(lambda: comm.barrier() if RANK else comm.split(0))
    assert "barrier" in said
    assert "split" in said


def test_other_communicators_do_not_matter(comm) -> None:
    mismatch(lambda: comm.all_reduce(ft.ones(2 + RANK)).numpy())
    assert world.all_reduce(ft.ones(2)).numpy().tolist() == [N, N]
    half = comm.split(RANK % 2)
    assert half.all_reduce(ft.ones(2 + RANK % 2)).numpy()[0] == half.world_size


@pytest.mark.parametrize("size", [3, LARGE])
def test_the_same_sequence_may_be_cut_differently(comm, size: int) -> None:
    x = ft.ones(size)
    for _ in range(3):
        a = comm.all_reduce(x)
        b = comm.all_reduce(a * 2.0 + x)
        c = comm.broadcast(x, N - 1)
        if RANK == 0:
            fp.realize(a)
            fp.realize(b)
        elif RANK == 1:
            fp.realize(b, c)
        fp.realize(a, b, c)
        assert (a.numpy()[0], b.numpy()[0]) == (N, N * (2 * N + 1))


def test_a_plan_may_have_more_collectives_than_are_published_at_once(comm) -> None:
    x = ft.ones(3)
    sums = [comm.all_reduce(x * float(k)) for k in range(2 * PIECE + 10)]
    if RANK == 0:
        fp.realize(sums[:700])
    fp.realize(sums)
    assert [s.numpy()[0] for s in sums[::100]] == [N * k for k in range(0, 2 * PIECE + 10, 100)]


def test_shards_of_different_sizes_may_be_gathered(comm) -> None:
    rows = fp.partition(2 * N + 1, N)[RANK]
    assert comm.all_gather(ft.ones((len(rows), 2)), 0, size=2 * N + 1).numpy().shape == (2 * N + 1, 2)


def test_off_ranks_are_not_compared(monkeypatch) -> None:
    monkeypatch.setenv("FUEL_GUARD", "0")
    unguarded = MpiComm()
    assert unguarded.guard.exchange is None
    assert unguarded.all_reduce(ft.ones(3), ReduceOp.MAX).numpy().tolist() == [1] * 3


def test_it_is_off_everywhere_if_it_is_on_one_rank(monkeypatch) -> None:
    monkeypatch.setenv("FUEL_GUARD", "0" if RANK == 1 else "1")
    assert MpiComm().guard.exchange is None


def test_nobody_waits_inside_after_a_kernel_failed(comm, monkeypatch) -> None:
    total = comm.all_reduce(ft.ones(LARGE))
    broken = ft.cumulative_sum(ft.ones(5))
    with monkeypatch.context() as patch:
        for name in ("cumsum", "cumulative_sum"):
            patch.setattr(np, name, None)
        with pytest.raises(fp.errors.RealizeError):
            fp.realize(total + 1.0, broken)
    assert comm.guard.inside == -1
    del total, broken
    gc.collect()
    assert comm.all_reduce(ft.ones(2)).numpy().tolist() == [N, N]


def test_nobody_is_inside_of_what_could_not_be_started(comm, monkeypatch) -> None:
    x = ft.ones(LARGE)
    with monkeypatch.context() as patch:
        patch.setattr(comm.transport, "start_all_reduce", None)
        with pytest.raises(fp.errors.RealizeError):
            comm.all_reduce(x).numpy()
    assert comm.guard.inside == -1


def test_what_it_is_in_and_what_it_finished_is_known(comm) -> None:
    assert (comm.guard.doing(), comm.guard.last()) == ("", "")
    comm.all_reduce(ft.ones(3)).numpy()
    assert comm.guard.doing() == ""
    assert comm.guard.last().startswith("all_reduce SUM float32[3] at ")

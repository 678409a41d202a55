"""Clocks of ranks that share none are compared by messages."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from fuel_parallel.comm import clock

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "mine", clock.mine)


def test_ranks_of_one_kernel_share_its_clock() -> None:
    clock.compare(MPI.COMM_WORLD)
    assert clock.mine == clock.Clock(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, 0, 0)


def test_a_strange_clock_is_measured_as_well_as_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = 1_000_000_000 * MPI.COMM_WORLD.rank
    plain = clock.time.perf_counter_ns
    monkeypatch.setattr(clock, "_kernel", lambda: f"kernel of rank {MPI.COMM_WORLD.rank}")
    monkeypatch.setattr(clock.time, "perf_counter_ns", lambda: plain() + ahead)
    clock.compare(MPI.COMM_WORLD)
    assert abs(clock.mine.offset_ns + ahead) <= clock.mine.accuracy_ns
    assert clock.mine.accuracy_ns < 1_000_000_000


def test_an_unknown_kernel_is_a_strange_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_kernel", lambda: "")
    clock.compare(MPI.COMM_WORLD)
    assert (clock.mine.accuracy_ns > 0) == (MPI.COMM_WORLD.rank > 0)

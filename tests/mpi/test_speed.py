"""`fuelrun bench` on arrays of a device, a stand-in here: each way that can be taken, each result checked."""

from __future__ import annotations

import os

import numpy as np
import pytest
import stand_in
from mpi4py import MPI

from fuel_parallel.comm.device import SETTING
from fuel_parallel.comm.speed.bench import Ways, timings
from fuel_parallel.comm.speed.collectives import COLLECTIVES
from fuel_parallel.errors import CommunicatorError
from fuel_parallel.lazy import dtypes

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def ways():
    before = os.environ.get(SETTING)
    with stand_in.installed(stand_in.StandInMemory()) as memory:
        yield Ways.of_device(MPI.COMM_WORLD.Dup(), memory)
    assert os.environ.get(SETTING) == before


def test_ways_that_are_not_to_be_had_are_skipped_with_the_reason(ways) -> None:
    assert "staged" in ways.transports
    assert set(ways.transports) | {one.way for one in ways.skipped} == {"nccl", "mpi", "staged"}
    reasons = {one.way: one.reason for one in ways.skipped}
    assert "CuPy has no NCCL" in reasons["nccl"]
    assert "cannot be given device memory" in reasons.get("mpi", "cannot be given device memory")


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_collective_is_checked_and_timed(ways, name, dtype) -> None:
    found = list(timings(MPI.COMM_WORLD, ways, name, [0, 24, 4096], dtypes.dtype(dtype), 0.0))
    sizes = [0] if name == "barrier" else [0, 24, 4096]
    assert [(t.way, t.bytes) for t in found] == [(way, size) for size in sizes for way in ways.transports]
    assert all(0 < t.min_us <= t.latency_us <= t.max_us for t in found)
    assert MPI.COMM_WORLD.allgather(found) == [found] * MPI.COMM_WORLD.size


def test_a_wrong_result_ends_the_measurement_on_all_ranks(ways) -> None:
    class Wrong:
        """A transport that is wrong on one rank."""

        def __init__(self, right) -> None:
            self.right, self.rank, self.ranks = right, right.rank, right.ranks

        def broadcast(self, x, root):
            result = self.right.broadcast(x, root)
            return self.right.memory.array_module.asarray(result.get() + 1) if self.rank == 1 else result

    wrong = Ways({"wrong": Wrong(ways.transports["staged"])}, (), ways.place)
    with pytest.raises(CommunicatorError, match="broadcast of 64 bytes, way wrong: the result is wrong on some rank"):
        list(timings(MPI.COMM_WORLD, wrong, "broadcast", [64], np.dtype(np.float32), 0.0))

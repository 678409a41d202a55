"""The transports on a real GPU; skipped where CuPy sees none. On one rank NCCL can be used with one GPU, too."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import ReduceOp
from fuel_parallel.backends import available_devices
from fuel_parallel.comm.mpi import MpiComm

world = fp.init()
N, RANK = world.world_size, world.rank
GPUS = [name for name in available_devices() if name.startswith(("cuda", "rocm"))]
DEVICE = GPUS[RANK % len(GPUS)] if GPUS else ""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="CuPy sees no CUDA or ROCm device"),
]


@pytest.fixture(params=["auto", "nccl", "mpi", "staged"])
def comm(request, monkeypatch):
    monkeypatch.setenv("FUEL_TRANSPORT", request.param)
    made = MpiComm()
    try:
        made.transport_of(ft.zeros((1,), device=DEVICE).realize().node.value)
    except fp.FuelError as reason:
        if request.param in ("auto", "staged"):
            raise
        pytest.skip(f"{request.param} cannot be used here: {reason}")
    return made


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int16, np.float16, np.complex64, np.bool_])
@pytest.mark.parametrize("size", [0, 3, 1000, 3_000_001])
def test_collectives_are_those_of_host_arrays(comm, dtype, size):
    shards = [np.random.default_rng(rank).integers(0, 3, size).astype(dtype) for rank in range(N)]
    on_host, on_gpu = ft.asarray(shards[RANK]), ft.asarray(shards[RANK], device=DEVICE)
    for result, expected in [
        (comm.all_reduce(on_gpu), world.all_reduce(on_host)),
        (comm.broadcast(on_gpu, N - 1), world.broadcast(on_host, N - 1)),
        (comm.all_gather(on_gpu), world.all_gather(on_host)),
        (comm.reduce_scatter(on_gpu), world.reduce_scatter(on_host)),
        (comm.all_to_all(on_gpu, 0, 0), world.all_to_all(on_host, 0, 0)) if size % N == 0 else (on_gpu, on_host),
        (comm.shift(on_gpu), world.shift(on_host)),
        (comm.scan(on_gpu), world.scan(on_host)),
    ]:
        assert result.device == DEVICE
        np.testing.assert_array_equal(result.numpy(), expected.numpy())


@pytest.mark.mpi
def test_what_kernels_have_queued_is_waited_for_and_all_ranks_get_the_same_bits(comm):
    x = ft.asarray(np.random.default_rng(RANK).normal(size=1 << 22).astype(np.float32), device=DEVICE)
    y = x
    for _ in range(20):
        y = ft.sin(y) + x
    total = comm.all_reduce(y, ReduceOp.SUM)
    later = ft.sum(total * 0.5)
    fp.realize(total, later)
    digests = MPI.COMM_WORLD.allgather(total.numpy().tobytes())
    assert all(digest == digests[0] for digest in digests)
    np.testing.assert_allclose(total.numpy(), sum(MPI.COMM_WORLD.allgather(y.numpy())), rtol=1e-5, atol=1e-5)


@pytest.mark.mpi(min_size=2)
def test_messages_with_tags(comm):
    x = ft.asarray(np.arange(100_000.0) + RANK, device=DEVICE)
    comm.send(x, (RANK + 1) % N, tag=5)
    received = comm.recv((100_000,), ft.float64, (RANK - 1) % N, tag=5, device=DEVICE)
    np.testing.assert_array_equal(received.numpy(), np.arange(100_000.0) + (RANK - 1) % N)

"""Tensors on a stand-in device: which transport moves them, that the script can name it, and that a wrong one is an
error on all ranks."""

from __future__ import annotations

import gc
import os
import tempfile
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import stand_in
from mpi4py import MPI

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import ReduceOp
from fuel_parallel.backends import backend_of
from fuel_parallel.comm import background, cuda_probe
from fuel_parallel.comm.direct import DirectTransport
from fuel_parallel.comm.mpi import MpiComm
from fuel_parallel.comm.nccl import NcclTransport
from fuel_parallel.comm.staged import StagedTransport
from fuel_parallel.errors import ArgumentError, CollectiveMismatchError, CommunicatorError

pytestmark = pytest.mark.mpi(min_size=2)
world = fp.init()
N, RANK = world.world_size, world.rank


@pytest.fixture(params=["plain:0", "guarded:0"])
def device(request):
    memory = (stand_in.Guarded if request.param == "guarded:0" else stand_in.StandInMemory)(request.param)
    with stand_in.installed(memory):
        yield request.param
        background.finish()
        gc.collect()


@contextmanager
def shared_folder():
    """A folder of rank 0, for all ranks. Not `tmp_path`: ranks that make those at once get in each other's way."""
    with tempfile.TemporaryDirectory() if RANK == 0 else nullcontext("") as folder:
        yield MPI.COMM_WORLD.bcast(folder)
        MPI.COMM_WORLD.Barrier()


@pytest.fixture(scope="module")
def cache():
    """One for all tests: a try takes seconds."""
    with shared_folder() as folder:
        yield folder


@pytest.fixture
def new_cache(monkeypatch):
    with shared_folder() as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        yield folder


@pytest.fixture(autouse=True)
def settings(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.delenv("FUEL_TRANSPORT", raising=False)


def chosen(device, comm=None):
    """The transport of a new communicator for arrays of the device."""
    return (comm or MpiComm()).transport_of(backend_of(device).from_host(np.ones(2)))


def on(device, value):
    return ft.asarray(np.asarray(value), device=device)


def check_all(comm, device):
    """Every collective of tensors, against numpy."""

    def same(result, expected):
        assert result.device == device
        np.testing.assert_array_equal(result.numpy(), expected)

    shards = [np.arange(12.0).reshape(4, 3) + 100 * rank for rank in range(N)]
    x = on(device, shards[RANK])
    total = np.sum(shards, axis=0)
    part = fp.partition(3, N)[RANK]
    same(comm.all_reduce(x), total)
    same(comm.all_reduce(x, ReduceOp.MAX), shards[-1])
    same(comm.reduce(x, root=N - 1), total if RANK == N - 1 else np.zeros((4, 3)))
    same(comm.broadcast(x, 1), shards[1])
    same(comm.all_gather(x, 1), np.concatenate(shards, axis=1))
    same(comm.reduce_scatter(x, dim=1), total[:, part.start : part.stop])
    same(comm.scan(x), np.sum(shards[: RANK + 1], axis=0))
    same(comm.exscan(x), np.sum(shards[:RANK], axis=0) if RANK else np.zeros((4, 3)))
    same(comm.shift(x), shards[RANK - 1])
    same(comm.shift(x, wrap=False), shards[RANK - 1] if RANK else np.zeros((4, 3)))
    theirs = np.concatenate([shard[:, part.start : part.stop] for shard in shards])
    same(comm.all_to_all(x, 1, 0), theirs)
    comm.send(x, (RANK + 1) % N, tag=3)
    same(comm.recv((4, 3), ft.float64, (RANK - 1) % N, tag=3, device=device), shards[RANK - 1])
    large = on(device, np.full(50_000, RANK + 1.0, np.float32))
    same(comm.all_reduce(large), np.full(50_000, N * (N + 1) / 2, np.float32))


def test_what_is_chosen_without_a_setting_fits_the_memory(device):
    """MPI reads the plain device's memory as it reads its own; the other one's is a segmentation fault to it."""
    comm = MpiComm()
    check_all(comm, device)
    if device == "plain:0":
        assert isinstance(chosen(device, comm), DirectTransport)
        assert comm.device_choice.kind == "mpi"
        assert "two ranks of this host sent, received and reduced device memory rightly" in comm.device_choice.reason
    else:
        assert comm.device_choice.kind == "staged"
        assert "ended with a segmentation fault" in comm.device_choice.reason
    assert "CuPy has no NCCL (rank 0)" in comm.device_choice.reason
    choices = MPI.COMM_WORLD.allgather(str(comm.device_choice))
    assert len(set(choices)) == 1


def test_staging_can_be_asked_for_and_tries_nothing(device, monkeypatch):
    monkeypatch.setenv("FUEL_TRANSPORT", "staged")
    monkeypatch.setattr(cuda_probe, "probe", lambda *_, **__: pytest.fail("it was tried"))
    comm = MpiComm()
    check_all(comm, device)
    assert str(comm.device_choice) == "staged: FUEL_TRANSPORT=staged asks for it"


def test_memory_that_mpi_cannot_take_is_an_error_on_every_rank_and_no_crash(device, monkeypatch):
    monkeypatch.setenv("FUEL_TRANSPORT", "mpi")
    comm = MpiComm()
    if device == "plain:0":
        check_all(comm, device)
        assert comm.device_choice.kind == "mpi"
        return
    with pytest.raises(CommunicatorError, match=r"FUEL_TRANSPORT=mpi, but .* segmentation fault.*set FUEL_TRANSPORT"):
        comm.all_reduce(on(device, [1.0, 2.0])).realize()
    monkeypatch.setenv("FUEL_TRANSPORT", "staged")
    check_all(comm, device)  # nothing was sent, so the script can go on


@pytest.mark.parametrize("device", ["plain:0"], indirect=True)
def test_the_verdict_is_kept_for_the_next_communicator(device, monkeypatch, new_cache):
    comm = MpiComm()
    chosen(device, comm)
    MPI.COMM_WORLD.Barrier()
    monkeypatch.setattr(cuda_probe, "probe", lambda *_, **__: pytest.fail("it was tried again"))
    again = MpiComm()
    chosen(device, again)
    assert str(again.device_choice) == str(comm.device_choice)


@pytest.mark.parametrize("device", ["plain:0"], indirect=True)
def test_a_setting_that_means_nothing_is_refused_by_all(device, monkeypatch):
    monkeypatch.setenv("FUEL_TRANSPORT", "cuda" if RANK == N - 1 else "auto")
    with pytest.raises(ArgumentError, match=rf"FUEL_TRANSPORT='cuda' on rank {N - 1}: expected one of auto, nccl, mpi"):
        chosen(device)


@pytest.mark.parametrize("device", ["plain:0"], indirect=True)
def test_settings_that_differ_are_refused_by_all(device, monkeypatch):
    monkeypatch.setenv("FUEL_TRANSPORT", "staged" if RANK == 0 else "auto")
    with pytest.raises(ArgumentError, match="'staged' on rank 0 and 'auto' on rank 1"):
        chosen(device)


@pytest.mark.parametrize("device", ["plain:0"], indirect=True)
def test_nccl_that_is_not_there_cannot_be_asked_for(device, monkeypatch):
    monkeypatch.setenv("FUEL_TRANSPORT", "nccl")
    with pytest.raises(CommunicatorError, match=r"FUEL_TRANSPORT=nccl, but .* CuPy has no NCCL \(rank 0\)"):
        chosen(device)


class Broken:
    """An NCCL whose communicators fail on the last rank."""

    def get_unique_id(self):
        return (1,) * 128

    def NcclCommunicator(self, ranks, unique, rank):
        assert unique == (1,) * 128
        if rank == ranks - 1:
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")
        return object()


class Without(Broken):
    """One that cannot even make an id."""

    def get_unique_id(self):
        raise RuntimeError("no network")


@pytest.mark.parametrize(
    ("nccl", "why"), [(Broken, "NCCL_ERROR_SYSTEM_ERROR"), (Without, "no network")], ids=["meeting", "id"]
)
def test_ranks_go_on_together_without_an_nccl_that_does_not_start(nccl, why, monkeypatch):
    with stand_in.installed(stand_in.StandInMemory("plain:0", nccl())):
        comm = MpiComm()
        assert comm.all_reduce(on("plain:0", [RANK + 1.0])).item() == N * (N + 1) / 2
        assert comm.device_choice.kind == "mpi"
        assert why in comm.device_choice.reason
        monkeypatch.setenv("FUEL_TRANSPORT", "nccl")
        with pytest.raises(CommunicatorError, match=why):
            chosen("plain:0")


class Working(Broken):
    def NcclCommunicator(self, ranks, unique, rank):
        return object()


def test_ranks_with_a_gpu_each_take_nccl_and_those_that_share_one_do_not(monkeypatch):
    memory = stand_in.StandInMemory("plain:0", Working())
    x = memory.array_module.new(np.ones(3))
    with stand_in.installed(memory):
        comm = MpiComm()
        assert isinstance(comm.transport_of(x), NcclTransport)
        assert str(comm.device_choice) == f"nccl: each of {N} ranks has a GPU of its own"
        monkeypatch.setattr(memory, "identity", lambda: "0000:00:01.0")
        comm = MpiComm()
        assert isinstance(comm.transport_of(x), DirectTransport)
        assert "ranks 0 and 1 share plain:0 of " in comm.device_choice.reason
        monkeypatch.setattr(memory, "identity", lambda: "" if RANK else "0000:00:01.0")
        comm = MpiComm()
        comm.transport_of(x)
        assert "which GPU rank 1 has is not known" in comm.device_choice.reason


@pytest.mark.parametrize("device", ["plain:0"], indirect=True)
def test_tensors_on_a_device_do_not_meet_those_on_the_cpu(device, monkeypatch):
    comm = MpiComm()
    x = on(device if RANK == 0 else "cpu", [1.0])
    with pytest.raises(CollectiveMismatchError, match=r"(?s)device=plain.*cause: tensors on a GPU on some ranks"):
        comm.all_reduce(x).realize()


@pytest.mark.parametrize("device", ["plain:0"], indirect=True)
def test_a_communicator_has_one_device_on_each_rank(device, monkeypatch):
    monkeypatch.setenv("FUEL_TRANSPORT", "staged")
    with stand_in.installed(stand_in.StandInMemory("plain:1")):
        comm = MpiComm()
        chosen("plain:0", comm)
        with pytest.raises(CommunicatorError, match=r"has had tensors of plain:0 on rank .* and now one of plain:1"):
            chosen("plain:1", comm)


@pytest.mark.parametrize("device", ["guarded:0"], indirect=True)
def test_messages_need_no_choice_and_either_end_may_be_on_the_cpu(device):
    """Ranks that send and receive decide nothing together: the others may be busy with something else."""
    comm = MpiComm()
    if RANK == 0:
        comm.send(on(device, [4.0, 5.0]), 1)
        comm.send(ft.asarray([6.0]), 1)
        fp.realize()
    if RANK == 1:
        assert comm.recv((2,), ft.float64, 0).tolist() == [4.0, 5.0]
        received = comm.recv((1,), ft.float32, 0, device=device)
        assert (received.device, received.tolist()) == (device, [6.0])
    assert comm.device_choice is None
    comm.barrier()


@pytest.mark.parametrize("device", ["guarded:0"], indirect=True)
def test_the_cotangent_of_a_sent_tensor_comes_back_to_its_device(device):
    comm = MpiComm()
    x = on(device, np.ones(3, np.float32))
    if RANK == 0:
        comm.send(x, 1, differentiable=True)
        (gradient,) = ft.grad(0 * ft.sum(x), [x])
        assert gradient.device == device
        np.testing.assert_array_equal(gradient.numpy(), [5, 5, 5])
    if RANK == 1:
        received = comm.recv((3,), ft.float32, 0, differentiable=True, device=device)
        fp.realize(ft.grad(5 * ft.sum(received), [received]))
    comm.barrier()


@pytest.mark.parametrize("device", ["guarded:0"], indirect=True)
def test_many_communicators_each_reduce_in_a_thread_of_their_own(device):
    part = world.split(RANK % 2)
    members = [rank for rank in range(N) if rank % 2 == RANK % 2]
    values = [on(device, np.full(70_000, RANK + i, np.float32)) for i in range(4)]
    whole = [world.all_reduce(x) for x in values]
    among = [part.all_reduce(x) for x in values] if part.world_size > 1 else values
    fp.realize(*whole, *among)
    for i in range(4):
        assert whole[i].numpy()[-1] == N * (N - 1) / 2 + N * i
        assert among[i].numpy()[0] == sum(rank + i for rank in members)


def test_ranks_may_wait_for_reductions_of_both_kinds_in_any_order(device):
    """Rank 0 waits for the device's first. The others start that one only when they have the host's, which in shared
    memory takes rank 0's part."""
    comm = MpiComm()
    on_device = comm.transport_of(backend_of(device).from_host(np.ones(1)))
    x, y = np.full(300_000, RANK + 1.0), backend_of(device).from_host(np.full(100_000, RANK + 1.0))
    first = comm.transport.start_all_reduce(x, ReduceOp.SUM)
    if RANK == 0:
        second = on_device.start_all_reduce(y, ReduceOp.SUM)
        on_the_device, on_the_host = second.wait(), first.wait()
    else:
        on_the_host = first.wait()
        on_the_device = on_device.start_all_reduce(y, ReduceOp.SUM).wait()
    assert (on_the_host == N * (N + 1) / 2).all()
    assert (on_the_device.get() == N * (N + 1) / 2).all()


def test_no_variable_of_the_launcher_reaches_the_try():
    """A try that took the job's own variables would join it as a rank, or hang."""
    names = set(cuda_probe._environ())
    assert not names & {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"}
    assert {"PMI_RANK", "PMIX_RANK"} & set(os.environ)


def test_the_staged_transport_is_what_remains():
    with stand_in.installed(stand_in.Guarded()) as memory:
        comm = MpiComm()
        assert isinstance(comm.transport_of(memory.array_module.new(np.ones(2))), StagedTransport)

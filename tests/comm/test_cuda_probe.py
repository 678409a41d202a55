"""Whether an MPI takes device memory is found out in other processes, kept, and never fatal."""

from __future__ import annotations

import json
import os
import time

import pytest
import stand_in

from fuel_parallel.comm import cuda_probe
from fuel_parallel.comm.cuda_probe import Verdict, verdict_on

MEMORY = stand_in.StandInMemory()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fuel-parallel" / "cuda-aware.json"


@pytest.fixture
def tries(monkeypatch):
    """How often it was tried; every try comes to the same verdict."""
    made = []

    def probe(memory, path):
        made.append(path)
        return Verdict(False, 2, "a try crashed")

    monkeypatch.setattr(cuda_probe, "probe", probe)
    return made


def python(monkeypatch, program):
    """Lets tries run a program of one line in place of `cuda_try`."""
    monkeypatch.setattr(cuda_probe, "PROGRAM", ["-c", program])


def test_one_process_that_can_says_so(monkeypatch):
    verdict = cuda_probe.probe(MEMORY, "")
    assert (verdict.aware, verdict.ranks) == (True, 1)
    assert "one process alone sent, received and reduced device memory rightly" in verdict.reason


def test_memory_that_mpi_cannot_read_is_a_crash_of_the_try_only():
    verdict = cuda_probe.probe(stand_in.Guarded(), "")
    assert not verdict.aware
    assert "ended with a segmentation fault" in verdict.reason


def test_other_values_than_expected_are_a_no(monkeypatch):
    python(
        monkeypatch,
        "print('cuda_try: begins, 1 ranks'); print('cuda_try: wrong: a send of 1 float32 gave other values'); 1/0",
    )
    verdict = cuda_probe.probe(MEMORY, "")
    assert not verdict.aware
    assert verdict.reason == "a try with one process alone went wrong: a send of 1 float32 gave other values"


def test_ranks_that_end_without_a_word_are_a_no(monkeypatch):
    python(monkeypatch, "print('cuda_try: begins, 1 ranks'); print('cuda_try: hint yes')")
    verdict = cuda_probe.probe(MEMORY, "")
    assert not verdict.aware
    assert verdict.reason == "a try with one process alone ended with exit status 0; the library says yes"


def test_a_try_that_hangs_is_ended_and_a_no(monkeypatch):
    python(monkeypatch, "import time; print('cuda_try: begins, 1 ranks', flush=True); time.sleep(60)")
    begin = time.monotonic()
    verdict = cuda_probe.probe(MEMORY, "", timeout=1.0)
    assert time.monotonic() - begin < 20
    assert verdict == Verdict(False, 1, "a try with one process alone did not end within 1 s")


def test_a_try_that_cannot_begin_is_a_no(monkeypatch):
    python(monkeypatch, "raise ImportError('no CuPy')")
    assert cuda_probe.probe(MEMORY, "") == Verdict(False, 0, "a try of it could not be started: ImportError: no CuPy")


def test_two_ranks_that_cannot_be_started_leave_it_to_one(monkeypatch, tmp_path):
    """Its mpirun starts nothing, as one does in a job whose batch system it cannot ask."""
    (tmp_path / "bin").mkdir()
    mpirun = tmp_path / "bin" / "mpiexec"
    mpirun.write_text("#!/bin/sh\nexit 3\n")
    mpirun.chmod(0o755)
    verdict = cuda_probe.probe(MEMORY, str(tmp_path / "lib" / "libmpi.so"))
    assert (verdict.aware, verdict.ranks) == (True, 1)


def test_an_mpirun_under_which_each_rank_is_alone_is_no_try_of_two(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    mpirun = tmp_path / "bin" / "mpiexec"
    mpirun.write_text('#!/bin/sh\ntest "$1" = --version && exit\nshift 2\n"$@"; exec "$@"\n')
    mpirun.chmod(0o755)
    verdict = cuda_probe.probe(MEMORY, str(tmp_path / "lib" / "libmpi.so"))
    assert (verdict.aware, verdict.ranks) == (True, 1)


def test_only_the_librarys_own_mpirun_is_taken(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert cuda_probe.mpirun_beside("") is None
    assert cuda_probe.mpirun_beside(str(tmp_path / "lib" / "libmpi.so")) is None
    (tmp_path / "bin" / "mpirun").write_text("")
    (tmp_path / "bin" / "mpirun").chmod(0o755)
    assert cuda_probe.mpirun_beside(str(tmp_path / "lib" / "libmpi.so")) == tmp_path / "bin" / "mpirun"


def test_a_verdict_is_kept_for_the_library_its_path_and_the_memory(tries, cache):
    first = verdict_on(MEMORY, "MPI 1.0", "/a/libmpi.so")
    assert verdict_on(MEMORY, "MPI 1.0", "/a/libmpi.so") == first
    assert len(tries) == 1
    verdict_on(MEMORY, "MPI 1.1", "/a/libmpi.so")
    verdict_on(MEMORY, "MPI 1.0", "/b/libmpi.so")
    verdict_on(stand_in.Guarded(), "MPI 1.0", "/a/libmpi.so")
    assert len(tries) == 4
    assert len(json.loads(cache.read_text())) == 4


def test_another_host_or_another_tuning_is_another_verdict(tries, monkeypatch):
    verdict_on(MEMORY, "MPI", "/a")
    monkeypatch.setenv("UCX_TLS", "tcp")
    verdict_on(MEMORY, "MPI", "/a")
    monkeypatch.setattr(cuda_probe.socket, "gethostname", lambda: "elsewhere")
    verdict_on(MEMORY, "MPI", "/a")
    monkeypatch.setenv("PMIX_RANK", "1")  # what a launcher tells its ranks makes none
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    verdict_on(MEMORY, "MPI", "/a")
    assert len(tries) == 3


def test_a_verdict_can_be_asked_for_anew(tries):
    verdict_on(MEMORY, "MPI", "/a")
    verdict_on(MEMORY, "MPI", "/a", fresh=True)
    assert len(tries) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b'{"a": {"aware": "yes"}}'])
def test_a_cache_that_cannot_be_read_is_written_anew(tries, cache, content):
    cache.parent.mkdir()
    cache.write_bytes(content)
    assert verdict_on(MEMORY, "MPI", "/a").reason == "a try crashed"
    verdict_on(MEMORY, "MPI", "/a")
    assert len(tries) == 1


def test_a_cache_that_cannot_be_written_is_no_error(tries, cache):
    cache.parent.write_text("a file where the folder should be")
    assert verdict_on(MEMORY, "MPI", "/a").reason == "a try crashed"
    assert verdict_on(MEMORY, "MPI", "/a").reason == "a try crashed"
    assert len(tries) == 2


def test_a_try_gets_no_variable_of_a_launcher_or_batch_system(monkeypatch):
    for name in (
        "PMI_RANK",
        "PMIX_NAMESPACE",
        "OMPI_COMM_WORLD_SIZE",
        "SLURM_JOB_ID",
        "SLURM_NODELIST",
        "PBS_NODEFILE",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_pml", "ob1")
    names = set(cuda_probe._environ())
    assert not {n for n in names if n.startswith(("PMI", "SLURM", "PBS", "OMPI_COMM"))}
    assert "OMPI_MCA_pml" in names

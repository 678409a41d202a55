"""Ranks that go where no exception tells of it: the job ends soon, with one report and the right exit status."""

from __future__ import annotations

import time

import pytest

from fuelrun.launch.find import library

HEAD = """\
import atexit, os, signal, sys
import fuel_parallel as fp
import fuel_parallel.lazy as ft
world = fp.init()
world.all_reduce(ft.ones(4)).numpy()
open(f'up-{world.rank}', 'w').close()
"""
WITHIN_S = 5.0

ENDINGS = {
    "killed inside a collective": ("if world.rank: signal.raise_signal(9)\nworld.barrier()", 137, "SIGKILL"),
    "a crash at exit": ("if world.rank: atexit.register(os.kill, os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV"),
    "os._exit at exit": ("if world.rank: atexit.register(os._exit, 0)", 1, "the script called os._exit(0)"),
    "os._exit(0) while others wait": (
        "if world.rank: os._exit(0)\nworld.barrier()",
        1,
        "the script called os._exit(0)",
    ),
    "MPI_Abort(0)": (
        "from mpi4py import MPI\nif world.rank: MPI.COMM_WORLD.Abort(0)\nworld.barrier()",
        1,
        "rank 1 of 2",
    ),
    "sys.exit while others wait": ("if world.rank: sys.exit(7)\nworld.barrier()", 7, "sys.exit(7)"),
}


def ends(fuelrun, process) -> tuple[int, str]:
    begin = time.monotonic()
    _, err = process.communicate(timeout=30)
    took = time.monotonic() - begin
    assert took < WITHIN_S, f"took {took:.1f} s: {err}"
    assert fuelrun.nobody_left_within(WITHIN_S - took)  # under mpirun they are MPI's to end
    return process.returncode, err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ENDINGS)
def test_all_ranks_end_with_one_report_and_the_right_status(fuelrun, how: str) -> None:
    script, code, said = ENDINGS[how]
    process = fuelrun.start("-n", "2", fuelrun.write(HEAD + script))
    fuelrun.wait_for("up-*", 2)
    status, err = ends(fuelrun, process)
    assert (status, said in err, err.count("fuelrun: ")) == (code, True, 1), err


@pytest.mark.timeout(60)
def test_a_rank_that_ends_without_init_does_not_keep_the_others_waiting(fuelrun) -> None:
    script = "import os\nrank = os.environ['RANK']\nopen(f'up-{rank}', 'w').close()\nif rank == '1': raise SystemExit\n"
    process = fuelrun.start("-n", "2", fuelrun.write(script + HEAD))
    fuelrun.wait_for("up-*", 2)
    status, err = ends(fuelrun, process)
    assert status == 1
    assert "fp.init()" in err


@pytest.mark.timeout(60)
def test_under_mpirun_a_mismatch_ends_the_job_too(fuelrun, mpirun: str) -> None:
    script = fuelrun.write(HEAD + "if world.rank: world.barrier()")
    process = fuelrun.start(script, command=(mpirun, "-n", "2"))
    fuelrun.wait_for("up-*", 2)
    status, err = ends(fuelrun, process)
    assert status == 1
    assert err.count("Likely cause: rank 0 ended the script") == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", [0, HEAD.index("import fuel_parallel")], ids=["first", "before init"])
def test_under_mpirun_a_rank_that_leaves_in_an_exit_function_is_a_failure(fuelrun, mpirun: str, place: int) -> None:
    leave = "import atexit, os\nif os.environ['RANK'] == '1': atexit.register(os._exit, 0)\n"
    process = fuelrun.start(fuelrun.write(HEAD[:place] + leave + HEAD[place:]), command=(mpirun, "-n", "2"))
    fuelrun.wait_for("up-*", 2)
    status, err = ends(fuelrun, process)
    assert (status, err.count("the script called os._exit(0)")) == (1, 1), err


@pytest.mark.timeout(60)
def test_a_rank_that_is_killed_in_an_exit_function_is_missed_at_the_end(fuelrun, mpirun: str) -> None:
    script = HEAD + "if world.rank: atexit.register(os.kill, os.getpid(), signal.SIGKILL)"
    process = fuelrun.start(fuelrun.write(script), command=(mpirun, "-n", "2"))
    fuelrun.wait_for("up-*", 2)
    status, err = ends(fuelrun, process)
    assert status in (137, 9), err  # mpirun's own: MPICH gives the bare number of the signal


@pytest.mark.timeout(60)
def test_exit_functions_may_use_collectives(fuelrun) -> None:
    script = "import atexit\ndef total(): print(world.all_reduce(ft.ones(())).item())\natexit.register(total)\n" + HEAD
    done = fuelrun.run("-n", "2", fuelrun.write(script))
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n2.0\n", "")


def test_the_launcher_of_another_mpi_is_named(fuelrun) -> None:
    claims = {"Open MPI": {"PMI_RANK": "0", "PMI_SIZE": "2"}}
    other = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    done = fuelrun.run(fuelrun.write(HEAD), **claims.get(library().flavour or "", other))
    assert done.returncode == 1
    assert "started 2 ranks" in done.stderr
    assert "LaunchError" in done.stderr

"""Ranks have cores of their own, as the kernel sees it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fuel_parallel.environment import LauncherClaim
from fuelrun.launch import binding
from fuelrun.launch.find import find_engine

SHOW = """
import re
print(re.search(r"Cpus_allowed_list:\\s*(\\S+)", open("/proc/self/status").read())[1], flush=True)
"""
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
two_cores = pytest.mark.skipif(len(CORES) < 2, reason=f"two ranks need two cores, this process has {len(CORES)}")


def cores(text: str) -> list[set[int]]:
    return [set(binding.parse_list(line)) for line in text.splitlines()]


@two_cores
def test_two_ranks_share_the_cores_without_overlap(fuelrun) -> None:
    done = fuelrun.run("-n", "2", fuelrun.write(SHOW))
    assert (done.returncode, done.stderr) == (0, "")
    a, b = cores(done.stdout)
    assert not a & b
    assert sorted(a | b) == CORES


@two_cores
@pytest.mark.parametrize("words", [("--bind", "none"), ("--bind", "auto")])
def test_under_mpirun_too(fuelrun, words) -> None:
    engine = find_engine(None)
    script = fuelrun.write(SHOW)
    options = ("--bind-to", "none") if engine.name == "Open MPI" else ()
    command = (str(engine.mpirun), "-n", "2", *options)
    done = fuelrun.run(*words, script, command=command, **engine.variables(_job(), os.environ))
    a, b = cores(done.stdout)
    assert bool(a & b) == ("none" in words)
    assert sorted(a | b) == CORES


def _job():
    from fuelrun.launch.engine import Job

    return Job(ranks=2, command=(), shared_cores=False, arguments=())


@two_cores
def test_what_mpirun_has_bound_stays(fuelrun) -> None:
    engine = find_engine(None)
    option = ("--bind-to", "core") if engine.name == "Open MPI" else ("-bind-to", "core")
    command = (str(engine.mpirun), "-n", "2", *option)
    without = fuelrun.run(
        "--bind", "none", fuelrun.write(SHOW), command=command, **engine.variables(_job(), os.environ)
    )
    done = fuelrun.run(fuelrun.write(SHOW), command=command, **engine.variables(_job(), os.environ))
    assert sorted(map(sorted, cores(done.stdout))) == sorted(map(sorted, cores(without.stdout)))


def test_on_one_core_there_are_no_shares_and_that_is_said(fuelrun) -> None:
    command = (
        sys.executable,
        "-c",
        "import os, sys; os.sched_setaffinity(0, {%d}); os.execv(sys.argv[1], sys.argv[1:])",
    )
    command = (*command[:2], command[2] % CORES[-1])
    done = fuelrun.run("-n", "2", fuelrun.write(SHOW), command=command)
    assert done.returncode == 0
    assert "2 ranks share 1 core: correct, but slow" in done.stderr
    assert cores(done.stdout) == [{CORES[-1]}, {CORES[-1]}]


@two_cores
def test_lists_by_local_rank(fuelrun) -> None:
    lists = f"{CORES[1]}:{CORES[0]}"
    text = SHOW + "import os; print(os.environ['RANK'])\n"
    done = fuelrun.run("-n", "2", "--tag-output", "--bind", lists, fuelrun.write(text))
    assert f"[0/2] {CORES[1]}\n" in done.stdout
    assert f"[1/2] {CORES[0]}\n" in done.stdout


@pytest.mark.parametrize("text", ["some", "0-", "0::1", ":"])
def test_a_setting_that_is_none_is_refused(fuelrun, text) -> None:
    done = fuelrun.run("-n", "2", "--bind", text, fuelrun.write(SHOW))
    assert done.returncode == 2
    assert f"--bind {text}: expected auto, none, or lists of cores" in done.stderr


def test_cores_that_are_not_ours_are_refused_by_every_rank(fuelrun) -> None:
    done = fuelrun.run("-n", "2", "--bind", "65000", fuelrun.write(SHOW))
    assert done.returncode == 1
    assert "cannot run on all of the cores [65000]; it may use" in done.stderr
    assert done.stdout == ""


def test_without_a_local_rank_nothing_is_bound(monkeypatch) -> None:
    monkeypatch.delenv(binding.BIND, raising=False)
    before = os.sched_getaffinity(0)
    binding.bind(LauncherClaim("some", 1, 4, None, None, ()))
    assert os.sched_getaffinity(0) == before


def test_what_the_parent_may_use_is_known() -> None:
    assert binding.cores_of_ranks() >= os.sched_getaffinity(0)
    assert Path(f"/proc/{os.getppid()}/status").exists()

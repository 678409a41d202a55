"""A rank killed at any moment of a training run: the job ends in time, with 137, one report, and leaves nothing behind.

`FUEL_STRESS_KILLS` is how many are tried (6), half of them under `mpirun fuelrun`; `FUEL_STRESS_SEED` draws when.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fuel_parallel.environment import without_launcher
from fuelrun.launch.find import library, mpirun_of
from fuelrun.launch.processes import CLEANER

KILLS = int(os.environ.get("FUEL_STRESS_KILLS", "6"))
SEED = int(os.environ.get("FUEL_STRESS_SEED", "0"))
SCRIPT = Path(__file__).with_name("train.py")
STEPS = "40"
WITHIN_S = 5.0
SHARED = Path("/dev/shm")
CLEANED_S = 15.0
OF_A_RANK = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}
# A process alone in its MPI has a job that ends in 0000; those are other programs on this machine.
OF_OPEN_MPI = re.compile(r"sm_segment\.(?!.*0000\.0$)|vader_|osc_")
OF_MPICH = re.compile(r"mpich_")


@dataclass
class Job:
    """One training run, whose processes are known by a mark in their environment."""

    process: subprocess.Popen[str]
    mark: bytes

    def processes(self) -> Iterator[Path]:
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or self.mark not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                status = (entry / "status").read_text()
                if "(zombie)" not in status and f"Name:\t{CLEANER}" not in status:
                    yield entry
            except OSError:
                continue

    def ranks(self) -> list[int]:
        """Processes that are ranks, or are about to become some."""
        found = []
        for entry in self.processes():
            try:
                names = {word.partition(b"=")[0].decode() for word in (entry / "environ").read_bytes().split(b"\0")}
                words = (entry / "cmdline").read_bytes()
                name = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if names & OF_A_RANK and SCRIPT.name.encode() in words and name != CLEANER:
                found.append(int(entry.name))
        return found


def start(ranks: int, launcher: str, mark: str, folder: Path) -> Job:
    fuelrun = [sys.executable, "-m", "fuelrun"]
    if launcher == "fuelrun -n":
        command = [*fuelrun, "-q", "-n", str(ranks), str(SCRIPT), STEPS]
    else:
        found = mpirun_of(library())
        assert found is not None
        oversubscribe = ["--oversubscribe", "--bind-to", "none"] if library().flavour == "Open MPI" else []
        command = [str(found.path), "-n", str(ranks), *oversubscribe, *fuelrun, str(SCRIPT), STEPS]
    environ = {
        **without_launcher(os.environ),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_osc": "^ucx",
        "STRESS_KILL": mark,
    }
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Job(process, f"STRESS_KILL={mark}".encode())


def shared_files() -> set[str]:
    """The files in /dev/shm that jobs of this MPI have made."""
    names = OF_MPICH if library().flavour == "MPICH" else OF_OPEN_MPI
    return set(filter(names.match, os.listdir(SHARED))) if SHARED.is_dir() else set()


def mapped(pid: str | int) -> set[str]:
    """The files in /dev/shm that a process has in its memory."""
    try:
        return set(re.findall(r"/dev/shm/(\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE))
    except OSError:
        return set()


def left_of(known: set[str], names: set[str]) -> set[str]:
    """Those of `names` that no living process has in its memory, as far as they can be of the job of `known`."""
    used = {name for entry in Path("/proc").iterdir() if entry.name.isdigit() for name in mapped(entry.name)}
    jobs = {name.rpartition(".")[0] or name for name in known}
    return {name for name in names - used if not jobs or (name.rpartition(".")[0] or name) in jobs}


def time_of_a_run(launcher: str, folder: Path) -> float:
    begin = time.monotonic()
    job = start(2, launcher, f"{folder}-whole", folder)
    _, err = job.process.communicate(timeout=60)
    assert job.process.returncode == 0, err
    return time.monotonic() - begin


def killed(pid: int) -> bool:
    """Kills a process, or says that there is none."""
    if not pid:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def kill_one(rng: random.Random, launcher: str, longest: float, folder: Path, number: int) -> tuple[float, str]:
    """Kills a rank at some moment; how long the job then took to end, and in words what is wrong about that end."""
    ranks = rng.choice((2, 2, 3))
    moment = rng.uniform(0.0, longest)
    before = shared_files()
    job = start(ranks, launcher, f"{folder}-{number}", folder)
    time.sleep(moment)
    while not (found := job.ranks()) and job.process.poll() is None:
        time.sleep(0.005)
    known = {name for pid in found for name in mapped(pid)} & shared_files()
    victim = rng.choice(found or [0])
    if not killed(victim):
        job.process.communicate()
        return kill_one(rng, launcher, longest * 0.9, folder, number + 100_000)  # it was over before
    begin = time.monotonic()
    _, err = job.process.communicate(timeout=60)
    took = time.monotonic() - begin
    while (left := list(job.processes())) and time.monotonic() - begin < WITHIN_S:
        time.sleep(0.02)
    took = max(took, time.monotonic() - begin if left else took)
    # What nobody had noted is taken away some seconds later.
    while (left_files := left_of(known, shared_files() - before)) and time.monotonic() - begin < WITHIN_S + CLEANED_S:
        time.sleep(0.2)
    # Without a fuelrun around them the ranks' status is mpirun's, and MPICH's says the bare number of the signal.
    code = 9 if launcher != "fuelrun -n" and library().flavour == "MPICH" else 137
    if code == 9 and job.process.returncode == 143 and "Fatal error in" in err:
        code = 143  # MPICH in another rank has noticed first, and aborts below Python
    wrong = []
    if "did not start" in err:  # killed before it had a line of Python behind it: nobody knows it, but mpirun
        code = job.process.returncode or 1
        err = err.replace("did not start", "was killed by signal 9 (SIGKILL)")
    trained = all(Path(f"{folder}-{number}.{rank}.trained").exists() for rank in range(ranks))
    if trained and job.process.returncode == 0:
        code = 0  # killed when it was through: its end was known, and nothing is lost
    if job.process.returncode != code:
        wrong.append(f"exit status {job.process.returncode}, not {code}")
    if took > WITHIN_S:
        wrong.append(f"took {took:.1f} s")
    if left:
        wrong.append(f"left processes {[entry.name for entry in left]}")
    if left_files:
        wrong.append(f"left {sorted(left_files)}")
    if launcher == "fuelrun -n" and code and err.count("was killed by signal 9 (SIGKILL)") != 1:
        wrong.append("not one report")
    if "Traceback" in err:
        wrong.append("a traceback")
    where = f"kill {number}, {launcher}, {ranks} ranks, after {moment:.2f} s of {longest:.2f}: "
    return took, f"{where}{'; '.join(wrong)}\n{err}" if wrong else ""


@pytest.mark.timeout(60 + 8 * KILLS)
@pytest.mark.parametrize("launcher", ["fuelrun -n", "mpirun fuelrun"])
def test_a_job_whose_rank_is_killed_ends_cleanly(launcher: str, tmp_path: Path) -> None:
    rng = random.Random(f"{SEED} {launcher}")
    longest = time_of_a_run(launcher, tmp_path)
    ends = [kill_one(rng, launcher, longest, tmp_path, number) for number in range(KILLS // 2)]
    times = [took for took, _ in ends]
    print(f"{launcher}: {len(times)} kills, {statistics.median(times):.2f} s median, {max(times):.2f} s at most")
    wrong = [problem for _, problem in ends if problem]
    assert not wrong, f"{len(wrong)} of {len(ends)}:\n" + "\n".join(wrong[:10])

"""Ranks killed at random moments of runs that save: every checkpoint can be read, and the run ends as if never killed.

Half of `FUEL_STRESS_KILLS` (4) is how many kills there are; `FUEL_STRESS_SEED` draws when. Each run is killed, started
again with the same command line, killed again, and after a few kills left to end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_kills import Job

from fuel_parallel import checkpoint
from fuel_parallel.environment import without_launcher

KILLS = int(os.environ.get("FUEL_STRESS_KILLS", "4")) // 2
SEED = int(os.environ.get("FUEL_STRESS_SEED", "0"))
KILLS_A_RUN = 5
STEPS, EVERY, KEEP = 60, 2, 3
SCRIPT = Path(__file__).parent.parent.parent / "examples/train_gpt.py"
MODEL = ("--dim", "32", "--layers", "1", "--heads", "2", "--context", "8", "--batch", "4", "--sample", "0")
RUN = ("--metrics", "metrics.jsonl", "--checkpoint", "run", "--every", str(EVERY), "--keep", str(KEEP))


def start(folder: Path, *options: str) -> Job:
    mark = f"{folder}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "fuelrun", "-q", "-n", "2", *options, str(SCRIPT), *MODEL, *RUN, "--steps", str(STEPS)],
        cwd=folder,
        env={**without_launcher(os.environ), "STRESS_KILL": mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Job(process, f"STRESS_KILL={mark}".encode())


def ended(job: Job, within: float = 60) -> tuple[int, str]:
    _, err = job.process.communicate(timeout=within)
    return job.process.returncode, err


def ranks_of(job: Job) -> list[int]:
    found = []
    for entry in job.processes():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"fuelrun.launch.rank" in words and b"-n" not in words:
            found.append(int(entry.name))
    return found


def losses(folder: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


def kill_one(rng: random.Random, job: Job, run: Path, longest: float) -> bool:
    """Kills a rank at some moment; False if the job was through by then.

    Two times in three that is soon after the job has saved something, for much of its time is its start.
    """
    if rng.random() < 2 / 3:
        before = checkpoint.steps(run)
        while checkpoint.steps(run) == before and job.process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, longest / 8))
    else:
        time.sleep(rng.uniform(0.2, longest))
    return kill(rng, job)


def kill(rng: random.Random, job: Job) -> bool:
    """Kills a rank; False if the job was through by then."""
    while not (found := ranks_of(job)):
        if job.process.poll() is not None:
            return False
        time.sleep(0.01)
    try:
        os.kill(rng.choice(found), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(120 + 15 * KILLS)
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_never_was(tmp_path: Path) -> None:
    rng = random.Random(f"{SEED} checkpoints")
    whole = tmp_path / "whole"
    whole.mkdir()
    begin = time.monotonic()
    code, err = ended(start(whole))
    assert code == 0, err
    longest = time.monotonic() - begin
    expected = losses(whole)
    kills, runs, reached = 0, 0, []
    while kills < KILLS:
        runs += 1
        folder = tmp_path / f"run-{runs}"
        folder.mkdir()
        newest = 0
        for _ in range(min(KILLS_A_RUN, KILLS - kills)):
            job = start(folder)
            killed = kill_one(rng, job, folder / "run", longest)
            code, err = ended(job)
            if not killed or code == 0:
                assert code == 0, err
                break
            assert code != 2, err
            kills += 1
            # Nothing is lost, and whatever is there can be read.
            steps = checkpoint.steps(folder / "run")
            assert max(steps, default=0) >= newest
            assert len(steps) <= KEEP + 1
            assert checkpoint.verify(folder / "run") == {}
            newest = max(steps, default=0)
            reached.append(newest)
        code, err = ended(start(folder))
        assert code == 0, err
        assert losses(folder) == expected
        assert checkpoint.latest(folder / "run") == STEPS
        if newest < STEPS:  # else the last run had nothing to save, and only a save clears what killed ones left
            assert not list((folder / "run").glob(".*"))
    inside = sum(0 < step < STEPS for step in reached)
    print(
        f"{kills} kills in {runs} runs of {longest:.1f} s, {inside} of them between two checkpoints, "
        f"at step {statistics.median(reached or [0]):.0f} (median)"
    )


@pytest.mark.timeout(120 + 20 * KILLS)
def test_fuelrun_itself_starts_again_what_was_killed(tmp_path: Path) -> None:
    """At any moment from the first step on: a job that dies before it is not started again."""
    rng = random.Random(f"{SEED} restarts")
    whole = tmp_path / "whole"
    whole.mkdir()
    code, err = ended(start(whole))
    assert code == 0, err
    restarts, times = 0, []
    for run in range(KILLS):
        folder = tmp_path / f"run-{run}"
        folder.mkdir()
        begin = time.monotonic()
        job = start(folder, "--max-restarts", "3")
        steps = rng.randrange(1, STEPS)
        while lines(folder / "metrics.jsonl") < steps and job.process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.02))
        killed = kill(rng, job)
        code, err = ended(job)
        assert code == 0, err
        assert losses(folder) == losses(whole)
        assert checkpoint.verify(folder / "run") == {}
        restarts += "restart 1 of 3" in err
        if killed:
            times.append(time.monotonic() - begin)
    print(f"{KILLS} runs, {restarts} of them started again, {statistics.median(times or [0]):.1f} s each (median)")


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0

"""Ctrl-Z and going on; and that every signal reaches every rank once."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORK = """
import os, pathlib, signal, time
import fuel_parallel as fp
import fuel_parallel.lazy as ft
world = fp.init()
total = 0.0
for step in range(300):
    total += world.all_reduce(ft.asarray(1.0)).item()
    if step == 20:
        pathlib.Path(f"ready-{world.rank}").write_text(str(os.getpid()))
    time.sleep(0.005)
print(total)
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stopped(fuelrun, process: subprocess.Popen[str], ranks: int) -> list[int]:
    """Stops a job and waits until all of it is stopped; returns the ranks' processes."""
    fuelrun.wait_for("ready-*", ranks)
    pids = [int((fuelrun.folder / f"ready-{rank}").read_text()) for rank in range(ranks)]
    process.send_signal(signal.SIGTSTP)
    pid, status = os.waitpid(process.pid, os.WUNTRACED)
    assert (pid, os.WIFSTOPPED(status)) == (process.pid, True)
    assert [state(pid) for pid in pids] == ["T"] * ranks
    return pids


def test_a_job_is_stopped_and_goes_on_and_the_timeout_does_not_count(fuelrun) -> None:
    process = fuelrun.start("-n", "2", "--timeout", "2", fuelrun.write(WORK))
    stopped(fuelrun, process, 2)
    time.sleep(3.5)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "600.0\n" * 2), err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_job_that_is_stopped_can_be_ended(fuelrun, number: int, code: int) -> None:
    process = fuelrun.start("-n", "2", fuelrun.write(WORK))
    stopped(fuelrun, process, 2)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert fuelrun.nobody_left_within(5)


COUNT = """
import os, pathlib, signal, sys, time
rank, count = os.environ["RANK"], {n: 0 for n in (2, 10, 12, 15)}
def note(number, frame):
    count[number] += 1
for number in count:
    signal.signal(number, note)
from mpi4py import MPI
pathlib.Path(f"ready-{rank}").touch()
while not any(count[n] for n in (2, 15)):
    time.sleep(0.01)
time.sleep(0.6)
pathlib.Path(f"heard-{rank}").write_text(" ".join(str(count[n]) for n in sorted(count)))
"""


@pytest.mark.parametrize(("last", "heard"), [(signal.SIGINT, "1 1 1 0"), (signal.SIGTERM, "0 1 1 1")])
def test_every_signal_reaches_every_rank_once(fuelrun, last: int, heard: str) -> None:
    process = fuelrun.start("-n", "2", fuelrun.write(COUNT))
    fuelrun.wait_for("ready-*", 2)
    for number in (signal.SIGUSR1, signal.SIGUSR2, last):
        process.send_signal(number)
        time.sleep(0.3)
    process.communicate(timeout=60)
    assert process.returncode == 128 + last
    assert [(fuelrun.folder / f"heard-{rank}").read_text() for rank in range(2)] == [heard] * 2


def test_ctrl_c_at_a_terminal_reaches_every_rank_once(fuelrun) -> None:
    name = fuelrun.write(COUNT)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(fuelrun.folder)
        os.execve(sys.executable, [sys.executable, "-m", "fuelrun", "-n", "2", name], fuelrun.environ)
    fuelrun.wait_for("ready-*", 2)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert [(fuelrun.folder / f"heard-{rank}").read_text() for rank in range(2)] == ["1 0 0 0"] * 2

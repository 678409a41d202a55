"""Ranks that are asked to make room save together, at the same step, and the job says that it wants to go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import fuel_parallel as fp
from fuel_parallel.errors import ArgumentError

TRAIN = """
import os, pathlib, time
import fuel_parallel as fp
import fuel_parallel.lazy as ft
world = fp.init()
step = 0
def save():
    time.sleep(float(os.environ.get("SAVE_S", "0")))
    print("saved", world.rank, step, int(world.all_reduce(ft.asarray(1.0)).item()), flush=True)
with fp.on_preempt(save) as notice:
    while True:
        world.all_reduce(ft.asarray(1.0)).item()
        step += 1
        pathlib.Path(f"ready-{world.rank}").write_text(str(os.getpid())) if step == 3 else None
        notice.check()
"""


def saved(out: str) -> list[list[str]]:
    return sorted(line.split()[1:] for line in out.splitlines())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_ranks_save_at_the_same_step_though_one_is_told(fuelrun, number: int) -> None:
    process = fuelrun.start("-n", "3", fuelrun.write(TRAIN))
    fuelrun.wait_for("ready-*", 3)
    os.kill(int(Path(fuelrun.folder, "ready-1").read_text()), number)
    out, err = process.communicate(timeout=60)
    lines = saved(out)
    assert process.returncode == 75
    assert [line[0] for line in lines] == ["0", "1", "2"]
    assert len({line[1] for line in lines}) == 1
    assert {line[2] for line in lines} == {"3"}
    assert f"fuelrun: the ranks made room on {signal.Signals(number).name}, after saving" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_fuelrun_passes_it_on_and_waits_for_a_long_save(fuelrun, number: int) -> None:
    process = fuelrun.start("-n", "2", "--grace", "0.2", fuelrun.write(TRAIN), SAVE_S="1.5")
    fuelrun.wait_for("ready-*", 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, len(saved(out))) == (75, 2)


def test_one_rank_alone(fuelrun) -> None:
    process = fuelrun.start(fuelrun.write(TRAIN))
    fuelrun.wait_for("ready-*")
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, len(saved(out))) == (75, 1)


def test_under_mpirun_the_status_is_the_same(fuelrun, mpirun: str) -> None:
    process = fuelrun.start(fuelrun.write(TRAIN), command=(mpirun, "-n", "2"))
    fuelrun.wait_for("ready-*", 2)
    os.kill(int(Path(fuelrun.folder, "ready-0").read_text()), signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, len(saved(out))) == (75, 2)


def test_it_is_no_reason_to_start_again(fuelrun) -> None:
    process = fuelrun.start("-n", "2", "--max-restarts", "2", fuelrun.write(TRAIN))
    fuelrun.wait_for("ready-*", 2)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "restart" not in err


def test_an_mpirun_that_does_not_end_is_not_given_the_ranks_time(fuelrun, mpirun: str) -> None:
    slow = fuelrun.folder / "mpirun"
    slow.write_text(f"""#!/bin/sh
"{mpirun}" "$@"
status=$?
case "$1" in --version) exit $status;; esac
exec sleep 40
""")
    slow.chmod(0o755)
    process = fuelrun.start("-n", "2", "--mpirun", str(slow), fuelrun.write(TRAIN))
    fuelrun.wait_for("ready-*", 2)
    began = time.monotonic()
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, len(saved(out))) == (75, 2), err
    assert time.monotonic() - began < 20


def test_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with fp.on_preempt(lambda: None, comm=fp.IdentityComm()) as notice:
        assert not notice.told
        notice.check()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert notice.told
        with pytest.raises(SystemExit) as end:
            notice.check()
        assert end.value.code == 75
    assert signal.getsignal(signal.SIGUSR1) == before


def test_what_cannot_be_caught_is_refused() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ArgumentError, match="signal 9 cannot be caught; use SIGTERM or SIGUSR1"):
        fp.on_preempt(lambda: None, signals=(15, 9), comm=fp.IdentityComm())
    assert signal.getsignal(signal.SIGTERM) == before

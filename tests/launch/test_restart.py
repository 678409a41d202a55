"""Jobs that die and are started again, with real ranks; and the rules, as values."""

from __future__ import annotations

import os
import signal
import time

import pytest

from fuel_parallel.errors import LaunchError
from fuel_parallel.topology.files.hostfile import Host
from fuelrun.launch.hosts import Wish
from fuelrun.launch.records import RankRecord
from fuelrun.launch.restart import LONG_S, why_not
from fuelrun.launch.verdict import Ending, Verdict, judge

# Sums 0 to 9 by steps, each saved by rank 0; `at(step)` is where a test lets something happen.
TRAIN = """
import json, os, pathlib, signal, sys, time
import fuel_parallel as fp
import fuel_parallel.lazy as ft
world, file = fp.init(), pathlib.Path("state.json")
start = int(os.environ.get("FUEL_RESTART", "0"))
def at(step): {at}
step, total = json.loads(file.read_text()) if file.exists() else (0, 0.0)
print("from", step) if world.is_root else None
while step < 10:
    total += (world.all_reduce(ft.asarray(float(step))) / world.world_size).item()
    step += 1
    if world.is_root:
        file.with_suffix(".new").write_text(json.dumps([step, total]))
        file.with_suffix(".new").rename(file)
    at(step)
print("total", total) if world.is_root else None
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL) if step == 4 and start == 0 and world.rank == 1 else None"


def test_a_job_whose_rank_was_killed_goes_on(fuelrun) -> None:
    done = fuelrun.run("-n", "2", "--max-restarts", "3", fuelrun.write(TRAIN.format(at=KILL)))
    assert done.returncode == 0
    first, second, last = done.stdout.split("\n")[:3]
    assert (first, last) == ("from 0", "total 45.0")
    assert second in ("from 3", "from 4")  # rank 0 may have been ended before it saved
    assert "was killed by signal 9 (SIGKILL)" in done.stderr
    assert "restart 1 of 3 in 1 s" in done.stderr


def test_one_rank_is_watched_as_well(fuelrun) -> None:
    kill = KILL.replace("world.rank == 1", "True")
    done = fuelrun.run("--max-restarts", "1", fuelrun.write(TRAIN.format(at=kill)))
    assert (done.returncode, done.stdout) == (0, "from 0\nfrom 4\ntotal 45.0\n"), done.stderr


def test_a_job_that_comes_to_no_step_is_not_started_again(fuelrun) -> None:
    done = fuelrun.run("-n", "2", "--max-restarts", "3", fuelrun.write("raise ValueError('no data')"))
    assert done.returncode == 1
    assert "not started again: it ended before its first step" in done.stderr
    assert "restart 1" not in done.stderr


def test_a_job_that_fails_in_the_same_way_again_is_given_up(fuelrun) -> None:
    done = fuelrun.run("-n", "2", "--max-restarts", "3", fuelrun.write(TRAIN.format(at="1 / (step < 7)")))
    assert done.returncode == 1
    assert "restart 1 of 3" in done.stderr
    assert "ZeroDivisionError: division by zero; not started again" in done.stderr
    assert "restart 2" not in done.stderr


def test_the_number_of_restarts_is_kept(fuelrun) -> None:
    done = fuelrun.run("-n", "2", "--max-restarts", "1", fuelrun.write(TRAIN.format(at="os.kill(os.getpid(), 9)")))
    assert done.returncode == 137
    assert done.stderr.count("restart 1 of 1") == 1
    assert "it was started again once (--max-restarts 1)" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_ends_a_job_has_it_ended(fuelrun, number: int, code: int) -> None:
    wait = "pathlib.Path(f'ready-{world.rank}').touch(); time.sleep(60)"
    process = fuelrun.start("-n", "2", "--max-restarts", "3", fuelrun.write(TRAIN.format(at=wait)))
    fuelrun.wait_for("ready-*", 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "start" not in err


def test_ctrl_c_ends_the_pause_before_a_restart(fuelrun) -> None:
    again = "time.sleep(0.2); os.kill(os.getpid(), 9) if world.rank == 1 else None"
    process = fuelrun.start("-n", "2", "--max-restarts", "9", fuelrun.write(TRAIN.format(at=again)))
    seen = ""
    while "restart 2" not in seen:  # a pause of two seconds
        seen += process.stderr.readline()
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - began < 1.5
    assert not fuelrun.left()


def ending(*, code: int = 1, reason: str = "ValueError: x", steps: bool = True, lived: float = 1.0) -> Ending:
    record = RankRecord(1, os.getpid(), "here", 100.0, 100.0 + lived, code, reason, progressed=steps)
    return Ending(2, {1: record}, when=100.0 + lived)


def test_what_would_fail_again_is_not_started_again() -> None:
    assert why_not(judge(ending(reason="CollectiveMismatchError: ranks differ")), []) == "it would fail again"
    assert why_not(judge(ending()), []) == ""
    assert why_not(judge(ending(code=75, reason="made room on SIGTERM, after saving")), []) == "it was asked to end"
    assert why_not(Verdict(1), []) == "it was asked to end"


def test_living_for_long_is_progress_too() -> None:
    assert why_not(judge(ending(steps=False, lived=LONG_S - 1)), [])
    assert not why_not(judge(ending(steps=False, lived=LONG_S + 1)), [])


def test_one_start_without_a_step_is_forgiven_and_two_are_not() -> None:
    good, bad = judge(ending(reason="A")), judge(ending(reason="B", steps=False))
    assert why_not(bad, []) == "it ended before its first step"
    assert why_not(bad, [good]) == ""
    assert why_not(judge(ending(reason="C", steps=False)), [good, bad]).endswith("twice in a row")


def test_machines_that_are_gone_are_left_out() -> None:
    hosts = (Host("a"), Host("b", 2), Host("c", 4))
    assert Wish(hosts, 7).without(["c"], 2) == Wish(hosts[:2], 5)  # a: a third of seven, rounded up
    assert Wish(hosts, 2).without(["a"], 2) == Wish(hosts[1:], 2)
    assert Wish(hosts, None, 3, 2).without(["b"], 1) == Wish((hosts[0], hosts[2]), None, 2, 2)
    with pytest.raises(LaunchError, match="without a, c there is room for 2 ranks, less than --min-np 3"):
        Wish(hosts).without(["c", "a"], 3)

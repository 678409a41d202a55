"""Ranks that do not come: exit status 124, who is missing, where every rank stands, and its Python stack."""

from __future__ import annotations

import os
import signal
import time

import pytest

HEAD = """\
import os, time
import fuel_parallel as fp
import fuel_parallel.lazy as ft
world = fp.init()
world.all_reduce(ft.ones(4)).numpy()
open(f'up-{world.rank}-{os.getpid()}', 'w').close()
"""
TIMEOUT_S = 2.0
WITHIN_S = TIMEOUT_S + 3.0


def stuck(fuelrun, script: str, *, stop: bool = False) -> str:
    """What a job says that hangs after both ranks are up; rank 1 is stopped if so asked."""
    process = fuelrun.start("-n", "2", "--timeout", f"{TIMEOUT_S:g}", fuelrun.write(HEAD + script))
    fuelrun.wait_for("up-*", 2)
    begin = time.monotonic()
    if stop:
        os.kill(int(next(fuelrun.folder.glob("up-1-*")).name.split("-")[2]), signal.SIGSTOP)
        (fuelrun.folder / "stopped").touch()
    _, err = process.communicate(timeout=40)
    took = time.monotonic() - begin
    assert process.returncode == 124, err
    assert took < WITHIN_S, f"took {took:.1f} s: {err}"
    assert not fuelrun.left()
    assert err.count("has waited for 2 s") <= 2  # in the report, and in the last line, which is fuelrun's
    assert "arrived: rank 0\n" in err
    assert "missing: rank 1\n" in err
    return err


def stacks(fuelrun) -> dict[str, str]:
    return {path.name: path.read_text() for path in fuelrun.folder.glob("fuelrun-logs/*/stack-rank-*.txt")}


@pytest.mark.timeout(60)
def test_a_stopped_rank_is_named(fuelrun) -> None:
    wait = "while not os.path.exists('stopped'): time.sleep(0.01)\n"
    err = stuck(fuelrun, wait + "world.barrier()", stop=True)
    assert "barrier at script.py:8" in err
    assert "stopped by a signal" in err
    assert "last finished all_reduce SUM float32[4] at script.py:5" in err
    assert 'script.py", line 8' in stacks(fuelrun)["stack-rank-0.txt"]
    assert "stopped by a signal" in stacks(fuelrun)["stack-rank-1.txt"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("loop", ["while True: pass", "sum(range(10**13))"])
def test_a_rank_that_never_comes_is_named_with_its_line(fuelrun, loop: str) -> None:
    err = stuck(fuelrun, f"if world.rank == 1:\n    {loop}\nworld.all_reduce(ft.ones(3)).numpy()")
    assert "all_reduce SUM float32[3] at script.py:9" in err
    if "sum" not in loop:  # which holds the interpreter's lock, so its watchdog has not seen this line
        rank_1 = next(line for line in err.splitlines() if line.startswith("  rank 1"))
        assert "at script.py:8" in rank_1
    assert 'script.py", line 8' in stacks(fuelrun)["stack-rank-1.txt"]


@pytest.mark.timeout(60)
def test_a_wait_that_is_short_enough_is_none_of_its_business(fuelrun) -> None:
    script = "if world.rank == 1:\n    time.sleep(1.2)\nworld.barrier()\ntime.sleep(2.5)"
    done = fuelrun.run("-n", "2", "--timeout", "2", fuelrun.write(HEAD + script))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_timeout_that_is_no_time_is_refused(fuelrun) -> None:
    done = fuelrun.run("-n", "2", "--timeout", "soon", fuelrun.write(HEAD))
    assert done.returncode == 2
    assert "--timeout" in done.stderr


@pytest.mark.timeout(60)
def test_a_variable_that_is_no_time_is_refused_by_init(fuelrun) -> None:
    done = fuelrun.run("-n", "2", fuelrun.write(HEAD), FUEL_TIMEOUT="-1")
    assert done.returncode == 1
    assert "FUEL_TIMEOUT takes seconds, 0 or more (0: wait for ever); got '-1'" in done.stderr

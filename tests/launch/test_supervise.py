"""How jobs end, with real ranks under the MPI of this environment."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

MPI = "from mpi4py import MPI; world = MPI.COMM_WORLD\n"
RANK = "import os, sys, time; rank = int(os.environ['RANK'])\n"
# A rank that says that it is up, and goes on when all are: one that fails earlier ends the others before they say so.
UP = RANK + MPI + "open(f'up-{rank}', 'w').close()\nworld.Barrier()\n"
# After UP and the handlers: from here on a signal finds all ranks past the barrier and the handlers in place.
READY = "world.Barrier()\nopen(f'ready-{rank}', 'w').close()\n"


def ends(fuelrun, script: str, *words: str, within: float = 5.0) -> subprocess.CompletedProcess[str]:
    """Run two ranks; from the moment when all are up, the job must end in time and leave nobody behind."""
    name = fuelrun.write(script)
    process = fuelrun.start("-n", "2", *words, name)
    if script.startswith(UP):
        fuelrun.wait_for("up-*", 2)
    begin = time.monotonic()
    out, err = process.communicate(timeout=60)
    took = time.monotonic() - begin
    assert took < within, f"took {took:.1f} s"
    assert not fuelrun.left()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_all_ranks_see_each_other(fuelrun) -> None:
    done = ends(fuelrun, UP + "print('sum', world.allreduce(rank + 1))", within=15)
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (0, ["sum 3", "sum 3"], "")


def test_an_exception_is_one_tagged_traceback_and_ends_all_ranks(fuelrun) -> None:
    done = ends(fuelrun, UP + "if rank == 1: raise ValueError('no such layer')\nworld.Barrier()")
    first, *rest = done.stderr.splitlines()
    assert done.returncode == 1
    assert first.startswith("[rank 1/2 ")
    assert first.endswith("] Traceback (most recent call last):")
    assert rest[0] == f'  File "{fuelrun.folder}/script.py", line 5, in <module>'
    assert rest[-2:] == ["ValueError: no such layer", "fuelrun: rank 1 of 2 failed: ValueError: no such layer"]
    assert len(done.stderr.splitlines()) <= 6


def test_ranks_that_fail_alike_print_once(fuelrun) -> None:
    done = ends(fuelrun, UP + "raise KeyError('all the same')")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "ranks 0 and 1 of 2 failed" in done.stderr


def test_an_exception_before_mpi_is_initialised_ends_all_ranks(fuelrun) -> None:
    script = RANK + "if rank == 1: raise ImportError('no module')\n" + MPI + "world.Barrier()"
    done = ends(fuelrun, script, within=15)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(("status", "code"), [("3", 3), ("256", 1), ("'no data'", 1)])
def test_sys_exit_ends_the_job_with_its_status(fuelrun, status: str, code: int) -> None:
    done = ends(fuelrun, UP + f"if rank == 1: sys.exit({status})\nworld.Barrier()")
    assert done.returncode == code
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_killed_by_a_signal_is_128_plus_it(fuelrun, number: int) -> None:
    done = ends(fuelrun, UP + f"if rank == 1: os.kill(os.getpid(), {int(number)})\nworld.Barrier()")
    assert done.returncode == 128 + number
    assert "rank 1 of 2" in done.stderr
    assert f"was killed by signal {int(number)} ({signal.Signals(number).name})" in done.stderr


def test_a_rank_that_vanishes_with_status_0_is_a_failure(fuelrun) -> None:
    done = ends(fuelrun, UP + "if rank == 1: os._exit(0)\nworld.Barrier()")
    assert done.returncode == 1
    assert "rank 1 of 2" in done.stderr
    assert "ended before the script did" in done.stderr


def test_mpi_abort_in_a_script_keeps_its_code(fuelrun) -> None:
    done = ends(fuelrun, UP + "if rank == 1: world.Abort(7)\nworld.Barrier()")
    assert done.returncode == 7
    assert "rank 1 of 2" in done.stderr
    assert "called MPI_Abort(7)" in done.stderr


THREAD = "import threading\nif rank == 1: threading.Thread(target=lambda: 1 / 0).start()\n"


def test_an_exception_in_a_thread_ends_all_ranks(fuelrun) -> None:
    thread = (
        "import threading\nif rank == 1: threading.Thread(target=lambda: 1 / 0).start()\nworld.recv(source=1 - rank)"
    )
    done = ends(fuelrun, UP + thread)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_a_thread_that_fails_is_not_forgotten_when_the_script_ends_well(fuelrun) -> None:
    done = ends(fuelrun, UP + THREAD + "world.Barrier()")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_mpiruns_own_words_are_shown_when_asked_for(fuelrun) -> None:
    quiet = ends(fuelrun, UP + "if rank == 1: world.Abort(7)\nworld.Barrier()")
    for old in fuelrun.folder.glob("up-*"):
        old.unlink()
    verbose = ends(fuelrun, UP + "if rank == 1: world.Abort(7)\nworld.Barrier()", "--verbose")
    assert "MPI_ABORT was invoked" not in quiet.stderr
    assert "application called MPI_Abort" not in quiet.stderr
    assert "MPI_ABORT was invoked" in verbose.stderr or "application called MPI_Abort" in verbose.stderr


def test_rules_that_a_script_prints_are_not_mpiruns(fuelrun) -> None:
    text = "\n".join(["-" * 74, "results", "-" * 74, "", "=" * 83, "=   GOOD", ""])
    name = fuelrun.write(MPI + f"if world.rank == 0: print({text!r})")
    assert fuelrun.run("-n", "2", name).stdout == text + "\n"


def test_what_a_script_left_in_the_background_is_ended(fuelrun) -> None:
    name = fuelrun.write("import subprocess; subprocess.Popen(['sleep', '60'])\n" + MPI)
    assert fuelrun.run("-n", "2", name).returncode == 0
    assert not fuelrun.left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_fuelrun_ends_ranks_that_sleep(fuelrun, number: int, code: int) -> None:
    process = fuelrun.start("-n", "2", fuelrun.write(UP + "time.sleep(60)"))
    fuelrun.wait_for("up-*", 2)
    begin = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert time.monotonic() - begin < 3
    assert not fuelrun.left()


def test_ctrl_c_is_a_keyboard_interrupt_in_every_script(fuelrun) -> None:
    work = f"try:\n    {READY.replace(chr(10), chr(10) + '    ')}time.sleep(60)\n"
    name = fuelrun.write(UP + work + "except KeyboardInterrupt: print('saved', rank)")
    process = fuelrun.start("-n", "2", name)
    fuelrun.wait_for("ready-*", 2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, sorted(out.splitlines())) == (130, ["saved 0", "saved 1"])


def test_sigterm_lets_a_script_save(fuelrun) -> None:
    handler = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (print('saved', rank), sys.exit(0)))\n"
    process = fuelrun.start("-n", "2", fuelrun.write(handler + UP + READY + "time.sleep(60)"))
    fuelrun.wait_for("ready-*", 2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, sorted(out.splitlines())) == (143, ["saved 0", "saved 1"])


DEAF_HANDLERS = "import signal\nfor number in (2, 15): signal.signal(number, lambda *_: None)\n"
DEAF = DEAF_HANDLERS + READY + "world.recv(source=1 - rank)"


def test_ranks_that_hear_nothing_are_ended_after_the_grace_time(fuelrun) -> None:
    process = fuelrun.start("--grace", "1", "-n", "2", fuelrun.write(UP + DEAF))
    fuelrun.wait_for("ready-*", 2)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert 1 <= time.monotonic() - begin < 4.5
    assert not fuelrun.left()


def test_a_second_ctrl_c_does_not_wait_for_the_grace_time(fuelrun) -> None:
    process = fuelrun.start("--grace", "50", "-n", "2", fuelrun.write(UP + DEAF))
    fuelrun.wait_for("ready-*", 2)
    begin = time.monotonic()
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - begin < 5


def test_user_signals_are_passed_on(fuelrun) -> None:
    handler = "import signal\nsignal.signal(signal.SIGUSR1, lambda *_: (print('heard', rank), sys.exit(0)))\n"
    process = fuelrun.start("-n", "2", fuelrun.write(handler + UP + READY + "time.sleep(60)"))
    fuelrun.wait_for("ready-*", 2)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, sorted(out.splitlines())) == (0, ["heard 0", "heard 1"])


@pytest.mark.parametrize("work", ["while True: pass", DEAF])
def test_the_ranks_end_when_fuelrun_is_killed(fuelrun, work: str) -> None:
    process = fuelrun.start("-n", "2", fuelrun.write(UP + work))
    fuelrun.wait_for("up-*", 2)
    process.kill()
    assert fuelrun.nobody_left_within(5)


def test_the_ranks_end_when_mpirun_is_killed(fuelrun) -> None:
    process = fuelrun.start("-n", "2", fuelrun.write(UP + "while True: pass"))
    fuelrun.wait_for("up-*", 2)
    child = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    os.kill(int(child.stdout.split()[0]), signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 137
    assert "mpirun was killed by signal 9" in err
    assert not fuelrun.left()


def test_a_reader_that_has_enough_ends_the_job(fuelrun) -> None:
    process = fuelrun.start("-n", "2", fuelrun.write(UP + "while True: print('line', flush=True); time.sleep(0.01)"))
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=20) == 128 + signal.SIGPIPE
    assert not fuelrun.left()


def test_more_ranks_than_cores_are_started_with_a_note(fuelrun) -> None:
    ranks = len(os.sched_getaffinity(0)) + 1
    name = fuelrun.write(RANK + MPI + "print(rank, world.rank, os.environ['LOCAL_RANK'], world.size)")
    done = fuelrun.run("-n", str(ranks), name)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"{rank} {rank} {rank} {ranks}" for rank in range(ranks)]
    assert f"fuelrun: {ranks} ranks share" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_lines_of_ranks_do_not_mix(fuelrun) -> None:
    name = fuelrun.write(RANK + MPI + "for i in range(2000): print('rank', rank, 'line', i, 'x' * 50)")
    done = fuelrun.run("-n", "2", name, PYTHONUNBUFFERED="1")
    expected = sorted(f"rank {rank} line {i} {'x' * 50}" for rank in range(2) for i in range(2000))
    assert sorted(done.stdout.splitlines()) == expected


def test_tagged_lines_are_whole(fuelrun) -> None:
    name = fuelrun.write(
        RANK + MPI + "for i in range(500): print('line', i, end='\\n'); print('e', i, file=sys.stderr)"
    )
    done = fuelrun.run("--tag-output", "-n", "2", name)
    expected = sorted(f"[{rank}/2] line {i}" for rank in range(2) for i in range(500))
    assert sorted(done.stdout.splitlines()) == expected
    assert sorted(done.stderr.splitlines()) == [line.replace("line", "e") for line in expected]


def test_a_traceback_is_tagged_on_every_line_when_output_is(fuelrun) -> None:
    done = ends(fuelrun, UP + "if rank == 1: 1 / 0\nworld.Barrier()", "--tag-output")
    *trace, _ = done.stderr.splitlines()
    assert all(line.startswith("[1/2] ") for line in trace)

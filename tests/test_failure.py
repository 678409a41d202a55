"""What a rank does when it fails, without fuelrun around it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuel_parallel import failure
from fuel_parallel.environment import without_launcher
from fuel_parallel.errors import LaunchError
from fuelrun.launch.find import library, mpirun_of

# As `fp.init()` does under a bare mpirun. What comes before MPI is initialised is in EARLY.
EARLY = """
import os, sys
from fuel_parallel import environment, failure
claim = environment.detect()
rank = claim.rank
failure.install(rank, claim.world_size)
"""
MPI = "from mpi4py import MPI; world = MPI.COMM_WORLD\n"


@pytest.fixture
def mpirun(tmp_path: Path):
    """Runs a script on two ranks with the MPI's own mpirun: (exit status, output, errors, seconds)."""
    found = mpirun_of(library())
    assert found is not None
    environ = without_launcher(os.environ) | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    oversubscribe = ["--oversubscribe"] if found.flavour == "Open MPI" else []

    def run(script: str, *words: str) -> tuple[int, str, str, float]:
        (tmp_path / "script.py").write_text(script)
        words = words or (sys.executable, "script.py")
        begin = time.monotonic()
        done = subprocess.run(
            [found.path, *oversubscribe, "-n", "2", *words],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr, time.monotonic() - begin

    return run


@pytest.mark.parametrize("start", [EARLY + MPI, EARLY], ids=["after MPI_Init", "before MPI_Init"])
def test_an_exception_ends_all_ranks(mpirun, start: str) -> None:
    code, _, err, took = mpirun(start + "if rank == 1: raise ValueError('boom')\n" + MPI + "world.Barrier()")
    assert code == 1
    assert err.count("Traceback (most recent call last)") == 1
    assert "[rank 1/2 " in err
    assert "ValueError: boom" in err
    assert took < 8


@pytest.mark.parametrize("start", [EARLY + MPI, EARLY], ids=["after MPI_Init", "before MPI_Init"])
def test_sys_exit_ends_all_ranks_with_its_status(mpirun, start: str) -> None:
    code, _, err, _ = mpirun(start + "if rank == 1: sys.exit(3)\n" + MPI + "world.Barrier()")
    assert code == 3
    assert "Traceback" not in err


def test_a_sys_exit_that_the_script_catches_ends_nothing(mpirun) -> None:
    script = "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass\nworld.Barrier()\nprint('ended well')"
    code, out, _, _ = mpirun(EARLY + MPI + script)
    assert (code, out.count("ended well")) == (0, 2)


def test_ranks_that_fail_alike_print_one_traceback(mpirun) -> None:
    code, _, err, _ = mpirun(EARLY + MPI + "raise KeyError('same')")
    assert code == 1
    assert err.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize("script", [MPI, ""], ids=["after MPI_Init", "before MPI_Init"])
def test_fuelrun_inside_of_mpirun_becomes_the_rank(mpirun, script: str) -> None:
    script = f"import os\n{script}if os.environ['RANK'] == '1': 1 / 0\n{MPI}world.Barrier()"
    code, _, err, _ = mpirun(script, sys.executable, "-m", "fuelrun", "script.py")
    assert code == 1
    assert err.count("Traceback (most recent call last)") == 1
    assert 'script.py", line' in err
    assert "rank.py" not in err


def test_a_forked_child_speaks_for_itself_only(mpirun) -> None:
    script = "pid = os.fork()\nif pid == 0: raise ValueError('child')\nos.waitpid(pid, 0)\nprint('parent')"
    code, out, err, _ = mpirun(EARLY + script)
    assert (code, out.count("parent")) == (0, 2)
    assert "[rank" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(0), 0),
        (SystemExit(3), 3),
        (SystemExit(-1), 255),
        (SystemExit(256), 1),
        (SystemExit("text"), 1),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert failure.exit_code(error) == code


def raised_inside_of_the_library() -> LaunchError:
    """An error whose last frame lies in a file of fuel_parallel."""
    file = str(Path(failure.__file__).with_name("deep.py"))
    names = {"LaunchError": LaunchError}
    exec(compile("def deep():\n    raise LaunchError('wrong')", file, "exec"), names)
    try:
        names["deep"]()
    except LaunchError as error:
        return error
    raise RuntimeError("unreachable")


def test_our_own_errors_show_the_users_line_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUEL_TRACEBACK", raising=False)
    text = failure.describe(raised_inside_of_the_library())
    assert "test_failure.py" in text
    assert "deep.py" not in text
    assert text.endswith("LaunchError: wrong\n")


def test_all_frames_are_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUEL_TRACEBACK", "full")
    assert "deep.py" in failure.describe(raised_inside_of_the_library())


def test_ctrl_c_is_one_line() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        text = failure.describe(error)
    assert text.startswith("interrupted at ")
    assert text.count("\n") == 1


def test_alone_a_traceback_is_pythons_own(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import atexit\nfrom fuel_parallel import failure\n"
        "failure.install(0, 1)\natexit.register(print, 'at exit')\n1 / 0\n"
    )
    environ = without_launcher(os.environ)
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "at exit\n")
    assert done.stderr.startswith("Traceback (most recent call last):")

"""Log files of ranks: all that was printed, whole, also the last words of a crash."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path

import pytest

from fuel_parallel.errors import LaunchError
from fuelrun.launch.logs import Files, check, prefixed

TALK = """
import os, subprocess, sys
rank = int(os.environ["RANK"])
print("python", rank)
print("error", rank, file=sys.stderr)
os.write(1, b"from C\\n")
subprocess.run(["echo", "from a program"])
os.write(2, b"\\x1b[31mred\\x1b[0m\\n10%\\r20%\\rdone\\n")
print("no end", end="")
"""
LINES = ["python {}", "error {}", "from C", "from a program", "red", "done", "no end"]
HEAD = re.compile(r"-- \[\d(/\d)?\] process \d+ on \S+( restart \d)? --|-- \[\d/\d\] process \d+ on \S+, restart \d --")


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize("words", [["-n", "2"], ["-n", "2", "--tag-output"], []], ids=["two", "tagged", "alone"])
def test_all_that_a_rank_prints_is_kept(fuelrun, words: list[str]) -> None:
    done = fuelrun.run(*words, "--log-dir", "logs", fuelrun.write(TALK))
    assert done.returncode == 0, done.stderr
    ranks = range(2 if "-n" in words else 1)
    folder = fuelrun.folder / "logs"
    assert sorted(path.name for path in folder.iterdir()) == ["merged.log", *(f"rank-{rank}.log" for rank in ranks)]
    for rank in ranks:
        head, *rest = lines_of(folder / f"rank-{rank}.log")
        assert HEAD.fullmatch(head), head
        assert sorted(rest) == sorted(line.format(rank) for line in LINES)
        tag = f"[{rank}/2] " if "--tag-output" in words else ""
        assert f"{tag}python {rank}\n" in done.stdout
        assert f"{tag}from C\n" in done.stdout
    merged = lines_of(folder / "merged.log")
    assert len(merged) == len(ranks) * (1 + len(LINES))
    assert all(re.match(rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}} \[\d/{len(ranks)}\] ", line) for line in merged)


def test_under_mpirun_too(fuelrun, mpirun: str) -> None:
    done = fuelrun.run(fuelrun.write(TALK), command=(mpirun, "-n", "2"), FUEL_LOG_DIR="logs", FUEL_TAG_OUTPUT="1")
    assert done.returncode == 0, done.stderr
    assert all("from a program" in lines_of(fuelrun.folder / f"logs/rank-{rank}.log") for rank in range(2))
    assert "[1/2] from a program\n" in done.stdout


def test_the_last_words_of_a_crash_and_the_traceback_are_there(fuelrun) -> None:
    text = "import os\nprint('before')\nos.kill(os.getpid(), 11) if os.environ['RANK'] == '1' else os.read(0, 1)"
    done = fuelrun.run("-n", "2", "--log-dir", "logs", fuelrun.write("import fuel_parallel as fp; fp.init()\n" + text))
    assert done.returncode == 128 + signal.SIGSEGV
    assert "before" in lines_of(fuelrun.folder / "logs/rank-1.log")
    assert "Segmentation fault" in (fuelrun.folder / "logs/rank-1.log").read_text()
    done = fuelrun.run("-n", "2", "--tag-output", "--log-dir", "raised", fuelrun.write("1 / 0"))
    assert done.stderr.count("ZeroDivisionError: division by zero") == 2  # the traceback, and fuelrun's own line
    assert "ZeroDivisionError: division by zero" in lines_of(fuelrun.folder / "raised/rank-0.log")


def test_a_job_that_is_started_again_goes_on_in_its_logs(fuelrun) -> None:
    text = """
import os, time
import fuel_parallel as fp
import fuel_parallel.lazy as ft
world = fp.init()
world.all_reduce(ft.asarray(1.0)).item()
print("start", os.environ["FUEL_RESTART"])
if os.environ["FUEL_RESTART"] == "0":
    world.barrier()
    os.kill(os.getpid(), 9)
"""
    done = fuelrun.run("-n", "2", "--max-restarts", "1", "--log-dir", "logs", fuelrun.write(text))
    assert done.returncode == 0, done.stderr
    lines = lines_of(fuelrun.folder / "logs/rank-0.log")
    assert [line for line in lines if line.startswith("start")] == ["start 0", "start 1"]
    assert sum(", restart 1 --" in line for line in lines) == 1


@pytest.mark.parametrize("ranks", [["-n", "2"], []])
def test_a_folder_that_cannot_be_written_is_said_before_the_start(fuelrun, ranks: list[str]) -> None:
    (fuelrun.folder / "file").touch()
    done = fuelrun.run(*ranks, "--log-dir", "file/logs", fuelrun.write("print('started')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--log-dir file/logs: Not a directory; name a folder that every rank can write to" in done.stderr
    with pytest.raises(LaunchError, match="File exists"):
        check(fuelrun.folder / "file")


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    files = Files(tmp_path, 3, "[3/4] ")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
        told = files.write(b"a line\n" * 20)
        assert told.count("the job goes on without it") == 2
        assert f"fuelrun: [3/4] cannot write {tmp_path / 'rank-3.log'}: File too large" in told
        assert files.write(b"more\n") == ""
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("tag", [(), ("--tag-output",)])
@pytest.mark.parametrize("log", [(), ("--log-dir", "logs")])
def test_many_lines_come_whole_and_none_is_lost(fuelrun, tag: tuple[str, ...], log: tuple[str, ...]) -> None:
    """4 ranks, as fast as they can: a hundred thousand lines a second and more."""
    count = int(os.environ.get("FUEL_STRESS_LINES", "10000"))
    text = f"import os\nfor i in range({count}): print(f'<{{os.environ['RANK']}}:{{i}}:' + 'x' * (i % 200) + '>')"
    done = fuelrun.run("-n", "4", *tag, *log, fuelrun.write(text.replace("os.environ['RANK']", 'os.environ["RANK"]')))
    assert done.returncode == 0, done.stderr
    wanted = {f"<{rank}:{i}:{'x' * (i % 200)}>" for rank in range(4) for i in range(count)}
    if tag:
        wanted = {f"[{line[1]}/4] {line}" for line in wanted}
    lines = done.stdout.splitlines()
    assert len(lines) == len(wanted)
    assert set(lines) == wanted
    if log:
        assert len(lines_of(fuelrun.folder / "logs/merged.log")) == len(wanted) + 4


LOGGING = """
import logging
import fuel_parallel as fp
world = fp.init()
if CONFIGURED: logging.basicConfig(format="mine %(message)s")
logging.getLogger("data").warning("file %s", world.rank)
logging.getLogger("data").info("not shown")
"""


def test_records_of_logging_have_their_rank_unless_the_script_says_how(fuelrun) -> None:
    done = fuelrun.run("-n", "2", fuelrun.write(LOGGING.replace("CONFIGURED", "False")))
    host = os.uname().nodename
    assert sorted(done.stderr.splitlines()) == [f"[rank {r}/2 {host}] WARNING data: file {r}" for r in range(2)]
    done = fuelrun.run("-n", "2", fuelrun.write(LOGGING.replace("CONFIGURED", "True")))
    assert sorted(done.stderr.splitlines()) == ["mine file 0", "mine file 1"]


def test_prefixes() -> None:
    assert prefixed(b"", b"a ") == b""
    assert prefixed(b"\n\n", b"a ") == b"a \na \n"

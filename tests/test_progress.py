"""Progress of loops: what stands on a terminal, in a pipe, and on other ranks, and what happens when a loop breaks."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import environment, progress_bar
from fuel_parallel.errors import ArgumentError


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def pass_(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_bar, "time", clock)
    return clock


@dataclass
class Captured:
    """What was written to stderr so far."""

    capsys: pytest.CaptureFixture[str]
    text: str = ""

    def __str__(self) -> str:
        self.text += self.capsys.readouterr().err
        return self.text

    def lines(self) -> list[str]:
        return str(self).splitlines()


@pytest.fixture(autouse=True)
def stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Captured]:
    """A pipe, of a process that no launcher started."""
    for name in set(os.environ) - set(environment.without_launcher(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.delenv(progress_bar.TERMINAL, raising=False)
    yield Captured(capsys)
    assert progress_bar._showing == []
    assert progress_bar._OnTerminal._screen is None


def test_the_items_come_through_in_order() -> None:
    assert list(fp.progress("abc")) == ["a", "b", "c"]
    assert list(fp.progress(iter([1, 2]))) == [1, 2]


def test_a_loop_may_be_run_again() -> None:
    bar = fp.progress([1, 2])
    assert [list(bar), list(bar), bar.done] == [[1, 2], [1, 2], 2]


def test_the_total_is_the_length_where_there_is_one() -> None:
    assert fp.progress([1, 2]).total == 2
    assert fp.progress(iter([1, 2])).total is None
    assert fp.progress(iter([1, 2]), total=5).total == 5


def test_a_total_is_not_negative() -> None:
    with pytest.raises(ArgumentError, match="total must not be negative, but is -1"):
        fp.progress([], total=-1)


def test_a_pipe_gets_the_first_item_every_tenth_and_the_last(stderr: Captured, clock: Clock) -> None:
    for _ in fp.progress(range(200), description="training"):
        clock.pass_(1)
    counts = [int(line.split()[1].partition("/")[0]) for line in stderr.lines()]
    assert counts == [1, *range(21, 200, 20), 200]


def test_a_line_says_how_long_it_took_and_takes_how_fast_it_is_and_what_is_shown(
    stderr: Captured, clock: Clock
) -> None:
    bar = fp.progress(range(90), description="training")
    for step in bar:
        clock.pass_(2 if step else 10)
        bar.show(loss=2.3456789, tokens_per_s=12345.6, phase="warm up")
    assert stderr.lines()[0] == "training  1/90  0:10 < 14:50  10 s each  loss 2.346  tokens/s 12,346  phase warm up"
    # The slow first item is left out of the rate of the others.
    assert stderr.lines()[1].startswith("training  10/90  0:28 < 2:40  2 s each  loss")
    assert stderr.lines()[-1].startswith("training  90/90  3:08  2 s each  loss")


def test_a_quick_loop_gets_two_lines(stderr: Captured, clock: Clock) -> None:
    for _ in fp.progress(range(1000)):
        clock.pass_(0.001)
    assert [line.split()[0] for line in stderr.lines()] == ["1/1000", "1000/1000"]


def test_one_item_gets_one_line(stderr: Captured) -> None:
    list(fp.progress([1]))
    assert len(stderr.lines()) == 1


def test_no_items_are_not_worth_a_line(stderr: Captured) -> None:
    list(fp.progress([]))
    assert stderr.lines() == []


def test_a_slow_loop_is_not_silent_for_long(stderr: Captured, clock: Clock) -> None:
    for _ in fp.progress(range(100)):
        clock.pass_(601)
    assert len(stderr.lines()) == 100


def test_without_a_total_lines_come_by_time(stderr: Captured, clock: Clock) -> None:
    for _ in fp.progress(iter(range(100)), description="reading"):
        clock.pass_(1)
    assert stderr.lines()[0] == "reading  1  0:01  1/s"
    assert [line.split()[1] for line in stderr.lines()] == ["1", "31", "61", "91", "100"]


def test_a_loop_inside_of_a_loop_leaves_the_lines_to_the_outer_one(stderr: Captured, clock: Clock) -> None:
    for _ in fp.progress(range(20), description="outer"):
        for _ in fp.progress(range(100), description="inner"):
            clock.pass_(0.001)
    assert [line.split()[0] for line in stderr.lines()] == ["outer", "outer"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_loop_that_fails_says_how_far_it_came_and_passes_the_error_on(
    error: type[BaseException], stderr: Captured
) -> None:
    with pytest.raises(error):  # noqa: PT012
        for item in fp.progress(range(10)):
            if item == 4:
                raise error
    assert stderr.lines()[-1].startswith("4/10")


def test_breaking_off_ends_the_display(stderr: Captured) -> None:
    for item in fp.progress(range(10)):
        if item == 4:
            break
    assert stderr.lines()[-1].startswith("4/10")


@pytest.mark.parametrize("variables", [("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])
def test_other_ranks_are_silent(variables: tuple[str, str], stderr: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, said in ((1, 0), (0, 2)):
        stderr.text = ""
        monkeypatch.setenv(variables[0], str(rank))
        monkeypatch.setenv(variables[1], "2")
        assert list(fp.progress(range(3))) == [0, 1, 2]
        assert len(stderr.lines()) == said


def test_a_tensor_is_computed_when_it_is_shown() -> None:
    bar = fp.progress(range(3))
    loss = ft.asarray(1.5) * 2
    bar.show(loss=loss)
    assert loss.is_realized
    assert bar.values == {"loss": 3.0}


@pytest.mark.parametrize("stream", [None, "closed", "full"])
def test_the_loop_runs_where_nothing_can_be_written(stream: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {None: None, "closed": closed, "full": Full()}[stream])
    assert list(fp.progress(range(20))) == list(range(20))


def test_the_loop_runs_where_the_terminal_breaks(stderr: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(stream: Any) -> Any:
        raise RuntimeError("no such terminal")

    monkeypatch.setattr(progress_bar, "_new_screen", broken)
    monkeypatch.setenv(progress_bar.TERMINAL, "80")
    assert list(fp.progress(range(20))) == list(range(20))


# On a terminal.

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(text: str) -> str:
    return CONTROL.sub("", text)


def last_drawn(text: str) -> str:
    return plain(re.split(r"[\r\n]+", text.rstrip())[-1])


def test_fuelrun_tells_the_width_of_its_terminal(stderr: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress_bar.TERMINAL, "70")
    bar = fp.progress(range(20), description="training")
    for _ in bar:
        bar.show(loss=0.5)
    drawn = last_drawn(str(stderr))
    assert drawn.startswith("training ━")
    assert " 20/20  0:00" in drawn
    assert "loss 0.5" in drawn
    assert len(drawn) <= 70


@pytest.mark.parametrize("width", ["1", "20", "500"])
def test_any_width_will_do(width: str, stderr: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress_bar.TERMINAL, width)
    assert list(fp.progress(range(3), description="[training/]")) == [0, 1, 2]
    assert "training" in plain(str(stderr)) or width != "500"


def test_the_bar_is_not_drawn_for_every_item(stderr: Captured, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress_bar.TERMINAL, "70")
    for _ in fp.progress(range(1000)):
        clock.pass_(0.001)
    assert str(stderr).count("━\x1b") < 20


def test_loops_inside_of_loops_share_the_screen(
    stderr: Captured, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(progress_bar.TERMINAL, "70")
    for _ in fp.progress(range(3), description="outer"):
        for _ in fp.progress(range(3), description="inner"):
            clock.pass_(1)
    assert "inner" in plain(str(stderr))
    assert last_drawn(str(stderr)).startswith("outer")


def test_a_dumb_terminal_gets_lines(stderr: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress_bar.TERMINAL, "70")
    monkeypatch.setenv("TERM", "dumb")
    list(fp.progress(range(3)))
    assert "\x1b" not in str(stderr)
    assert len(stderr.lines()) == 2


def on_a_terminal(script: str, folder: Path, interrupt_after: float | None = None) -> tuple[str, str, int]:
    """What a script writes to its terminal and to its standard output, a pipe, and its exit status."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    ours, theirs = pty.openpty()
    environ = environment.without_launcher(os.environ) | {"TERM": "xterm", "COLUMNS": "80", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "script.py"], cwd=folder, env=environ, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    if interrupt_after is not None:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(interrupt_after)
        process.send_signal(2)
    drawn = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side has hung up
            break
        if not piece:
            break
        drawn += piece
    os.close(ours)
    said = process.communicate(timeout=30)[0]
    return drawn.decode(), said.decode(), process.returncode


def test_what_is_printed_into_a_file_meanwhile_stays_in_the_file(tmp_path: Path) -> None:
    drawn, said, code = on_a_terminal(
        """
        import fuel_parallel as fp
        for x in fp.progress(range(3), description="training"):
            print("item", x)
        """,
        tmp_path,
    )
    assert (said, code) == ("item 0\nitem 1\nitem 2\n", 0)
    assert "3/3" in plain(drawn)
    assert "item" not in drawn


def test_an_exception_comes_below_the_bar_and_leaves_the_cursor(tmp_path: Path) -> None:
    drawn, _, code = on_a_terminal(
        """
        import fuel_parallel as fp
        for x in fp.progress(range(3), description="training"):
            if x == 1:
                raise ValueError("spoilt")
        """,
        tmp_path,
    )
    bar, traceback = plain(drawn).split("Traceback")
    assert bar.rstrip(" ").endswith("\n")
    assert "1/3" in bar
    assert "ValueError: spoilt" in traceback
    assert "\x1b[?25l" not in drawn  # hides the cursor
    assert code == 1


def test_ctrl_c_leaves_the_cursor(tmp_path: Path) -> None:
    drawn, _, code = on_a_terminal(
        """
        import time
        import fuel_parallel as fp
        for x in fp.progress(range(300), description="training"):
            print(x)
            time.sleep(0.1)
        """,
        tmp_path,
        interrupt_after=0.3,
    )
    assert "KeyboardInterrupt" in drawn
    assert "\x1b[?25l" not in drawn
    assert code == -2


def test_the_module_loads_neither_arrays_nor_mpi_nor_rich(tmp_path: Path) -> None:
    program = "import sys, fuel_parallel.progress_bar; print(sorted({'numpy', 'mpi4py', 'rich'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.stdout == "[]\n", run.stderr

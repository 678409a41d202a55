"""How far a loop has come: a bar on a terminal, plain lines elsewhere, on rank 0 alone.

    bar = fp.progress(range(1000), description="training")
    for step in bar:
        ...
        bar.show(loss=loss, tokens_per_s=rate)

On a terminal, fuelrun's included, that is one line which is redrawn between two items, a few times a second:

    training ━━━━━━━━━━━━━━━━━━━━━ 120/1000  0:11 < 1:20  11.0/s  loss 2.314  tokens/s 11,264

In a pipe or a file it is a line for the first item, about every tenth of the loop and the last one. Other ranks say
nothing. There is no thread behind it, and the cursor is never hidden: whatever ends the process, Ctrl-C, an exception
or SIGKILL, leaves the terminal as it was. Where nothing can be drawn the loop runs on without.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TextIO, TypeVar

from fuel_parallel import environment
from fuel_parallel.arguments import checked
from fuel_parallel.errors import ArgumentError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Item = TypeVar("Item")

TERMINAL = "FUEL_TERMINAL"
"""Set by fuelrun in its ranks, whose stderr is a pipe, when its own is a terminal: the width of that terminal."""

_REDRAW_S = 0.2
_QUIET_AT_LEAST_S = 3.0  # between two plain lines
_QUIET_AT_MOST_S = 600.0


@checked
def progress(iterable: Iterable[Item], total: int | None = None, description: str = "") -> Bar[Item]:
    """An iterable of the same items that shows on rank 0's stderr how far the loop has come.

    Args:
        iterable: What to loop over.
        total: Number of items; taken from `len(iterable)` where it has one.
        description: A word or two that stand before the numbers.

    >>> bar = progress([1, 2, 3], description="adding")
    >>> sum(bar), bar.done, bar.total
    (6, 3, 3)
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if total is not None and total < 0:
        raise ArgumentError(f"progress: total must not be negative, but is {total}")
    return Bar(iterable, total, description)


@dataclass(eq=False)
class Bar(Generic[Item]):
    """What `progress` returns. `done` counts the items whose turn in the loop is over."""

    iterable: Iterable[Item]
    total: int | None
    description: str
    done: int = field(default=0, init=False)
    values: dict[str, float | str] = field(default_factory=dict, init=False)
    _began: float = field(default=0.0, init=False)
    _first_done: float = field(default=0.0, init=False)

    def show(self, **values: Any) -> None:
        """Shows named values behind the numbers until they are set anew; `tokens_per_s` is shown as tokens/s.

        A tensor is computed here and now, on every rank alike.
        """
        self.values.update({name: v if isinstance(v, str | int | float) else float(v) for name, v in values.items()})

    def __iter__(self) -> Generator[Item]:
        self.done = 0
        self._began = time.monotonic()
        display = _display() if _rank() == 0 else _Nowhere()
        try:
            display.start(self)
            for item in self.iterable:
                yield item
                self.done += 1
                if self.done == 1:
                    self._first_done = time.monotonic()
                display.update(self)
        finally:
            display.stop(self)

    def facts(self) -> list[str]:
        """The numbers as they are shown: count, time gone and to come, rate, values."""
        elapsed = time.monotonic() - self._began
        count = str(self.done) if self.total is None else f"{self.done}/{self.total}"
        facts = [count, _clock(elapsed)]
        if self.done:
            rate = self._rate()
            if self.total is not None and self.done < self.total:
                facts[-1] += f" < {_clock((self.total - self.done) / rate)}"
            facts.append(f"{_number(rate)}/s" if rate >= 1 else f"{_number(1 / rate)} s each")
        facts += [f"{_spoken(name)} {v if isinstance(v, str) else _number(v)}" for name, v in self.values.items()]
        return facts

    def _rate(self) -> float:
        """Items a second. The first is often many times as slow as the others: it counts only while it is alone."""
        others = self.done - 1
        since = self._first_done if others else self._began
        return (others or 1) / max(time.monotonic() - since, 1e-9)


def _clock(seconds: float) -> str:
    """As people write it.

    >>> _clock(71), _clock(3671)
    ('1:11', '1:01:11')
    """
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def _number(value: float) -> str:
    """Four digits, or all of those before the point.

    >>> _number(2.31415), _number(11264.4), _number(3), _number(0.00061234)
    ('2.314', '11,264', '3', '0.0006123')
    """
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.4g}"


def _spoken(name: str) -> str:
    return name.replace("_per_", "/").replace("_", " ")


def _rank() -> int:
    """This process's rank: MPI's own word where MPI runs, else what the launcher claims, else 0."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return int(mpi.COMM_WORLD.rank)
    claim = environment.detect()
    return claim.rank if claim is not None else 0


# Where it is shown.


class _Display(Protocol):
    def start(self, bar: Bar[Any]) -> None: ...
    def update(self, bar: Bar[Any]) -> None: ...
    def stop(self, bar: Bar[Any]) -> None: ...


class _Nowhere:
    def start(self, bar: Bar[Any]) -> None:
        pass

    update = stop = start


_showing: list[_Display] = []  # displays of loops that run now, the outermost first


def _display() -> _Display:
    stream = sys.stderr
    if stream is None:
        return _Nowhere()
    return _Guarded(_OnTerminal(stream) if _is_terminal(stream) else _InLines(stream))


def _is_terminal(stream: TextIO) -> bool:
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        return os.environ.get(TERMINAL, "").isdigit() or stream.isatty()
    except ValueError:  # closed
        return False


class _Guarded:
    """A display whose troubles (a closed pipe, a strange terminal) are not the script's: it falls silent instead."""

    def __init__(self, display: _Display) -> None:
        self._display = display

    def start(self, bar: Bar[Any]) -> None:
        self._try(self._display.start, bar)
        _showing.append(self)

    def update(self, bar: Bar[Any]) -> None:
        self._try(self._display.update, bar)

    def stop(self, bar: Bar[Any]) -> None:
        self._try(self._display.stop, bar)
        if self in _showing:
            _showing.remove(self)

    def _try(self, action: Callable[[Bar[Any]], None], bar: Bar[Any]) -> None:
        try:
            action(bar)
        except Exception:  # whatever a terminal or rich comes up with
            self._display = _Nowhere()


class _InLines:
    """Plain lines, for pipes and files."""

    last_line = 0.0  # when any of them wrote its last: loops inside of loops share the patience of who reads

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._written = -1  # items done at the last line

    def start(self, bar: Bar[Any]) -> None:
        self._outermost = not _showing
        if self._outermost:
            _InLines.last_line = time.monotonic()

    def update(self, bar: Bar[Any]) -> None:
        quiet = time.monotonic() - _InLines.last_line
        tenth = max((bar.total or 0) // 10, 1)
        far = bar.done - self._written >= tenth if bar.total else quiet >= 10 * _QUIET_AT_LEAST_S
        due = (far and quiet >= _QUIET_AT_LEAST_S) or quiet >= _QUIET_AT_MOST_S
        is_first = self._outermost and bar.done == 1
        if is_first or (due and bar.done != bar.total):
            self._write(bar)

    def stop(self, bar: Bar[Any]) -> None:
        if self._outermost and self._written != bar.done and bar.done:
            self._write(bar)

    def _write(self, bar: Bar[Any]) -> None:
        self._written = bar.done
        _InLines.last_line = time.monotonic()
        self._stream.write("  ".join(filter(None, [bar.description, *bar.facts()])) + "\n")
        self._stream.flush()


class _OnTerminal:
    """One line that is redrawn, by rich; loops inside of loops get a line each below it."""

    _screen: Progress | None = None
    _tasks: ClassVar[dict[Bar[Any], TaskID]] = {}  # what is on the screen
    _drawn = 0.0  # when that was drawn last

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, bar: Bar[Any]) -> None:
        self._owner = _OnTerminal._screen is None
        if _OnTerminal._screen is None:
            screen = _new_screen(self._stream)
            screen.start()
            _OnTerminal._screen = screen
        self._rich = _OnTerminal._screen
        self._tasks[bar] = self._rich.add_task(bar.description, total=bar.total, facts="")
        if self._owner:
            self._draw()

    def update(self, bar: Bar[Any]) -> None:
        if time.monotonic() - _OnTerminal._drawn >= _REDRAW_S:
            self._draw()

    def stop(self, bar: Bar[Any]) -> None:
        if not self._owner:
            self._rich.remove_task(self._tasks.pop(bar))
            return
        try:
            self._draw()
        finally:
            _OnTerminal._screen = None
            self._tasks.clear()
            self._rich.stop()

    def _draw(self) -> None:
        _OnTerminal._drawn = time.monotonic()
        for bar, task in self._tasks.items():
            self._rich.update(task, completed=bar.done, facts="  ".join(bar.facts()))
        self._rich.refresh()


def _new_screen(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    class ConsoleWithCursor(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False  # it was never hidden

    width = os.environ.get(TERMINAL, "")
    of_fuelrun = width.isdigit() and not stream.isatty()
    console = ConsoleWithCursor(
        file=stream,
        force_terminal=True,
        width=max(int(width), 20) if of_fuelrun else None,
    )
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
        TextColumn("{task.fields[facts]}", markup=False, table_column=Column(no_wrap=True)),
        console=console,
        auto_refresh=False,
        expand=True,
        # What the script prints meanwhile goes above the bar, unless it goes somewhere else.
        redirect_stdout=of_fuelrun or (sys.stdout is not None and sys.stdout.isatty()),
    )

"""Laps: what a rank does one after the other in steps that repeat, such as the actions of a pipeline schedule.

A lap ends where the next one begins, so one look at the clock and one note of 16 bytes is all that a lap costs.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from typing import Any

MOST_LAPS = 500_000
"""That are noted at most of one row of laps; what comes later is counted as dropped."""

_STEP = -1


class Laps:
    """A row of laps of this process. `about` says what they are of, in terms of JSON.

    >>> laps = Laps({"name": "1f1b"})
    >>> laps.begin_step()
    >>> laps.end("0F0")
    >>> laps.end("0B0")
    >>> [(step, name) for step, name, began, ended in laps.spans()]
    [(0, '0F0'), (0, '0B0')]
    """

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.dropped = 0
        self._notes = array("q")  # pairs: the number of a name, or _STEP, and when it ended
        self._numbers: dict[Any, int] = {}

    def begin_step(self) -> None:
        """The next step begins, and its first lap."""
        self._note(_STEP)

    def end(self, what: Any) -> None:
        """A lap has ended, and the next begins. `str(what)` is its name; it is taken when the trace is written."""
        numbers = self._numbers
        number = numbers.get(what)
        if number is None:
            number = numbers[what] = len(numbers)
        self._note(number)

    def _note(self, number: int) -> None:
        if len(self._notes) < 2 * MOST_LAPS:
            self._notes.extend((number, time.perf_counter_ns()))
        else:
            self.dropped += 1

    def first(self) -> int | None:
        """When the first step began, in nanoseconds of `time.perf_counter_ns`; None before it."""
        return self._notes[1] if self._notes else None

    def spans(self) -> Iterator[tuple[int, str, int, int]]:
        """Of each lap its step, its name, and when it began and ended, in nanoseconds."""
        names = [str(what) for what in self._numbers]
        step, before = -1, 0
        for number, now in zip(self._notes[::2], self._notes[1::2], strict=True):
            if number == _STEP:
                step += 1
            else:
                yield step, names[number], before, now
            before = now

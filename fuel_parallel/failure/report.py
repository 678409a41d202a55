"""What is said of a failure: its status, its traceback, and how that is printed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from fuel_parallel.errors import CollectiveTimeoutError, FuelError
from fuel_parallel.failure.rank import me

TRACEBACK = "FUEL_TRACEBACK"

_OWN_FRAMES = str(Path(__file__).parent.parent) + os.sep


def exit_code(error: BaseException) -> int:
    """The status with which a rank ends: 1 for an exception, 130 for Ctrl-C, what `sys.exit` was given.

    124 is for a collective that waited for too long, as of timeout(1).
    A `SystemExit` counts modulo 256, as for every process, but never becomes 0 by that: `sys.exit(256)` is 1.
    """
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, CollectiveTimeoutError):
        return 124
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    if not isinstance(error.code, int):
        return 1
    return (error.code & 0xFF) or (1 if error.code else 0)


def describe(error: BaseException) -> str:
    """The traceback as a user wants to read it, ending in a newline.

    An error that fuel-parallel raised on purpose is about the caller's line, so the library's own frames are left
    out of it; with FUEL_TRACEBACK=full in the environment all are shown.
    """
    if isinstance(error, KeyboardInterrupt):
        return one_line(error) + "\n"
    if isinstance(error, SystemExit):
        return one_line(error) + "\n" if one_line(error) else ""
    report = traceback.TracebackException.from_exception(error)
    if isinstance(error, FuelError) and os.environ.get(TRACEBACK) != "full":
        for part in _chain(report):
            users = [frame for frame in part.stack if not frame.filename.startswith(_OWN_FRAMES)]
            part.stack = traceback.StackSummary.from_list(users)
        if not report.stack:  # found out after the script's end
            return "".join(report.format_exception_only())
    return "".join(report.format())


def _chain(report: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    pending, seen = [report], set[int]()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        pending += [link for link in (part.__cause__, part.__context__) if link is not None]
        pending += part.exceptions or []


def one_line(error: BaseException) -> str:
    """What happened in one line; empty for a `sys.exit` with a number, which has nothing to say."""
    if isinstance(error, SystemExit):
        return "" if error.code is None or isinstance(error.code, int) else str(error.code)
    if isinstance(error, KeyboardInterrupt):
        frames = traceback.extract_tb(error.__traceback__)
        where = f" at {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
        return f"interrupted{where}"
    return traceback.format_exception_only(error)[-1].strip().partition("\n")[0]


def tagged(text: str) -> str:
    """A text with who says it, and the tag of `fuelrun --tag-output` before each line."""
    this = me()
    if this.world_size != 1 and text:
        of = "" if this.world_size is None else f"/{this.world_size}"
        text = f"[rank {this.rank}{of} {os.uname().nodename}] {text}"
    return "".join(this.line_tag + line for line in text.splitlines(keepends=True))


def write(text: str) -> None:
    """To standard error, in one write as far as the kernel takes it, so that no other rank gets in between."""
    data = text.encode("utf-8", "backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def flush() -> None:
    """Writes what is buffered."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a closed or broken stream must not hide the failure itself
            stream.flush()

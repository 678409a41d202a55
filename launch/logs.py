"""Log files: `--log-dir DIR` keeps what each rank prints in `rank-R.log`, and all of it in `merged.log`.

What a rank writes, in Python, in C, or by programs that it starts, passes through a small process of its own
(`fuelrun-log`), which writes whole lines to the files and on to where they went before. So the last words of a rank
that crashes are not lost, and nobody's line is cut by another's. Files are appended to: a job that is started again
goes on in them, after a line that says so.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import select
import sys
import time
from pathlib import Path

from fuel_parallel import failure
from fuel_parallel.errors import LaunchError
from fuelrun.launch import processes

MERGED = "merged.log"
_SHOWN_AFTER_MS = 100  # a line without an end, a progress bar say, is not kept from a terminal
_LONGEST = 1 << 20  # a line that is longer is written in pieces
_DRAIN_S = 2.0  # how long a rank alone waits at its end for its output to be written
_DRAWN = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|[^\r\n]*\r(?!\n)")  # colours, and what was drawn over


def check(folder: Path) -> None:
    """Make the folder, or raise LaunchError: a job must not lose its output for a typo."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK | os.X_OK) else "it may not be written to"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise LaunchError(f"--log-dir {folder}: {reason}; name a folder that every rank can write to, or leave it out")


def divert(folder: Path, rank: int, world_size: int | None, *, tag: str = "") -> None:
    """From here on what this process prints goes into the files of `folder`, too. To be called before any thread is.

    Args:
        folder: It is made if it is not there; raises LaunchError if that fails.
        rank: Whose output it is.
        world_size: Number of ranks; None where that is not known.
        tag: What the lines that are passed on begin with.
    """
    check(folder)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    mark = f"[{rank}] " if world_size is None else f"[{rank}/{world_size}] "
    files = Files(folder, rank, mark)
    files.write(f"-- {mark.strip()} process {os.getpid()} on {os.uname().nodename}{_which_start()} --\n".encode())
    failure.on_report.append(lambda report: _keep(files, tag, report))
    pipes = [os.pipe(), os.pipe()]
    ended, end = os.pipe()

    def copy() -> None:
        for _, write in pipes:
            os.close(write)
        os.close(ended)
        _Copier([pipes[0][0], pipes[1][0]], files, tag.encode()).run()

    if not processes.leave_behind(processes.LOGGER, copy):
        return
    for fd, (read, write) in enumerate(pipes, 1):
        os.dup2(write, fd)
        os.close(read)
        os.close(write)
    os.close(end)
    if world_size == 1:
        atexit.register(_wait_until_written, ended)


class Files:
    """The log of a rank, and that of all."""

    def __init__(self, folder: Path, rank: int, mark: str) -> None:
        self._mark = mark
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._open: dict[Path, int] = {}
        for name in (f"rank-{rank}.log", MERGED):
            try:
                self._open[folder / name] = os.open(folder / name, flags, 0o666)
            except OSError as error:
                raise LaunchError(f"cannot write the log {folder / name}: {error.strerror}") from None

    def write(self, lines: bytes) -> str:
        """Append whole lines; returns what the user should know, once for a file that takes no more."""
        if b"\x1b" in lines or b"\r" in lines:
            lines = _DRAWN.sub(b"", lines)
        told = ""
        for path, fd in list(self._open.items()):
            text = lines if path.name != MERGED else prefixed(lines, f"{_now()} {self._mark}".encode())
            try:
                while text:
                    text = text[os.write(fd, text) :]
            except OSError as error:
                del self._open[path]
                told += f"fuelrun: {self._mark}cannot write {path}: {error.strerror}; the job goes on without it\n"
        return told


def prefixed(lines: bytes, prefix: bytes) -> bytes:
    r"""Whole lines, each behind a prefix.

    >>> prefixed(b"one\ntwo\n", b"[0/2] ")
    b'[0/2] one\n[0/2] two\n'
    """
    return prefix + lines[:-1].replace(b"\n", b"\n" + prefix) + lines[-1:] if lines and prefix else lines


class _Copier:
    """What the process left behind does: standard output and standard error, until both have ended."""

    def __init__(self, sources: list[int], files: Files, tag: bytes) -> None:
        self._targets = dict(zip(sources, (1, 2), strict=True))
        self._files = files
        self._tag = tag
        self._rest = dict.fromkeys(sources, b"")
        self._shown = dict.fromkeys(sources, 0)  # of the rest, so much has been passed on

    def run(self) -> None:
        poll = select.poll()
        for source in self._targets:
            poll.register(source, select.POLLIN)
        left = set(self._targets)
        while left:
            waiting = not self._tag and any(len(self._rest[s]) > self._shown[s] for s in left)
            ready = poll.poll(_SHOWN_AFTER_MS if waiting else None)
            for source, _ in ready:
                data = os.read(source, 1 << 16)
                self._take(source, data)
                if not data:
                    poll.unregister(source)
                    left.discard(source)
            if not ready:
                for source in left:
                    self._pass_on(source, self._rest[source][self._shown[source] :])
                    self._shown[source] = len(self._rest[source])

    def _take(self, source: int, data: bytes) -> None:
        text = self._rest[source] + data
        cut = text.rfind(b"\n") + 1 if data and len(text) < _LONGEST else len(text)
        whole, self._rest[source] = text[:cut], text[cut:]
        if not whole:
            return
        ended = whole if whole.endswith(b"\n") else whole + b"\n"
        self._pass_on(source, prefixed(ended, self._tag) if self._tag else whole[self._shown[source] :])
        self._shown[source] = 0
        if told := self._files.write(ended):
            self._pass_on(source, told.encode())

    def _pass_on(self, source: int, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more; the files still want it
            while data:
                # Whole lines, as many as a pipe takes at once: between parts of more, MPICH puts the lines of others.
                cut = data.rfind(b"\n", 0, select.PIPE_BUF) + 1 or select.PIPE_BUF
                data = data[os.write(self._targets[source], data[:cut]) :]


def _keep(files: Files, tag: str, report: str) -> None:
    lines = (line.removeprefix(tag) for line in report.splitlines(keepends=True))
    files.write("".join(lines).encode("utf-8", "backslashreplace"))


def _wait_until_written(ended: int) -> None:
    """A shell's prompt comes after the last line."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nowhere, fd)
    select.select([ended], [], [], _DRAIN_S)


def _which_start() -> str:
    number = os.environ.get("FUEL_RESTART", "0")
    return f", restart {number}" if number not in ("", "0") else ""


def _now() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now)) + f".{int(now * 1000) % 1000:03d}"

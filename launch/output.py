"""Lines that stay whole.

The launchers' own tags cut lines in two, because they tag each write and not each line. So a rank tags its own
lines and hands each to the kernel in one write; what other ranks write can only come between lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from typing_extensions import Buffer


class LineTagger(io.BufferedIOBase):
    """A binary stream that writes each whole line to `fd` in one write, behind a tag.

    A line without an end is kept until its end comes or the stream is closed.
    """

    def __init__(self, fd: int, tag: str) -> None:
        self._fd = fd
        self._tag = tag.encode()
        self._rest = b""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        """Yes."""
        return True

    def fileno(self) -> int:
        """The descriptor below, for programs that this process starts; their lines carry no tag."""
        return self._fd

    def write(self, data: Buffer, /) -> int:
        """Take `data`; each line that is complete goes out."""
        taken = bytes(data)
        with self._lock:
            *whole, self._rest = (self._rest + taken).split(b"\n")
            for line in whole:
                self._put(line)
        return len(taken)

    def close(self) -> None:
        """Write what is left as a line of its own."""
        if not self.closed:
            with self._lock, contextlib.suppress(OSError):
                if self._rest:
                    self._put(self._rest)
                    self._rest = b""
        super().close()

    def _put(self, line: bytes) -> None:
        data = self._tag + line + b"\n"
        while data:  # one write, unless the pipe is full
            data = data[os.write(self._fd, data) :]


def tag_lines(tag: str) -> None:
    """Put `tag` before every line that this process writes with `print`, `sys.stdout` or `sys.stderr`."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        earlier = getattr(sys, name)
        with contextlib.suppress(Exception):
            earlier.flush()
        errors = "backslashreplace" if name == "stderr" else "surrogateescape"
        tagger = cast(io.BufferedWriter, LineTagger(fd, tag))
        stream = io.TextIOWrapper(tagger, encoding="utf-8", errors=errors, line_buffering=True)
        setattr(sys, name, stream)


def write_whole_lines() -> None:
    """Let `print` hand over each line when it ends, though standard output is mpirun's pipe.

    Under PYTHONUNBUFFERED as well: there each piece of a line would go out alone, and MPICH mixes those of all ranks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)

"""A file that is being read: its text, its lines, and errors that say where."""

from __future__ import annotations

import re
from pathlib import Path

from fuel_parallel.errors import TopologyFileError

LARGEST = 64 << 20
"""Bytes of a file that is read at most."""

COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Source:
    r"""Text and where it comes from. `notes` are what its reader wants to be known: what it left out, or had to assume.

    >>> source = Source("hosts.txt", "n01\r\nn02")
    >>> source.lines, str(source.error("no such host", line=2))
    (['n01', 'n02'], 'hosts.txt, line 2: no such host')
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        self.lines = self.text.split("\n")
        self.notes: list[str] = []

    @classmethod
    def open(cls, path: Path) -> Source:
        """Reads a file, or standard input for `-`. Raises `TopologyFileError`: missing, too large, no text."""
        try:
            if str(path) == "-":
                with open(0, "rb", closefd=False) as file:
                    raw = file.read(LARGEST + 1)
            else:
                with path.open("rb") as file:
                    raw = file.read(LARGEST + 1)
        except OSError as reason:
            raise TopologyFileError(f"cannot read {path}: {reason.strerror}") from None
        if len(raw) > LARGEST:
            raise TopologyFileError(f"{path} is larger than {LARGEST >> 20} MiB; no topology file is")
        return cls("standard input" if str(path) == "-" else str(path), _decoded(raw, path))

    def error(self, reason: str, *, line: int | None = None, key: str = "") -> TopologyFileError:
        """To be raised: where, what is wrong, and what was expected. Lines count from 1."""
        place = [self.name, *([f"line {line}"] if line is not None else []), *([key] if key else [])]
        return TopologyFileError(f"{', '.join(place)}: {reason}")

    def note(self, text: str, *, line: int | None = None) -> None:
        """Something that the user should know, but that is no error."""
        self.notes.append(text if line is None else f"line {line}: {text}")


def _decoded(raw: bytes, path: Path) -> str:
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"  # UTF-16: PowerShell's `>`
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as reason:
        raise TopologyFileError(f"{path} is no text: {reason.reason} at byte {reason.start}") from None
    if "\0" in text:
        raise TopologyFileError(f"{path} is no text: it has zero bytes, the first at {text.index(chr(0))}")
    return text

"""The JSON in what `rocm-smi --json` and `amd-smi --json` print, with prompts and warnings around it."""

from __future__ import annotations

import json
import re
from typing import Any

from fuel_parallel.topology.files.amd_links import Cell
from fuel_parallel.topology.files.source import COLOURS, Source

START = re.compile(r"^[ \t]*(?=\[\s*\{|\{\s*\")", re.MULTILINE)
OUTERMOST = re.compile(r"^(?=\[\s*\{|\{\s*\")", re.MULTILINE)


class _TwiceError(ValueError):
    pass


def decode(source: Source) -> Any:
    """The only JSON of a text. Raises `TopologyFileError` where it is cut or not JSON, and where there is a second."""
    text = COLOURS.sub("", source.text)
    start = START.search(text)
    if start is None:
        raise source.error("no JSON; expected what `--json` prints, from its first bracket on")
    decoder = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refused)
    try:
        value, end = decoder.raw_decode(text, start.end())
    except json.JSONDecodeError as reason:
        raise source.error(f"no JSON: {reason.msg}; paste the whole output of `--json`", line=reason.lineno) from None
    except _TwiceError as reason:
        raise source.error(
            f"the key {str(reason)[:80]!r} is there twice in one object", line=_line(text, start)
        ) from None
    except (ValueError, RecursionError) as reason:
        kind = "nested too deeply" if isinstance(reason, RecursionError) else str(reason)[:120]
        raise source.error(f"no JSON that a tool wrote: {kind}", line=_line(text, start)) from None
    second = OUTERMOST.search(text, end)
    if second is not None:
        raise source.error("a second JSON text; a file describes one machine: keep one", line=_line(text, second))
    return value


def entry(source: Source, value: Any, key: str, place: str) -> Any:
    """A value of an object. Raises where that is none, or lacks the key."""
    if not isinstance(value, dict):
        raise source.error(f"found {_what(value)}, expected an object with {key!r}", key=place)
    if key not in value:
        raise source.error(f"{key!r} is missing", key=place)
    return value[key]


def integer(source: Source, value: Any, place: str, below: int) -> int:
    """A number from 0. Raises where it is something else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise source.error(f"found {_what(value)}, expected a number from 0 to {below - 1}", key=place)
    return value


def cell(source: Source, value: Any, place: str) -> Cell:
    """A word or number. Raises where it is something else."""
    if isinstance(value, bool) or not isinstance(value, str | int) or len(str(value)) > 64:
        raise source.error(f"found {_what(value)}, expected a word or a number", key=place)
    return Cell(str(value).strip(), None, place)


def _what(value: Any) -> str:
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)[:40]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(key)
        found[key] = value
    return found


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _line(text: str, place: re.Match[str]) -> int:
    return text.count("\n", 0, place.end()) + 1

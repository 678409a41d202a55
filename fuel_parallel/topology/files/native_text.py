"""TOML, YAML and JSON as plain data, and the line on which each key stands; what is known only of the text.

All three are read in bounded time and memory: keys may not repeat, YAML has neither anchors nor tags, and nothing is
nested deeper than a topology is.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from fuel_parallel.errors import DataError
from fuel_parallel.topology.files import native_yaml
from fuel_parallel.topology.files.native_yaml import DEEPEST, Path
from fuel_parallel.topology.files.source import Source

LARGEST_MIB = {"json": 16, "toml": 4, "yaml": 2}
"""By how fast each is read, so that none takes more than a minute."""
Lines = dict[Path, int]

_WORDS = "format|name|node|numa|device|nic|switch|link|override"
_JSON = re.compile(rf'\s*\{{\s*"(?:{_WORDS})"\s*:')
_TOML = re.compile(r"^[ \t]*\[\[[A-Za-z_. ]{1,80}\]\][ \t]*(?:#.*)?$|^(?:format|name)[ \t]*=[ \t]*[\"']", re.MULTILINE)
_YAML = re.compile(rf"(?:{_WORDS})[ \t]*:(?:[ \t]|$)")


def language(source: Source) -> str | None:
    """`toml`, `yaml` or `json` where the text has a sure sign of a native file in it; else None."""
    first = next((line for line in source.lines if line.strip() and not line.startswith(("#", "---", "%"))), "")
    if _JSON.match(source.text[: 1 << 16]):
        return "json"
    if _YAML.match(first):
        return "yaml"
    return "toml" if _TOML.search(source.text) else None


def parse(source: Source, form: str) -> Any:
    """The data. Raises `TopologyFileError` with the line when it is not of that language."""
    most = LARGEST_MIB[form]
    if len(source.text) > most << 20:
        raise source.error(f"a topology in {form.upper()} has at most {most} MiB; this has {len(source.text) >> 20}")
    try:
        return _PARSERS[form](source)
    except RecursionError:
        raise source.error(f"nested too deeply; expected at most {DEEPEST} levels") from None


def lines_of(source: Source, form: str) -> Lines:
    """The line of each key and of each item of a list, counted from 1. The text must have been parsed before."""
    return dict(_LINES[form](source))


# JSON.


def _json(source: Source) -> Any:
    try:
        data = json.loads(source.text, object_pairs_hook=_unique, parse_constant=_no_number)
        if re.search(r"\\u[dD][89a-fA-F]", source.text):
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except UnicodeEncodeError:
        raise source.error("half of a pair of surrogates is no letter; write the letter itself") from None
    except json.JSONDecodeError as reason:
        raise source.error(f"this is no JSON: {reason.msg}, column {reason.colno}", line=reason.lineno) from None
    except DataError as reason:
        line = _line_of_repeated(source) if "twice" in str(reason) else None
        raise source.error(str(reason), line=line) from None
    except ValueError:  # Python writes and reads no integer of more than 4300 digits
        raise source.error("a number has thousands of digits; no figure of a machine has") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise DataError(f"the key {key[:60]!r} stands twice in one table; expected once")
        found[key] = value
    return found


def _no_number(word: str) -> NoReturn:
    raise DataError(f"{word} is no figure of a machine; leave out what is unknown")


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+|\n', re.DOTALL)


def _json_lines(source: Source) -> Iterator[tuple[Path, int]]:
    """Walks over the tokens with the path of keys and indexes to where it is."""
    path: list[str | int] = []
    inside: list[str] = []
    line, key = 1, True
    for found in _JSON_TOKEN.finditer(source.text):
        word = found[0]
        if word == "\n":
            line += 1
        elif word in "{[":
            inside.append(word)
            path.append("" if word == "{" else 0)
            key = word == "{"
            if word == "[":
                yield tuple(path), line
        elif word in "}]":
            inside.pop()
            path.pop()
            key = False
        elif word == ",":
            last = path[-1]
            key = inside[-1] == "{"
            if isinstance(last, int):
                path[-1] = last + 1
                yield tuple(path), line
        elif word == ":":
            key = False
        elif key:
            path[-1] = str(json.loads(word))
            yield tuple(path), line


def _line_of_repeated(source: Source) -> int | None:
    """Where the first key stands that was there already."""
    seen: set[Path] = set()
    try:
        for path, line in _json_lines(source):
            if path in seen and isinstance(path[-1], str):
                return line
            seen.add(path)
    except (ValueError, IndexError):  # what comes later may be no JSON
        pass
    return None


# TOML.

_KEY = r"(?:[A-Za-z0-9_-]+|\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*')"
_KEYS = rf"{_KEY}(?:[ \t]*\.[ \t]*{_KEY})*"
_HEADER = re.compile(rf"[ \t]*(\[\[?)[ \t]*({_KEYS})[ \t]*\]")
_ASSIGNED = re.compile(rf"[ \t]*({_KEYS})[ \t]*=")
_TEXT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""' + r"|'''.*?'''" + r'|"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'|#[^\n]*|[\[{]|[\]}]|\n", re.DOTALL
)


def _toml(source: Source) -> Any:
    for number, line in enumerate(source.lines, 1):
        # Keys of many parts take a parser the square of their number.
        bare = re.sub(r"\"[^\"]*\"|'[^']*'", "", line).partition("#")[0]
        if bare.partition("=")[0].count(".") > 4 * DEEPEST:
            raise source.error(f"nested too deeply; expected at most {DEEPEST} levels", line=number)
    try:
        return tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as reason:
        found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", str(reason))
        what = str(reason)[: found.start()] if found else str(reason)
        at = int(found[1]) if found and found[1] else len(source.lines)
        raise source.error(f"this is no TOML: {what}", line=at) from None
    except ValueError:
        raise source.error("a number or a date is none that exists; expected such as 12 or 1.5") from None


def _toml_lines(source: Source) -> Iterator[tuple[Path, int]]:
    """The lines of tables and of their keys; what is inside of a value stands on the line of its key or of its item."""
    counts: dict[Path, int] = {}
    table: Path = ()
    text, at, line = source.text, 0, 1
    while at < len(text):
        header = _HEADER.match(text, at)
        assigned = None if header else _ASSIGNED.match(text, at)
        if header:
            table = _place(_split(header[2]), counts, header[1] == "[[")
            if table[-1] == 0:
                yield table[:-1], line
            yield table, line
            at = header.end()
        elif assigned:
            key = (*table, *_split(assigned[1]))
            yield key, line
            at = assigned.end()
        stop, line_after = _value_end(text, at, line)
        if assigned:
            yield from _items(text[at:stop], key, line)
        at, line = stop, line_after


def _place(names: Path, counts: dict[Path, int], repeated: bool) -> Path:
    """The path of a table, with the index that each table of tables has come to."""
    path: Path = ()
    for position, name in enumerate(names):
        path = (*path, name)
        if repeated and position == len(names) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path


def _split(keys: str) -> Path:
    words = re.findall(_KEY, keys)
    return tuple(word[1:-1] if word[0] in "\"'" else word for word in words)


def _value_end(text: str, at: int, line: int) -> tuple[int, int]:
    """Behind the line on which a value ends, and the number of the next: brackets and strings may span lines."""
    depth = 0
    for found in _TEXT.finditer(text, at):
        word = found[0]
        line += word.count("\n")
        depth += (word in "[{") - (word in "]}")
        if word == "\n" and depth <= 0:
            return found.end(), line
    return len(text), line


def _items(value: str, key: Path, line: int) -> Iterator[tuple[Path, int]]:
    """The lines of the items of a list, such as of inline tables."""
    if not value.lstrip().startswith("["):
        return
    depth = index = 0
    fresh = True
    for found in re.finditer(_TEXT.pattern + r"|,|[^\s\[\]{},\"'#]+", value, re.DOTALL):
        word = found[0]
        if depth == 1 and fresh and word not in "]\n," and not word.startswith("#"):
            yield (*key, index), line
            fresh = False
        if word == "," and depth == 1:
            index, fresh = index + 1, True
        depth += (word in "[{") - (word in "]}")
        line += word.count("\n")


_PARSERS: dict[str, Callable[[Source], Any]] = {"json": _json, "yaml": native_yaml.parse, "toml": _toml}
_LINES: dict[str, Callable[[Source], Iterable[tuple[Path, int]]]] = {
    "json": _json_lines,
    "yaml": native_yaml.lines_of,
    "toml": _toml_lines,
}

"""The square tables of `rocm-smi` and `amd-smi`: a title, a line of names, and a row for each name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from fuel_parallel.topology.files.amd_links import MOST_GPUS, Cell, Matrix
from fuel_parallel.topology.files.source import COLOURS, Source

MOST_SECTIONS = 64
LONGEST_LINE = 1 << 14
REMARK = re.compile(r"\s*(?:WARNING|ERROR|INFO|\[|$)")
WORD = r"[\w./:-]{1,64}"


@dataclass
class Section:
    """A title, its line, and the lines below it up to the next title, with their numbers."""

    title: str
    line: int
    body: list[tuple[int, str]] = field(default_factory=list)


def sections(source: Source, title_of: Callable[[str, int], str | None]) -> dict[str, Section]:
    """The sections by title, which `title_of` finds in a line and its number; "" ends a section.

    Raises `TopologyFileError` where a title comes twice.
    """
    found: dict[str, Section] = {}
    current: Section | None = None
    for number, line in enumerate(COLOURS.sub("", source.text).split("\n"), 1):
        line = line if len(line) < LONGEST_LINE else ""  # a table of 256 GPUs is narrower
        title = title_of(line, number)
        if title is None:
            if current is not None:
                current.body.append((number, line))
            continue
        if not title:
            current = None
            continue
        if title in found:
            raise source.error(
                f"a second {title!r}; the first is in line {found[title].line}. A file describes one machine",
                line=number,
            )
        if len(found) == MOST_SECTIONS:
            raise source.error(f"more than {MOST_SECTIONS} tables; keep those of one machine", line=number)
        current = found[title] = Section(title, number)
    return found


def square(source: Source, section: Section, name: str) -> tuple[tuple[str, ...], Matrix]:
    """The names of a table, which match a pattern, and its cells by their places.

    Lines that a terminal broke are joined, remarks between rows skipped. Raises where rows are cut or missing.
    """
    lines = [(n, line.split()) for n, line in section.body if not REMARK.match(line)]
    names, place = _names(source, section, lines, name)
    index = {one: n for n, one in enumerate(names)}
    rows: dict[str, list[Cell]] = {}
    current = ""
    for number, words in lines[place:]:
        if words[0] in index or re.fullmatch(name, words[0], re.ASCII):
            _finish(source, section, names, rows, current)
            current, words = words[0], words[1:]
            if current not in index or current in rows:
                what = "a second row of" if current in rows else "no column for the row of"
                raise source.error(f"{what} {current} in {section.title!r}; expected one each", line=number)
            rows[current] = []
        elif not current or len(rows[current]) == len(names):
            break  # what follows the table
        for word in words:
            column = names[len(rows[current])] if len(rows[current]) < len(names) else ""
            if not column or not re.fullmatch(WORD, word, re.ASCII):
                raise source.error(_surplus(section, current, word, column), line=number)
            rows[current].append(Cell(word, number, f"{section.title}, {current} to {column}"))
    _finish(source, section, names, rows, current)
    missing = [one for one in names if one not in rows]
    if missing:
        raise source.error(
            f"{section.title!r} lacks the rows of {_some(missing)}; paste the whole output", line=section.line
        )
    return names, {(index[a], b): cell for a, cells in rows.items() for b, cell in enumerate(cells)}


def _names(
    source: Source, section: Section, lines: list[tuple[int, list[str]]], name: str
) -> tuple[tuple[str, ...], int]:
    """The header, which may go on in further lines, and how many lines it takes."""
    names: dict[str, None] = {}
    place = 0
    for number, words in lines:
        if not all(re.fullmatch(name, word, re.ASCII) for word in words) or (place and words[0] in names):
            break
        for word in words:
            if word in names or len(names) == MOST_GPUS:
                reason = f"two columns called {word}" if word in names else f"more than {MOST_GPUS} columns"
                raise source.error(f"{section.title!r} has {reason}; expected each GPU once", line=number)
            names[word] = None
        place += 1
    if not names:
        raise source.error(
            f"{section.title!r} has no table; expected a line with the names of the GPUs, and a row for each",
            line=section.line,
        )
    return tuple(names), place


def _surplus(section: Section, row: str, word: str, column: str) -> str:
    if column:
        return f"the cell of {row} under {column} is {word[:40]!r}; expected a word or number"
    return f"{word[:40]!r} follows the last cell of {row} in {section.title!r}; expected one cell for each column"


def _finish(
    source: Source, section: Section, names: tuple[str, ...], rows: dict[str, list[Cell]], current: str
) -> None:
    if current and len(rows[current]) < len(names):
        cells = rows[current]
        raise source.error(
            f"the row of {current} in {section.title!r} is cut: it has {len(cells)} cells of {len(names)}; those under "
            f"{_some(list(names[len(cells) :]))} are missing. Paste the whole output",
            line=cells[-1].line if cells else _line_of(section, current),
        )


def _line_of(section: Section, name: str) -> int:
    return next((number for number, line in reversed(section.body) if line.split()[:1] == [name]), section.line)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + ", ..." * (len(names) > 8)

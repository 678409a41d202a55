"""The tables that `nvidia-smi topo` prints, wherever they stand in a text: names of columns, and rows of cells.

People paste them: tabs become spaces or get lost, colours stay, the terminal breaks lines, the end is cut off. What can
be told apart is; a row with too few or too many cells is refused, since nobody can tell which cell is which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from fuel_parallel.topology.cores import MOST
from fuel_parallel.topology.files.source import COLOURS, Source

MOST_COLUMNS = 256
"""No machine has as many GPUs and network cards; a table that says so is wrong, or wants our memory."""

MOST_TABLES = 16
"""One of links, and one of access for each of its kinds."""

NUMBER = r"(?:0|[1-9]\d{0,3})(?!\d)"
NAME = rf"(?:GPU{NUMBER}|NIC{NUMBER}|mlx\d{{1,2}}_{NUMBER})"
LINK_CELL = r"NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|X"
ACCESS_CELL = r"OK|CNS|GNS|TNS|NS|DR|U"
CELL = re.compile(rf"[ \t]*({LINK_CELL}|{ACCESS_CELL}|N/A)", re.ASCII)
LOST_ESCAPE = re.compile(r"(?:\^\[)?\[[0-9;]{0,8}m")
"""A colour of which a page or a pager took the first character."""

TITLES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")

ROW_START = re.compile(rf"[ \t]*({NAME})", re.ASCII)
GPU_ROW = re.compile(rf"^[ \t]*GPU\d+[ \t]*(?:{LINK_CELL}|{ACCESS_CELL})(?![A-Za-z])", re.ASCII | re.MULTILINE)
GPU_HEADER = re.compile(r"^[ \t]*GPU0(?:[ \t]*\S.{0,8000})?CPU Affinity", re.ASCII | re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A device of a table: its cells in the order of the columns, and what stands under the titles after them."""

    name: str
    line: int
    cells: tuple[str, ...]
    facts: dict[str, str]

    @property
    def cores(self) -> str:
        """The cores that are near, "" where they are unknown."""
        cores = self.facts.get("CPU Affinity", "")
        return "" if cores == "N/A" else cores

    @property
    def numa(self) -> int | None:
        """The NUMA domain; None where it is unknown, and where there are several."""
        numa = self.facts.get("NUMA Affinity", "")
        return int(numa) if numa.isdigit() else None


@dataclass
class Table:
    """`line` is that of the header."""

    line: int
    columns: tuple[str, ...]
    titles: tuple[str, ...]
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def is_of_access(self) -> bool:
        """Whether it says which pairs may read each other's memory (`topo -p2p`), and not how they are linked."""
        return any(re.fullmatch(ACCESS_CELL, cell) for row in self.rows.values() for cell in row.cells)


def plain_lines(source: Source) -> list[str]:
    """The lines without colours; "" for those that no table has: of any length they would take time."""
    text = LOST_ESCAPE.sub("", COLOURS.sub("", source.text))
    return [line if len(line) < 1 << 16 else "" for line in text.split("\n")]


def tables(source: Source) -> list[Table]:
    """All tables of a text, in its order. Raises `TopologyFileError` where one is cut or does not fit its header."""
    lines = plain_lines(source)
    found: list[Table] = []
    number = 0
    while number < len(lines):
        table, after = _header(source, lines, number)
        if table is None:
            number += 1
            continue
        number = _rows(source, lines, after, table)
        if table.rows:
            found.append(table)
        if len(found) > MOST_TABLES:
            raise source.error(f"more than {MOST_TABLES} tables; keep that of one machine", line=table.line)
    return found


def _header(source: Source, lines: list[str], number: int) -> tuple[Table | None, int]:
    """The header that begins at a line, if any, and the line after it: the terminal may have broken it."""
    columns, titles = _names(lines[number])
    if not columns or columns[0] != "GPU0":
        return None, number
    after = number + 1
    while after < len(lines) and not ROW_START.fullmatch(lines[after]) and len(columns) <= MOST_COLUMNS:
        more, ends = _names(lines[after])
        if not (more or ends) or titles or (more and more[0] == "GPU0"):
            break
        columns, titles, after = columns + more, ends, after + 1
    if len(columns) > MOST_COLUMNS:
        raise source.error(
            f"a table with {len(columns)} columns; no machine has more than {MOST_COLUMNS} GPUs and network cards",
            line=number + 1,
        )
    twice = next((c for n, c in enumerate(columns) if c in columns[:n]), None)
    if twice is not None:
        raise source.error(f"two columns are called {twice}; expected each device once", line=number + 1)
    return Table(number + 1, columns, titles), after


def _names(line: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The devices and the titles of a line of a header; nothing if it has anything else."""
    start = re.search("|".join(TITLES), line)
    devices, rest = (line[: start.start()], line[start.start() :]) if start else (line, "")
    names: list[str] = []
    for word in devices.split():
        if re.fullmatch(f"{NAME}+", word, re.ASCII):
            names.extend(re.findall(NAME, word))  # "NIC8NIC9": the tab between them was lost
        elif names and re.fullmatch(r"[a-z][a-z0-9_.-]{0,30}\d[a-z0-9_.-]{0,30}", word, re.ASCII):
            names.append(word)  # old drivers write the cards' own names: bnxt_re0, hfi1_0
        else:
            return (), ()
        if len(names) > MOST_COLUMNS:
            break
    return tuple(names), tuple(title for title in TITLES if title in rest)


def _rows(source: Source, lines: list[str], number: int, table: Table) -> int:
    """Reads the rows after a header, and gives the line after them."""
    known = set(table.columns)
    while number < len(lines):
        name = _row_name(lines[number], known)
        if name is None:
            if lines[number].strip() or (table.rows and not _row_follows(lines, number, known)):
                break
            number += 1
            continue
        if name in table.rows:
            raise source.error(f"a second row of {name}; expected one row a device", line=number + 1)
        if len(table.rows) >= MOST_COLUMNS:
            raise source.error(f"more than {MOST_COLUMNS} rows; expected one for each column", line=number + 1)
        text, after = _joined(lines, number, known)
        table.rows[name] = _row(source, table, name, text, number + 1)
        number = after
    return number


def _row_follows(lines: list[str], number: int, known: set[str]) -> bool:
    """Whether an empty line is only between two rows: some pages double every line break."""
    return number + 1 < len(lines) and _row_name(lines[number + 1], known) is not None


def _row_name(line: str, known: set[str]) -> str | None:
    """The device whose row a line is: it begins with its name, and no second name follows, as in a header."""
    start = ROW_START.match(line)
    name = start[1] if start else line.split(maxsplit=1)[0] if line.strip() else ""
    rest = line.lstrip()[len(name) :]
    if not name or (start is None and name not in known) or rest.startswith(":") or ROW_START.match(rest):
        return None
    return name


def _joined(lines: list[str], number: int, known: set[str]) -> tuple[str, int]:
    """A row with the lines that the terminal broke off from it, and the line after them."""
    after = number + 1
    while (
        after < min(len(lines), number + MOST_COLUMNS)
        and _continues(lines[after])
        and _row_name(lines[after], known) is None
    ):
        after += 1
    return " ".join([lines[number], *(line.strip() for line in lines[number + 1 : after])]), after


def _continues(line: str) -> bool:
    """Whether a line is cells and numbers only; those that say what a word means have a "="."""
    words = line.split()
    return bool(words) and all(re.fullmatch(rf"(?:{LINK_CELL}|N/A|[\d,-])+", word, re.ASCII) for word in words)


def _row(source: Source, table: Table, name: str, text: str, line: int) -> Row:
    cells: list[str] = []
    place = text.index(name) + len(name)
    while len(cells) < len(table.columns) and (cell := CELL.match(text, place)):
        cells.append(cell[1])
        place = cell.end()
    rest = text[place:]
    if len(cells) < len(table.columns):
        _refuse(source, table, name, cells, rest, line)
    extra = CELL.match(rest)
    if extra and extra[1] != "N/A":
        raise source.error(
            f"the row of {name} has more cells than the header (line {table.line}) has devices: {extra[1]!r} follows "
            f"that of {table.columns[-1]}; paste the header whole",
            line=line,
        )
    facts = _facts(source, table, rest, line)
    for title, value in facts.items():
        if value != "N/A" and not _ascends(value):
            raise source.error(f"found {value[:40]!r}, expected a list such as '0-3,8', or N/A", line=line, key=title)
    return Row(name, line, tuple(cells), facts)


def _refuse(source: Source, table: Table, name: str, cells: list[str], rest: str, line: int) -> None:
    missing = table.columns[len(cells) :]
    found = rest.split(maxsplit=1)[0][:40] if rest.strip() else ""
    if found and not re.fullmatch(r"[\d,-]+", found):
        raise source.error(
            f"the cell of {name} under {missing[0]} is {found!r}; expected X, NV# with a number, PIX, PXB, PHB, NODE "
            "or SYS",
            line=line,
        )
    names = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
    raise source.error(
        f"the row of {name} is cut: it has {len(cells)} cells of {len(table.columns)}; those under {names} are "
        "missing. Paste the whole output of `nvidia-smi topo -m`",
        line=line,
    )


def _facts(source: Source, table: Table, rest: str, line: int) -> dict[str, str]:
    """What stands under the titles; a title whose field cannot be told is left out, which is unknown."""
    words = rest.split()
    if not words or not table.titles:
        return {}
    fields = [part.strip() for part in rest.split("\t")][1:] if rest.lstrip(" ").startswith("\t") else []
    if fields and len(fields) >= len(table.titles) and not any(" " in part for part in fields):
        # There is a tab more before the last title, but people's editors drop it.
        ends = [part for part in fields[2:] if part][:1]
        return {t: v for t, v in zip(TITLES, [*fields[:2], *ends], strict=False) if v and t in table.titles}
    if len(words) == len(table.titles):
        return dict(zip(table.titles, words, strict=True))
    source.note(f"cannot tell which of {', '.join(table.titles)} {rest.strip()[:40]!r} is; left unknown", line=line)
    return {}


def _ascends(text: str) -> bool:
    """Whether a text is a list of numbers as Linux writes them; without making it one, which may take memory."""
    last = -1
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part, re.ASCII)
        if not ends or not last < int(ends[1]) <= int(ends[2] or ends[1]) < MOST:
            return False
        last = int(ends[2] or ends[1])
    return True


def legend(source: Source) -> Iterator[tuple[int, str, str]]:
    """The lines of the "NIC Legend": `NIC0: mlx5_0`."""
    for number, line in enumerate(plain_lines(source), 1):
        found = re.fullmatch(r"\s*(NIC\d{1,4})\s*:\s*([\w.-]{1,64})\s*", line, re.ASCII)
        if found:
            yield number, found[1], found[2]

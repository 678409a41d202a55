"""From which size on a collective goes through a node's shared memory rather than through MPI: a table, and its file.

The table is measured, for no rule of thumb holds on two machines. `fuelrun bench --tune` writes it for the machine that
it runs on; where there is no file, `DEFAULT` holds, which was measured on the machine that it names. What is not in a
table that was read is not guessed: ranks beyond the last row use the last row.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from fuel_parallel.drafts import take_place
from fuel_parallel.errors import DataError

NEVER = 1 << 62
"""A threshold that no size reaches."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Thresholds for nodes with up to `ranks` ranks: the least number of bytes for which the window is faster.

    Bytes are those of the whole: of what a rank hands to `all_reduce`, `reduce_scatter` and `broadcast`, and of what it
    gets from `all_gather`. An all-reduce has three ways: small arrays are handed in (by two ranks only); others are
    reduced in place, once they have been moved into a window if they were not born there; and one whose result must
    be in private memory is copied out again.
    """

    ranks: int
    all_reduce_handed_in: int
    all_reduce_in_place: int
    all_reduce_copied: int
    reduce_scatter: int
    all_gather: int
    broadcast: int


KINDS = tuple(name for name in Row.__struct_fields__ if name != "ranks")


class CollectiveTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was measured: on which machine, with which MPI, and the rows by ascending number of ranks."""

    machine: str
    mpi: str
    rows: tuple[Row, ...]


DEFAULT = CollectiveTable(
    machine="x86-64 server (AMD Zen 3), 2 cores",
    mpi="Open MPI 5.0",
    rows=(
        Row(
            ranks=2,
            all_reduce_handed_in=16 << 10,
            all_reduce_in_place=512 << 10,
            all_reduce_copied=32 << 20,
            reduce_scatter=64 << 10,
            all_gather=128 << 10,
            broadcast=128 << 10,
        ),
        Row(
            ranks=1024,
            all_reduce_handed_in=NEVER,
            all_reduce_in_place=512 << 10,
            all_reduce_copied=32 << 20,
            reduce_scatter=256 << 10,
            all_gather=256 << 10,
            broadcast=256 << 10,
        ),
    ),
)


def least_bytes(table: CollectiveTable, kind: str, ranks: int) -> int:
    """The size from which on `kind` among `ranks` ranks of a node goes through the window.

    >>> least_bytes(CollectiveTable(machine="", mpi="", rows=()), "broadcast", 2) == NEVER
    True
    """
    for row in table.rows:
        if ranks <= row.ranks:
            return int(getattr(row, kind))
    return int(getattr(table.rows[-1], kind)) if table.rows else NEVER


def table_path() -> Path:
    """Where the table of this user is kept: `$XDG_CACHE_HOME/fuel-parallel/collectives.json`."""
    return cache_folder() / "collectives.json"


def cache_folder() -> Path:
    """Where measurements of this user's machines are kept."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if cache else Path.home() / ".cache") / "fuel-parallel"


def read_table(path: Path | None = None) -> CollectiveTable:
    """The table in a file, or `DEFAULT` where there is none.

    Raises `DataError` when the file is not a table: silently using other numbers would hide a measurement.
    """
    path = table_path() if path is None else path
    try:
        data = path.read_bytes()
    except OSError:
        return DEFAULT
    try:
        table = msgspec.json.decode(data, type=CollectiveTable)
    except (msgspec.DecodeError, UnicodeDecodeError) as reason:
        raise DataError(
            f"{path} is not a table of collectives: {reason}; remove it or run fuelrun bench --tune"
        ) from None
    ranks = [row.ranks for row in table.rows]
    if ranks != sorted(set(ranks)):
        raise DataError(f"{path}: rows must be by ascending number of ranks, but they are for {ranks} ranks")
    return table


def write_table(table: CollectiveTable, path: Path | None = None) -> Path:
    """Writes the table, whole or not at all, and says where."""
    path = table_path() if path is None else path
    write_json(path, table)
    return path


def write_json(path: Path, value: Any) -> None:
    """Writes a file of the cache, whole or not at all, whoever else writes it. Raises `OSError` when it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
        take_place(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise

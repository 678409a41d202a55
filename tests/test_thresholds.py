"""Which way a collective takes: the table, its file, and what is wrong with a file."""

from __future__ import annotations

import os
import stat

import pytest

from fuel_parallel.comm import thresholds
from fuel_parallel.comm.thresholds import NEVER, CollectiveTable, Row, least_bytes, read_table, write_table
from fuel_parallel.errors import DataError


def row(ranks, **least):
    return Row(ranks=ranks, **{**dict.fromkeys(thresholds.KINDS, NEVER), **least})


TABLE = CollectiveTable(
    machine="here",
    mpi="this one",
    rows=(
        row(ranks=2, all_reduce_in_place=10, reduce_scatter=20, all_gather=30, broadcast=40),
        row(ranks=8, all_reduce_in_place=100, reduce_scatter=200, all_gather=300, broadcast=NEVER),
    ),
)


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("all_reduce_in_place", 2, 10),
        ("all_reduce_in_place", 3, 100),
        ("reduce_scatter", 8, 200),
        ("all_gather", 64, 300),  # beyond the last row
        ("broadcast", 1, 40),
        ("broadcast", 4, NEVER),
    ],
)
def test_the_first_row_with_enough_ranks_holds(kind, ranks, expected):
    assert least_bytes(TABLE, kind, ranks) == expected


def test_an_empty_table_leaves_everything_to_mpi():
    assert least_bytes(CollectiveTable(machine="", mpi="", rows=()), "all_reduce_in_place", 2) == NEVER


def test_what_is_written_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_table() == thresholds.DEFAULT
    path = write_table(TABLE)
    assert path == tmp_path / "fuel-parallel" / "collectives.json"
    assert read_table() == TABLE
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a table of collectives: Input data was truncated"),
        ("\xff", "is not a table of collectives"),
        ('{"machine": "m", "mpi": "x", "rows": [{"ranks": 2}]}', "missing required field `all_reduce_handed_in`"),
        ('{"machine": "m", "mpi": "x", "rows": [], "more": 1}', "unknown field `more`"),
        (
            '{"machine": "m", "mpi": "x", "rows": [{"ranks": 2, "all_reduce_handed_in": "1"}]}',
            "Expected `int`, got `str`",
        ),
    ],
)
def test_a_file_that_is_no_table_is_an_error_that_names_it(tmp_path, text, message):
    path = tmp_path / "collectives.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=message) as error:
        read_table(path)
    assert str(path) in str(error.value)
    assert "fuelrun bench --tune" in str(error.value)


def test_rows_out_of_order_are_an_error(tmp_path):
    path = write_table(CollectiveTable(machine="", mpi="", rows=TABLE.rows[::-1]), tmp_path / "t.json")
    with pytest.raises(DataError, match=r"ascending number of ranks, but they are for \[8, 2\] ranks"):
        read_table(path)


def test_a_file_that_cannot_be_read_is_no_file(tmp_path):
    path = write_table(TABLE, tmp_path / "t.json")
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path.chmod(stat.S_IWUSR)
    assert read_table(path) == thresholds.DEFAULT

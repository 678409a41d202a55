"""`fuelrun bench --tune` measures, and writes a table that the library reads."""

from __future__ import annotations

import json

import pytest

from fuel_parallel.comm.thresholds import KINDS, NEVER, read_table
from fuel_parallel.comm.tuning import describe, sizes, threshold


def test_tuning_writes_a_table_that_can_be_read(fuelrun) -> None:
    done = fuelrun.run("bench", "--tune", "-n", "2", "--seconds", "0", "--json", XDG_CACHE_HOME=str(fuelrun.folder))
    assert (done.returncode, done.stderr) == (0, "")
    path = fuelrun.folder / "fuel-parallel" / "collectives.json"
    table = read_table(path)
    assert [row.ranks for row in table.rows] == [2]
    assert all(getattr(table.rows[0], kind) > 0 for kind in KINDS)
    assert json.loads(done.stdout) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say what to measure: fuelrun bench --tune"),
        (("--tune", "-n", "0"), "-n takes the number of ranks, a whole number of at least 1; got '0'"),
        (("--tune", "--seconds", "soon"), "--seconds takes seconds, 0 or more; got 'soon'"),
        (("--tune", "--output", "no/where.json"), "--output no/where.json: there is no folder"),
    ],
)
def test_mistakes_are_told_in_one_line(fuelrun, words, message) -> None:
    done = fuelrun.run("bench", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("ranks", "environ", "message"),
    [
        ("1", {}, "compares ranks, but this is one alone; fuelrun bench --tune -n 2 starts two"),
        ("2", {"FUEL_NODE_LOCAL": "0"}, "do not share the memory of one node"),
    ],
)
def test_where_there_is_nothing_to_tune_that_is_said(fuelrun, ranks, environ, message) -> None:
    done = fuelrun.run("bench", "--tune", "-n", ranks, **environ)
    assert done.returncode == 1
    assert message in done.stderr


def test_help_teaches(fuelrun) -> None:
    text = fuelrun.run("bench", "--help").stdout
    for part in ("--tune", "fuelrun bench --tune -n 4", "srun", "shared memory is faster than MPI", "collectives.json"):
        assert part in text
    assert "bench" in fuelrun.run("--help").stdout


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ({1: 2.0, 2: 2.0}, 1),
        ({1: 0.5, 2: 2.0, 4: 2.0}, 2),
        ({1: 2.0, 2: 0.9, 4: 1.0}, 4),  # lucky once
        ({1: 2.0, 2: 0.9}, NEVER),
        ({}, NEVER),
    ],
)
def test_a_threshold_is_where_shared_memory_begins_to_win_for_good(speedups, expected) -> None:
    assert threshold(speedups) == expected


def test_small_arrays_are_tried_as_small_ones_only() -> None:
    assert max(sizes("all_reduce_handed_in")) == 64 << 10
    assert max(sizes("broadcast")) == 16 << 20


def test_a_table_is_told_in_words(tmp_path) -> None:
    from fuel_parallel.comm.thresholds import DEFAULT

    text = "\n".join(describe(DEFAULT, tmp_path))
    assert f"written to {tmp_path}" in text
    assert "up to 2 ranks, shared memory is faster\n  all_reduce_handed_in  from 16 KiB on" in text
    assert "at no size" in text
    assert "from 32 MiB on" in text

"""`fuelrun bench` times collectives; with `--tune` it writes a table that the library reads."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fuel_parallel.backends import available_devices
from fuel_parallel.comm.speed import collectives as speed
from fuel_parallel.comm.speed.tuning import describe, sizes, threshold
from fuel_parallel.comm.thresholds import KINDS, NEVER, read_table
from fuelrun.bench import COLLECTIVES, Sizes


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
        (("all_reduse",), "there is no collective 'all_reduse' to measure; did you mean all_reduce?"),
        (("fft",), "there is no collective 'fft' to measure; it is one of all_reduce, reduce_scatter,"),
        (("--sizes", "4 apples"), "--sizes takes sizes such as 64,4KiB,1MiB or a range 4KiB:64MiB; got '4 apples'"),
        (("--sizes", "1MiB:4KiB"), "--sizes 1MiB:4KiB: a range goes from a smaller size of 1 or more to a larger one"),
        (("--plot", "no/where.png"), "--plot no/where.png: there is no folder"),
        (("--plot", "picture.txt"), "--plot picture.txt: the name must end in one of .png, .svg, .pdf"),
        (("--tune", "all_reduce"), "COLLECTIVE and --tune do not go together"),
        (("--tune", "--sizes", "4KiB"), "--sizes and --tune do not go together"),
        (("--output", "table.json"), "--output is where --tune writes its table"),
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


def test_each_collective_is_timed_every_way(fuelrun) -> None:
    words = ("-n", "2", "--seconds", "0", "--sizes", "0,8,64KiB", "--json", "--plot", "speed.svg")
    done = fuelrun.run("bench", *words, FUEL_NODE_LOCAL="1")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["ranks"], report["nodes"], report["dtype"], report["skipped"]) == (2, 1, "float32", [])
    found = {(t["collective"], t["way"], t["bytes"]) for t in report["timings"]}
    sized = [name for name in COLLECTIVES if name != "barrier"]
    plain = {(name, way, size) for name in sized for way in ("auto", "mpi") for size in (0, 8, 65536)}
    shared = {(name, "shared", 65536) for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")}
    assert found == plain | shared | {("barrier", "auto", 0), ("barrier", "mpi", 0)}
    for t in report["timings"]:
        assert 0 < t["min_us"] <= t["latency_us"] <= t["max_us"]
        assert t["algorithm_gb_s"] == pytest.approx(t["bytes"] / t["latency_us"] / 1e3)
    picture = (fuelrun.folder / "speed.svg").read_text()
    assert picture.startswith("<?xml")


def test_a_table_can_be_read_and_cut(fuelrun) -> None:
    done = fuelrun.run("bench", "all_reduce", "-n", "3", "--seconds", "0", "--sizes", "8:128", "--dtype", "bfloat16")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert {(row[0], row[1]) for row in rows} == {(size, way) for size in ("8", "32", "128") for way in ("auto", "mpi")}
    assert "# all_reduce, bfloat16, 3 ranks on 1 node" in done.stdout


def test_the_bus_carries_what_a_perfect_algorithm_needs(fuelrun) -> None:
    done = fuelrun.run("bench", "all_reduce", "all_gather", "-n", "3", "--seconds", "0", "--sizes", "12KiB", "--json")
    for t in json.loads(done.stdout)["timings"]:
        factor = {"all_reduce": 4 / 3, "all_gather": 2 / 3}[t["collective"]]
        assert t["bus_gb_s"] == pytest.approx(factor * t["algorithm_gb_s"])


def test_a_way_that_is_not_to_be_had_is_said(fuelrun) -> None:
    done = fuelrun.run("bench", "barrier", "-n", "2", "--seconds", "0", FUEL_NODE_LOCAL="0")
    assert done.returncode == 0
    assert "# shared: skipped, the ranks do not share the memory of one node" in done.stdout


def test_the_command_line_knows_what_can_be_timed() -> None:
    """It is written down twice, for the launcher must not import arrays."""
    assert tuple(speed.COLLECTIVES) == COLLECTIVES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64", [64]),
        ("1kib,4KiB,4kB", [1024, 4096, 4000]),
        ("4KiB:100KiB", [4096, 16384, 65536]),
        ("2MiB", [2 << 20]),
        ("1:1", [1]),
    ],
)
def test_sizes_are_read(text, expected) -> None:
    assert Sizes().convert(text, None, None) == expected


def test_a_wrong_result_is_found() -> None:
    """The check that comes before the clock."""

    class Wrong(speed.Transport):
        def broadcast(self, x, root):
            return x + 1

    Wrong.__abstractmethods__ = frozenset()
    assert not speed.COLLECTIVES["broadcast"].make(Wrong(), speed.Place(), 4, np.dtype(np.float32)).check()


def test_a_device_that_is_not_there_is_named(fuelrun) -> None:
    if any(name.startswith("cuda") for name in available_devices()):
        pytest.skip("there is a CUDA device here")
    done = fuelrun.run("bench", "all_reduce", "-n", "2", "--device", "cuda")
    assert done.returncode == 1
    assert "--device cuda: there is none on" in done.stderr
    assert "which has cpu" in done.stderr


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
    text = " ".join(fuelrun.run("bench", "--help").stdout.split())
    for part in (
        "bench all_reduce -n 4",
        "bench --tune",
        "srun",
        "shared memory is faster than MPI",
        "collectives.json",
    ):
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

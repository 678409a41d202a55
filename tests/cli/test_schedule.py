"""`fuelrun schedule`: schedules as a time line, a table, JSON, CSV and pictures."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

from fuel_parallel.errors import FuelError
from fuel_parallel.pipeline_parallel import Costs, ScheduleKind, build, from_csv, simulate
from fuelrun.schedule import HELP, schedule
from tests.pipeline_parallel.recordings import trace_of, with_waits, write

SIZE = ["--stages", "2", "--microbatches", "3"]


def run(*words) -> str:
    runner = CliRunner()
    return runner.invoke(schedule, [str(word) for word in words], catch_exceptions=False, standalone_mode=False).output


def test_a_time_line_is_plain_text_in_a_pipe() -> None:
    lines = run("--kind", "1f1b", *SIZE).splitlines()
    assert lines[0] == "rank 0  F0 F1       B0    F2 B1       B2"
    assert lines[1] == "rank 1     F0 B0    F1 B1    F2 B2"
    assert lines[3].startswith("1f1b: time 12, bubble 25.0%")
    assert "activations held 2, 1" in lines[3]


def test_a_long_time_line_is_cut_into_pieces() -> None:
    lines = run("--kind", "gpipe", "--stages", 2, "--microbatches", 40).splitlines()
    assert sum(line.startswith("rank 1") for line in lines) == 4
    assert max(map(len, lines)) <= 160


def test_csv_is_what_check_reads(tmp_path) -> None:
    text = run("--kind", "zb-v", *SIZE, "--csv")
    assert from_csv(text, "zb-v").orders == build("zb-v", 2, 3).orders
    (tmp_path / "mine.csv").write_text(text)
    assert "mine: can run; time" in run("--check", tmp_path / "mine.csv")
    (tmp_path / "broken.csv").write_text("0F0,0B0\n1B0,1F0\n")
    with pytest.raises(FuelError, match="rank 1 is at 1B0 and waits for 1F0"):
        run("--check", tmp_path / "broken.csv")


def test_json_has_actions_and_times() -> None:
    found = json.loads(run("--kind", "gpipe", "--stages", 2, "--microbatches", 1, "--lower", "--json"))
    assert found["total"] == 6
    assert found["activations_held"] == [1, 1]
    assert found["ranks"][0][1] == {"action": "0SEND_F0", "start": 1.0, "end": 1.0}


def test_kinds_are_compared_at_equal_work() -> None:
    lines = run("--compare", "gpipe,1f1b,zb-h1,interleaved-1f1b", "--stages", 4, "--microbatches", 8).splitlines()
    cells = [line.split() for line in lines[1:]]
    assert [row[0] for row in cells] == ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"]
    assert [row[2] for row in cells] == ["33", "33", "27", "28.5"]
    assert [row[5] for row in cells] == ["8", "4", "4", "5.5"]
    found = json.loads(run("--compare", "gpipe,zb-h2", "--stages", 4, "--microbatches", 8, "--json"))
    assert found[1]["bubble_ratio_of_span"] == pytest.approx(0)


def test_pictures_are_drawn(tmp_path) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    run("--kind", "zb-v", *SIZE, "--svg", svg, "--png", png)
    assert svg.read_text().count("<title>") == 2 * 2 * 3 * 3
    assert "3W2: " in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_trace_tells_what_actions_cost(tmp_path) -> None:
    """So other schedules of the same stages are predicted, here in ms."""
    ran = build("zb-h1", 2, 3)
    costs = Costs(0.002, 0.003, 0.001, message=0.0005)
    path = write(tmp_path / "out.json", trace_of(ran, {0: with_waits(ran, simulate(ran, costs))}))
    found = json.loads(run("--kind", "gpipe", "--stages", 2, "--microbatches", 8, "--costs", path, "--json"))
    expected = simulate(build("gpipe", 2, 8), Costs(2, 3, 1, message=0.5)).total
    assert (found["unit"], found["total"]) == ("ms", pytest.approx(expected))
    table = json.loads(run("--compare", "gpipe,zb-h1", "--stages", 2, "--microbatches", 8, "--costs", path, "--json"))
    assert table[0]["total"] == pytest.approx(expected)
    assert [row["peak_activations"] for row in table] == [8, 2]


def test_a_topology_tells_what_actions_cost() -> None:
    words = ["--stages", 8, "--microbatches", 16, "--topology", "nvswitch", "--flops", "1e15"]
    free = json.loads(run("--kind", "1f1b", *words, "--activation-bytes", 0, "--json"))
    # Eight devices of 312 TFLOP/s, 0.85 of which is reached, and a bubble of 7 to 16.
    assert free["total"] == pytest.approx(3 * 1e15 / (8 * 312e12 * 0.85) * (16 + 7) / 16 * 1e3, rel=1e-3)
    busy = json.loads(run("--kind", "1f1b", *words, "--activation-bytes", "1e11", "--json"))
    assert busy["total"] > free["total"]
    slow = json.loads(run("--kind", "1f1b", *words, "--activation-bytes", 0, "--tflops", 156, "--json"))
    assert slow["total"] == pytest.approx(2 * free["total"], rel=1e-3)
    row = json.loads(run("--compare", "1f1b", *words, "--activation-bytes", 0, "--json"))[0]
    assert (row["total"], row["peak_activations"]) == (pytest.approx(free["total"]), 8)
    assert "time, ms" in run("--compare", "1f1b", *words, "--activation-bytes", 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kind", "1f1b"], "--stages and --microbatches are needed"),
        (["--kind", "2f2b", *SIZE], "'2f2b' is no kind of schedule; there are gpipe"),
        (["--kind", "1f1b", "--compare", "gpipe", *SIZE], "--kind and --compare exclude each other"),
        (["--check", "none.csv"], "none.csv: cannot be read: No such file"),
        (["--check", "none.csv", *SIZE], "leave out the options"),
        (["--compare", "gpipe", *SIZE, "--csv"], "--compare makes a table or JSON"),
        (["--kind", "gpipe", *SIZE, "--svg", "a.png"], "the name must end in .svg"),
        (["--stages", "0"], "--stages takes the depth of the pipeline, a whole number of at least 1; got '0'"),
        (["--kind", "gpipe", *SIZE, "--message", "1", "--costs", "a"], "--message and --costs exclude each other"),
        (["--kind", "gpipe", *SIZE, "--flops", "1"], "--flops goes with --topology"),
        (["--kind", "gpipe", *SIZE, "--topology", "nvswitch", "--flops", "1"], "needs --flops and --activation-bytes"),
        (
            [
                "--stages",
                "9",
                "--microbatches",
                "9",
                *["--topology", "nvswitch", "--flops", "1", "--activation-bytes", "1"],
            ],
            "the topology has 8 devices, and the pipeline 9 ranks",
        ),
        (["--kind", "gpipe", *SIZE, "--message", "-1"], r"message=-1.0\): expected a number of 0 or more"),
    ],
)
def test_other_words_are_refused(words: list[str], message: str) -> None:
    with pytest.raises((FuelError, click.UsageError), match=message):
        run(*words)


def test_help_names_every_kind() -> None:
    assert f"Kinds: {', '.join(kind.value for kind in sorted(ScheduleKind, key=list(ScheduleKind).index))}" in HELP

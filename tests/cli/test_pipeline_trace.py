"""`fuelrun trace --pipeline`: predicted and measured, one above the other, and what lies between."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fuel_parallel.errors import FuelError
from fuel_parallel.pipeline_parallel import Costs, Schedule, Timeline, build, parse_action, read_trace, simulate
from fuelrun.trace import trace
from tests.pipeline_parallel.recordings import needed, trace_of, with_waits, write

MS = 1e-3

SCRIPT = """
import numpy as np
import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.pipeline_parallel import PipelineRunner, build

world = fp.init()
schedule = build("zb-h1", world.world_size, 4)
stage = fp.Linear(8, 8, ft.random.Generator(world.rank))
runner = PipelineRunner({world.rank: stage}, schedule, world, loss=lambda y, t: ft.mean((y - t) ** 2))
x = np.ones((8, 8), np.float32)
for _ in range(3):
    fp.realize(runner.step(x, x).gradients)
    runner.evaluate(x, x)
"""


def run(*words) -> str:
    words = [str(word) for word in words]
    return CliRunner().invoke(trace, words, catch_exceptions=False, standalone_mode=False).output


def ran(schedule: Schedule, *times: float) -> dict[int, Timeline]:
    """Steps with forwards and parts of backwards of so many ms."""
    costs = [Costs(*[time * MS] * 3, message=0.25 * MS) for time in times]
    return {n: with_waits(schedule, simulate(schedule, one)) for n, one in enumerate(costs)}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    schedule = build("zb-h1", 2, 3)
    return write(tmp_path / "out.json", trace_of(schedule, ran(schedule, 9, 7, 1, 2, 3)))


def test_both_time_lines_are_drawn_on_one_scale(out: Path) -> None:
    lines = run(out, "--pipeline").splitlines()
    assert lines[0] == "zb-h1: 3 micro-batches, 2 stages on 2 ranks"
    titles = [n for n, line in enumerate(lines) if line.startswith(("predicted:", "measured, median of 3 steps:"))]
    assert len(titles) == 2
    predicted, measured = (lines[n + 1] for n in titles)
    assert predicted.split() == ["rank", "0", "F0", "F1", "I0", "W0", "F2", "I1", "W1", "I2", "W2"]
    assert measured.replace("<", " <").split()[:6] == ["rank", "0", "F0", "F1", "<0", "I0"]
    assert predicted.index("W2") == pytest.approx(measured.index("W2"), abs=1)
    total = f"{simulate(build('zb-h1', 2, 3), Costs(2, 2, 2, message=0.25)).total:.2f}"
    assert ["total", total, total, "+0.0%"] in [line.split() for line in lines]


def test_json_has_both_and_the_difference(out: Path) -> None:
    found = json.loads(run(out, "--pipeline", "--step", 4, "--json"))
    assert (found["name"], found["unit"], found["steps"]) == ("zb-h1", "ms", 5)
    totals = next(one for one in found["differences"] if one["name"] == "total")
    expected = [simulate(build("zb-h1", 2, 3), Costs(t, t, t, message=0.25)).total for t in (2, 3)]
    assert [totals["predicted"], totals["measured"]] == pytest.approx(expected)
    assert totals["share"] == pytest.approx(expected[1] / expected[0] - 1)
    assert found["measured"]["total"] == pytest.approx(expected[1])
    assert found["predicted"]["ranks"][0][0] == {"action": "0F0", "start": 0, "end": pytest.approx(2)}


def test_pictures_have_both(out: Path, tmp_path: Path) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    run(out, "--pipeline", "--svg", svg, "--png", png)
    text = svg.read_text()
    assert text.count("<title>0F0: ") == 2
    assert "waiting for a message" in text
    assert ">predicted: time" in text
    assert png.read_bytes().startswith(b"\x89PNG")


def test_costs_of_another_trace_predict(out: Path, tmp_path: Path) -> None:
    schedule = build("gpipe", 2, 3)
    other = write(tmp_path / "other.json", trace_of(schedule, ran(schedule, 2)))
    found = json.loads(run(other, "--pipeline", "--costs", out, "--json"))
    assert found["predicted"]["total"] == pytest.approx(found["measured"]["total"])
    with pytest.raises(FuelError, match="backward_input is not known, only the whole backward is, and zb-h1 has"):
        run(out, "--pipeline", "--costs", other)


def test_replicas_are_shown_one_by_one(tmp_path: Path) -> None:
    schedule = build("1f1b", 2, 2)
    path = write(tmp_path / "out.json", trace_of(schedule, ran(schedule, 1), replicas=2))
    assert "the first of 2 pipelines" in run(path, "--pipeline")
    assert "the first of" not in run(path, "--pipeline", "--replica", 1)
    with pytest.raises(click.UsageError, match=r"--replica 2: .* has 2 pipelines, counted from 0"):
        run(path, "--pipeline", "--replica", 2)


@pytest.mark.parametrize("words", [["--step", "1"], ["--png", "a.png"], ["--replica", "0"], ["--costs", "b.json"]])
def test_options_of_the_pipeline_need_it(out: Path, words: list[str]) -> None:
    with pytest.raises(click.UsageError, match=f"{words[0]} goes with --pipeline"):
        run(out, *words)


def test_a_trace_without_a_pipeline_is_one_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "out.json", {"fuel_parallel": {"version": 1, "ranks": []}, "traceEvents": []})
    with pytest.raises(FuelError, match="there is no whole step of a pipeline in it; a `PipelineRunner` that runs"):
        run(path, "--pipeline")


def test_the_summary_leaves_actions_out(out: Path) -> None:
    """They lie over what they are made of, and would count twice."""
    summary = json.loads(run(out, "--json"))
    assert [(rank["rank"], rank["total_ms"]) for rank in summary["ranks"]] == [(0, 0.009), (1, 0.0)]


def test_a_runner_under_trace_leaves_all_of_it(fuelrun) -> None:
    """Of real ranks: each action of the schedule once, a wait before what needs a message, and no time unaccounted."""
    done = fuelrun.run("-n", "2", "--trace", "out.json", fuelrun.write(SCRIPT))
    assert done.returncode == 0, done.stderr
    (measured,) = read_trace(fuelrun.folder / "out.json")
    plain = build("zb-h1", 2, 4)
    assert (measured.schedule.computation().orders, sorted(measured.steps)) == (plain.orders, [0, 1, 2])
    for timeline in measured.steps.values():
        for spans, order in zip(timeline.ranks, measured.schedule.orders, strict=True):
            expected = [one for a in order for one in (needed(measured.schedule, a), a) if one is not None]
            assert [span.action for span in spans] == expected
            assert all(one.end == pytest.approx(other.start) for one, other in pairwise(spans))
        times = {span.action: span for spans in timeline.ranks for span in spans}
        for n in range(4):  # on one clock, nothing is there before its making has begun
            assert times[parse_action(f"1RECV_F{n}")].end > times[parse_action(f"0F{n}")].start
    costs = measured.costs()
    assert all(time > 0 for name in ("forward", "backward_input", "backward_weight") for time in getattr(costs, name))
    lines = fuelrun.run("trace", "out.json", "--pipeline").stdout.splitlines()
    assert lines[0] == "zb-h1: 4 micro-batches, 2 stages on 2 ranks"
    assert any(line.startswith("measured, median of 1 step:") for line in lines)

"""Laps: they cover the time of a step without gaps, and end up in the trace with what they are of."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from fuel_parallel.runtime import laps as module
from fuel_parallel.runtime.laps import Laps

PIPELINE = """
import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.pipeline_parallel import build
from fuel_parallel.pipeline_parallel.run.recording import recording

schedule = build("gpipe", 1, 2)
laps = recording(schedule, fp.IdentityComm())
for _ in range(3):
    laps.begin_step()
    for action in schedule.orders[0]:
        ft.ones((8, 8)).realize()
        laps.end(action)
"""


def test_laps_follow_each_other_without_gaps() -> None:
    laps = Laps({})
    assert laps.first() is None
    for _ in range(2):
        laps.begin_step()
        for name in ("0F0", "1RECV_F0", "0F0"):
            laps.end(name)
    spans = list(laps.spans())
    assert [(step, name) for step, name, _, _ in spans] == [(n, a) for n in (0, 1) for a in ("0F0", "1RECV_F0", "0F0")]
    assert spans[0][2] == laps.first()
    for (step, _, _, ended), (after, _, began, _) in pairwise(spans):
        assert began == ended if step == after else began >= ended
    assert all(began <= ended for _, _, began, ended in spans)


def test_a_row_that_is_full_counts_what_it_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LAPS", 3)
    laps = Laps({})
    laps.begin_step()
    for number in range(5):
        laps.end(number)
    assert ([name for _, name, _, _ in laps.spans()], laps.dropped) == (["0", "1"], 3)


def test_the_trace_has_the_schedule_and_every_action(tmp_path: Path) -> None:
    environ = {"FUEL_TRACE": str(tmp_path / "out.json"), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", PIPELINE], cwd=tmp_path, env=environ, timeout=60, check=True)
    whole = json.loads((tmp_path / "out.json").read_text())
    about = whole["fuel_parallel"]["ranks"][0]
    assert about["pipelines"] == [{"comm": "world", "rank": 0, "name": "gpipe", "schedule": "0F0,0F1,0B0,0B1\n"}]
    actions = [e for e in whole["traceEvents"] if e.get("cat") == "action"]
    assert [(e["args"]["step"], e["name"]) for e in actions] == [
        (step, name) for step in range(3) for name in ("0F0", "0F1", "0B0", "0B1")
    ]
    assert {e["args"]["pipeline"] for e in actions} == {0}
    runs = [e for e in whole["traceEvents"] if e.get("cat") == "run"]
    for action, run in zip(actions, runs, strict=True):  # each has realized once
        assert action["ts"] <= run["ts"]
        assert run["ts"] + run["dur"] <= action["ts"] + action["dur"] + 0.002

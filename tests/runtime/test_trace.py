"""What a traced process leaves: Chrome's format, with every kernel, phase and byte; nothing without FUEL_TRACE."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuel_parallel.lazy as ft
from fuel_parallel.runtime import trace
from fuel_parallel.runtime.execute import execute
from fuel_parallel.runtime.graph import trace as graph_of
from fuel_parallel.runtime.plan import Plan, make_plan

SCRIPT = """
import numpy as np
import fuel_parallel as fp
import fuel_parallel.lazy as ft

weight = fp.Parameter(np.ones((64, 32), np.float32))
for _ in range(3):
    x = ft.asarray(np.ones((16, 64), np.float32))
    loss = ft.mean(ft.square(ft.tanh(x @ weight)))
    weight.assign(weight - ft.grad(loss, [weight])[0] * 0.1)
    fp.realize(loss, weight)
"""


def run_traced(folder: Path, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    environ = {"FUEL_TRACE": str(folder / "out.json"), "PATH": "/usr/bin:/bin", **environ}
    return subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def events_in(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def plan_of(*outputs: ft.Tensor) -> Plan:
    return make_plan(graph_of([output.node for output in outputs])[0])


def test_nothing_is_recorded_unless_asked_for() -> None:
    assert trace.recorder is None


def test_every_kernel_has_its_time_its_line_and_its_flops(tmp_path: Path) -> None:
    done = run_traced(tmp_path, SCRIPT)
    assert (done.returncode, done.stderr) == (0, "")
    kernels = [e for e in events_in(tmp_path / "out.json") if e.get("cat") == "kernel"]
    products = [e for e in kernels if e["name"] == "matmul"]
    assert len(products) == 6
    assert {e["args"]["flops"] for e in products} == {2 * 16 * 64 * 32}
    assert {e["args"]["line"] for e in products} == {"script.py:9"}
    assert all(e["dur"] > 0 for e in kernels)


def test_a_region_is_named_by_its_operations(tmp_path: Path) -> None:
    run_traced(tmp_path, SCRIPT)
    regions = [e for e in events_in(tmp_path / "out.json") if e["name"].startswith("region: ")]
    assert any("tanh" in e["name"] and "tanh" in e["args"]["ops"] for e in regions)


def test_phases_follow_each_other_and_the_script_has_the_rest(tmp_path: Path) -> None:
    run_traced(tmp_path, SCRIPT)
    spans = [e for e in events_in(tmp_path / "out.json") if e["ph"] == "X" and e["tid"] == 0]
    counts = Counter(e["name"] for e in spans)
    assert all(counts[phase] == 3 for phase in trace.PHASES)
    assert counts["script"] == 2
    spans.sort(key=lambda e: e["ts"])
    for before, after in pairwise(spans):
        assert after["ts"] - before["ts"] - before["dur"] == pytest.approx(0, abs=50)


def test_memory_is_counted(tmp_path: Path) -> None:
    run_traced(tmp_path, SCRIPT)
    counters = [e for e in events_in(tmp_path / "out.json") if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"live results", "arena", "resident"}
    assert max(e["args"]["bytes"] for e in counters if e["name"] == "live results") >= 16 * 32 * 4


def test_a_script_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    done = run_traced(tmp_path, SCRIPT + "\nraise ValueError('enough')")
    assert done.returncode == 1
    assert any(e["name"] == "matmul" for e in events_in(tmp_path / "out.json"))


def test_a_realize_that_fails_leaves_a_trace_without_the_broken_run(tmp_path: Path) -> None:
    script = SCRIPT + (
        "\nfrom fuel_parallel.lazy.node import Op, apply\n"
        "def kernel(xp, x): raise ArithmeticError('no')\n"
        "bad = Op('bad', lambda x: x, kernel)\n"
        "try: fp.realize(ft.Tensor(apply(bad, (weight.node,))))\n"
        "except fp.FuelError: pass\n"
        "fp.realize(weight + 1)\n"
    )
    done = run_traced(tmp_path, script)
    assert done.returncode == 0, done.stderr
    names = Counter(e["name"] for e in events_in(tmp_path / "out.json"))
    assert (names["run"], names["bad"]) == (4, 0)


def test_a_folder_that_cannot_be_written_is_a_word_and_no_failure(tmp_path: Path) -> None:
    done = run_traced(tmp_path, SCRIPT, FUEL_TRACE=str(tmp_path / "missing" / "out.json"))
    assert done.returncode == 0
    assert "the trace cannot be written" in done.stderr


def test_a_forked_child_writes_no_trace(tmp_path: Path) -> None:
    run_traced(tmp_path, SCRIPT + "\nimport os, sys\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\n")
    assert [path.name for path in tmp_path.glob("out*")] == ["out.json"]
    assert any(e["name"] == "matmul" for e in events_in(tmp_path / "out.json"))


def test_a_rank_notes_no_more_than_its_limit(tmp_path: Path) -> None:
    limited = "from fuel_parallel.runtime import trace\ntrace.MOST_EVENTS = 12\n" + SCRIPT
    run_traced(tmp_path, limited)
    about = json.loads((tmp_path / "out.json").read_text())["fuel_parallel"]["ranks"][0]
    assert about["dropped"] > 0


def test_live_bytes_are_those_of_the_results_that_are_still_needed() -> None:
    x = ft.asarray(np.ones((8, 8), np.float32))
    plan = plan_of(ft.matmul(ft.matmul(ft.matmul(x, x), x), x))
    # Of three products at most two live at a time.
    assert trace.live_bytes(plan)[plan.leaves :] == [256, 512, 512]


def test_a_view_keeps_what_it_looks_at_alive() -> None:
    x = ft.asarray(np.ones((8, 8), np.float32))
    flipped = ft.permute_dims(ft.matmul(x, x), (1, 0))
    plan = plan_of(ft.matmul(flipped, x), ft.matmul(x, x + 0))
    levels = trace.live_bytes(plan)[plan.leaves + len(plan.constants) :]
    assert min(levels) >= 256


def test_a_plan_runs_the_same_with_a_recorder(tmp_path: Path) -> None:
    x = ft.asarray(np.arange(4.0))
    graph, leaves, computed = graph_of([(x * 2 + 1).node])
    plan = make_plan(graph)
    recorder = trace.Recorder(tmp_path / "out.json")
    seen = []
    for _ in range(2):
        compute = recorder.timed(plan, computed, lambda step, xp, arguments: seen.append(step) or "value")
        for step in plan.steps:
            assert compute(step, np, [node.value for node in leaves]) == "value"
    assert seen == [*plan.steps, *plan.steps]
    assert len(recorder.events) == 3 * len(seen)
    assert execute(plan, [node.value for node in leaves], computed)[0].tolist() == [1.0, 3.0, 5.0, 7.0]

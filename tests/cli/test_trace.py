"""`fuelrun --trace` on real ranks, and what `fuelrun trace` says about it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

SCRIPT = """
import time
import numpy as np
import fuel_parallel as fp
import fuel_parallel.lazy as ft

world = fp.init()
weight = ft.asarray(np.ones((64, 64), np.float32))
fp.realize(world.all_reduce(ft.sum(weight)))
for _ in range(3):
    if world.rank == world.world_size - 1:
        time.sleep(0.05)
    fp.realize(world.all_reduce(weight @ weight, fp.ReduceOp.AVG))
"""


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_trace_of_all_ranks_is_one_file(fuelrun) -> None:
    done = fuelrun.run("-n", "2", "--trace", "out.json", fuelrun.write(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert "fuelrun: trace of 2 ranks in out.json: `fuelrun trace out.json` sums it up" in done.stderr
    assert [path.name for path in fuelrun.folder.glob("out*")] == ["out.json"]
    whole = load(fuelrun.folder / "out.json")
    assert [info["rank"] for info in whole["fuel_parallel"]["ranks"]] == [0, 1]
    reduced = [e for e in whole["traceEvents"] if e.get("cat") == "collective"]
    assert sorted(e["pid"] for e in reduced) == [0] * 4 + [1] * 4
    assert {e["args"]["bytes"] for e in reduced} == {4, 64 * 64 * 4}
    assert {(e["args"]["comm"], e["args"]["op"]) for e in reduced} == {("world", "sum"), ("world", "avg")}
    names = {e["args"]["name"] for e in whole["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"}
    assert {name.partition(",")[0] for name in names} == {"rank 0", "rank 1"}


def test_waiting_is_told_from_communicating(fuelrun) -> None:
    fuelrun.run("-n", "2", "--trace", "out.json", fuelrun.write(SCRIPT))
    done = fuelrun.run("trace", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    waiting, slow = summary["ranks"]
    assert summary["slowest_rank"] == 1
    assert waiting["wait_ms"] > 100
    assert slow["wait_ms"] < 100
    assert slow["script_ms"] > 100
    assert waiting["exposed_ms"] == pytest.approx(waiting["communication_ms"])
    assert {op["name"] for op in summary["ops"]} >= {"matmul"}
    assert next(op for op in summary["ops"] if op["name"] == "matmul")["gflop_s"] > 0
    assert [(c["name"], c["comm"], c["runs"]) for c in summary["collectives"]] == [("all_reduce", "world", 8)]
    for rank in summary["ranks"]:
        parts = rank["kernel_ms"] + rank["exposed_ms"] + rank["runtime_ms"] + rank["script_ms"]
        assert parts == pytest.approx(rank["total_ms"])


def test_the_summary_is_for_people(fuelrun) -> None:
    fuelrun.run("-n", "2", "--trace", "out.json", fuelrun.write(SCRIPT))
    said = fuelrun.run("trace", "out.json").stdout
    for part in ("Where the time went", "Kernels, all ranks", "matmul", "all_reduce", "Slowest rank: 1"):
        assert part in said


def test_the_last_step_can_be_drawn(fuelrun) -> None:
    fuelrun.run("-n", "2", "--trace", "out.json", fuelrun.write(SCRIPT))
    assert fuelrun.run("trace", "--svg", "step.svg", "out.json").returncode == 0
    drawn = fuelrun.folder / "step.svg"
    texts = [element.text for element in ElementTree.parse(drawn).iter() if element.tag.endswith("text")]
    assert {"rank 0", "rank 1", "all_reduce", "wait for rank 1"} <= set(texts)


def test_one_rank_is_traced_in_this_process(fuelrun) -> None:
    assert fuelrun.run("--trace", "out.json", fuelrun.write(SCRIPT)).returncode == 0
    summary = json.loads(fuelrun.run("trace", "--json", "out.json").stdout)
    assert [rank["rank"] for rank in summary["ranks"]] == [0]
    assert summary["slowest_rank"] is None


def test_under_mpirun_the_command_puts_the_files_together(fuelrun, mpirun: str) -> None:
    done = fuelrun.run("--trace", "out.json", fuelrun.write(SCRIPT), command=(mpirun, "-n", "2"))
    assert done.returncode == 0, done.stderr
    assert len(list(fuelrun.folder.glob("out.json.rank-*.json"))) == 2
    done = fuelrun.run("trace", "--json", "out.json")
    assert [rank["rank"] for rank in json.loads(done.stdout)["ranks"]] == [0, 1]
    assert [path.name for path in fuelrun.folder.glob("out*")] == ["out.json"]


def test_a_rank_that_fails_leaves_its_trace(fuelrun) -> None:
    script = fuelrun.write(SCRIPT + "\nif world.rank == 1:\n    raise ValueError('enough')\nworld.barrier()\n")
    done = fuelrun.run("-n", "2", "--trace", "out.json", script)
    assert done.returncode == 1
    ranks = {info["rank"] for info in load(fuelrun.folder / "out.json")["fuel_parallel"]["ranks"]}
    assert 1 in ranks


def test_ranks_that_are_not_in_it_are_named(fuelrun) -> None:
    fuelrun.run("-n", "2", "--trace", "out.json", fuelrun.write(SCRIPT))
    whole = load(fuelrun.folder / "out.json")
    whole["fuel_parallel"]["ranks"].pop()
    (fuelrun.folder / "out.json").write_text(json.dumps(whole))
    assert "No trace of rank 1" in fuelrun.run("trace", "out.json").stdout


def test_the_file_of_an_earlier_job_is_not_taken_for_this_ones(fuelrun) -> None:
    (fuelrun.folder / "out.json").write_text("{}")
    (fuelrun.folder / "out.json.rank-7.json").write_text("old")
    done = fuelrun.run("-n", "2", "--trace", "out.json", fuelrun.write("pass"))
    assert "no trace: no rank realized anything" in done.stderr
    assert not list(fuelrun.folder.glob("out*"))


def test_where_a_trace_cannot_go_no_job_starts(fuelrun) -> None:
    fuelrun.write("open('started', 'w')")
    done = fuelrun.run("-n", "2", "--trace", "missing/out.json", "script.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fuelrun: --trace takes a file that can be written; missing/out.json cannot\n"
    assert not (fuelrun.folder / "started").exists()


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_dry_run_shows_the_trace(fuelrun, ranks: str) -> None:
    done = fuelrun.run("--dry-run", "-n", ranks, "--trace", "out.json", fuelrun.write("pass"))
    assert f"FUEL_TRACE={fuelrun.folder}/out.json" in done.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot read the trace out.json: No such file or directory"),
        ('{"traceEvents": [', "out.json is cut off or no JSON"),
        ("[1, 2]", "out.json is no trace of fuelrun"),
        ('{"traceEvents": [], "displayTimeUnit": "ms"}', "`fuelrun --trace out.json train.py` writes one"),
        (
            '{"displayTimeUnit": "ms", "fuel_parallel": {"version": 9, "ranks": []}, "traceEvents": []}',
            "out.json is a trace of version 9; this fuelrun reads version 1",
        ),
        (
            '{"displayTimeUnit": "ms", "fuel_parallel": {"version": 1, "ranks": []}, "traceEvents": [{"name": 3}]}',
            "Expected `str`, got `int` - at `$.traceEvents[0].name`",
        ),
        (
            '{"displayTimeUnit": "ms", "fuel_parallel": {"version": 1, "ranks": []}, "traceEvents": '
            '[{"name": "all_reduce", "ph": "X", "pid": 0, "cat": "collective", "args": {"turn": 0}}]}',
            "event 0, 'all_reduce', has comm None, expected str",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(fuelrun, text: str | None, says: str) -> None:
    if text is not None:
        fuelrun.write(text, "out.json")
    done = fuelrun.run("trace", "out.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


OVERLAPPING = """
import time
import numpy as np
import fuel_parallel as fp
import fuel_parallel.lazy as ft

world = fp.init()
layers = [fp.Linear(512, 512, ft.random.Generator(n)) for n in range(6)]
parameters = [p for layer in layers for p in layer.parameters()]
fp.realize(layers)
for _ in range(4):
    x = ft.ones((128, 512))
    for layer in layers:
        x = ft.tanh(layer(x))
    gradients = ft.grad(ft.mean(x * x), parameters)
    fp.realize(fp.data_parallel.average_gradients(gradients, world, bucket_bytes=1 << 20))
    world.barrier()
"""


def test_what_goes_on_beside_kernels_is_hidden_and_no_wait(fuelrun) -> None:
    done = fuelrun.run("-n", "2", "--trace", "out.json", fuelrun.write(OVERLAPPING))
    assert done.returncode == 0, done.stderr
    summary = json.loads(fuelrun.run("trace", "--json", "out.json").stdout)
    for rank in summary["ranks"]:
        assert rank["hidden_ms"] > 0
        assert rank["hidden_ms"] + rank["exposed_ms"] == pytest.approx(rank["communication_ms"])
        parts = rank["kernel_ms"] + rank["exposed_ms"] + rank["runtime_ms"] + rank["script_ms"]
        assert parts == pytest.approx(rank["total_ms"])
    events = [e for e in load(fuelrun.folder / "out.json")["traceEvents"] if e.get("cat") in ("collective", "kernel")]
    for pid, tid in {(e["pid"], e["tid"]) for e in events}:
        track = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if (e["pid"], e["tid"]) == (pid, tid))
        assert all(end <= begin + 0.002 for (_, end), (begin, _) in pairwise(track))  # to the thousandth of a us
    turns = [e["args"]["turn"] for e in events if e["pid"] == 0 and e["cat"] == "collective"]
    assert turns == sorted(turns)
    texts = [e.text for e in ElementTree.fromstring(_drawn(fuelrun)).iter() if e.tag.endswith("text")]
    assert "collectives" in texts


def _drawn(fuelrun) -> str:
    assert fuelrun.run("trace", "--svg", "step.svg", "out.json").returncode == 0
    return (fuelrun.folder / "step.svg").read_text()


def test_a_trace_takes_the_place_of_nothing_else(fuelrun) -> None:
    script = fuelrun.write(SCRIPT)
    for name in (script, "/dev/null"):
        done = fuelrun.run("--trace", name, script)
        assert done.returncode == 2
        assert "is there and holds no trace, so it is left alone" in done.stderr
    assert (fuelrun.folder / script).read_text() == SCRIPT
    assert Path("/dev/null").is_char_device()

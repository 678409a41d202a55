"""A training run in SLURM that is preempted ends like one that never was. `FUEL_STRESS=1`: it takes half a minute."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from cluster import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 400
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(300),
    pytest.mark.skipif("FUEL_STRESS" not in os.environ, reason="trains twice for half a minute: FUEL_STRESS=1"),
]


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()] if path.exists() else []


def test_a_preempted_run_ends_with_the_same_bits(user, cluster, pmi: str) -> None:
    if pmi == "pmi2":
        pytest.skip("pmi2 of SLURM 22.05 garbles addresses of MPICH's UCX in some jobs, see docs/slurm.md")
    for name in ("train_gpt.py", "settling.py"):
        shutil.copy(EXAMPLES / name, user.folder)
    (user.folder / "text").write_text("how much wood would a woodchuck chuck, if a woodchuck could chuck wood? " * 200)
    small = f"--steps {STEPS} --dim 32 --layers 1 --heads 2 --context 16 --batch 8 --sample 0 --text text --every 5"
    options = ("--nodes", "2", "--requeue", "--time", "10")

    def submit(name: str) -> str:
        saved = ("--checkpoint", f"{name}-saved", "--metrics", f"{name}.jsonl")
        return user.submit(*options, "--job-name", name, "train_gpt.py", *small.split(), *saved)

    plain = submit("plain")
    assert cluster.wait_for_end(plain, 90) == "COMPLETED", user.log(plain)
    disturbed = submit("disturbed")
    wait_until(lambda: len(losses(user.folder / "disturbed.jsonl")) > STEPS // 5, 60, "a fifth of the steps")
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true")
    cluster.run("sbatch", "--output=/dev/null", *urgent)
    wait_until(lambda: cluster.fields(disturbed)["Restarts"] == "1", 60, "no restart")
    assert cluster.wait_for_end(disturbed, 120) == "COMPLETED", user.log(disturbed)
    assert "going on after step" in user.log(disturbed)
    assert losses(user.folder / "disturbed.jsonl") == losses(user.folder / "plain.jsonl")
    assert len(losses(user.folder / "plain.jsonl")) == STEPS

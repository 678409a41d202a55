"""The GPT example goes on where it was: a run that was stopped ends with the bits of one that never was."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fuel_parallel import checkpoint
from fuel_parallel.environment import without_launcher

Start = Callable[..., "subprocess.CompletedProcess[str]"]

TINY = ("--dim", 16, "--layers", 1, "--heads", 2, "--context", 8, "--batch", 8, "--steps", 12, "--sample", 20)
TINY += ("--metrics", "metrics.jsonl")


def losses(folder: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


def ending(run: subprocess.CompletedProcess[str]) -> str:
    """The held-out loss and the sample, which take all of the model and the random state."""
    return run.stdout.partition("step 12: ")[2]


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(ranks: int | None, start: Start, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = start("train_gpt.py", *TINY, ranks=ranks, folder=tmp_path / "whole")
    words = (*TINY, "--checkpoint", "run", "--every", 3, "--keep", 2)
    saved = start("train_gpt.py", *words, ranks=ranks, folder=tmp_path / "parts")
    assert (whole.returncode, saved.returncode) == (0, 0), saved.stderr
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")  # saving changes nothing
    run = tmp_path / "parts" / "run"
    assert sorted(path.name for path in run.iterdir()) == ["step-00000009", "step-00000012"]
    shutil.rmtree(run / "step-00000012")  # as if it had been stopped after step 10
    resumed = start("train_gpt.py", *words, ranks=ranks, folder=tmp_path / "parts")
    assert resumed.returncode == 0, resumed.stderr
    assert "going on after step 9, from run\n" in resumed.stdout
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert ending(resumed) == ending(whole) != ""


def test_a_run_that_made_room_goes_on_with_the_same_bits(start: Start, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    long = ("train_gpt.py", *TINY, "--steps", 80)
    whole = start(*long, ranks=2, folder=tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    script = Path(__file__).parent.parent.parent / "examples" / "train_gpt.py"
    words = [*map(str, long[1:]), "--checkpoint", "run", "--every", "1000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fuelrun", "-n", "2", str(script), *words],
        cwd=tmp_path,
        env=without_launcher(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3) and process.poll() is None:
        time.sleep(0.005)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert checkpoint.steps(tmp_path / "run") == [len(losses(tmp_path))]
    resumed = start(*long, *words[-4:], ranks=2, folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path) == losses(tmp_path / "whole")


@pytest.mark.parametrize(("ranks", "mesh"), [(2, "dp=2"), (3, "tp=3")])
def test_more_ranks_go_on_from_what_fewer_saved(ranks: int, mesh: str, start: Start, tmp_path: Path) -> None:
    words = (*TINY, "--checkpoint", "run", "--every", 6, "--dtype", "float64")
    first = start("train_gpt.py", *words, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    alone = losses(tmp_path)
    shutil.rmtree(tmp_path / "run" / "step-00000012")
    second = start("train_gpt.py", *words, "--mesh", mesh, ranks=ranks, folder=tmp_path)
    assert second.returncode == 0, second.stderr
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 13))
    assert [loss for _, loss in losses(tmp_path)] == pytest.approx([loss for _, loss in alone], rel=1e-9)


def test_what_it_cannot_go_on_from_is_said_in_one_line(start: Start, tmp_path: Path) -> None:
    assert start("train_gpt.py", *TINY, "--checkpoint", "run", folder=tmp_path).returncode == 0
    (tmp_path / "file").touch()
    for words, text in (
        (
            ("--checkpoint", "run", "--dim", 32),
            r"run/step-00000012: the checkpoint is of another state: \d+ mis.*",
        ),
        (("--checkpoint", "file"), "file: a folder of checkpoints is expected here, and there is a file"),
    ):
        run = start("train_gpt.py", *TINY, *words, ranks=2, folder=tmp_path)
        assert run.returncode == 2
        told = [line for line in run.stderr.splitlines() if line.startswith("train_gpt.py: ")]
        assert len(told) == 1
        assert re.fullmatch(rf"train_gpt.py: --checkpoint {text}", told[0]), told
        assert "Traceback" not in run.stderr

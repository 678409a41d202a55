"""The GPT example: what it writes, what it refuses, and that the number of ranks changes nothing but rounding."""

from __future__ import annotations

import json
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., "subprocess.CompletedProcess[str]"]
Losses = Callable[..., list[float]]

EXAMPLE = Path(__file__).parent.parent.parent / "examples/train_gpt.py"
TINY = ("--dim", 16, "--layers", 1, "--heads", 2, "--context", 8, "--batch", 8)


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run of all parts of the example, alone."""
    folder = tmp_path_factory.mktemp("trained")
    run = start("train_gpt.py", *TINY, "--steps", 100, "--sample", 20, "--metrics", "metrics.jsonl", folder=folder)
    assert run.returncode == 0, run.stderr
    return run, folder / "metrics.jsonl"


def test_metrics_are_one_json_object_a_step(trained: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    written = records(trained[1])
    assert [record["step"] for record in written] == list(range(1, 101))
    assert all(set(record) == {"step", "loss", "tokens_per_s"} for record in written)
    assert all(record["tokens_per_s"] > 0 for record in written)


def test_the_loss_starts_near_that_of_guessing_and_falls(
    trained: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    losses = [record["loss"] for record in records(trained[1])]
    vocabulary = len(set(runpy.run_path(str(EXAMPLE))["read"](None)))  # each version of Python has other help texts
    assert losses[0] == pytest.approx(math.log(vocabulary), abs=0.5)
    assert losses[-1] < losses[0] - 0.5


def test_the_held_out_loss_is_told_now_and_then(trained: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    told = re.findall(r"step (\d+): held-out loss (\d\.\d{4}) nats a character", trained[0].stdout)
    assert [step for step, _ in told] == ["50", "100"]
    assert float(told[1][1]) < float(told[0][1])


def test_a_sample_of_the_wanted_length_comes_last(trained: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    sample = trained[0].stdout.partition("step 100: ")[2].partition("\n")[2]
    assert sample.startswith("The ")
    assert len(sample) == len("The ") + 20 + 1  # what it starts from, and the newline of print


def test_progress_goes_to_stderr(trained: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    assert re.search(r"training  100/100  .*loss \d\.\d+  tokens/s", trained[0].stderr)
    assert "training  " not in trained[0].stdout


def test_any_text_will_do(start: Start, tmp_path: Path) -> None:
    (tmp_path / "novel.txt").write_text("Ein Zug fährt ein. 雪が降る。\n" * 100, "utf-8")
    words = ("--text", "novel.txt", "--steps", 3, "--sample", 0, "--dtype", "float64")
    run = start("train_gpt.py", *TINY, *words, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "step 3: held-out loss" in run.stdout


@pytest.fixture(scope="module")
def losses(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The losses of the first steps on so many ranks."""
    known: dict[tuple[Any, ...], list[float]] = {}

    def losses(ranks: int | None, dtype: str, attempt: int = 1, mesh: str = "") -> list[float]:
        key = (ranks, dtype, attempt, mesh)
        if key not in known:
            folder = tmp_path_factory.mktemp("losses")
            words = ("--steps", 10, "--sample", 0, "--metrics", "metrics.jsonl", "--dtype", dtype, *mesh.split())
            run = start("train_gpt.py", *TINY, *words, ranks=ranks, folder=folder)
            assert run.returncode == 0, run.stderr
            known[key] = [record["loss"] for record in records(folder / "metrics.jsonl")]
            assert len(known[key]) == 10
        return known[key]

    return losses


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-9)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_number_of_ranks_changes_only_rounding(ranks: int, dtype: str, tolerance: float, losses: Losses) -> None:
    assert losses(ranks, dtype) == pytest.approx(losses(None, dtype), rel=tolerance)


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, "--mesh tp=2 --sequence-parallel"),
        (3, "--mesh tp=3"),
        (4, "--mesh dp=2,tp=2"),
        (4, "--mesh dp=-1,tp=2 --sequence-parallel"),
    ],
)
def test_so_does_what_ranks_share(ranks: int, mesh: str, losses: Losses) -> None:
    assert losses(ranks, "float64", mesh=mesh) == pytest.approx(losses(None, "float64"), rel=1e-9)


@pytest.mark.parametrize("ranks", [None, 2])
def test_the_same_run_gives_the_same_bits(ranks: int | None, losses: Losses) -> None:
    assert losses(ranks, "float32", 1) == losses(ranks, "float32", 2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--text", "missing.txt"], "--text missing.txt: No such file or directory"),
        (["--text", "empty.txt"], "--text empty.txt: the file is empty"),
        (["--text", "latin-1.txt"], "--text latin-1.txt: not UTF-8: invalid start byte at byte 1"),
        (["--text", "short.txt"], "the text has 6 characters; with --context 64 it needs 1300"),
        (["--text", "."], "--text .: Is a directory"),
        (["--context", "400000"], "the text has \\d+ characters; with --context 400000 it needs 8000020"),
        (["--dim", "10", "--heads", "4"], "--dim 10 cannot be shared equally by --heads 4"),
        (["--steps", "0"], "'--steps': 0 is not in the range x>=1"),
        (["--batch", "-8"], "'--batch': -8 is not in the range x>=1"),
        (["--lr", "0"], "'--lr': 0.0 is not in the range 0<x<=1"),
        (["--sample", "-1"], "'--sample': -1 is not in the range x>=0"),
        (["--layers", "two"], "'--layers': 'two' is not a valid integer"),
        (["--dtype", "float16"], "'--dtype': 'float16' is not one of 'float32', 'float64'"),
        (["--metrics", "no/such/folder"], "--metrics no/such/folder: No such file or directory"),
        (["--mesh", "dp=1,cp=1"], "--mesh: the axes here are pp, dp and tp, not 'cp'"),
        (["--mesh", "tp=2"], "Mesh: tp=2 do not make 1 ranks"),
        (["--speed", "9"], "No such option '?--speed"),
        (["stray"], "unexpected extra argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_said_in_one_line_with_exit_code_2(
    words: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin-1.txt").write_bytes("größer".encode("latin-1")[1:])
    (tmp_path / "short.txt").write_text("short\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    assert re.fullmatch(rf"train_gpt\.py: .*{text}.*\n", said.err), said.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--batch", "3"], "train_gpt.py: a batch of 3 cannot be shared equally by 2 ranks; use a multiple of 2"),
        (["--steps", "0"], "train_gpt.py: Invalid value for '--steps': 0 is not in the range x>=1."),
    ],
)
def test_all_ranks_give_up_and_one_says_why(words: list[str], text: str, start: Start) -> None:
    run = start("train_gpt.py", *words, ranks=2)
    assert (run.returncode, run.stdout) == (2, "")
    assert [line for line in run.stderr.splitlines() if "fuelrun:" not in line] == [text]
    assert "Traceback" not in run.stderr


def test_a_problem_of_one_rank_is_told_by_that_rank(start: Start, tmp_path: Path) -> None:
    # Only rank 0 writes metrics; the others learn from it that there is nothing to do.
    run = start("train_gpt.py", "--metrics", "no/such/folder", ranks=2, folder=tmp_path)
    assert run.returncode == 2
    assert "train_gpt.py: --metrics no/such/folder: No such file or directory" in run.stderr


def test_help_is_printed_once(start: Start) -> None:
    run = start("train_gpt.py", "--help", ranks=2)
    assert (run.returncode, run.stdout.count("Usage:"), run.stderr) == (0, 1, "")
    assert "--held" not in run.stdout
    assert all(f"--{name} " in run.stdout for name in ("text", "steps", "batch", "context", "lr", "sample", "metrics"))

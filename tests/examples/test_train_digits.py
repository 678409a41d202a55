"""The digits example: it learns to read on any number of ranks, and says what it needs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("ranks", [None, 2])
def test_it_reads_nearly_all_digits(ranks: int | None, start: Start) -> None:
    pytest.importorskip("sklearn")
    run = start("train_digits.py", ranks=ranks)
    assert run.returncode == 0, run.stderr
    found = re.fullmatch(r"test accuracy (\d+\.\d)% of 359 digits\n", run.stdout)
    assert found is not None, run.stdout
    assert float(found[1]) >= 97


def test_without_scikit_learn_it_says_what_to_install(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError('No module named sklearn', name='sklearn')")
    run = start("train_digits.py", PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    assert run.stderr == "train_digits.py: needs scikit-learn: pip install 'fuel-parallel[examples]'\n"

"""Starting an example as a user does: a process of its own, in an empty folder, alone or on ranks of fuelrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuel_parallel.environment import without_launcher

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """`start("train_gpt.py", "--steps", "3", ranks=2)`; `launch` are options of fuelrun, `typed` is what is read."""

    def start(
        example: str,
        *words: object,
        ranks: int | None = None,
        folder: Path | None = None,
        launch: tuple[str, ...] = (),
        typed: str = "",
        **environ: str,
    ) -> subprocess.CompletedProcess[str]:
        launcher = [] if ranks is None else ["-m", "fuelrun", "-n", str(ranks), *launch]
        return subprocess.run(
            [sys.executable, *launcher, str(EXAMPLES / example), *map(str, words)],
            cwd=folder or tmp_path_factory.mktemp("run"),
            env=without_launcher(os.environ) | environ,
            input=typed,
            capture_output=True,
            text=True,
            timeout=100,
        )

    return start

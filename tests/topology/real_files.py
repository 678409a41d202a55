"""Real topology files of others, which the project does not ship: tests read them where they are, and say so if not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("FUEL_TOPOLOGY_FILES", Path(__file__).parents[3] / "shared" / "files"))


def real(name: str) -> Path:
    """A real file by its name; skips the test without it."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no {name} in {FOLDER}; FUEL_TOPOLOGY_FILES names a folder of real topology files")
    return path

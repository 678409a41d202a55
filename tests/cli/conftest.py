"""Tests of commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher import Launcher, launched, mpirun_here


@pytest.fixture
def fuelrun(tmp_path: Path) -> Iterator[Launcher]:
    yield from launched(tmp_path)


@pytest.fixture(scope="session")
def mpirun() -> str:
    return mpirun_here()

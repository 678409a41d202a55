"""docs/environment.md lists the variables of the library and the launcher, all of them and no others."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
VARIABLE = re.compile(r"(?<![A-Z_])FUEL_[A-Z]+(?:_[A-Z]+)*")


def test_every_variable_has_one_row_of_the_page() -> None:
    files = [file for folder in ("fuel_parallel", "cli", "launch") for file in (ROOT / folder).rglob("*.py")]
    read = {name for file in files for name in VARIABLE.findall(file.read_text())}
    rows = re.findall(r"^(?:\| )?`(FUEL_[A-Z_]+)` ", (ROOT / "docs/environment.md").read_text(), re.MULTILINE)
    assert len(read) > 20
    assert sorted(rows) == sorted(read)

"""The pictures of docs/ that measure nothing are what the library draws today; `make pictures` draws them anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PICTURES = Path(__file__).parent.parent / "docs/pictures"


@pytest.mark.parametrize(
    ("script", "drawn"),
    [("training_step", ["training_step"]), ("placement", ["placement", "heat_map"])],
)
def test_a_picture_is_what_its_script_draws(script: str, drawn: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "docs/pictures"  # nodes tell the lines that built them, as they are seen from the repository
    folder.mkdir(parents=True)
    copy = folder / f"{script}.py"
    copy.write_text((PICTURES / copy.name).read_text())
    subprocess.run([sys.executable, str(copy)], check=True, cwd=tmp_path)
    for name in drawn:
        same = (folder / f"{name}.svg").read_text() == (PICTURES / f"{name}.svg").read_text()
        assert same, f"{name}.svg is not what the library draws any more: run `python docs/pictures/{script}.py`"

"""The tables of docs/interop.md, made from outcomes: `python tests/interop/page.py` writes them anew."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent.parent / "docs" / "interop.md"
LIBRARIES = ["einops", "array_api_compat", "array_api_extra", "scipy", "sklearn"]
NAMES = {"array_api_compat": "array-api-compat", "array_api_extra": "array-api-extra", "sklearn": "scikit-learn"}

STATES = {
    "lazy": "builds graph, computes nothing",
    "computes": "gives tensors, computes on the way",
    "leaves": "gives numpy arrays or numbers",
}
WORKS = list(STATES)


def outcomes_of(library: str) -> dict[str, Any]:
    """What `outcomes.py` prints."""
    command = [sys.executable, str(FOLDER / "outcomes.py"), library]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def table(library: str, version: str, outcomes: dict[str, tuple[str, str]]) -> str:
    """The table of a library: a row for each outcome, with the functions that have it."""
    rows: dict[str, list[str]] = {text: [] for text in STATES.values()}
    for name, (state, why) in outcomes.items():
        works = STATES.get(state)
        rows.setdefault(works or _failure(why), []).append(f"`{name}`{f' ({why})' if works and why else ''}")
    lines = [f"| {NAMES.get(library, library)} {version} | |", "|---|---|"]
    lines += [f"| {text} | {', '.join(names)} |" for text, names in rows.items() if names]
    return "\n".join(lines)


def _failure(why: str) -> str:
    return f"fails: {why}" if ":" in why else f"needs `{why}`"


def told(library: str, page: str) -> str:
    """The table of a library that the page has."""
    found = re.search(rf"<!-- {library} -->\n(.*?)\n<!-- -->", page, re.DOTALL)
    assert found, f"{PAGE.name} has no table between <!-- {library} --> and <!-- -->"
    return found[1]


def working(text: str) -> dict[str, str]:
    """What a table says works, by function."""
    states = {words: state for state, words in STATES.items()}
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    return {name: states[row[0]] for row in rows if row[0] in states for name in re.findall(r"`(.+?)`", row[1])}


def main() -> None:
    """Writes all tables."""
    page = PAGE.read_text()
    for library in LIBRARIES:
        found = outcomes_of(library)
        mark, text = f"<!-- {library} -->\n", table(library, found["version"], found["outcomes"])
        page = page.replace(f"{mark}{told(library, page)}\n", f"{mark}{text}\n")
    PAGE.write_text(page)


if __name__ == "__main__":
    main()

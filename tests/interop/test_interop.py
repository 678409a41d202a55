"""Functions of other libraries, called with lazy tensors, give what they give for numpy arrays."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from interop import page


@cache
def found(library: str) -> dict[str, Any]:
    return page.outcomes_of(library)


@pytest.mark.parametrize("library", page.LIBRARIES)
def test_nothing_gives_other_values_or_changes_its_arguments(library: str) -> None:
    outcomes = found(library)["outcomes"]
    assert outcomes
    assert not {name: why for name, (state, why) in outcomes.items() if state == "wrong"}


@pytest.mark.parametrize("library", page.LIBRARIES)
def test_the_page_tells_what_works(library: str) -> None:
    """All of it, for the versions that the page names; with others, what it says to work does not fail."""
    told, now = page.told(library, page.PAGE.read_text()), found(library)
    table = page.table(library, now["version"], now["outcomes"])
    if table.splitlines()[0] == told.splitlines()[0]:
        assert table == told, "run `python tests/interop/page.py`"
    claims = page.working(told)
    assert claims
    missing = {name: now["outcomes"][name] for name in claims if name in now["outcomes"]}
    assert not {name: why for name, (state, why) in missing.items() if state not in page.WORKS}

"""docs/reports.md names a test for what it promises: each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs/reports.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:\w+/)?test_\w+\.py(?:::test_\w+)?)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_is_named_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    text = (TESTS / file).read_text()
    assert not function or f"\ndef {function}(" in text


def test_many_are_named() -> None:
    assert len(NAMED) > 50

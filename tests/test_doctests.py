"""The examples in docstrings and pages hold.

pytest's own `--doctest-modules` would import cli/ and launch/ under the names of their folders; here every module goes
by the name under which it is installed.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

OPTIONAL = {"cupy", "cupyx", "pyopencl"}  # modules that stand on one of these are tested where it is installed
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
ROOT = Path(__file__).parent.parent


def modules(package: str) -> list[str]:
    found = importlib.import_module(package)
    inner = pkgutil.walk_packages(found.__path__, package + ".")
    return [package, *(one.name for one in inner if not one.name.endswith(".__main__"))]


def module_or_skip(name: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name in OPTIONAL:
            pytest.skip(f"{missing.name} is not installed")
        raise


@pytest.mark.parametrize("name", sorted({*modules("fuel_parallel"), *modules("fuelrun"), *modules("fuelrun.launch")}))
def test_docstring(name: str) -> None:
    assert doctest.testmod(module_or_skip(name), optionflags=OPTIONS).failed == 0


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), ids=lambda page: page.name)
def test_page(page: Path) -> None:
    # A fence that closes a code block would else count as output of the example before it.
    text = page.read_text().replace("```", "\n")
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert doctest.DocTestRunner(optionflags=OPTIONS).run(examples).failed == 0

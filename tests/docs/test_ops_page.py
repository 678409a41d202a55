"""The reference of ops lists what the registry and the namespace hold, and nothing else."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fuel_parallel.lazy as ft
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import OPS, ZERO, Op

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def ops_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ops_page", DOCS / "ops_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(text: str) -> dict[str, list[str]]:
    """The cells behind the first, by the first word of that."""
    found = {}
    for row in text.split("   * - ")[1:]:
        first, *cells = re.split(r"\n     -", row.partition("\n\n")[0])
        found[first.split()[0].strip("`")] = [cell.strip() for cell in cells]
    return found


def test_all_ops_and_functions_are_there(ops_page: ModuleType) -> None:
    text = ops_page.page()
    listed = rows(text)
    assert OPS.keys() <= listed.keys()
    functions = set(re.findall(r"<fuel_parallel\.lazy\.(\w+)>`", text))
    assert {"sum", "einsum", "grad", "layer_norm", "topk"} <= functions
    assert functions == {n for n in ft.__all__ if type(getattr(ft, n)).__name__ == "function" and n[0] != "_"}


def test_an_op_that_is_entered_appears_with_all_that_is_known_of_it(
    ops_page: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def op(name: str, **more: Any) -> None:
        monkeypatch.setitem(OPS, name, Op(name, infer=lambda x: x, kernel=lambda xp, x: x, **more))

    op("plain", shapes="[n] -> [n]")
    op("derived", shapes="[] -> []", vjp=(lambda g, y, x: g,), domain=dtypes.FLOATING)
    op("constant", vjp=ZERO, elementwise=True, domain=(dtypes.bool_, dtypes.int8, *dtypes.COMPLEX))
    listed = rows(ops_page.page())
    assert listed["plain"] == ["[n] -> [n]", "any", "none", "numpy, cupy"]
    assert listed["derived"] == ["[] -> []", "floats", "yes", "numpy, cupy"]
    assert listed["constant"] == ["", "bool, complex, int8", "zero", "numpy, cupy, fused on numpy"]


def test_a_function_that_is_public_appears(ops_page: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(x: ft.Tensor, /, *, times: int = 2) -> ft.Tensor:
        """`x` added to itself.

        Not listed.
        """
        return x * times

    monkeypatch.setattr(ft, "twice", twice, raising=False)
    monkeypatch.setattr(ft, "__all__", [*ft.__all__, "twice"])
    text = ops_page.page(str.upper)
    assert ":func:`twice(x, /, *, times=2) <fuel_parallel.lazy.twice>`\n     - `X` ADDED TO ITSELF.\n" in text


def test_the_documentation_is_built_with_it() -> None:
    assert "ops_page.page(" in (DOCS / "conf.py").read_text()
    assert "api/ops" in (DOCS / "index.md").read_text()

"""Printing a tensor and showing it in a notebook compute nothing, and say what it is."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as arrays

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.lazy import display


@given(arrays.arrays(np.float64, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12)))
def test_values_are_printed_as_numpy_prints_them(array: np.ndarray[Any, Any]) -> None:
    wanted = np.array2string(array, separator=", ", threshold=40, edgeitems=3, prefix="Tensor(")
    assert repr(ft.asarray(array)) == f"Tensor({wanted}, shape={array.shape}, dtype=float64, device=cpu)"


def test_of_a_large_tensor_only_what_is_printed_leaves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    backend = display.backend_of("cpu")
    monkeypatch.setattr(type(backend), "to_host", lambda self, a: (sizes.append(a.size), np.asarray(a))[1])
    x = ft.asarray(np.arange(100_000).reshape(10, 100, 100))
    assert "99999" in repr(x)
    assert sizes == [7**3]


@pytest.mark.parametrize(
    ("x", "printed"),
    [
        (ft.ones((2, 3)) + 1, "Tensor(shape=(2, 3), dtype=float32, device=cpu, lazy add)"),
        (fp.Parameter(ft.ones(2)), "Parameter(shape=(2,), dtype=float32, device=cpu, lazy full)"),
        (fp.Parameter(ft.asarray([1, 2])), "Parameter([1, 2], shape=(2,), dtype=int64, device=cpu)"),
        (ft.asarray([True]), "Tensor([ True], shape=(1,), dtype=bool, device=cpu)"),
        (ft.asarray([1.5], dtype=ft.bfloat16), "Tensor([1.5], shape=(1,), dtype=bfloat16, device=cpu)"),
    ],
)
def test_what_is_printed(x: ft.Tensor, printed: str) -> None:
    assert repr(x) == printed


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


def test_a_notebook_shows_values() -> None:
    root = parsed(ft.asarray([[1.0, 2.0]])._repr_html_())
    rows = {row[0].text: row[1].text for row in root.iter("tr")}
    assert rows.pop("built at", "").partition(":")[0].endswith("test_display.py")  # type: ignore[union-attr]
    assert rows == {
        "shape": "(1, 2)",
        "dtype": "float32",
        "device": "cpu",
        "bytes": "8",
        "state": "value",
    }
    assert root.findtext("pre") == "[[1., 2.]]"


def test_a_notebook_shows_the_graph_of_what_has_no_value() -> None:
    x = ft.sum(ft.asarray([1.0, 2.0]) + ft.ones(2))
    root = parsed(x._repr_html_())
    assert not x.is_realized
    assert root.find("pre") is None
    (svg,) = root.iter("{http://www.w3.org/2000/svg}svg")
    titles = [e.text or "" for e in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert [re.findall(r"#\d+ (\w+)", title)[0] for title in titles] == ["data", "full", "add", "sum"]


def test_a_notebook_does_not_draw_what_nobody_could_see() -> None:
    x = ft.ones(2)
    for _ in range(100):
        x = ft.sin(x)
    assert "101 nodes" in (parsed(x._repr_html_()).findtext("p") or "")


def test_a_graph_is_a_picture_in_a_notebook_and_a_table_in_print(capsys: pytest.CaptureFixture[str]) -> None:
    x = ft.sum(ft.ones(3))
    view = ft.graph({"x": x})
    ft.show(x)
    assert str(view) == capsys.readouterr().out
    assert parsed(view._repr_svg_()).tag.endswith("svg")
    assert not x.is_realized

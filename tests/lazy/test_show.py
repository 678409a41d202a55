"""`show` lists every node once, in an order that can be read, and draws pictures in which boxes do not overlap."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuel_parallel.lazy as ft
from fuel_parallel.comm import SymbolicComm
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.draw import to_dot, to_svg
from fuel_parallel.lazy.layout import LAYER_GAP, arrange
from fuel_parallel.lazy.outline import Entry, outline
from fuel_parallel.lazy.show import table
from fuel_parallel.module import Module, Parameter

SVG = "{http://www.w3.org/2000/svg}"


HEADINGS = ["#", "op", "inputs", "result", "attributes", "device", "state", "built at"]


def graph() -> list[ft.Tensor]:
    """A loss and its gradient, averaged over four ranks."""
    weight = ft.asarray(np.ones((3, 2), dtype=np.float32))
    hidden = ft.tanh(ft.ones((5, 3)) @ weight)
    loss = ft.mean(hidden * hidden)
    return [loss, SymbolicComm(1, 4).all_reduce(ft.grad(loss, weight))]


def test_the_table_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    x = ft.asarray([[1.0, 2.0]]).realize()
    y = x[:, ::-1] * 2.5
    assert ft.show(ft.sum(y + y, axis=1)) is None  # type: ignore[func-returns-value]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "5 nodes to compute from 1 values"
    assert re.split(r"\s{2,}", lines[1].strip()) == HEADINGS
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines[2:]]
    assert [row[1:] for row in cells[:-1]] == [
        ["data", "float32[1, 2]", "cpu", "value", cells[0][-1]],
        ["slice", "0", "float32[1, 2]", "window=[0:1:1, 1:-1:-1]", "cpu", "lazy", cells[1][-1]],
        ["full", "float32[]", "value=2.5", "cpu", "lazy", cells[2][-1]],
        ["multiply", "1 2", "float32[1, 2]", "cpu", "lazy", cells[3][-1]],
        ["add", "3 3", "float32[1, 2]", "cpu", "lazy", cells[4][-1]],
    ]
    assert cells[-1][0] == ">"
    assert cells[-1][2:6] == ["sum", "4", "float32[1]", "axis=(1,), keepdims=False"]
    assert all(re.fullmatch(r".*test_show\.py:\d+", row[-1]) for row in cells)


def test_nothing_is_computed(capsys: pytest.CaptureFixture[str]) -> None:
    x = ft.ones(3) + 1
    ft.show(x)
    assert not x.is_realized
    ft.show(x.realize())
    assert "0 nodes to compute from 1 values" in capsys.readouterr().out


def test_modules_and_nests_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    class Pair(Module):
        def __init__(self) -> None:
            self.left, self.right = Parameter(ft.ones(2)), Parameter(ft.zeros(3))

    ft.show({"model": Pair(), "more": [ft.ones(4) * 2]})
    marked = [line for line in capsys.readouterr().out.splitlines() if line.startswith(">")]
    assert [re.search(r"float32\[\d\]", line)[0] for line in marked] == ["float32[2]", "float32[3]", "float32[4]"]  # type: ignore[index]


def test_wide_and_long_rows_are_cut() -> None:
    x = ft.concat([ft.ones(1) * i for i in range(30)])
    text = table(outline([x]))
    assert "… (30 in all)" in text
    assert max(map(len, text.splitlines())) < 200


def test_inputs_stand_before_what_uses_them() -> None:
    entries = outline(graph())
    assert all(i < number for number, entry in enumerate(entries) for i in entry.inputs)
    assert [entry.op for entry in entries].count("tanh") == 1
    assert sum(entry.is_output for entry in entries) == 2


MISTAKES: list[tuple[Any, Any, str]] = [
    (ft.ones(1), "graph.png", r"the file must end in .dot, .gv, .svg, but is named 'graph.png'"),
    (ft.ones(1), "graph", r"must end in .dot, .gv, .svg, but is named 'graph'"),
    (3, None, "expected a tensor, a module or a nest of them, but found no tensor in 3"),
]


@pytest.mark.parametrize(("x", "file", "text"), MISTAKES)
def test_mistakes_are_named(x: Any, file: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        ft.show(x, file)


@pytest.mark.parametrize("name", ["graph.svg", "graph.SVG", "graph.dot", "graph.gv"])
def test_the_ending_of_the_file_says_what_is_drawn(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ft.show(graph(), tmp_path / name)
    ft.show(graph(), str(tmp_path / name))
    written = (tmp_path / name).read_text()
    assert written.startswith("<svg" if name.lower().endswith("svg") else "digraph {")
    assert capsys.readouterr().out == ""


# Pictures.


def hostile() -> Entry:
    return Entry('a<b>&"c"\\', "data", (), "x\x00\n", ("y=]]>",), "cpu", True, True, "<stdin>:1")


def test_the_picture_is_xml_and_labels_are_escaped() -> None:
    root = ElementTree.fromstring(to_svg([hostile()]))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts[0] == 'a<b>&"c"\\'
    assert texts[1] is not None
    assert texts[1].startswith("x?")


def test_a_picture_has_a_box_for_each_node_but_for_constants() -> None:
    entries = outline(graph())
    boxes = sum(not (e.is_constant and not e.is_output) for e in entries)
    root = ElementTree.fromstring(to_svg(entries))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert len(titles) == boxes
    assert any("all_reduce" in title and "test_show.py" in title for title in titles)
    assert sum(path.get("marker-end") is not None for path in root.iter(f"{SVG}path")) >= boxes - 1


def test_collectives_stand_out() -> None:
    entries = outline(graph())
    collective = [i for i, e in enumerate(entries) if e.category == "collectives"]
    assert [entries[i].op for i in collective] == ["all_reduce"]
    fills = [box.get("fill") for box in ElementTree.fromstring(to_svg(entries)).iter(f"{SVG}rect")]
    assert fills.count("#dc2626") == 2, "the box, and its swatch in the legend"


def test_a_constant_is_drawn_into_the_box_that_uses_it() -> None:
    drawn = to_svg(outline([ft.ones(3) * 0.123456789]))
    assert "multiply  0.12346" in drawn
    assert to_svg(outline([ft.full((), 2.0)])).count("<title>") == 1, "unless it is what was asked for"


def test_graphviz_text_is_quoted() -> None:
    text = to_dot([hostile()])
    assert r'label="a<b>&\"c\"\\\nx' in text
    assert "n0 -> n1;" in to_dot(outline([-ft.ones(2)]))


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_reads_it() -> None:
    run = subprocess.run(["dot", "-Tplain"], input=to_dot(outline(graph())), capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


@st.composite
def directed_graphs(draw: st.DrawFn) -> tuple[list[float], list[tuple[int, int]]]:
    count = draw(st.integers(0, 25))
    widths = draw(st.lists(st.floats(20, 300), min_size=count, max_size=count))
    edges = [
        (source, target)
        for target in range(1, count)
        for source in draw(st.lists(st.integers(0, target - 1), max_size=3, unique=True))
    ]
    return widths, edges


@given(directed_graphs())
def test_boxes_do_not_overlap_and_lines_lead_down(drawn: Any) -> None:
    widths, edges = drawn
    layout = arrange(widths, 40.0, edges)
    for source, target in edges:
        ys = [layout.y[source], *(y for _, y in layout.lines[source, target]), layout.y[target]]
        assert all(b - a >= 40 + LAYER_GAP - 1e-6 for a, b in pairwise(ys))
    for i in range(len(widths)):
        assert layout.x[i] - widths[i] / 2 >= -1e-6
        assert layout.x[i] + widths[i] / 2 <= layout.width + 1e-6
        for j in range(i):
            if layout.y[i] == layout.y[j]:
                assert abs(layout.x[i] - layout.x[j]) >= (widths[i] + widths[j]) / 2 + 1


def test_a_chain_is_drawn_straight() -> None:
    layout = arrange([50.0, 80.0, 60.0], 40.0, [(0, 1), (1, 2)])
    assert layout.x == [40.0, 40.0, 40.0]


def test_a_graph_of_a_thousand_nodes_is_drawn() -> None:
    x = first = ft.ones(4)
    for _ in range(500):
        x = ft.exp(x) * first
    assert to_svg(outline([x])).count("<title>") == 1001

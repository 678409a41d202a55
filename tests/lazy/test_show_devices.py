"""`show` says where everything runs: devices and both ends of copies, of the graph and of its plan."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import stand_in
import third_party

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import backends
from fuel_parallel.comm import IdentityComm
from fuel_parallel.lazy.draw import DEVICES, to_dot, to_svg
from fuel_parallel.lazy.outline import Entry, outline
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.outline import outline_of_plan
from fuel_parallel.runtime.plan import plans

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(backends._found, "abacus:0", third_party.Abacus(0))
    with stand_in.installed(stand_in.StandInMemory("plain:0")):
        yield


def mixed() -> list[ft.Tensor]:
    """A sum on one device, an op that it leaves to the host, a collective, and a hop to another vendor."""
    x = ft.asarray(np.ones((3, 3))).to("abacus:0")
    y = ft.argsort(x + x, axis=1)
    total = IdentityComm().all_reduce(ft.sum((x * x).to("plain:0")))
    return [y, total]


def ends(entries: list[Entry]) -> list[tuple[str, str]]:
    return [(entries[e.inputs[0]].op, e.place) for e in entries if e.op == "copy"]


def test_a_copy_names_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    ft.show(mixed())
    text = capsys.readouterr().out
    assert re.findall(r"copy .*?(\w+:?\d? → \w+:?\d?) ", text) == [
        "cpu → abacus:0",
        "abacus:0 → cpu",
        "cpu → plain:0",
    ]
    assert re.search(r"multiply .* abacus:0 ", text)


def test_the_plan_has_the_hops_to_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = mixed()
    assert ("argsort", "cpu → abacus:0") not in ends(outline(tensors))
    entries = outline_of_plan(tensors)
    assert ("add", "abacus:0 → cpu") in ends(entries)
    assert ("argsort", "cpu → abacus:0") in ends(entries)
    assert [e.device for e in entries if e.op == "argsort"] == ["cpu"]
    assert all("test_show_devices.py:" in e.line for e in entries if e.line)
    assert sum(e.is_output for e in entries) == 2
    assert not any(t.is_realized for t in tensors), "nothing is computed"
    made = plans.made
    ft.show(tensors, plan=True)
    assert plans.made == made
    assert "abacus:0 → cpu" in capsys.readouterr().out


def test_it_is_the_plan_that_runs() -> None:
    tensors = mixed()
    outline_of_plan(tensors)
    made = plans.made
    fp.realize(tensors)
    assert plans.made == made


def test_printing_a_plan_names_both_ends() -> None:
    text = str(plans.plan_for(trace([t.node for t in mixed()])[0]))
    assert re.search(r"copy\(%\d+\) : float64\[3, 3\] from abacus:0 to cpu", text)
    assert re.search(r"copy\(%\d+\) : int64\[3, 3\] from cpu to abacus:0", text)


@pytest.mark.parametrize("entries", [lambda: outline(mixed()), lambda: outline_of_plan(mixed())], ids=["graph", "plan"])
def test_each_device_has_a_colour_and_copies_have_two(entries: Any) -> None:
    found = entries()
    boxes = [e for e in found if not (e.is_constant and not e.is_output)]
    root = ElementTree.fromstring(to_svg(found))
    bands = [r.get("fill") for r in root.iter(f"{SVG}rect") if r.get("width") == "5"]
    names = ["cpu", *dict.fromkeys(n for e in boxes for n in (e.source, e.device) if n not in ("", "cpu"))]
    wanted = [DEVICES[names.index(n)] for e in boxes for n in (e.source, e.device) if n]
    assert bands == wanted
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert set(names) <= set(texts), "the legend has them all"
    wide = [p for p in root.iter(f"{SVG}path") if p.get("stroke-width") == "2.6"]
    assert len(wide) == sum(found[i].device != e.device for e in boxes for i in e.inputs if found[i] in boxes)


def test_a_single_device_is_not_coloured() -> None:
    entries = outline([ft.ones(3) + ft.asarray([1.0, 2.0, 3.0])])
    assert 'width="5"' not in to_svg(entries)
    assert "subgraph" not in to_dot(entries)


def test_graphviz_has_a_cluster_for_each_device(tmp_path: Path) -> None:
    ft.show(mixed(), tmp_path / "plan.dot", plan=True)
    text = (tmp_path / "plan.dot").read_text()
    assert re.findall(r'subgraph cluster_\d \{ label="(.*?)"', text) == ["cpu", "abacus:0", "plain:0"]
    assert text.count("{") == text.count("}")
    assert text.count("[penwidth=3]") == text.count("→") / 2
    if shutil.which("dot"):
        assert (
            subprocess.run(["dot", "-Tplain"], input=text, capture_output=True, text=True, timeout=60).returncode == 0
        )

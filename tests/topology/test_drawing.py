"""Pictures of topologies: what is in them, as SVG, PNG and DOT."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click import UsageError
from defusedxml.ElementTree import fromstring
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import ArgumentError
from fuel_parallel.topology import (
    DeviceInfo,
    DeviceKind,
    DeviceTopology,
    Interconnect,
    Link,
    MeshAxis,
    Nic,
    Switch,
    place,
)
from fuel_parallel.topology.drawing import drawing
from fuel_parallel.topology.files import examine_text, write
from fuel_parallel.topology.heat_map import heat_map
from fuelrun.pictures import write_heat_map, write_picture
from tests.topology.machines import dgx1, fat_tree, gpus, link, two_nodes

SVG = "{http://www.w3.org/2000/svg}"
AXES = [MeshAxis(name="dp", size=2), MeshAxis(name="tp", size=4, nbytes=1 << 24)]


def texts(svg: str) -> list[str]:
    return [e.text or "" for e in fromstring(svg).iter(f"{SVG}text")]


def titled(svg: str, words: str) -> list[dict[str, str]]:
    """The attributes of the shapes whose title has these words."""
    return [dict(e.attrib) for e in fromstring(svg).iter() for t in e.findall(f"{SVG}title") if words in (t.text or "")]


def boxes(svg: str, part: str) -> list[dict[str, str]]:
    """The boxes of a part."""
    return [shape for shape in titled(svg, part) if "rx" in shape]


def partly_known() -> DeviceTopology:
    t = gpus(4)
    t.add_link("cuda:0", "cuda:1", link(50))
    t.add_link("cuda:2", "cuda:3", Link(interconnect=Interconnect.NVLINK, path="NV4"))
    return t


def test_a_picture_has_machines_devices_switches_and_links() -> None:
    svg = drawing(two_nodes())
    found = texts(svg)
    assert {"n0", "n1", "leaf", "nic", "cuda:0", "cuda:3"} <= set(found)
    assert found.count("cuda:0") == 2
    assert found.count("6 x nvlink, 200 GB/s") == 2
    assert len(titled(svg, "nvlink, 200 GB/s")) == 12


def test_wider_links_are_thicker_and_unknown_ones_dashed() -> None:
    [known], [unknown] = titled(drawing(partly_known()), "50 GB/s"), titled(drawing(partly_known()), "unknown")
    assert "stroke-dasharray" in unknown
    assert "stroke-dasharray" not in known
    [slow] = titled(drawing(linked_pair(1)), "1 GB/s")
    assert float(known["stroke-width"]) > float(slow["stroke-width"])
    assert "bandwidth unknown" in texts(drawing(partly_known()))
    assert "bandwidth unknown" not in texts(drawing(two_nodes()))


def linked_pair(rate: float) -> DeviceTopology:
    t = gpus(2)
    t.add_link("cuda:0", "cuda:1", link(rate))
    return t


def test_ranks_are_shown_and_coloured_by_an_axis_of_the_mesh() -> None:
    t = two_nodes()
    placed = place(t, AXES)
    svg = drawing(t, placed, "tp")
    assert {f"rank {n}" for n in range(8)} <= set(texts(svg))
    assert {f"tp={n}" for n in range(4)} <= set(texts(svg))
    fills = {device: shape["fill"] for device in placed.devices for shape in boxes(svg, device)}
    assert len(fills) == 8
    assert len(set(fills.values())) == 4
    assert fills[placed.devices[0]] == fills[placed.devices[4]]
    assert {"dp=0", "dp=1"} <= set(texts(drawing(t, placed)))
    with pytest.raises(ArgumentError, match="there is no axis 'pp'; the axes are dp, tp"):
        drawing(t, placed, "pp")


def test_many_machines_are_drawn_from_outside_and_the_picture_says_so() -> None:
    svg = drawing(fat_tree(32))
    found = texts(svg)
    assert len(titled(svg, ": 8 devices")) == 32
    assert "Inside of machines: 256 x nvlink, 240 GB/s" in found
    assert any("links inside of machines are summed up" in text for text in found)
    assert len(svg) < 200_000


def test_what_is_left_out_of_a_large_network_is_said() -> None:
    lines = "".join(f"SwitchName=s{n} Nodes=n{n}x[0-39]\n" for n in range(30))
    found = texts(drawing(examine_text(lines).topology))
    assert "The first 12 of 30 groups of machines are drawn." in found
    assert any("32 are drawn" in text for text in found)


def test_a_heat_map_hatches_what_is_unknown() -> None:
    svg = heat_map(partly_known())
    assert [cell["fill"] for cell in titled(svg, "cuda:0 to cuda:2")] == ["url(#unknown)"]
    assert [cell["fill"] for cell in titled(svg, "cuda:2 to cuda:3")] == ["url(#unknown)"]
    assert re.fullmatch(r"#[0-9a-f]{6}", titled(svg, "cuda:0 to cuda:1")[0]["fill"])
    assert {"50", "?", "NV4", "unknown, which is not slow"} <= set(texts(svg))


def test_a_heat_map_is_darker_where_more_is_carried() -> None:
    svg = heat_map(dgx1())
    fast, slow = (titled(svg, words)[0]["fill"] for words in ("cuda:0 to cuda:3", "cuda:0 to cuda:1"))
    assert int(fast[1:3], 16) < int(slow[1:3], 16)
    assert "12 to 50 GB/s" in texts(svg)
    assert "unknown, which is not slow" not in texts(svg)


def test_a_large_heat_map_has_no_text_in_its_cells() -> None:
    assert "240" not in texts(heat_map(fat_tree(3)))
    assert "The first 96 of 104 devices." in texts(heat_map(gpus(104)))


def test_nothing_cannot_be_drawn() -> None:
    with pytest.raises(ArgumentError, match="is empty; there is nothing to draw"):
        drawing(DeviceTopology("none"))
    with pytest.raises(ArgumentError, match="has no devices to draw"):
        heat_map(DeviceTopology("none"))


def test_graphviz_gets_a_cluster_for_each_machine_and_labels() -> None:
    dot = write(two_nodes(), "graphviz")
    assert dot.count("subgraph cluster_") == 2
    assert '"leaf" -- "n0/nic" [label="10 GB/s"' in dot
    assert 'label="NV4 ?", color="#65a30d", style=dashed' in write(partly_known(), "graphviz")
    hostile = DeviceTopology('a"]; b')
    hostile.add_device(DeviceInfo(id='x"\n\\', kind=DeviceKind.CPU))
    assert write(hostile, "graphviz").splitlines()[0] == 'graph "a\\"]; b" {'
    assert '"x\\" \\\\" [label=' in write(hostile, "graphviz")


def test_the_suffix_says_which_kind_of_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, start in (("a.svg", b"<svg"), ("a.png", b"\x89PNG")):
        write_picture(two_nodes(), tmp_path / name, place(two_nodes(), AXES))
        assert (tmp_path / name).read_bytes().startswith(start)
        write_heat_map(partly_known(), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(UsageError, match=r"a picture is an \.svg or a \.png file"):
        write_picture(two_nodes(), tmp_path / "a.gif")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_topology_can_be_drawn(data: st.DataObject) -> None:
    t = DeviceTopology(data.draw(st.text(max_size=8)))
    nodes = data.draw(st.lists(st.text(max_size=4), min_size=1, max_size=12))
    parts = []
    for i, node in enumerate(nodes):
        kind = data.draw(st.integers(0, 2))
        part = (
            DeviceInfo(id=f"{node}/{i}", node=node, kind=DeviceKind.CUDA)
            if kind == 0
            else Nic(id=f"{node}/{i}", node=node)
            if kind == 1
            else Switch(id=f"{node}/{i}", node=node, kind=data.draw(st.sampled_from(list(Interconnect))))
        )
        t.add(part)
        parts.append(part.id)
    for a, b in data.draw(st.sets(st.tuples(st.sampled_from(parts), st.sampled_from(parts)), max_size=10)):
        if a < b:
            t.add_link(a, b, Link(bandwidth_mb_s=data.draw(st.sampled_from([None, 1.0, 1e12]))))
    fromstring(drawing(t))
    write(t, "graphviz")

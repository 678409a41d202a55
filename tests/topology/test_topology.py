"""`DeviceTopology`: building, asking, ways over several links, and its value."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.errors import DataError, TopologyError
from fuel_parallel.topology import (
    Description,
    DeviceInfo,
    DeviceKind,
    DeviceTopology,
    Interconnect,
    Link,
    Nic,
    NumaDomain,
    Switch,
)
from fuel_parallel.topology.cores import format_list, parse_list, parse_mask
from fuel_parallel.topology.text import outline

NVLINK = Link(interconnect=Interconnect.NVLINK, bandwidth_mb_s=20_000.0, latency_us=1.0)
PCIE = Link(interconnect=Interconnect.PCIE, bandwidth_mb_s=12_000.0, latency_us=0.5)
NETWORK = Link(interconnect=Interconnect.NETWORK, bandwidth_mb_s=3_000.0, latency_us=2.0)


def gpu(name: str, node: str = "") -> DeviceInfo:
    return DeviceInfo(id=name, kind=DeviceKind.CUDA, memory_bytes=100, node=node)


def two_nodes() -> DeviceTopology:
    """Two GPUs with NVLink in each of two machines, each with a card behind a PCI switch, and a switch between them."""
    t = DeviceTopology("pair")
    t.add_switch(Switch(id="leaf", kind=Interconnect.NETWORK))
    for node in "ab":
        t.add_switch(Switch(id=f"{node}/pci", node=node, kind=Interconnect.PCIE))
        t.add_nic(Nic(id=f"{node}/nic:0", node=node))
        for n in range(2):
            t.add_device(gpu(f"{node}/cuda:{n}", node))
            t.add_link(f"{node}/cuda:{n}", f"{node}/pci", PCIE)
        t.add_link(f"{node}/cuda:0", f"{node}/cuda:1", NVLINK)
        t.add_link(f"{node}/pci", f"{node}/nic:0", PCIE)
        t.add_link(f"{node}/nic:0", "leaf", NETWORK)
    return t


def test_a_way_is_as_wide_as_its_narrowest_link_and_as_long_as_all() -> None:
    t = two_nodes()
    route = t.route("a/cuda:0", "b/cuda:1")
    assert route is not None
    assert route.parts == ("a/cuda:0", "a/pci", "a/nic:0", "leaf", "b/nic:0", "b/pci", "b/cuda:1")
    assert (route.bandwidth_mb_s, route.latency_us, route.interconnect) == (3000.0, 6.0, Interconnect.NETWORK)
    assert t.transfer_time_us("a/cuda:0", "b/cuda:1", 3000 * 2**20) == pytest.approx(1e6 + 6)
    assert t.bandwidth_mb_s("a/cuda:0", "a/cuda:1") == 20_000.0
    assert t.fastest_peer("a/cuda:0") == "a/cuda:1"
    assert (t.bandwidth_mb_s("a/cuda:0", "a/cuda:0"), t.transfer_time_us("leaf", "leaf", 5)) == (math.inf, 0.0)


def test_devices_pass_nothing_on() -> None:
    t = DeviceTopology()
    for n in range(3):
        t.add_device(gpu(f"cuda:{n}"))
    t.add_link("cuda:0", "cuda:1", NVLINK)
    t.add_link("cuda:1", "cuda:2", NVLINK)
    assert t.route("cuda:0", "cuda:2") is None
    assert t.bandwidth_mb_s("cuda:0", "cuda:2") is None
    assert t.transfer_time_us("cuda:0", "cuda:2", 1) is None


def test_what_is_unknown_stays_unknown() -> None:
    t = DeviceTopology()
    for name in ("cuda:0", "cuda:1", "cuda:2"):
        t.add_device(gpu(name))
    t.add_link("cuda:0", "cuda:1", Link(interconnect=Interconnect.PCIE, path="SYS"))
    assert t.route("cuda:0", "cuda:1") is not None
    assert t.bandwidth_mb_s("cuda:0", "cuda:1") is None
    assert t.transfer_time_us("cuda:0", "cuda:1", 1) is None
    assert t.fastest_peer("cuda:0") is None
    assert t.bandwidth_mb_s("cuda:0", "cuda:2") is None


def test_links_have_directions() -> None:
    t = DeviceTopology()
    t.add_device(gpu("cuda:0"))
    t.add_device(gpu("cuda:1"))
    t.add_directed_link("cuda:0", "cuda:1", PCIE)
    assert (t.bandwidth_mb_s("cuda:0", "cuda:1"), t.bandwidth_mb_s("cuda:1", "cuda:0")) == (12_000.0, None)
    assert [c.one_way for c in t.connections()] == [True]


def test_its_value_does_not_depend_on_the_order() -> None:
    t = two_nodes()
    again = DeviceTopology.from_description(t.description())
    assert again == t
    assert hash(again.description()) == hash(t.description())
    turned = t.description()
    turned = Description(name=t.name, parts=turned.parts[::-1], connections=turned.connections[::-1])
    assert DeviceTopology.from_description(turned) == t
    again.add_device(gpu("one more"))
    assert again != t


def test_questions_about_all_of_it() -> None:
    t = two_nodes()
    t.add_device(DeviceInfo(id="a/cpu:0", kind=DeviceKind.CPU, node="a", cores="0-3"))
    t.add_numa(NumaDomain(id="a/numa:0", node="a", index=0, cores="0-3"))
    assert t.nodes == ["a", "b"]
    assert [d.id for d in t.devices_of_kind(DeviceKind.CPU)] == ["a/cpu:0"]
    assert len(t) == 5
    assert t.total_memory() == 400
    assert len(t.devices_of_node("a")) == 3
    assert "4 cuda" in repr(t)
    assert [n.id for n in t.nics] == ["a/nic:0", "b/nic:0"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda t: t.add_device(gpu("leaf")), "two parts with the id 'leaf'"),
        (lambda t: t.add_link("leaf", "root", PCIE), "there is no 'root'; add it first"),
        (lambda t: t.add_link("leaf", "leaf", PCIE), "from 'leaf' to itself"),
        (lambda t: t.add_link("a/cuda:0", "a/cuda:1", PCIE), "there is a link from 'a/cuda:0' to 'a/cuda:1' already"),
        (lambda t: t.add_link("leaf", "a/pci", Link(bandwidth_mb_s=0)), "bandwidth_mb_s 0; expected a positive number"),
        (lambda t: t.add_link("leaf", "a/pci", Link(bandwidth_mb_s=math.nan)), "bandwidth_mb_s nan"),
        (lambda t: t.add_link("leaf", "a/pci", Link(latency_us=-1)), "latency_us -1"),
        (lambda t: t.device("cuda:9"), "there is no device 'cuda:9'; the devices are a/cuda:0, a/cuda:1"),
        (lambda t: t.bandwidth_mb_s("leaf", "x"), "there is no part 'x'"),
    ],
)
def test_mistakes_say_what_is_wrong(wrong, message) -> None:
    with pytest.raises(TopologyError) as caught:
        wrong(two_nodes())
    assert message in str(caught.value)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 5), st.integers(0, 3)), max_size=16))
def test_ways_are_the_widest_and_of_those_the_shortest(edges) -> None:
    t = DeviceTopology()
    for n in range(7):
        t.add_switch(Switch(id=str(n)))
    for a, b, width, latency in edges:
        if a != b and t.link(str(a), str(b)) is None:
            t.add_directed_link(str(a), str(b), Link(bandwidth_mb_s=float(width), latency_us=float(latency)))

    def ways(part: str, seen: tuple[str, ...]):
        if part == "1":
            yield seen
            return
        for neighbour in t.links_of(part):
            if neighbour not in seen:
                yield from ways(neighbour, (*seen, neighbour))

    def cost(parts: tuple[str, ...]) -> tuple[float, float]:
        links = [t.link(a, b) for a, b in itertools.pairwise(parts)]
        return -min(x.bandwidth_mb_s for x in links), sum(x.latency_us for x in links)

    route = t.route("0", "1")
    expected = [("0", "1")] if t.link("0", "1") else list(ways("0", ("0",)))
    if not expected:
        assert route is None
    else:
        assert cost(route.parts) == min(map(cost, expected))
        assert (route.bandwidth_mb_s, route.latency_us) == (-cost(route.parts)[0], cost(route.parts)[1])


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cores_are_read_as_they_are_written(cores) -> None:
    assert set(parse_list(format_list(cores))) == cores
    mask = sum(1 << core for core in cores)
    words = [f"{mask >> 32 * n & 0xFFFFFFFF:08x}" for n in range(10)]
    assert set(parse_mask(",".join(reversed(words)))) == cores
    assert set(parse_mask(hex(mask))) == cores


@pytest.mark.parametrize("text", ["a", "3-1", "0-99999999999", "-1", "1-", "²"])
def test_other_lists_of_cores_are_refused(text) -> None:
    with pytest.raises(DataError, match="is not a list of cores"):
        parse_list(text)


@pytest.mark.parametrize("text", ["xyz", "0x" + "f" * 20000, "1,123456789"])
def test_other_masks_are_refused(text) -> None:
    with pytest.raises(DataError, match="is not a mask of cores"):
        parse_mask(text)


def test_names_cannot_command_a_terminal() -> None:
    t = DeviceTopology("\x1b]0;title\x07")
    t.add_device(DeviceInfo(id="cpu:0", kind=DeviceKind.CPU, name="\x1b[2J gone"))
    assert all(line.isprintable() for line in outline(t))
    assert "gone" in "".join(outline(t))

"""A machine in each node of a network."""

from __future__ import annotations

import pytest

from fuel_parallel.errors import ArgumentError
from fuel_parallel.topology import (
    DeviceInfo,
    DeviceKind,
    DeviceTopology,
    Interconnect,
    Link,
    MeshAxis,
    Nic,
    NumaDomain,
    Origin,
    Switch,
    place,
)
from fuel_parallel.topology.combine import machine_in
from fuel_parallel.topology.files import examine_text

TREE = "SwitchName=root Switches=leaf[1-2]\nSwitchName=leaf1 Nodes=n[1-2]\nSwitchName=leaf2 Nodes=n3\n"
PCIE = Link(interconnect=Interconnect.PCIE, bandwidth_mb_s=20_000.0)
NETWORK = Link(interconnect=Interconnect.NETWORK, bandwidth_mb_s=3_000.0)


def machine(nics: int = 2, node: str = "", speed: float | None = None) -> DeviceTopology:
    """Two GPUs on one NUMA domain, and cards."""
    prefix = f"{node}/" if node else ""
    t = DeviceTopology("box")
    t.add_numa(NumaDomain(id=f"{prefix}numa:0", node=node, index=0))
    for n in range(2):
        t.add_device(DeviceInfo(id=f"{prefix}cuda:{n}", node=node, kind=DeviceKind.CUDA))
        t.add_link(f"{prefix}cuda:{n}", f"{prefix}numa:0", PCIE)
    for n in range(nics):
        t.add_nic(Nic(id=f"{prefix}nic:{n}", node=node, speed_mb_s=speed))
        t.add_link(f"{prefix}nic:{n}", f"{prefix}numa:0", PCIE)
    return t


def network() -> DeviceTopology:
    return examine_text(TREE).topology


def test_each_node_gets_the_machine_and_its_cards_hang_where_the_card_was() -> None:
    t = machine_in(network(), machine())
    assert t.nodes == ["n1", "n2", "n3"]
    assert t.device_ids() == [f"n{n}/cuda:{i}" for n in (1, 2, 3) for i in range(2)]
    assert set(t.links_of("leaf1")) == {"root", "n1/nic:0", "n1/nic:1", "n2/nic:0", "n2/nic:1"}
    assert t.link("n3/cuda:1", "n3/numa:0") == PCIE
    route = t.route("n1/cuda:0", "n3/cuda:1")
    assert route is not None
    assert route.bandwidth_mb_s is None
    assert {"leaf1", "root", "leaf2"} <= set(route.parts)


def test_a_machine_that_knows_its_name_loses_it() -> None:
    named = machine(node="here")
    named.add_switch(Switch(id="somewhere", kind=Interconnect.NETWORK))
    named.add_link("here/nic:0", "somewhere", NETWORK)
    assert machine_in(network(), named) == machine_in(network(), machine())


def test_an_unknown_bandwidth_becomes_that_of_the_card_as_an_assumption() -> None:
    t = machine_in(network(), machine(speed=25_000.0))
    link = t.link("n1/nic:1", "leaf1")
    assert link is not None
    assert (link.bandwidth_mb_s, link.origin) == (25_000.0, Origin.ASSUMED)
    between = t.link("leaf1", "root")
    assert between is not None
    assert between.bandwidth_mb_s is None


def test_without_cards_the_network_is_linked_to_numa_domains_or_devices() -> None:
    assert "n1/numa:0" in machine_in(network(), machine(nics=0)).links_of("leaf1")
    bare = DeviceTopology()
    bare.add_device(DeviceInfo(id="cuda:0", kind=DeviceKind.CUDA))
    assert set(machine_in(network(), bare).links_of("leaf2")) == {"root", "n3/cuda:0"}


def test_rails_stay_apart_where_there_are_as_many_cards() -> None:
    rails = DeviceTopology("rails")
    for n in range(2):
        rails.add_switch(Switch(id=f"rail{n}", kind=Interconnect.NETWORK))
    for node in ("a", "b"):
        for n in range(2):
            rails.add_nic(Nic(id=f"{node}/nic:{n}", node=node))
            rails.add_link(f"{node}/nic:{n}", f"rail{n}", NETWORK)
    assert set(machine_in(rails, machine()).links_of("rail1")) == {"a/nic:1", "b/nic:1"}
    assert set(machine_in(rails, machine(nics=1)).links_of("a/nic:0")) == {"a/numa:0", "rail0", "rail1"}


def test_nodes_that_are_linked_directly_are_linked_card_by_card() -> None:
    t = machine_in(examine_text("RingName=r Nodes=n[1-3]\n").topology, machine())
    assert set(t.links_of("n1/nic:0")) == {"n1/numa:0", "n2/nic:0", "n3/nic:0"}


def test_a_combined_cluster_can_be_placed_on() -> None:
    t = DeviceTopology("two")
    t.add_switch(Switch(id="leaf", kind=Interconnect.NETWORK))
    for node in ("a", "b"):
        t.add_nic(Nic(id=f"{node}/nic:0", node=node))
        t.add_link(f"{node}/nic:0", "leaf", NETWORK)
    placed = place(machine_in(t, machine()), [MeshAxis(name="dp", size=2), MeshAxis(name="tp", size=2, nbytes=1 << 20)])
    assert placed.nodes == ("a", "a", "b", "b")


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(ArgumentError, match="has no machines to put box into"):
        machine_in(DeviceTopology("net"), machine())
    with pytest.raises(ArgumentError, match="is a cluster of 3 machines; expected one"):
        machine_in(network(), network())
    with pytest.raises(ArgumentError, match="box has no devices"):
        machine_in(network(), DeviceTopology("box"))

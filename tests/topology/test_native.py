"""The native file: what it says, and that every topology can be said."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuel_parallel.topology import (
    DeviceKind,
    Interconnect,
    Link,
    Origin,
)
from fuel_parallel.topology.files import FORMATS, native, write
from fuel_parallel.topology.model import mb_s
from tests.topology.machines import MACHINES, dgx1, fat_tree, mi250
from tests.topology.native_files import CLUSTER, read, topologies


def test_a_file_says_what_its_entries_stand_for() -> None:
    t = read(CLUSTER)
    assert (t.name, t.nodes) == ("cluster", ["n01", "n02", "n03", "n04"])
    assert t.device_ids() == [f"n0{n}/cuda:{g}" for n in range(1, 5) for g in range(2)]
    second = t.device("n02/cuda:1")
    assert (second.kind, second.node, second.numa, second.bus) == (DeviceKind.CUDA, "n02", 1, "0000:0f:00.0")
    assert (second.memory_bytes, second.tflops) == (40 * 2**30, 312.0)
    assert t.device("n02/cuda:0").memory_bytes == 80 * 2**30
    assert t.nics[0].speed_mb_s == mb_s(25)
    nvlink = Link(
        interconnect=Interconnect.NVLINK, bandwidth_mb_s=mb_s(240), count=12, path="NV12", origin=Origin.ASSUMED
    )
    assert t.link("n04/cuda:1", "n04/cuda:0") == nvlink
    # What is not said of a link is unknown.
    assert t.link("n01/nic:0", "n01/cuda:1") == Link(interconnect=Interconnect.PCIE)
    network = Link(interconnect=Interconnect.NETWORK, bandwidth_mb_s=mb_s(12.5), latency_us=0.8)
    assert t.link("leaf2", "n01/nic:0") == network
    changed = t.link("n03/nic:0", "leaf2")
    assert (changed.bandwidth_mb_s, changed.latency_us, changed.origin) == (5.5, 0.8, Origin.MEASURED)
    # 4 NVLinks, 8 to cards, 8 of the network
    assert sum(1 for _ in t.connections()) == 20


def test_json_and_yaml_have_the_same_structure() -> None:
    plain = tomllib.loads(CLUSTER)
    assert read(json.dumps(plain)) == read(CLUSTER)
    assert read(native._yaml(plain)) == read(CLUSTER)


@pytest.mark.parametrize("form", native.FORMS)
@pytest.mark.parametrize("name", [*MACHINES, "fat tree", "devices in turns"])
def test_machines_are_written_and_read_again_in_their_order(name, form) -> None:
    special = {"fat tree": lambda: fat_tree(20), "devices in turns": lambda: fat_tree(3, shuffled=1)}
    t = (MACHINES | special)[name]()
    again = read(native.write(t, form))
    assert again == t
    assert again.device_ids() == t.device_ids()
    assert again.nodes == t.nodes or name == "devices in turns"


def test_a_cluster_of_equal_machines_is_a_short_file() -> None:
    small, large = (native.write(fat_tree(machines)) for machines in (2, 32))
    assert len(large.splitlines()) < 60
    assert len(large.splitlines()) < len(small.splitlines()) + 10
    assert 'name = "n[0-31]"' in large
    assert 'between = ["n[16-31]/nic:[0-7]", "leaf1"]' in large


def test_all_pairs_and_packages_are_said_in_few_entries() -> None:
    # Sixteen NVLinks of two widths, and a link to the bus: at most one entry for each GPU and width.
    assert native.write(dgx1()).count("[[link]]") < 12
    # Four packages, four wide links and four narrow ones, and the bus.
    assert native.write(mi250()).count("[[link]]") == 4


def test_the_table_of_formats_writes_it_too() -> None:
    assert FORMATS[0].name == "native"
    assert write(fat_tree(1), "native") == native.write(fat_tree(1))


def test_the_schema_names_all_fields() -> None:
    schema = native.schema()
    fields = schema["$defs"]["DeviceEntry"]["properties"]
    assert set(fields) == {"id", "node", "kind", "name", "memory", "tflops", "numa", "bus", "cores"}
    assert schema["$defs"]["LinkEntry"]["additionalProperties"] is False


@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(topologies(), st.sampled_from(native.FORMS))
def test_any_topology_is_said_exactly(t, form) -> None:
    again = read(native.write(t, form))
    assert again == t
    assert again.device_ids() == t.device_ids()


def test_the_documentation_shows_a_file_that_can_be_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "topology-files.md").read_text()
    t = read(page.partition("```toml\n")[2].partition("```")[0])
    # In each machine 8 NVLinks and 8 cards; of 256 cards each at two switches.
    assert (len(t), sum(1 for _ in t.connections())) == (256, 32 * 16 + 256 * 2)
    assert t.link("n017/nic:3", "leaf1").bandwidth_mb_s == mb_s(12.5)

"""The machines of a job, probed by its ranks and measured between them."""

from __future__ import annotations

import itertools
import os

import pytest

import fuel_parallel as fp
from fuel_parallel.comm.speed.probing import Finding, Seat, _joined, _with_figures, pairs, probe_all
from fuel_parallel.comm.speed.validating import NAMES, compare
from fuel_parallel.topology import (
    DeviceInfo,
    DeviceKind,
    DeviceTopology,
    Interconnect,
    Link,
    Nic,
    NumaDomain,
    Origin,
)
from fuel_parallel.topology.cores import parse_list

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


def test_all_ranks_get_one_topology_of_their_machine() -> None:
    world = fp.init()
    t = probe_all(world)
    assert len(t.nodes) == 0  # one machine needs no name
    cores = {core for d in t.devices_of_kind(DeviceKind.CPU) for core in parse_list(d.cores)}
    assert os.sched_getaffinity(0) <= cores
    everywhere = world.all_gather_object(t.description(), type=type(t.description()))
    assert everywhere == [t.description()] * world.world_size


def test_measured_links_say_so() -> None:
    world = fp.init()
    t = probe_all(world, measure=True, per_rank=True)
    assert t.device_ids() == [f"cpu:{n}" for n in range(world.world_size)]
    for device in t.devices:
        (link,) = t.links_of(device.id).values()
        assert link.origin is Origin.MEASURED
        assert 10 < link.bandwidth_mb_s < 1e7
        assert (link.latency_us is not None) == (world.world_size > 1)
    if world.world_size > 1:
        time = t.transfer_time_us("cpu:0", f"cpu:{world.world_size - 1}", 1 << 20)
        assert 1 < time < 1e6


@pytest.mark.mpi(min_size=2)
def test_predictions_stand_beside_timings_of_all_collectives() -> None:
    world = fp.init()
    t = probe_all(world, measure=True, per_rank=True)
    found = compare(world, t, sizes=(4096, 65536), seconds=0.001)
    assert list(found) == ["mpi", "auto"]
    for comparisons in found.values():
        assert [(c.timing.collective, c.timing.nbytes) for c in comparisons] == list(
            itertools.product(NAMES, (4096, 65536))
        )
        assert all(c.timing.ranks == world.world_size and c.timing.us > 0 and c.predicted_us > 0 for c in comparisons)


def machine(name: str, speed: float | None) -> DeviceTopology:
    t = DeviceTopology(name)
    t.add_numa(NumaDomain(id=f"{name}/numa:0", node=name, index=0))
    t.add_device(DeviceInfo(id=f"{name}/cpu:0", node=name, kind=DeviceKind.CPU))
    t.add_link(f"{name}/cpu:0", f"{name}/numa:0", Link(interconnect=Interconnect.SHARED_MEMORY))
    if speed is not None:
        for number, rate in enumerate((speed, speed, speed / 10)):
            nic = f"{name}/nic:{number}"
            t.add_nic(Nic(id=nic, node=name, speed_mb_s=rate))
            t.add_link(nic, f"{name}/numa:0", Link(interconnect=Interconnect.PCIE, bandwidth_mb_s=9000.0))
    return t


def test_machines_are_joined_by_their_fastest_cards() -> None:
    t = _joined([machine("a", 1000.0).description(), machine("b", 1000.0).description()])
    assert t.nodes == ["a", "b"]
    assert set(t.links_of("network")) == {"a/nic:0", "a/nic:1", "b/nic:0", "b/nic:1"}
    assert t.route("a/numa:0", "b/numa:0").bandwidth_mb_s == 1000.0
    unknown = _joined([machine("a", None).description(), machine("b", None).description()])
    assert unknown.route("a/cpu:0", "b/cpu:0").bandwidth_mb_s is None


def test_what_was_measured_between_machines_becomes_their_links() -> None:
    hosts = ["a", "a", "b", "b"]
    t = _joined([machine("a", 1000.0).description(), machine("b", 1000.0).description()])
    met = {(0, 1): (5000.0, 2.0), (2, 3): (5000.0, 2.0), (0, 2): (600.0, 12.0)}
    assert pairs(hosts) == list(met)
    findings = [Finding(copy_mb_s=1.0) for _ in hosts]
    findings[1] = Finding(copy_mb_s=1.0, peer_mb_s=5000.0, peer_us=2.0)
    findings[3] = Finding(copy_mb_s=1.0, peer_mb_s=5000.0, peer_us=2.0)
    findings[2] = Finding(copy_mb_s=1.0, peer_mb_s=600.0, peer_us=12.0)
    measured = _with_figures(t, [Seat(host, ()) for host in hosts], findings)
    route = measured.route("a/cpu:0", "b/cpu:0")
    assert route.latency_us == pytest.approx(12.0)
    assert route.bandwidth_mb_s == pytest.approx(300.0)  # two cards, measured together
    assert measured.link("a/cpu:0", "a/numa:0").bandwidth_mb_s == 5000.0

"""What looks wrong in a topology that holds together."""

from __future__ import annotations

from fuel_parallel.topology import DeviceTopology, Interconnect, Link
from fuel_parallel.topology.problems import problems
from tests.topology.machines import MACHINES, fat_tree, gpus


def test_machines_that_are_fully_described_have_none() -> None:
    assert [problems(make()) for make in (*MACHINES.values(), lambda: fat_tree(3))] == [[]] * (len(MACHINES) + 1)


def test_nothing_and_a_single_device() -> None:
    assert problems(DeviceTopology()) == ["there are no devices"]
    assert problems(gpus(1)) == []


def test_nvlinks_that_differ_by_direction_are_told() -> None:
    t = gpus(2)
    for (a, b), count in {("cuda:0", "cuda:1"): 12, ("cuda:1", "cuda:0"): 11}.items():
        t.add_directed_link(a, b, Link(interconnect=Interconnect.NVLINK, bandwidth_mb_s=1.0, count=count))
    assert problems(t) == ["cuda:0 to cuda:1 has 12 NVLinks, and 11 back"]

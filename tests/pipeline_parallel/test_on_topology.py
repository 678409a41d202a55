"""Costs on a machine are those of its devices and of the ways between them."""

from __future__ import annotations

import pytest

from fuel_parallel.errors import ArgumentError, TopologyError
from fuel_parallel.pipeline_parallel import Workload, build, search, simulate
from fuel_parallel.pipeline_parallel.on_topology import pipeline_devices, workload_on
from fuel_parallel.topology import DeviceInfo, DeviceKind, DeviceTopology, Link


def row_of(peaks: list[float | None], rates: list[float | None]) -> DeviceTopology:
    """Devices in a row, with a link of so many MB/s and 10 us between each two neighbours."""
    topology = DeviceTopology()
    for number, peak in enumerate(peaks):
        topology.add_device(DeviceInfo(id=f"cuda:{number}", kind=DeviceKind.CUDA, tflops=peak))
    for number, rate in enumerate(rates):
        link = Link(bandwidth_mb_s=rate, latency_us=10.0)
        topology.add_link(f"cuda:{number}", f"cuda:{number + 1}", link)
    return topology


def work(topology: DeviceTopology, **options) -> Workload:
    options = {"flops": 3e12, "activation_bytes": 4 * 2**20, "efficiency": 0.5, **options}
    return workload_on(topology, topology.device_ids(), **options)


def test_each_pair_of_stages_has_the_way_between_its_devices() -> None:
    topology = row_of([100.0] * 3, [1000.0, 100.0])
    costs = work(topology).costs(build("1f1b", 3, 4))
    assert costs.forward == pytest.approx([3e12 / 50e6 / 3 / 4] * 3)
    # A MiB of each micro-batch.
    assert costs.message == pytest.approx([1e6 / 1000 + 10, 1e6 / 100 + 10])
    there_and_back = work(topology).costs(build("zb-v", 3, 4))
    assert there_and_back.message == pytest.approx([1010, 10010, 0, 10010, 1010])


def test_interleaved_stages_go_on_from_the_last_device_to_the_first() -> None:
    topology, schedule = row_of([100.0] * 3, [1000.0, 500.0]), build("interleaved-1f1b", 3, 3, 2)
    with pytest.raises(ArgumentError, match="sends from rank 2 to rank 0, and that has no finite time"):
        work(topology).costs(schedule)
    topology.add_link("cuda:2", "cuda:0", Link(bandwidth_mb_s=100.0, latency_us=10.0))
    mib = 4 / 3  # of a micro-batch
    there, on, back = (mib * 1e6 / rate + 10 for rate in (1000, 500, 100))
    assert work(topology).costs(schedule).message == pytest.approx([there, on, back, there, on])


def test_a_slow_device_takes_longer() -> None:
    schedule = build("gpipe", 2, 2)
    costs = work(row_of([100.0, 25.0], [1e9])).costs(schedule)
    assert costs.forward[1] == pytest.approx(4 * costs.forward[0])
    even = work(row_of([100.0, 25.0], [1e9]), tflops=100.0).costs(schedule)
    assert simulate(schedule, even).total < simulate(schedule, costs).total


def test_search_counts_the_machine_in() -> None:
    """Many small messages over a slow way cost more latency than a bubble does."""
    topology = row_of([100.0] * 2, [1e6])
    found = search(2, work(topology, flops=1e8), num_microbatches=[2, 32], kinds=["1f1b"])
    assert [one.schedule.num_microbatches for one in found] == [2, 32]
    found = search(2, work(topology, flops=1e15), num_microbatches=[2, 32], kinds=["1f1b"])
    assert [one.schedule.num_microbatches for one in found] == [32, 2]


def test_tables_and_speeds_of_other_ranks_are_refused() -> None:
    schedule = build("gpipe", 3, 2)
    with pytest.raises(ArgumentError, match="slowness has a number for each of the 3 ranks of gpipe"):
        Workload(slowness=[1, 2]).costs(schedule)
    with pytest.raises(ArgumentError, match="message is a number or a table of 3 rows of 3"):
        Workload(message=[[0, 1], [1, 0]]).costs(schedule)


def test_what_is_not_known_is_an_error() -> None:
    with pytest.raises(TopologyError, match="the bandwidth from cuda:0 to cuda:1 is unknown"):
        work(row_of([100.0] * 2, [None]))
    with pytest.raises(TopologyError, match="the tflops of cuda:1 is unknown"):
        work(row_of([100.0, None], [1.0]))
    with pytest.raises(ArgumentError, match="flops must be a positive number, got 0"):
        work(row_of([100.0] * 2, [1.0]), flops=0)
    with pytest.raises(ArgumentError, match="tflops must be a positive number, got -1"):
        work(row_of([100.0] * 2, [1.0]), tflops=-1)


def test_neighbours_in_the_pipeline_are_near_each_other() -> None:
    topology = DeviceTopology()
    for name in ("a", "b", "c", "d"):
        topology.add_device(DeviceInfo(id=name, kind=DeviceKind.CUDA))
    for one, other, rate in (("a", "c", 1e5), ("b", "d", 1e5), ("a", "b", 10.0), ("c", "d", 10.0)):
        topology.add_link(one, other, Link(bandwidth_mb_s=rate))
    order = pipeline_devices(topology, 4)
    assert {frozenset(order[:2]), frozenset(order[2:])} == {frozenset("ac"), frozenset("bd")}
    with pytest.raises(ArgumentError, match="the topology has 4 devices, and the pipeline 5 ranks"):
        pipeline_devices(topology, 5)

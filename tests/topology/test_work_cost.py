"""The time of copies and operations, against a simulation that goes from event to event."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.topology import DeviceInfo, DeviceKind, DeviceTopology, Interconnect, Link, NumaDomain
from fuel_parallel.topology.work_cost import CALL_US, Work, WorkCost

NAMES = ("cpu", "cuda:0", "cuda:1", "rocm:0")
MB = 2**20


@st.composite
def works(draw: st.DrawFn) -> list[Work]:
    count = draw(st.integers(0, 14))
    return [
        Work(
            draw(st.sampled_from(NAMES)),
            draw(st.sampled_from(NAMES)),
            draw(st.integers(0, 40 * MB)),
            tuple(draw(st.lists(st.integers(0, n - 1), max_size=3))) if n else (),
        )
        for n in range(count)
    ]


def engines(work: Work) -> set[tuple[str, bool]]:
    return {(device, work.source != work.target) for device in (work.source, work.target)}


def simulated(listed: list[Work], cost: WorkCost) -> float:
    """Starts whatever can start, then waits for the next end, and so on."""
    now, running, done, waiting = 0.0, {}, set(), list(range(len(listed)))
    while waiting or running:
        taken = {engine for n in running for engine in engines(listed[n])}
        for n in list(waiting):
            # Who waits keeps its place in the queues of its devices.
            if set(listed[n].after) <= done and not engines(listed[n]) & taken:
                running[n] = now + cost.us(listed[n])
                waiting.remove(n)
            taken |= engines(listed[n])
        now = min(running.values())
        for n in [n for n, end in running.items() if end == now]:
            done.add(n)
            del running[n]
    return now


@given(works())
def test_the_end_is_that_of_a_simulation(listed: list[Work]) -> None:
    cost = WorkCost()
    assert cost.finish_us(listed) == pytest.approx(simulated(listed, cost))


@given(works())
def test_no_earlier_than_its_longest_chain_and_no_later_than_one_by_one(listed: list[Work]) -> None:
    cost = WorkCost()
    chains: list[float] = []
    for work in listed:
        chains.append(cost.us(work) + max((chains[n] for n in work.after), default=0.0))
    times = [cost.us(work) for work in listed]
    assert max(chains, default=0.0) <= cost.finish_us(listed) + 1e-6
    assert cost.finish_us(listed) <= sum(times) + 1e-6


def machine() -> DeviceTopology:
    t = DeviceTopology()
    t.add_numa(NumaDomain(id="numa:0", index=0))
    for name in ("cuda:0", "cuda:1"):
        t.add_device(DeviceInfo(id=name, kind=DeviceKind.CUDA))
        t.add_link(name, "numa:0", Link(interconnect=Interconnect.PCIE, bandwidth_mb_s=20_000.0, latency_us=1.0))
    t.add_link("cuda:0", "cuda:1", Link(interconnect=Interconnect.NVLINK, bandwidth_mb_s=100_000.0, latency_us=2.0))
    return t


def test_links_of_the_topology_count() -> None:
    cost = WorkCost(machine())
    assert cost.us(Work("cuda:0", "cuda:1", 100 * MB)) == pytest.approx(CALL_US + 2 + 1000)
    for ends in (("cpu", "cuda:0"), ("cuda:1", "cpu")):
        assert cost.us(Work(*ends, 20 * MB)) == pytest.approx(CALL_US + 1 + 1000), "the host is the NUMA domain"
    assert cost.us(Work("cuda:0", "rocm:0", 12 * MB)) == WorkCost().us(Work("cuda:0", "rocm:0", 12 * MB))


def test_a_link_of_unknown_bandwidth_is_taken_for_what_such_links_carry() -> None:
    t = DeviceTopology()
    for name in ("cuda:0", "cuda:1"):
        t.add_device(DeviceInfo(id=name, kind=DeviceKind.CUDA))
    t.add_link("cuda:0", "cuda:1", Link(interconnect=Interconnect.NVLINK, count=4))
    us = WorkCost(t).us(Work("cuda:0", "cuda:1", 80 * MB))
    assert us == pytest.approx(CALL_US + 1000)
    assert math.isfinite(us)


def test_devices_of_a_cluster_are_those_of_a_machine() -> None:
    t = DeviceTopology()
    for node, rate in (("a", 100_000.0), ("b", 50_000.0)):
        for n in range(2):
            t.add_device(DeviceInfo(id=f"{node}/cuda:{n}", kind=DeviceKind.CUDA, node=node))
        t.add_device(DeviceInfo(id=f"{node}/cpu:0", kind=DeviceKind.CPU, node=node))
        link = Link(interconnect=Interconnect.NVLINK, bandwidth_mb_s=rate, latency_us=0.0)
        t.add_link(f"{node}/cuda:0", f"{node}/cuda:1", link)
        t.add_link(f"{node}/cuda:0", f"{node}/cpu:0", Link(bandwidth_mb_s=10_000.0, latency_us=0.0))
    cost = WorkCost(t)
    assert cost.us(Work("cuda:0", "cuda:1", 100 * MB)) == pytest.approx(CALL_US + 1000)
    assert cost.us(Work("cpu", "cuda:0", 10 * MB)) == pytest.approx(CALL_US + 1000)

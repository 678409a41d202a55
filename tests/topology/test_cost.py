"""Predicted times: the textbook's formulas on a switch, sharing of links, and what is unknown."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.errors import ArgumentError, TopologyError
from fuel_parallel.topology import DeviceTopology, Interconnect, Link, Switch
from fuel_parallel.topology.algorithms import Collective, algorithms
from fuel_parallel.topology.cost import CostModel
from tests.topology.machines import fat_tree, gpus, two_nodes

ALPHA, MB_S = 2.0, 1000.0


def switch(members: int) -> DeviceTopology:
    t = gpus(members)
    t.add_switch(Switch(id="hub"))
    for device in t.device_ids():
        t.add_link(device, "hub", Link(bandwidth_mb_s=MB_S, latency_us=ALPHA / 2))
    return t


def lines(members: int, collective: Collective):
    import numpy as np

    return CostModel(switch(members)).lines(collective, np.arange(members)[None])


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_the_formulas_of_thakur_rabenseifner_and_gropp_on_a_switch(p: int) -> None:
    # Sections 4.1 to 4.5: alpha and beta of p members, without the reduction's gamma.
    beta, log = 1e6 / 2**20 / MB_S, math.log2(p)
    expected = {
        (Collective.ALL_REDUCE, "halving-doubling"): (2 * log, 2 * (p - 1) / p),
        (Collective.ALL_REDUCE, "ring"): (2 * (p - 1), 2 * (p - 1) / p),
        (Collective.REDUCE_SCATTER, "halving-doubling"): (log, (p - 1) / p),
        (Collective.ALL_GATHER, "halving-doubling"): (log, (p - 1) / p),
        (Collective.ALL_GATHER, "ring"): (p - 1, (p - 1) / p),
        (Collective.BROADCAST, "tree"): (log, log),
        (Collective.BROADCAST, "scatter-all-gather"): (log + p - 1, 2 * (p - 1) / p),
        (Collective.ALL_TO_ALL, "pairwise"): (p - 1, (p - 1) / p),
        (Collective.P2P, "direct"): (1, 1),
    }
    for (collective, algorithm), (alphas, betas) in expected.items():
        found = lines(p, collective)[algorithm]
        assert (found.alpha, found.beta) == (pytest.approx(alphas * ALPHA), pytest.approx(betas * beta)), algorithm


@given(st.sampled_from(list(Collective)), st.integers(2, 40))
def test_steps_send_from_member_to_other_member_once_a_step(collective: Collective, members: int) -> None:
    for steps in algorithms(collective, members).values():
        for step in steps:
            assert len(step.sources) == len(step.targets) == len(set(step.sources)) == len(set(step.targets))
            assert all(
                0 <= a < members and 0 <= b < members and a != b
                for a, b in zip(step.sources, step.targets, strict=True)
            )
            assert 0 < step.fraction <= 1


@given(st.integers(2, 33))
def test_every_member_gets_what_a_broadcast_sends(members: int) -> None:
    have = {0}
    for step in algorithms(Collective.BROADCAST, members)["tree"]:
        assert set(step.sources) <= have
        have |= set(step.targets)
    assert have == set(range(members))


@given(st.integers(2, 24))
def test_an_all_reduce_brings_every_part_of_everyone_to_everyone(members: int) -> None:
    # At least (p-1)/p of the array must leave each member twice.
    for name, steps in algorithms(Collective.ALL_REDUCE, members).items():
        sent = [0.0] * members
        for step in steps:
            for source in step.sources:
                sent[source] += step.times * step.fraction
        assert sum(sent) >= 2 * (members - 1) - 1e-9, name


def test_small_arrays_take_the_fewest_steps_and_large_ones_the_least_bytes() -> None:
    model = CostModel(switch(8))
    devices = model.topology.device_ids()
    small, large = (model.predict(Collective.BROADCAST, devices, n) for n in (64, 64 << 20))
    assert (small.algorithm, large.algorithm) == ("tree", "scatter-all-gather")


def test_a_hierarchy_is_used_between_machines() -> None:
    model = CostModel(two_nodes(count=8, nodes=2))
    order = sorted(model.topology.device_ids())
    assert model.predict(Collective.ALL_REDUCE, order, 1 << 16).algorithm.startswith("hierarchical/")


def test_transfers_at_the_same_time_share_a_link() -> None:
    model = CostModel(two_nodes())
    pairs = [[f"n0/cuda:{n}", f"n1/cuda:{n}"] for n in range(4)]
    one, four = (model.predict_all(Collective.P2P, some, 1 << 30).us for some in (pairs[:1], pairs))
    assert four == pytest.approx(4 * one, rel=1e-3)


def test_equal_ways_between_switches_share_the_data() -> None:
    model = CostModel(fat_tree(4, under_leaf=2, spines=4, uplink=25))
    pairs = [[f"n{m}/cuda:{g}", f"n{m + 2}/cuda:{g}"] for m in range(2) for g in range(8)]
    # 16 cards of 25 GB/s against 4 spines of 25 GB/s.
    one, all_ = (model.predict_all(Collective.P2P, some, 1 << 30).us for some in (pairs[:1], pairs))
    t = model.topology
    assert one == pytest.approx(t.transfer_time_us(*pairs[0], 1 << 30), rel=1e-3)
    assert all_ == pytest.approx(one * 4 * 24 / 25, rel=0.01)


@pytest.mark.parametrize("topology", [two_nodes(), fat_tree(4, under_leaf=2)])
def test_one_transfer_takes_what_the_topology_says(topology: DeviceTopology) -> None:
    model = CostModel(topology)
    devices = topology.device_ids()
    for other in devices[1:]:
        expected = topology.transfer_time_us(devices[0], other, 1 << 20)
        assert model.predict(Collective.P2P, [devices[0], other], 1 << 20).us == pytest.approx(expected)


def test_what_is_unknown_stays_unknown() -> None:
    t = gpus(3)
    t.add_link("cuda:0", "cuda:1", Link(interconnect=Interconnect.PCIE))
    model = CostModel(t)
    assert model.predict(Collective.ALL_REDUCE, ["cuda:0", "cuda:1"], 8) is None
    assert (
        model.unknown(["cuda:0", "cuda:1"])
        == "the bandwidth from cuda:0 to cuda:1 is unknown: that of the link cuda:0 to cuda:1"
    )
    assert model.unknown(["cuda:0", "cuda:2"]) == "nothing is known of a way from cuda:0 to cuda:2"
    assert model.predict(Collective.ALL_REDUCE, ["cuda:0"], 8).us == 0.0


def test_mistakes_say_what_is_wrong() -> None:
    model = CostModel(switch(4))
    with pytest.raises(ArgumentError, match="each device is one rank"):
        model.predict(Collective.ALL_REDUCE, ["cuda:0", "cuda:0"], 1)
    with pytest.raises(ArgumentError, match="have one length"):
        model.predict_all(Collective.ALL_REDUCE, [["cuda:0"], ["cuda:1", "cuda:2"]], 1)
    with pytest.raises(ArgumentError, match="nbytes"):
        model.predict(Collective.ALL_REDUCE, ["cuda:0", "cuda:1"], -1)
    with pytest.raises(TopologyError, match="no device 'cuda:9'"):
        model.predict(Collective.ALL_REDUCE, ["cuda:0", "cuda:9"], 1)

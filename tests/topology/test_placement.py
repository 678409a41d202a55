"""Placement: the best there is for few devices, near to it for some dozens, quick and never worse for thousands."""

from __future__ import annotations

import itertools
import math
import os
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import ArgumentError, TopologyError
from fuel_parallel.topology import DeviceInfo, DeviceKind, DeviceTopology, Interconnect, Link
from fuel_parallel.topology.algorithms import Collective
from fuel_parallel.topology.batch import Batch
from fuel_parallel.topology.cost import CostModel
from fuel_parallel.topology.mesh_axes import MeshAxis
from fuel_parallel.topology.placement import Placement, place
from fuel_parallel.topology.search_local import descend
from tests.topology.machines import MACHINES, fat_tree, gpus, link, two_nodes

STRESS = bool(os.environ.get("FUEL_STRESS"))
MESHES = [
    shape
    for ranks in range(2, 9)
    for length in (1, 2, 3)
    for shape in itertools.product(range(2, 9), repeat=length)
    if math.prod(shape) == ranks
]


def mesh(*sizes: int) -> list[MeshAxis]:
    """The last axis sends much within its groups, the first one a gradient, one in between hands activations on."""
    names = {1: ["tp"], 2: ["dp", "tp"], 3: ["dp", "pp", "tp"]}[len(sizes)]
    traffic = {
        "dp": {"nbytes": 64 << 20},
        "pp": {"nbytes": 4 << 20, "collective": Collective.P2P, "count": 8},
        "tp": {"nbytes": 8 << 20, "count": 16},
    }
    return [MeshAxis(name=name, size=size, **traffic[name]) for name, size in zip(names, sizes, strict=True)]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_few_ranks_are_placed_as_well_as_can_be(machine: str, shape: tuple[int, ...]) -> None:
    model = CostModel(MACHINES[machine]())
    axes = mesh(*shape)
    batch = Batch(model.network, range(8), axes)
    every = np.array(list(itertools.permutations(range(8), math.prod(shape))), dtype=np.int64)
    least = batch.cost(every).min()
    placed = place(model, axes)
    assert placed.method == "exact"
    assert placed.after_us() == pytest.approx(least, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(MACHINES)), st.sampled_from(MESHES), st.permutations(range(8)))
def test_many_at_once_cost_what_one_costs(machine: str, shape: tuple[int, ...], order: list[int]) -> None:
    model = CostModel(MACHINES[machine]())
    axes = mesh(*shape)
    devices = model.topology.device_ids()
    ranks = np.array(order[: math.prod(shape)])
    expected = 0.0
    for i, axis in enumerate(axes):
        grid = np.moveaxis(ranks.reshape(shape), i, -1).reshape(-1, axis.size)
        groups = [[devices[d] for d in row] for row in grid]
        expected += model.predict_all(axis.collective, groups, axis.nbytes).us * axis.count
    assert Batch(model.network, range(8), axes).cost(ranks[None])[0] == pytest.approx(expected)


def test_tp_groups_land_inside_nodes_and_cost_less_by_the_ratio_of_the_links() -> None:
    t = two_nodes(shuffled=3)
    # Large enough for latencies not to count.
    tp = MeshAxis(name="tp", size=4, nbytes=1 << 30)
    placed = place(t, [MeshAxis(name="dp", size=2, nbytes=1 << 20), tp])
    for group in (placed.nodes[:4], placed.nodes[4:]):
        assert len(set(group)) == 1
    before, after = (next(c.us for c in costs if c.axis == "tp") for costs in (placed.before, placed.after))
    model = CostModel(t)
    linear = t.device_ids()
    crossing = [
        sum(t.device(a).node != t.device(b).node for a, b in zip(g, g[1:] + g[:1], strict=True)) / 2
        for g in (linear[:4], linear[4:])
    ]
    # A ring over both machines crosses the one card of each as often as its neighbours are in different machines.
    ratio = 200 / 10 * sum(crossing)
    assert before / after <= ratio * 1.01
    assert before / after >= 200 / 10 * 0.99
    assert after == pytest.approx(model.predict(Collective.ALL_REDUCE, placed.devices[:4], 1 << 30).us)


def best_of_random_searches(model: CostModel, axes: list[MeshAxis], restarts: int) -> float:
    batch = Batch(model.network, range(len(model.network.devices)), axes)
    random = np.random.default_rng(99)
    ranks = math.prod(axis.size for axis in axes)
    return min(descend(batch, random.permutation(len(batch.devices))[:ranks], random)[1] for _ in range(restarts))


@pytest.mark.timeout(3600 if STRESS else 120)
@pytest.mark.parametrize("shape", [(4, 2, 4), (8, 4)])
def test_thirty_two_ranks_are_placed_as_well_as_by_many_random_searches(shape: tuple[int, ...]) -> None:
    model = CostModel(two_nodes(count=8, nodes=4, shuffled=1))
    found = place(model, mesh(*shape)).after_us()
    assert found <= 1.02 * best_of_random_searches(model, mesh(*shape), 200 if STRESS else 2)


@pytest.mark.parametrize("shuffled", [None, 7])
def test_thousands_of_devices_are_placed_quickly_and_never_worse(shuffled: int | None) -> None:
    t = fat_tree(512, shuffled, uplink=50)
    start = time.perf_counter()
    placed = place(t, mesh(64, 8, 8))
    assert time.perf_counter() - start < 20
    assert placed.after_us() <= placed.before_us()
    assert sorted(placed.devices) == sorted(t.device_ids())
    if shuffled is not None:
        assert all(len(set(placed.nodes[i : i + 8])) == 1 for i in range(0, 4096, 8))
        assert placed.after_us() < placed.before_us() / 2


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(1, 50)), max_size=12),
    st.sampled_from([(2,), (3,), (2, 2), (5,), (2, 3), (7,)]),
)
def test_never_worse_than_the_order_of_the_topology(edges: list[tuple[int, int, int]], shape: tuple[int, ...]) -> None:
    t = gpus(7)
    for a, b, width in edges:
        if a != b and t.link(f"cuda:{a}", f"cuda:{b}") is None:
            t.add_link(f"cuda:{a}", f"cuda:{b}", link(width))
    try:
        placed = place(t, mesh(*shape))
    except TopologyError:
        assert CostModel(t).unknown(t.device_ids()) is not None
        return
    before, after = placed.before_us(), placed.after_us()
    assert after is not None
    assert before is None or after <= before * (1 + 1e-9)
    assert place(t, mesh(*shape)) == placed
    assert len(set(placed.devices)) == math.prod(shape)


def test_an_axis_can_be_kept_inside_a_machine() -> None:
    t = two_nodes(shuffled=3)
    free = [MeshAxis(name="dp", size=2, nbytes=1 << 30), MeshAxis(name="tp", size=4, nbytes=1)]
    kept = [free[0], msgspec.structs.replace(free[1], within_node=True)]
    assert not all(len(set(place(t, free).nodes[i : i + 4])) == 1 for i in (0, 4))
    assert all(len(set(place(t, kept).nodes[i : i + 4])) == 1 for i in (0, 4))
    with pytest.raises(TopologyError, match="axis 'tp' of 8 ranks must stay inside of a machine, but machines have 4"):
        place(t, [MeshAxis(name="tp", size=8, within_node=True)])


def test_devices_with_too_little_memory_are_left_out() -> None:
    t = DeviceTopology()
    for n in range(4):
        t.add_device(DeviceInfo(id=f"cuda:{n}", kind=DeviceKind.CUDA, memory_bytes=(8 if n == 1 else 16) << 30))
    for a, b in itertools.combinations(range(4), 2):
        t.add_link(f"cuda:{a}", f"cuda:{b}", link(20))
    assert "cuda:1" not in place(t, [MeshAxis(name="dp", size=3)], memory_bytes=10 << 30).devices
    with pytest.raises(
        ArgumentError, match=r"the mesh has 4 ranks .* there are 3 usable devices with 10737418240 bytes"
    ):
        place(t, [MeshAxis(name="dp", size=4)], memory_bytes=10 << 30)


def test_an_unknown_bandwidth_is_said_and_not_guessed() -> None:
    t = gpus(3)
    t.add_link("cuda:0", "cuda:1", Link(interconnect=Interconnect.PCIE, path="SYS"))
    with pytest.raises(TopologyError, match="the bandwidth from cuda:0 to cuda:1 is unknown"):
        place(t, [MeshAxis(name="tp", size=2)])
    t.add_link("cuda:1", "cuda:2", link(10))
    placed = place(t, [MeshAxis(name="tp", size=2)])
    assert (set(placed.devices), placed.before_us()) == ({"cuda:1", "cuda:2"}, None)
    assert "own order is unknown" in placed.why


def test_where_asked_for_unknown_links_are_compared_by_what_such_links_carry() -> None:
    t = gpus(4)
    for a, b in itertools.combinations(range(4), 2):
        path = "PIX" if a + b == 3 else "SYS"
        t.add_link(f"cuda:{a}", f"cuda:{b}", Link(interconnect=Interconnect.PCIE, path=path))
    axes = [MeshAxis(name="dp", size=2), MeshAxis(name="tp", size=2, nbytes=8 << 20)]
    placed = place(t, axes, likely=True)
    assert {frozenset(placed.devices[:2]), frozenset(placed.devices[2:])} == {
        frozenset({"cuda:0", "cuda:3"}),
        frozenset({"cuda:1", "cuda:2"}),
    }
    assert (placed.before_us(), placed.after_us()) == (None, None)
    assert placed.why.endswith(
        "is unknown: that of the link cuda:0 to cuda:1; placed by what links of their kinds usually carry"
    )


def test_where_nothing_is_known_the_devices_stay_in_their_order() -> None:
    placed = place(gpus(4), [MeshAxis(name="dp", size=4)], likely=True)
    assert (placed.devices, placed.method) == (tuple(f"cuda:{n}" for n in range(4)), "order")
    assert placed.why == "nothing is known of a way from cuda:0 to cuda:1; placed in the devices' own order"


def test_a_placement_says_where_each_rank_goes() -> None:
    placed = place(two_nodes(shuffled=3), mesh(2, 2, 2))
    assert [placed.rank(**placed.coordinates(rank)) for rank in range(8)] == list(range(8))
    assert placed.coordinates(5) == {"dp": 1, "pp": 0, "tp": 1}
    assert msgspec.json.decode(msgspec.json.encode(placed), type=Placement) == placed
    lines = placed.rankfile().splitlines()
    assert lines[0].startswith(f"rank 0={placed.nodes[0]} slot=")
    assert len({line.partition("=")[2] for line in lines}) == 8
    assert [f"{n}/cuda:{v}" for n, v in zip(placed.hosts(), placed.visible_devices(), strict=True)] == list(
        placed.devices
    )


@pytest.mark.parametrize("axes", [[], [MeshAxis(name="a", size=1)] * 2, [MeshAxis(name="a", size=0)]])
def test_a_mesh_that_is_none_is_refused(axes: list[MeshAxis]) -> None:
    with pytest.raises(ArgumentError):
        place(gpus(2), axes)

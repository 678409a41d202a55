"""Whatever the algorithm of a group: the same values, combined where they lie, and no hop too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import stand_in
from hypothesis import given
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.device_group.algorithms import ByOrder, ByParts, Hands, fold, meetings, tree
from fuel_parallel.device_group.hands import Rehearsal, Sized
from fuel_parallel.errors import ArgumentError
from fuel_parallel.partitioning import partition
from fuel_parallel.topology import DeviceInfo, DeviceKind, DeviceTopology, Interconnect, Link
from fuel_parallel.topology.work_cost import WorkCost

NAMES = ("cpu", "plain:0", "plain:1", "next:0", "next:1")
ALGORITHMS = ("fold", "tree", "parts")


def route(source: str, target: str) -> list[str]:
    if source == target:
        return []
    kinds = {source.partition(":")[0], target.partition(":")[0]}
    return [target] if "cpu" in kinds or len(kinds) == 1 else ["cpu", target]


@dataclass
class Placed:
    device: str
    array: Any


class Arrays(Hands[Placed]):
    """Arrays that know where they are."""

    def __init__(self) -> None:
        self.copies: list[tuple[str, str]] = []

    def stops(self, x: Placed, device: str) -> list[str]:
        return route(x.device, device)

    def copy(self, x: Placed, device: str) -> Placed:
        assert x.device != device
        assert route(x.device, device) == [device]
        self.copies.append((x.device, device))
        return Placed(device, x.array)

    def combine(self, a: Placed, b: Placed) -> Placed:
        assert a.device == b.device
        return Placed(a.device, a.array + b.array)

    def finish(self, x: Placed) -> Placed:
        return Placed(x.device, x.array * 10)

    def cut(self, x: Placed, parts: int) -> list[Placed]:
        return [Placed(x.device, x.array[p.start : p.stop]) for p in partition(len(x.array), parts)]

    def join(self, xs: Any) -> Placed:
        assert len({x.device for x in xs}) == 1
        return Placed(xs[0].device, np.concatenate([x.array for x in xs]))


def made(name: str, hands: Hands[Any], devices: list[str]) -> ByOrder[Any]:
    if name == "parts":
        return ByParts(hands, devices, fold(len(devices)))
    hops_of = lambda a, b: float(len(route(devices[a], devices[b])))  # noqa: E731
    return ByOrder(hands, devices, fold(len(devices)) if name == "fold" else tree(len(devices), hops_of))


groups = st.lists(st.sampled_from(NAMES), min_size=1, max_size=7)


@given(name=st.sampled_from(ALGORITHMS), devices=groups, extent=st.integers(0, 9), seed=st.integers(0, 99))
def test_every_algorithm_gives_the_same_values(name: str, devices: list[str], extent: int, seed: int) -> None:
    arrays = np.random.default_rng(seed).integers(-50, 50, (len(devices), extent))
    xs = [Placed(device, array) for device, array in zip(devices, arrays, strict=True)]
    total, whole = arrays.sum(0) * 10, arrays.reshape(-1)

    def check(results: list[Placed], wanted: list[Any], where: list[str]) -> None:
        assert [x.device for x in results] == where
        for found, each in zip(results, wanted, strict=True):
            assert found.array.tolist() == each.tolist()

    group, n = made(name, Arrays(), devices), len(devices)
    check(group.all_reduce(xs, False), [total], devices[:1])
    check(group.all_reduce(xs, True), [total] * n, devices)
    check(group.reduce_scatter(xs), [total[p.start : p.stop] for p in partition(extent, n)], devices)
    check(group.all_gather(xs, False), [whole], devices[:1])
    check(group.all_gather(xs, True), [whole] * n, devices)
    check(group.broadcast(xs[0]), [arrays[0]] * n, devices)


@given(size=st.integers(1, 9), data=st.data())
def test_in_a_tree_each_device_sends_once_and_when_it_has_all_of_its_own(size: int, data: st.DataObject) -> None:
    times = {
        (a, b): float(data.draw(st.integers(0, 3), label=f"{a} {b}")) for a in range(size) for b in range(size) if a < b
    }
    order = tree(size, lambda a, b: times[min(a, b), max(a, b)])
    assert sorted(source for source, _ in order) == list(range(1, size))
    gone: set[int] = set()
    for source, target in order:
        assert target not in gone, "what it sent lacks this"
        assert target < source
        gone.add(source)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.randoms(use_true_random=False))
def test_a_tree_hops_between_two_vendors_as_seldom_as_can_be(sizes: list[int], seed: Any) -> None:
    kinds = [kind for kind, count in enumerate(sizes) for _ in range(count)]
    seed.shuffle(kinds)
    order = tree(len(kinds), lambda a, b: 1.0 if kinds[a] == kinds[b] else 2.0)
    assert sum(kinds[a] != kinds[b] for a, b in order) == len(sizes) - 1


@given(st.integers(1, 12))
def test_everyone_meets_everyone(size: int) -> None:
    found = meetings(size)
    assert Counter(found) == Counter((a, b) for a in range(size) for b in range(size) if a != b)
    width = 2 * (size // 2)
    for first in range(0, len(found), width or 1):
        assert all(count == 2 for count in Counter(m for hop in found[first : first + width] for m in hop).values())


@given(devices=groups, nbytes=st.integers(0, 2**24), name=st.sampled_from(ALGORITHMS))
def test_what_is_rehearsed_is_what_is_done(devices: list[str], nbytes: int, name: str) -> None:
    rehearsal, arrays = Rehearsal(route), Arrays()
    made(name, rehearsal, devices).all_reduce([Sized(device, nbytes) for device in devices], True)
    made(name, arrays, devices).all_reduce([Placed(device, np.zeros(20)) for device in devices], True)
    assert [(w.source, w.target) for w in rehearsal.works if w.source != w.target] == arrays.copies
    assert WorkCost().finish_us(rehearsal.works) <= sum(map(WorkCost().us, rehearsal.works)) + 1e-6


# Groups of stand-ins: two vendors, two devices of each and more.


@pytest.fixture
def stand_ins() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("plain:0", "plain:1", "plain:2", "plain:3", "next:0", "next:1"):
            stack.enter_context(stand_in.installed(stand_in.StandInMemory(name)))
        yield


def linked(devices: list[str]) -> DeviceTopology:
    t = DeviceTopology()
    for name in devices:
        t.add_device(DeviceInfo(id=name, kind=DeviceKind.CUDA))
    for a, b in [(a, b) for a in devices for b in devices if a < b]:
        t.add_link(a, b, Link(interconnect=Interconnect.NVLINK, bandwidth_mb_s=200_000.0, latency_us=2.0))
    return t


def shards(group: fp.DeviceGroup, rows: int = 6) -> list[ft.Tensor]:
    return [ft.asarray(np.arange(rows) + 0.1 * n).to(d).realize() for n, d in enumerate(group.devices)]


FOUR = [f"plain:{n}" for n in range(4)]
TWO_AND_TWO = ["plain:0", "next:0", "plain:1", "next:1"]
CASES: list[tuple[Any, Any, Callable[[list[str]], Any]]] = [
    (FOUR, [("plain:1", "plain:0"), ("plain:3", "plain:2"), ("plain:2", "plain:0")], linked),
    (
        TWO_AND_TWO,
        [("plain:1", "plain:0"), ("next:1", "next:0"), ("next:0", "cpu"), ("cpu", "plain:0")],
        lambda _: None,
    ),
    (["cpu", "plain:0"], [("plain:0", "cpu")], lambda _: None),
    (["cpu", "cpu", "cpu"], [], lambda _: None),
]


@pytest.mark.parametrize(("devices", "wanted", "topology"), CASES)
def test_the_hops_of_known_machines(
    devices: list[str], wanted: Any, topology: Any, stand_ins: None, hops: Callable[..., Any]
) -> None:
    group = fp.DeviceGroup(devices, topology=topology(devices))
    total = group.all_reduce(shards(group))
    assert hops(total) == wanted
    np.testing.assert_allclose(total.numpy(), sum(np.arange(6) + 0.1 * n for n in range(len(devices))))


def test_the_algorithm_can_be_named(stand_ins: None, hops: Callable[..., Any]) -> None:
    values = {}
    for name, count in (("fold", 6), ("tree", 6), ("parts", 24), ("auto", 6)):
        group = fp.DeviceGroup(FOUR, topology=linked(FOUR), algorithm=name)  # type: ignore[arg-type]
        each = group.all_reduce(shards(group), to="all")
        assert len(hops(*each)) == count
        values[name] = [x.numpy() for x in each]
    for name in ALGORITHMS:
        np.testing.assert_allclose(values[name], values["fold"], rtol=1e-12)
    assert np.array_equal(values["auto"], values["tree"]), "the same bits as by the algorithm that was taken"
    with pytest.raises(ArgumentError, match="algorithm is 'auto' or 'fold' or 'tree' or 'parts', not the str 'ring'"):
        fp.DeviceGroup(FOUR, algorithm="ring")  # type: ignore[arg-type]


def test_large_tensors_go_by_parts(stand_ins: None) -> None:
    group = fp.DeviceGroup(FOUR, topology=linked(FOUR))
    chosen = {n: group._decision("all_reduce", (n,) * 4, True, group.devices)[0] for n in (2**10, 2**20, 2**28)}
    assert chosen == {2**10: "tree", 2**20: "tree", 2**28: "parts"}
    for devices, wanted in ((TWO_AND_TWO, "tree"), (FOUR[:2], "fold"), (["cpu", "plain:0"], "fold")):
        group = fp.DeviceGroup(devices)
        for n in chosen:
            assert group._decision("all_reduce", (n,) * group.size, True, group.devices)[0] == wanted


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("devices", [FOUR[:3], TWO_AND_TWO, ["cpu", "plain:0", "cpu", "next:0"]], ids=str)
def test_gradients_are_the_same(algorithm: Any, devices: list[str], stand_ins: None) -> None:
    group = fp.DeviceGroup(devices, algorithm=algorithm)
    xs = [ft.reshape(x, (2, 3)) for x in shards(group)]
    n = group.size
    loss = sum(ft.sum(ft.square(y)).to("cpu") for y in group.all_reduce(xs, fp.ReduceOp.AVG, to="all"))
    mean = np.mean([x.numpy() for x in xs], axis=0)
    for gradient, device in zip(ft.grad(loss, xs), devices, strict=True):
        assert gradient.device == device
        np.testing.assert_allclose(gradient.numpy(), 2 * mean)
    scattered = group.reduce_scatter(xs, dim=1)
    assert ft.concat([x.to("cpu") for x in scattered], axis=1).numpy() == pytest.approx(n * mean)
    assert [x.device for x in group.broadcast(xs[-1])] == devices
    assert [x.device for x in group.broadcast(ft.ones(3).to("next:1"))] == devices

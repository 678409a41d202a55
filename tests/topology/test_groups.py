"""`linked_groups`: which devices are all joined to each other."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.errors import ArgumentError, TopologyError
from fuel_parallel.topology import DeviceInfo, DeviceKind, DeviceTopology, Interconnect, Link, files
from fuel_parallel.topology.groups import LinkedGroup, linked_groups
from tests.topology.real_files import real


def machine(size: int, links: dict[tuple[int, int], int], kind: Interconnect = Interconnect.NVLINK) -> DeviceTopology:
    t = DeviceTopology()
    for n in range(size):
        t.add_device(DeviceInfo(id=f"cuda:{n}", kind=DeviceKind.CUDA))
    for (a, b), count in links.items():
        t.add_link(f"cuda:{a}", f"cuda:{b}", Link(interconnect=kind, count=count))
    return t


def cuda(*numbers: int) -> tuple[str, ...]:
    return tuple(f"cuda:{n}" for n in numbers)


def test_a_dgx1_has_two_groups_of_four() -> None:
    t = files.read(real("nvsmi_dgx1_v100_8gpu_4nic_indented.txt"))
    assert linked_groups(t, 4) == [LinkedGroup(cuda(0, 1, 2, 3), 1), LinkedGroup(cuda(4, 5, 6, 7), 1)]
    assert linked_groups(t, 5) == []
    # By hand: in each half three pairs have NV2 and three NV1; across, 0-4 and 1-5 have NV2, 2-6 and 3-7 NV1.
    strong = [g.devices for g in linked_groups(t, 2) if g.weakest == 2]
    assert strong == [cuda(*p) for p in [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)]]
    assert len(linked_groups(t, 2)) == 6 + 6 + 4


def test_behind_nvlinks_of_all_every_set_is_a_group() -> None:
    t = files.read(real("nvsmi_dgxa100_8gpu_12mlx5_oldcols.txt"))
    assert linked_groups(t, 8) == [LinkedGroup(cuda(0, 1, 2, 3, 4, 5, 6, 7), 12)]
    assert len(linked_groups(t, 4)) == 70


def test_strong_groups_come_first() -> None:
    t = machine(4, {(0, 1): 1, (2, 3): 2, (1, 2): 2})
    assert [g.devices for g in linked_groups(t, 2)] == [cuda(1, 2), cuda(2, 3), cuda(0, 1)]


def test_only_links_of_the_kinds_asked_for_count() -> None:
    t = machine(2, {(0, 1): 1}, Interconnect.INFINITY_FABRIC)
    assert linked_groups(t, 2) == []
    assert linked_groups(t, 2, kinds=[Interconnect.INFINITY_FABRIC]) == [LinkedGroup(cuda(0, 1), 1)]


def test_a_link_one_way_joins_nothing() -> None:
    t = machine(2, {})
    t.add_directed_link("cuda:0", "cuda:1", Link(interconnect=Interconnect.NVLINK))
    assert linked_groups(t, 2) == []


def test_groups_of_one_and_too_many_groups_are_refused() -> None:
    t = machine(20, dict.fromkeys(combinations(range(20), 2), 1))
    with pytest.raises(ArgumentError, match="a size of 2 or more"):
        linked_groups(t, 1)
    with pytest.raises(TopologyError, match="more than 10000 groups of 10"):
        linked_groups(t, 10)


def test_a_search_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuel_parallel.topology.groups.MOST_STEPS", 10_000)
    # Each device lacks one other, so no group has more than 10 of 20; there is no telling that at once.
    t = machine(20, {pair: 1 for pair in combinations(range(20), 2) if pair[1] != pair[0] + 10})
    with pytest.raises(TopologyError, match="too many sets of 11 devices"):
        linked_groups(t, 11)


@given(st.sets(st.sampled_from(list(combinations(range(7), 2)))), st.integers(2, 5))
def test_groups_are_those_that_trying_all_sets_finds(pairs: set[tuple[int, int]], size: int) -> None:
    t = machine(7, dict.fromkeys(sorted(pairs), 1))
    expected = [cuda(*s) for s in combinations(range(7), size) if all(p in pairs for p in combinations(s, 2))]
    assert [g.devices for g in linked_groups(t, size)] == expected

"""Which cores ranks get: apart from each other, near, and whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.topology.binding import share_of_cores

NOWHERE = Path("/nowhere")


def shares(allowed, ranks, root=NOWHERE):
    return [share_of_cores(allowed, rank, ranks, root) for rank in range(ranks)]


@pytest.fixture
def two_sockets(tmp_path) -> Path:
    """Cores 0 to 3 and 4 to 7, each with a second thread eight higher."""
    for domain in range(2):
        node = tmp_path / f"sys/devices/system/node/node{domain}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{4 * domain}-{4 * domain + 3},{4 * domain + 8}-{4 * domain + 11}\n")
    for core in range(16):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    return tmp_path


@given(st.sets(st.integers(0, 200), min_size=1), st.integers(1, 40))
def test_shares_are_apart_and_fair(allowed, ranks) -> None:
    found = shares(allowed, ranks)
    if ranks > len(allowed):
        assert found == [()] * ranks
    else:
        assert sorted(core for share in found for core in share) == sorted(allowed)
        assert max(map(len, found)) - min(map(len, found)) <= 1


def test_ranks_stay_in_one_domain_with_whole_cores(two_sockets) -> None:
    assert shares(range(16), 2, two_sockets) == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    assert shares(range(16), 4, two_sockets) == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]
    assert shares(range(16), 1, two_sockets) == [tuple(range(16))]
    assert shares(range(16), 8, two_sockets)[5] == (5, 13)


def test_a_container_with_a_part_of_the_cores(two_sockets) -> None:
    assert shares([1, 2, 9, 10], 2, two_sockets) == [(1, 9), (2, 10)]
    assert shares([1, 9], 2, two_sockets) == [(1,), (9,)]  # two threads of one core, if there is no more
    assert shares([1, 4, 5, 6], 2, two_sockets) == [(1,), (4, 5, 6)]
    assert shares([1], 2, two_sockets) == [(), ()]


def test_ranks_that_do_not_divide_by_domains(two_sockets) -> None:
    found = shares(range(16), 3, two_sockets)
    assert sorted(core for share in found for core in share) == list(range(16))
    assert [len(share) for share in found] == [6, 6, 4]

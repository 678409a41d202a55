"""The ranks of a job share one cache: equal outcomes, reuse only of what all hold, and a flush after a loss."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fuel_parallel as fp
from fuel_parallel.distributed_cache import CacheConfig, CacheGroup, CacheShardInfo
from fuel_parallel.errors import ArgumentError, CommunicatorError, OutOfPagesError

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = world.world_size, world.rank
CONFIG = CacheConfig(num_pages=12, page_tokens=4)


@pytest.fixture
def group() -> Iterator[CacheGroup]:
    yield CacheGroup(world, CONFIG)
    world.barrier()


def same_everywhere(group: CacheGroup) -> None:
    replica = group.replica
    tables = {str(sequence): replica.table.pages(sequence).tolist() for sequence in replica.table}
    mine = [replica.applied, replica.digest, tables, replica.pool.free_count]
    everyone = world.all_gather_object(mine)
    assert everyone == [everyone[0]] * N


def test_all_ranks_get_the_same_outcomes(group: CacheGroup) -> None:
    group.step()  # rank 0 hears of the others
    if RANK == 0:
        group.admit(1, list(range(10)))
        group.extend(1, [1, 2, 3])
        group.fork(1, 2)
        group.extend(2, [7])
    outcomes = world.all_gather_object([str(one) for one in group.step().outcomes])
    assert len(outcomes[0]) == 4
    assert outcomes == [outcomes[0]] * N
    same_everywhere(group)
    assert group.replica.table.length(2) == 14


def test_a_prefix_is_reused_when_the_last_rank_has_it(group: CacheGroup) -> None:
    prompt = list(range(10))
    if RANK == 0:
        group.admit(1, prompt)
    for _ in range(2):
        group.step()
    if RANK < N - 1:
        group.wrote(1, 10)
    for _ in range(2):
        group.step()
    assert group.replica.confirmed_tokens(1) == 0
    group.wrote(1, 10)
    for _ in range(2):
        group.step()
    assert group.replica.confirmed_tokens(1) == 8
    if RANK == 0:
        assert group.admit(2, [*prompt[:8], 99]).reused_tokens == 8
        assert group.admit(3, [*prompt[:8], 99], tenant="other").reused_tokens == 0
    group.step()
    same_everywhere(group)
    assert group.replica.prefixes.statistics.tokens_saved == 8


def test_pages_of_ended_sequences_go_first_to_whoever_needs_them(group: CacheGroup) -> None:
    for number in range(8):
        if RANK == 0:
            group.admit(number, [number] * 17)
        for _ in range(2):
            group.step()
        group.wrote(number, 17)
        for _ in range(2):
            group.step()
        if RANK == 0:
            group.end(number)
        group.step()
    same_everywhere(group)
    assert group.replica.prefixes.statistics.evictions > 0
    assert group.replica.pool.used_count == len(group.replica.prefixes)


def test_out_of_pages_is_told_to_who_asked(group: CacheGroup) -> None:
    if RANK == 0:
        with pytest.raises(OutOfPagesError, match="sequence 1 needs 13 pages, 12 of 12 are free"):
            group.admit(1, [0] * 49)
    else:
        with pytest.raises(CommunicatorError, match=f"admit: rank 0 decides .* this is rank {RANK}"):
            group.admit(1, [0])
    assert group.step().outcomes == []


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_lost_its_pages_flushes_all(group: CacheGroup, lost: int) -> None:
    if RANK == 0:
        group.admit(1, list(range(10)))
    for _ in range(2):
        era = group.step().era
    group.wrote(1, 10)
    for _ in range(2):
        group.step()
    assert len(group.replica.prefixes) == 2
    if lost == RANK:
        group.rejoin()
    for _ in range(4):
        after = group.step().era
    assert after > era
    assert len(group.replica.prefixes) == len(group.replica.table) == 0
    if RANK == 0:
        assert group.admit(1, list(range(10))).reused_tokens == 0
    group.step()
    same_everywhere(group)


def test_a_flush_is_for_all(group: CacheGroup) -> None:
    if RANK == 0:
        group.admit(1, [1, 2])
    for _ in range(2):
        era = group.step().era
    if RANK == 0:
        group.flush()
    assert group.step().era > era
    assert 1 not in group.replica.table


def test_ranks_of_other_layers_count_for_theirs() -> None:
    shards = [CacheShardInfo(rank, N, 2 * N) for rank in range(N)]
    group = CacheGroup(world, CONFIG, shards)
    if RANK == 0:
        group.admit(1, [1] * 9)
    for _ in range(2):
        group.step()
    group.wrote(1, 4 if RANK == N - 1 else 9)
    for _ in range(2):
        group.step()
    assert group.replica.confirmed_tokens(1) == 4
    with pytest.raises(ArgumentError, match="sequence 1 has 9 tokens, not 10"):
        group.wrote(1, 10)

"""What follows from the events of ranks: positions, what all hold, confirmed prefixes, and a log of bounded size."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.distributed_cache import (
    CacheRoutingHint,
    CacheShardInfo,
    CacheSyncProtocol,
    FlushAll,
    PrefixConfirmed,
    ShardEvicted,
    ShardUpdated,
    SyncEvent,
)
from fuel_parallel.errors import ArgumentError

RANKS, LAYERS = 3, 4
positions = st.integers(0, 6)
ranks = st.integers(0, RANKS - 1)
layers = st.integers(0, LAYERS - 1) | st.none()
sequences = st.integers(0, 1)
events = st.one_of(
    st.builds(ShardUpdated, rank=ranks, layer=layers, seq_pos=positions, sequence=sequences),
    st.builds(ShardEvicted, rank=ranks, layer=layers, seq_pos=positions | st.just(-1), sequence=sequences),
    st.builds(PrefixConfirmed, prefix_id=st.integers(0, 2**64 - 1), num_tokens=st.integers(1, 8)),
    st.just(FlushAll()),
)


@given(st.integers(1, 9), st.integers(0, 40))
def test_every_layer_belongs_to_one_rank(world_size: int, num_layers: int) -> None:
    shards = [CacheShardInfo(rank, world_size, num_layers) for rank in range(world_size)]
    assert [layer for shard in shards for layer in shard.layers] == list(range(num_layers))
    assert max(len(shard.layers) for shard in shards) - min(len(shard.layers) for shard in shards) <= 1
    for layer in range(num_layers):
        assert sum(shard.owns_layer(layer) for shard in shards) == 1


def test_layers_can_be_named() -> None:
    shard = CacheShardInfo(1, 2, 8, layers=[7, 0])
    assert shard.layers == (7, 0)
    assert shard.owns_layer(7)
    assert not shard.owns_layer(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2, 8), "rank must be from 0 to 1, not 2"),
        ((0, 2, 8, [8]), r"numbers from 0 to 7; got \[8\]"),
        ((0, 2, 8, [1, 1]), r"different numbers from 0 to 7; got \[1, 1\]"),
    ],
)
def test_a_shard_that_cannot_be_is_an_error(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        CacheShardInfo(*arguments)  # type: ignore[arg-type]


class Model:
    """The same rules without any economy: a position for each sequence, rank and layer."""

    def __init__(self) -> None:
        self.positions: dict[tuple[int, int, int], int] = {}
        self.prefixes: dict[int, int] = {}

    def record(self, event: SyncEvent) -> None:
        if isinstance(event, FlushAll):
            self.__init__()  # type: ignore[misc]
        elif isinstance(event, PrefixConfirmed):
            self.prefixes[event.prefix_id] = event.num_tokens
        else:
            for layer in range(LAYERS) if event.layer is None else [event.layer]:
                place = (event.sequence, event.rank, layer)
                if isinstance(event, ShardUpdated):
                    self.positions[place] = event.seq_pos
                elif place in self.positions:
                    self.positions[place] = min(self.positions[place], event.seq_pos)
            if isinstance(event, ShardEvicted):
                self.prefixes = {name: n for name, n in self.prefixes.items() if n <= event.seq_pos + 1}
            self.positions = {place: at for place, at in self.positions.items() if at >= 0}


@given(st.lists(events, max_size=25))
def test_positions_and_prefixes_follow_from_the_events(history: list[SyncEvent]) -> None:
    protocol, model = CacheSyncProtocol(RANKS, LAYERS), Model()
    for event in history:
        protocol.record_event(event)
        model.record(event)
    for sequence in range(2):
        for layer in range(LAYERS):
            by_rank = [model.positions.get((sequence, rank, layer)) for rank in range(RANKS)]
            assert [protocol.latest_position(rank, layer, sequence) for rank in range(RANKS)] == by_rank
            least = None if None in by_rank else min(at for at in by_rank if at is not None)
            assert protocol.min_synced_position(layer, sequence) == least
        ends = [model.positions.get((sequence, r, layer), -1) for r in range(RANKS) for layer in range(LAYERS)]
        assert protocol.synced_tokens(sequence) == min(ends) + 1
    for name in (event.prefix_id for event in history if isinstance(event, PrefixConfirmed)):
        assert protocol.is_prefix_confirmed(name) == (name in model.prefixes)
        assert protocol.prefix_tokens(name) == model.prefixes.get(name)


def test_only_the_ranks_that_hold_a_layer_count_for_it() -> None:
    shards = [CacheShardInfo(0, 3, 2, [0]), CacheShardInfo(1, 3, 2, [1]), CacheShardInfo(2, 3, 2, [1])]
    protocol = CacheSyncProtocol(3, 2, shards)
    protocol.record_event(ShardUpdated(0, 0, 9))
    assert protocol.min_synced_position(0) == 9
    assert protocol.min_synced_position(1) is None
    assert protocol.synced_tokens() == 0
    protocol.record_event(ShardUpdated(1, None, 7))
    protocol.record_event(ShardUpdated(2, 1, 5))
    assert protocol.min_synced_position(1) == 5
    assert protocol.synced_tokens() == 6
    protocol.forget(0)
    assert protocol.min_synced_position(0) is None
    with pytest.raises(ArgumentError, match=r"rank 2 holds the layers \[1\], not 0"):
        protocol.record_event(ShardUpdated(2, 0, 5))


def test_a_prefix_ends_with_its_pages() -> None:
    protocol = CacheSyncProtocol(1, 1)
    protocol.record_event(PrefixConfirmed(1, 16))
    protocol.record_event(PrefixConfirmed(2, 32))
    protocol.record_event(ShardEvicted(0, None, 15))
    assert protocol.is_prefix_confirmed(1)
    assert not protocol.is_prefix_confirmed(2)
    protocol.withdraw_prefix(1)
    assert not protocol.is_prefix_confirmed(1)


@given(st.lists(events, max_size=12), st.integers(0, 5), st.integers(-1, 15))
def test_the_log_keeps_the_last_events(history: list[SyncEvent], size: int, count: int) -> None:
    protocol = CacheSyncProtocol(RANKS, LAYERS).with_max_log_size(size)
    for event in history:
        protocol.record_event(event)
    kept = history[max(0, len(history) - size) :]
    assert protocol.event_count() == len(kept)
    assert protocol.recent_events(count) == kept[max(0, len(kept) - max(count, 0)) :]


@given(events)
def test_events_travel_as_a_tagged_union(event: SyncEvent) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=SyncEvent) == event


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (ShardUpdated(3, 0, 1), "ShardUpdated: rank must be from 0 to 2, not 3"),
        (ShardUpdated(0, 4, 1), r"rank 0 holds the layers \[0, 1, 2, 3\], not 4"),
        (ShardUpdated(0, 0, -1), "seq_pos is 0 or more, not -1"),
        (ShardEvicted(0, 0, -2), "seq_pos is -1 or more, not -2"),
    ],
)
def test_an_event_that_cannot_be_is_an_error_and_changes_nothing(event: SyncEvent, message: str) -> None:
    protocol = CacheSyncProtocol(RANKS, LAYERS)
    with pytest.raises(ArgumentError, match=message):
        protocol.record_event(event)
    assert protocol.event_count() == 0


def test_a_protocol_needs_ranks_layers_and_their_shards() -> None:
    with pytest.raises(ArgumentError, match="expected ranks and layers, got 0 and 1"):
        CacheSyncProtocol(0, 1)
    with pytest.raises(ArgumentError, match="shards are those of ranks 0 to 1, in this order"):
        CacheSyncProtocol(2, 1, [CacheShardInfo(1, 2, 1), CacheShardInfo(0, 2, 1)])
    with pytest.raises(ArgumentError, match="expected 0 events or more, got -1"):
        CacheSyncProtocol(1, 1).with_max_log_size(-1)


def test_a_hint_without_ranks_has_no_targets() -> None:
    assert CacheRoutingHint(42, (0, 2), 128).has_targets()
    assert not CacheRoutingHint(0, (), 0).has_targets()

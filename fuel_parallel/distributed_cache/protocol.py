"""What ranks tell each other about their parts of a KV cache, and what follows from it. Metadata only, no tensors.

A position counts tokens of a sequence from 0, and `seq_pos` is the last one that a shard holds. Positions are those of
one sequence unless `sequence` says otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from fuel_parallel.errors import ArgumentError
from fuel_parallel.partitioning import partition


@dataclass(frozen=True, init=False)
class CacheShardInfo:
    """The layers whose keys and values a rank holds: by `partition`, or those that are given.

    Args:
        rank: The rank that holds the shard.
        world_size: The number of ranks.
        num_layers: The attention layers of the model.
        layers: Which of them; None for the rank's part of all.

    Raises:
        ArgumentError: A rank outside of the world, a layer outside of the model or twice.

    >>> CacheShardInfo(1, 3, 10).layers
    (4, 5, 6)
    >>> CacheShardInfo(0, 2, 4, layers=[0, 3]).owns_layer(3)
    True
    """

    rank: int
    world_size: int
    num_layers: int
    layers: tuple[int, ...]

    def __init__(self, rank: int, world_size: int, num_layers: int, layers: Iterable[int] | None = None) -> None:
        if not 0 <= rank < world_size:
            raise ArgumentError(f"CacheShardInfo: rank must be from 0 to {world_size - 1}, not {rank}")
        own = tuple(partition(num_layers, world_size)[rank] if layers is None else layers)
        if len(set(own)) < len(own) or not all(0 <= layer < num_layers for layer in own):
            raise ArgumentError(
                f"CacheShardInfo: layers are different numbers from 0 to {num_layers - 1}; got {list(own)}"
            )
        for name, value in (("rank", rank), ("world_size", world_size), ("num_layers", num_layers), ("layers", own)):
            object.__setattr__(self, name, value)

    def owns_layer(self, layer: int) -> bool:
        """Whether the rank holds this layer."""
        return layer in self.layers


class ShardUpdated(msgspec.Struct, frozen=True, tag=True):
    """A rank now holds a layer up to position `seq_pos`. Layer None: all layers that the rank holds."""

    rank: int
    layer: int | None
    seq_pos: int
    sequence: int = 0


class PrefixConfirmed(msgspec.Struct, frozen=True, tag=True):
    """All ranks hold the prefix of `num_tokens` tokens. `prefix_id` is the hash of its last page, cut to 64 bits."""

    prefix_id: int
    num_tokens: int


class ShardEvicted(msgspec.Struct, frozen=True, tag=True):
    """A rank has dropped all positions beyond `seq_pos`; -1: all of them. Layer None: of all its layers."""

    rank: int
    layer: int | None
    seq_pos: int
    sequence: int = 0


class FlushAll(msgspec.Struct, frozen=True, tag=True):
    """All ranks have dropped all they had, as for another model."""


SyncEvent = ShardUpdated | PrefixConfirmed | ShardEvicted | FlushAll
"""What a rank tells the others. A tagged union: `msgspec.msgpack.decode(data, type=SyncEvent)`."""


class CacheRoutingHint(msgspec.Struct, frozen=True):
    """Where a request finds the longest cached part of its prompt.

    Args:
        prefix_id: The prefix, as in `PrefixConfirmed`; 0 where nothing is cached.
        relevant_ranks: Who holds it.
        reusable_tokens: How many tokens need not be computed.

    >>> CacheRoutingHint(42, (0, 2), 128).has_targets()
    True
    """

    prefix_id: int
    relevant_ranks: tuple[int, ...]
    reusable_tokens: int

    def has_targets(self) -> bool:
        """Whether anyone holds it."""
        return bool(self.relevant_ranks)


class CacheSyncProtocol:
    """How far each rank is, and which prefixes all ranks hold, as their events tell.

    Args:
        world_size: The number of ranks.
        num_layers: The attention layers of the model.
        shards: What each rank holds. Only ranks that hold a layer count for it; without, all ranks hold all layers.

    >>> protocol = CacheSyncProtocol(world_size=2, num_layers=4)
    >>> protocol.record_event(ShardUpdated(rank=0, layer=0, seq_pos=10))
    >>> print(protocol.min_synced_position(0))
    None
    >>> protocol.record_event(ShardUpdated(rank=1, layer=0, seq_pos=8))
    >>> protocol.min_synced_position(0)
    8
    """

    def __init__(self, world_size: int, num_layers: int, shards: Sequence[CacheShardInfo] | None = None) -> None:
        if world_size < 1 or num_layers < 1:
            raise ArgumentError(f"CacheSyncProtocol: expected ranks and layers, got {world_size} and {num_layers}")
        if shards is not None and [shard.rank for shard in shards] != list(range(world_size)):
            raise ArgumentError(f"CacheSyncProtocol: shards are those of ranks 0 to {world_size - 1}, in this order")
        self.world_size = world_size
        self.num_layers = num_layers
        every = range(num_layers)
        self._layers = [frozenset(every if shards is None else shards[rank].layers) for rank in range(world_size)]
        # By sequence and rank, the position by layer; None stands for all layers that have no entry of their own.
        self._positions: dict[tuple[int, int], dict[int | None, int]] = {}
        self._prefixes: dict[int, int] = {}
        self._log: deque[SyncEvent] = deque(maxlen=10_000)

    def with_max_log_size(self, size: int) -> CacheSyncProtocol:
        """This protocol, which now keeps the last `size` events only (10,000 unless told)."""
        if size < 0:
            raise ArgumentError(f"with_max_log_size: expected 0 events or more, got {size}")
        self._log = deque(self._log, maxlen=size)
        return self

    def record_event(self, event: SyncEvent) -> None:
        """Takes in what a rank tells.

        An eviction never moves a rank forward, and with positions that a confirmed prefix needs it ends its
        confirmation. Raises `ArgumentError` for a rank, layer or position that cannot be.
        """
        match event:
            case ShardUpdated():
                self._check(event, least=0)
                self._move(event)
            case ShardEvicted():
                self._check(event, least=-1)
                self._evict(event)
            case PrefixConfirmed():
                self._prefixes[event.prefix_id] = event.num_tokens
            case FlushAll():
                self._positions.clear()
                self._prefixes.clear()
        self._log.append(event)

    def forget(self, sequence: int) -> None:
        """Drops the positions of a sequence that has ended; confirmed prefixes stay."""
        for rank in range(self.world_size):
            self._positions.pop((sequence, rank), None)

    def latest_position(self, rank: int, layer: int, sequence: int = 0) -> int | None:
        """The last position that a rank holds of a layer; None if it holds nothing."""
        known = self._positions.get((sequence, rank), {})
        return known.get(layer, known.get(None)) if layer in self._layers[rank] else None

    def min_synced_position(self, layer: int, sequence: int = 0) -> int | None:
        """The last position that all ranks hold that have the layer; None if one of them holds nothing."""
        owners = [rank for rank in range(self.world_size) if layer in self._layers[rank]]
        positions = [self.latest_position(rank, layer, sequence) for rank in owners]
        held = [position for position in positions if position is not None]
        return min(held) if held and len(held) == len(positions) else None

    def synced_tokens(self, sequence: int = 0) -> int:
        """How many tokens from the beginning all ranks hold of all their layers."""
        ends = []
        for rank, layers in enumerate(self._layers):
            known = self._positions.get((sequence, rank), {})
            if known.keys() <= {None}:
                ends += [known.get(None, -1)] if layers else []
            else:
                ends += [known.get(layer, known.get(None, -1)) for layer in layers]
        return min(ends, default=-1) + 1

    def is_prefix_confirmed(self, prefix_id: int) -> bool:
        """Whether all ranks hold the prefix."""
        return prefix_id in self._prefixes

    def prefix_tokens(self, prefix_id: int) -> int | None:
        """The length of a confirmed prefix; None if it is not confirmed."""
        return self._prefixes.get(prefix_id)

    def withdraw_prefix(self, prefix_id: int) -> None:
        """Ends the confirmation of a prefix whose pages are gone."""
        self._prefixes.pop(prefix_id, None)

    def event_count(self) -> int:
        """The number of events in the log."""
        return len(self._log)

    def recent_events(self, count: int) -> list[SyncEvent]:
        """The last `count` events, or as many as the log has, oldest first."""
        return list(islice(self._log, max(0, len(self._log) - max(count, 0)), None))

    def _move(self, event: ShardUpdated) -> None:
        known = self._positions.setdefault((event.sequence, event.rank), {})
        if event.layer is None:
            known.clear()
        known[event.layer] = event.seq_pos

    def _evict(self, event: ShardEvicted) -> None:
        known = self._positions.get((event.sequence, event.rank), {})
        layers = self._layers[event.rank] if event.layer is None else {event.layer}
        for layer in layers:
            position = known.get(layer, known.get(None))
            if position is not None:
                known[layer] = min(position, event.seq_pos)
        left = {layer: known.get(layer, known.get(None, -1)) for layer in self._layers[event.rank]}
        self._positions[event.sequence, event.rank] = {layer: at for layer, at in left.items() if at >= 0}
        kept = event.seq_pos + 1
        self._prefixes = {name: tokens for name, tokens in self._prefixes.items() if tokens <= kept}

    def _check(self, event: ShardUpdated | ShardEvicted, least: int) -> None:
        name = type(event).__name__
        if not 0 <= event.rank < self.world_size:
            raise ArgumentError(f"{name}: rank must be from 0 to {self.world_size - 1}, not {event.rank}")
        if event.layer is not None and event.layer not in self._layers[event.rank]:
            raise ArgumentError(
                f"{name}: rank {event.rank} holds the layers {sorted(self._layers[event.rank])}, not {event.layer}"
            )
        if event.seq_pos < least:
            raise ArgumentError(f"{name}: seq_pos is {least} or more, not {event.seq_pos}")

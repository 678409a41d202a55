"""The bookkeeping of a KV cache that several ranks hold together: pages, prefixes, agreement, routing.

A page is a number: on each rank it is the place, in that rank's pool of arrays, of the keys and values of some tokens,
for the layers and heads that the rank has. All ranks of a group take the same decisions in the same order, so a page
number means the same tokens on all of them. docs/kv-cache.md tells how it fits together.

The bookkeeping needs no tensors. What does (`KVPool`, `PagedBatch`) is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fuel_parallel.distributed_cache.agreement import Follower, Leader, Orders, Report
from fuel_parallel.distributed_cache.group import CacheGroup, CacheStep
from fuel_parallel.distributed_cache.hashing import PageHashes
from fuel_parallel.distributed_cache.pages import PageLayout, PagePool
from fuel_parallel.distributed_cache.prefixes import CacheStatistics, EvictedPage, Match, PrefixCache
from fuel_parallel.distributed_cache.protocol import (
    CacheRoutingHint,
    CacheShardInfo,
    CacheSyncProtocol,
    FlushAll,
    PrefixConfirmed,
    ShardEvicted,
    ShardUpdated,
    SyncEvent,
)
from fuel_parallel.distributed_cache.replica import (
    Admit,
    CacheConfig,
    CacheReplica,
    Command,
    Confirm,
    End,
    Extend,
    Fork,
    Outcome,
)
from fuel_parallel.distributed_cache.routing import PrefixDigest, Router, RoutingPolicy
from fuel_parallel.distributed_cache.sequences import PageCopy, SequenceTable
from fuel_parallel.distributed_cache.simulation import Request, SimulationResult, TraceConfig, chat_trace, simulate
from fuel_parallel.distributed_cache.spill import FileSpill, HostSpill, SpillStore

if TYPE_CHECKING:
    from fuel_parallel.distributed_cache.batch import Chunk, PagedBatch
    from fuel_parallel.distributed_cache.pool import KVPool, LayerCache

_WITH_TENSORS = {"Chunk": "batch", "KVPool": "pool", "LayerCache": "pool", "PagedBatch": "batch"}

__all__ = [
    "Admit",
    "CacheConfig",
    "CacheGroup",
    "CacheReplica",
    "CacheRoutingHint",
    "CacheShardInfo",
    "CacheStatistics",
    "CacheStep",
    "CacheSyncProtocol",
    "Chunk",
    "Command",
    "Confirm",
    "End",
    "EvictedPage",
    "Extend",
    "FileSpill",
    "FlushAll",
    "Follower",
    "Fork",
    "HostSpill",
    "KVPool",
    "LayerCache",
    "Leader",
    "Match",
    "Orders",
    "Outcome",
    "PageCopy",
    "PageHashes",
    "PageLayout",
    "PagePool",
    "PagedBatch",
    "PrefixCache",
    "PrefixConfirmed",
    "PrefixDigest",
    "Report",
    "Request",
    "Router",
    "RoutingPolicy",
    "SequenceTable",
    "ShardEvicted",
    "ShardUpdated",
    "SimulationResult",
    "SpillStore",
    "SyncEvent",
    "TraceConfig",
    "chat_trace",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TENSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_WITH_TENSORS[name]}"), name)
    return value

"""The bookkeeping of a KV cache that several ranks hold together: pages, prefixes, agreement, routing.

A page is a number: on each rank it is the place, in that rank's pool of arrays, of the keys and values of some tokens,
for the layers and heads that the rank has. All ranks of a group take the same decisions in the same order, so a page
number means the same tokens on all of them. docs/kv-cache.md tells how it fits together.
"""

from fuel_parallel.distributed_cache.pages import PageLayout, PagePool
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
from fuel_parallel.distributed_cache.sequences import PageCopy, SequenceTable

__all__ = [
    "CacheRoutingHint",
    "CacheShardInfo",
    "CacheSyncProtocol",
    "FlushAll",
    "PageCopy",
    "PageLayout",
    "PagePool",
    "PrefixConfirmed",
    "SequenceTable",
    "ShardEvicted",
    "ShardUpdated",
    "SyncEvent",
]

"""What the layers of a model get of a cache."""

from __future__ import annotations

from collections.abc import Sequence

from fuel_parallel.distributed_cache import KVPool, LayerCache, PagedBatch
from fuel_parallel.errors import ArgumentError


def layer_caches(cache: KVPool | None, batch: PagedBatch | None, layers: int) -> Sequence[LayerCache | None]:
    """For each layer its cache in a step, or None without one. Raises `ArgumentError` for a cache without a batch."""
    if cache is None and batch is None:
        return [None] * layers
    if cache is None or batch is None:
        given, missing = ("cache", "batch") if batch is None else ("batch", "cache")
        raise ArgumentError(f"a model on pages needs a cache and a batch; {given}= was given without {missing}=")
    return [cache.layer(number, batch) for number in range(layers)]

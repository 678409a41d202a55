"""The keys and values of a rank's layers, in pages, on its device; and a model's attention over them.

The arrays are allocated once and written in place: a write is a node of the graph like any other, which replaces the
variable's value, and since nobody else holds the old value the plan writes over it (docs/plans.md). Whichever plan runs
next takes the writes along, so that nobody has to ask for the pool.

Which page has what is decided by the bookkeeping, the same on all ranks; a pool does as its outcomes say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fuel_parallel.backends import backend_of
from fuel_parallel.distributed_cache.batch import PagedBatch, padded
from fuel_parallel.distributed_cache.pages import PageLayout
from fuel_parallel.distributed_cache.replica import Outcome
from fuel_parallel.distributed_cache.spill import SpillStore
from fuel_parallel.errors import ArgumentError, CacheError
from fuel_parallel.lazy import dtypes, effects
from fuel_parallel.lazy.node import Spec, data_node
from fuel_parallel.lazy.ops import creation, elementwise, manipulation, reductions
from fuel_parallel.lazy.ops.paged_attention import copy_pages, paged_attention, write_pages
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Variable
from fuel_parallel.runtime.realize import realize

if TYPE_CHECKING:
    from fuel_parallel.comm.communicator import Communicator


class KVPool:
    """Keys and values of tokens, in `num_pages` pages of `page_size` tokens.

    Args:
        num_layers: Attention layers of this rank: all, or under pp its own (`CacheShardInfo`).
        num_kv_heads: Heads of keys and values that this rank has of each; under tp a head that serves query heads of
            several ranks is on each of them.
        head_dim: Elements of a head.
        page_size: Tokens of a page.
        num_pages: How many pages; or
        budget_bytes: how many bytes they may take, scales included.
        dtype: float32, float16, bfloat16, float64, or int8 with a float32 scale for each token and head.
        device: Where the arrays are.
        comm: Ranks that share the bookkeeping: with a budget, all take as many pages as fit on the one where fewest do.

    Raises:
        ArgumentError: Not exactly one of `num_pages` and `budget_bytes`; a budget for less than one page; a size or
            dtype that cannot be.

    >>> pool = KVPool(num_layers=2, num_kv_heads=4, head_dim=64, page_size=16, budget_bytes=2**20, dtype="bfloat16")
    >>> pool.num_pages, pool.bytes_per_page
    (32, 32768)
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int = 16,
        num_pages: int | None = None,
        budget_bytes: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        comm: Communicator | None = None,
    ) -> None:
        self.layout = PageLayout(num_layers, num_kv_heads, head_dim, page_size, dtype)
        if (num_pages is None) == (budget_bytes is None):
            raise ArgumentError("KVPool: give either num_pages or budget_bytes")
        if num_pages is None:
            num_pages = _affordable(self.layout, budget_bytes or 0, comm)
        if num_pages < 1:
            raise ArgumentError(f"KVPool: num_pages must be 1 or more, not {num_pages}")
        self.num_pages = num_pages
        self.page_size, self.device, self.dtype = page_size, device, dtypes.dtype(dtype)
        shape = (self.num_pages, page_size, num_kv_heads, head_dim)
        self._pages = [[self._zeros(shape, self.dtype) for _ in _KINDS] for _ in range(num_layers)]
        scales = _KINDS if self.dtype == dtypes.int8 else ()
        self._scales = [[self._zeros(shape[:3], dtypes.float32) for _ in scales] for _ in range(num_layers)]

    @classmethod
    def for_model(cls, model: Module, **options: Any) -> KVPool:
        """A pool for all attention layers of a model, or of this rank's part of one; `options` as above."""
        layers: list[Any] = [layer for layer in model.named_modules().values() if hasattr(layer, "cached_heads")]
        forms = {(layer.cached_heads, layer.head_size) for layer in layers}
        if len(forms) != 1:
            raise ArgumentError(
                "KVPool.for_model: attention layers must be alike in heads of keys and values and their size; "
                f"{type(model).__name__} has {sorted(forms) or 'none'}"
            )
        ((heads, size),) = forms
        return cls(num_layers=len(layers), num_kv_heads=heads, head_dim=size, **options)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page: keys and values of all layers, with their scales."""
        return self.layout.page_bytes

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts keys and values [tokens, kv heads, head dim] at slots [tokens]; negative slots are passed over."""
        self._check_layer(layer)
        for number, new in enumerate((keys, values)):
            if self._scales[layer]:
                new, scale = _quantized(new)
                self._rebind(self._scales[layer][number], write_pages(self._scales[layer][number], scale, slots))
            pages = self._pages[layer][number]
            self._rebind(pages, write_pages(pages, creation.astype(new, self.dtype), slots))

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        *,
        groups: Sequence[int] | None = None,
    ) -> Tensor:
        """Writes a batch's keys and values, and attends to all that its sequences have: [tokens, heads, head dim].

        `query` is [tokens, heads, head dim], keys and values [tokens, kv heads, head dim]; `groups` as in
        `lazy.paged_attention`.
        """
        self.write(layer, batch.slots, keys, values)
        written_keys, written_values = self._pages[layer]
        key_scales, value_scales = self._scales[layer] or (None, None)
        return paged_attention(
            query,
            written_keys,
            written_values,
            batch.page_table,
            batch.lengths,
            batch.starts,
            groups=groups,
            key_scales=key_scales,
            value_scales=value_scales,
        )

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies pages in all layers, in this order, before anything is written from now on."""
        if len(sources) != len(targets):
            raise ArgumentError(f"copy_pages: {len(sources)} sources and {len(targets)} targets")
        self._check_pages("copy_pages", *sources, *targets)
        if sources:
            room = padded(len(sources)) - len(sources)
            ends = [creation.asarray([*pages, *[-1] * room], dtype="int32") for pages in (sources, targets)]
            for variable in self.__tensors__():
                self._rebind(variable, copy_pages(variable, *ends))

    def read_page(self, page: int) -> bytes:
        """What this rank has in a page: keys and values of all layers, then their scales."""
        self._check_pages("read_page", page)
        realize(self)
        to_host = backend_of(self.device).to_host
        return b"".join(to_host(variable.node.value[page]).tobytes() for variable in self.__tensors__())

    def write_page(self, page: int, content: bytes) -> None:
        """Fills a page with what `read_page` gave, on a pool of the same layout. Done at once.

        Raises `CacheError` for content of another length, and changes nothing.
        """
        self._check_pages("write_page", page)
        if len(content) != self.bytes_per_page:
            raise CacheError(
                f"write_page: a page of this pool has {self.bytes_per_page} bytes, the content {len(content)}; it "
                "is of another model, dtype or number of ranks, and must be computed again"
            )
        slots = creation.asarray(np.arange(page * self.page_size, (page + 1) * self.page_size))
        start = 0
        for variable in self.__tensors__():
            shape, dtype = variable.shape[1:], variable.dtype
            part = np.frombuffer(content, dtype, count=math.prod(shape), offset=start).reshape(shape)
            self._rebind(variable, write_pages(variable, creation.asarray(part, device=self.device), slots))
            start += part.nbytes
        realize(self)

    def follow(self, outcomes: Iterable[Outcome], spill: SpillStore | None = None) -> None:
        """Does as the bookkeeping has decided, in order: saves pages that are evicted, and copies those written to.

        To be called with the outcomes of each `CacheGroup.step` before the next batch is computed.
        """
        for outcome in outcomes:
            if spill is not None:
                for evicted in outcome.evicted:
                    spill.save(evicted.page_hash, self.read_page(evicted.page))
            self.copy_pages([copy.source for copy in outcome.copies], [copy.target for copy in outcome.copies])

    def restore(self, pages: Sequence[int], page_hashes: Iterable[bytes], spill: SpillStore) -> int:
        """Fills pages from a store up to the first whose hash it has not; gives how many it filled.

        Ranks may find different numbers; the least of them is what need not be computed.
        """
        filled = 0
        for page, page_hash in zip(pages, page_hashes, strict=False):
            content = spill.load(page_hash)
            if content is None:
                break
            self.write_page(page, content)
            filled += 1
        return filled

    def reset(self) -> None:
        """Starts with empty arrays: for a pool that was lost when a step failed half-way. See `CacheGroup.rejoin`."""
        for variable in self.__tensors__():
            variable.assign(self._zeros(variable.shape, variable.dtype))

    def layer(self, layer: int, batch: PagedBatch) -> LayerCache:
        """What the attention of one layer takes as its `cache`."""
        self._check_layer(layer)
        return LayerCache(self, layer, batch)

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Variable:
        values = backend_of(self.device).array_module.zeros(shape, dtype=dtype)
        return Variable(Tensor(data_node(values, Spec(shape, dtype, self.device))))

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layout.layers:
            raise ArgumentError(
                f"KVPool: there is no layer {layer}; those of this rank are 0 to {self.layout.layers - 1}"
            )

    def _check_pages(self, name: str, *pages: int) -> None:
        wrong = [page for page in pages if not 0 <= page < self.num_pages]
        if wrong:
            raise CacheError(f"{name}: there is no page {wrong[0]}; pages are 0 to {self.num_pages - 1}")

    def _rebind(self, variable: Variable, value: Tensor) -> None:
        variable.assign(value)
        effects.make_due(variable)

    def __tensors__(self) -> list[Variable]:
        return [variable for layer in (*self._pages, *self._scales) for variable in layer]


_KINDS = ("keys", "values")


@dataclass(frozen=True)
class LayerCache:
    """One layer of a pool in one step: the `cache` of `fp.Attention`."""

    pool: KVPool
    layer: int
    batch: PagedBatch

    @property
    def positions(self) -> Tensor:
        """[tokens], of the rotation."""
        return self.batch.positions

    def attend(self, query: Tensor, key: Tensor, value: Tensor, groups: Sequence[int] | None = None) -> Tensor:
        """As attention has them: [heads, tokens, head dim], of a batch's tokens."""
        query, key, value = (manipulation.permute_dims(x, (1, 0, 2)) for x in (query, key, value))
        result = self.pool.attend(self.layer, query, key, value, self.batch, groups=groups)
        return manipulation.permute_dims(result, (1, 0, 2))


def _affordable(layout: PageLayout, budget_bytes: int, comm: Communicator | None) -> int:
    """How many pages fit into the budget, on all ranks if there are several."""
    if comm is None:
        return layout.pages_in(budget_bytes)
    # A rank without layers or heads takes what the others do.
    mine = budget_bytes // layout.page_bytes if layout.page_bytes else None
    fitting = comm.all_gather_object(mine, type=int | None)
    fewest: int = min((pages for pages in fitting if pages is not None), default=0)
    if fewest < 1:
        raise ArgumentError(
            f"KVPool: the budgets hold {fitting} pages, by rank, and every rank with layers and heads needs one; here "
            f"a page takes {layout.page_bytes} bytes, the budget is {budget_bytes}"
        )
    return fewest


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, heads, dim] as int8, and [tokens, heads] of what one step of it stands for."""
    x = creation.astype(x, dtypes.float32)
    scale = reductions.max(elementwise.abs(x), axis=-1, keepdims=True) / 127.0
    steps = elementwise.round(x / (scale + (scale == 0)))
    return creation.astype(steps, dtypes.int8), manipulation.squeeze(scale, axis=-1)

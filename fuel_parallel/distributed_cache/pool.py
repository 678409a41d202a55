"""The keys and values of a rank's layers, in pages, on its device; and a model's attention over them.

The arrays are allocated once and written in place: a write is a node of the graph like any other, which replaces the
variable's value, and since nobody else holds the old value the plan writes over it (docs/plans.md). Writes are pending
effects: whichever plan runs next takes them along, so that no step depends on somebody asking for the pool.

Which page has what is decided by the bookkeeping, the same on all ranks; a pool does as its outcomes say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fuel_parallel.backends import backend_of
from fuel_parallel.distributed_cache.batch import PagedBatch
from fuel_parallel.distributed_cache.pages import PageLayout
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy import dtypes, effects
from fuel_parallel.lazy.node import Spec, data_node
from fuel_parallel.lazy.ops import creation, elementwise, manipulation, reductions
from fuel_parallel.lazy.ops.paged_attention import paged_attention, write_pages
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Variable


class KVPool:
    """Keys and values of tokens, in `num_pages` pages of `page_size` tokens.

    Args:
        num_layers: Attention layers of this rank: all, or under pp its own (`CacheShardInfo`).
        num_kv_heads: Heads of keys and values that this rank has of each; under tp a head that serves query heads of
            several ranks is on each of them.
        head_dim: Elements of a head.
        page_size: Tokens of a page.
        num_pages: How many pages; or
        budget_bytes: how many bytes they may take, scales included. All ranks of a group need the same number of pages.
        dtype: float32, float16, bfloat16, float64, or int8 with a float32 scale for each token and head.
        device: Where the arrays are.

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
    ) -> None:
        self.layout = PageLayout(num_layers, num_kv_heads, head_dim, page_size, dtype)
        if (num_pages is None) == (budget_bytes is None):
            raise ArgumentError("KVPool: give either num_pages or budget_bytes")
        self.num_pages = self.layout.pages_in(budget_bytes) if budget_bytes is not None else int(num_pages or 0)
        if self.num_pages < 1:
            raise ArgumentError(f"KVPool: num_pages must be 1 or more, not {num_pages}")
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
        names = ("key_scales", "value_scales")
        scales = dict(zip(names, self._scales[layer], strict=False))
        where = (batch.page_table, batch.lengths, batch.starts)
        return paged_attention(query, *self._pages[layer], *where, groups=groups, **scales)

    def layer(self, layer: int, batch: PagedBatch) -> LayerCache:
        """What the attention of one layer takes as its `cache`."""
        return LayerCache(self, layer, batch)

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Variable:
        values = backend_of(self.device).array_module.zeros(shape, dtype=dtype)
        return Variable(Tensor(data_node(values, Spec(shape, dtype, self.device))))

    def _rebind(self, variable: Variable, value: Tensor) -> None:
        variable.assign(value)
        effects.keep(value.node)

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


def _quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, heads, dim] as int8, and [tokens, heads] of what one step of it stands for."""
    x = creation.astype(x, dtypes.float32)
    scale = reductions.max(elementwise.abs(x), axis=-1, keepdims=True) / 127.0
    steps = elementwise.round(x / (scale + (scale == 0)))
    return creation.astype(steps, dtypes.int8), manipulation.squeeze(scale, axis=-1)

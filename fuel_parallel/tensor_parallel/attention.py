"""Attention whose heads are shared by ranks."""

from __future__ import annotations

from typing import Any

from fuel_parallel.arguments import checked
from fuel_parallel.attention import (
    Attention,
    AttentionCache,
    Rotary,
    check_cache,
    check_heads,
    join_heads,
    split_heads,
)
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.lazy.ops import indexing
from fuel_parallel.lazy.ops.attention import scaled_dot_product_attention
from fuel_parallel.lazy.random import Generator
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module
from fuel_parallel.partitioning import partition
from fuel_parallel.tensor_parallel.linear import ColumnParallel, RowParallel


class ParallelAttention(Module):
    """`fp.Attention` of which each rank computes some query heads, with the key and value heads that serve them.

    Numbers of heads that do not divide are cut by `partition`, and a rank may have none. Where a key head serves query
    heads of several ranks, each of these holds it, and its gradient is the sum of theirs.

    Args:
        dim, heads, generator: As in `fp.Attention`; the generator in the same state on all ranks.
        comm: The ranks.
        kv_heads, head_size, bias, out_bias, causal, rotary, dtype: As in `fp.Attention`.
        sequence_dim: x and the result are this rank's part of the sequence, which lies in that dimension; None if they
            are whole. The heads see the whole sequence.

    >>> from fuel_parallel import SymbolicComm
    >>> attention = ParallelAttention(8, 4, Generator(0), SymbolicComm(0, 3), kv_heads=2)
    >>> attention.query.weight.shape, attention.key.weight.shape          # two query heads and the head of their keys
    ((8, 4), (8, 2))
    """

    @checked
    def __init__(
        self,
        dim: int,
        heads: int,
        generator: Generator,
        comm: Communicator,
        *,
        kv_heads: int | None = None,
        head_size: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        causal: bool = False,
        rotary: Rotary | None = None,
        sequence_dim: int | None = None,
        dtype: Any = None,
    ) -> None:
        self.heads, self.kv_heads, self.head_size = check_heads(dim, heads, kv_heads, head_size)
        size = self.head_size
        queries = {"block": size, "sequence_dim": sequence_dim, "bias": bias, "dtype": dtype}
        keys = queries | {"columns": self._key_columns(comm)}
        width, kv_width = heads * size, self.kv_heads * size
        self.query = ColumnParallel(dim, width, generator, comm, **queries)
        self.key = ColumnParallel(dim, kv_width, generator, comm, **keys)
        self.value = ColumnParallel(dim, kv_width, generator, comm, **keys)
        self.out = RowParallel(
            width,
            dim,
            generator,
            comm,
            block=size,
            sequence_dim=sequence_dim,
            bias=bias if out_bias is None else out_bias,
            dtype=dtype,
        )
        self._finish(comm, causal, rotary)

    @classmethod
    def from_dense(cls, dense: Attention, comm: Communicator, *, sequence_dim: int | None = None) -> ParallelAttention:
        """This rank's heads of a dense attention that all ranks hold alike."""
        layer = cls.__new__(cls)
        layer.heads, layer.kv_heads, layer.head_size = dense.heads, dense.kv_heads, dense.head_size
        queries: dict[str, Any] = {"block": dense.head_size, "sequence_dim": sequence_dim}
        keys = queries | {"columns": layer._key_columns(comm)}
        layer.query = ColumnParallel.from_dense(dense.query, comm, **queries)
        layer.key = ColumnParallel.from_dense(dense.key, comm, **keys)
        layer.value = ColumnParallel.from_dense(dense.value, comm, **keys)
        layer.out = RowParallel.from_dense(dense.out, comm, **queries)
        layer._finish(comm, dense.causal, dense.rotary)
        return layer

    def _finish(self, comm: Communicator, causal: bool, rotary: Rotary | None) -> None:
        self.causal, self.rotary = causal, rotary
        self._mine = partition(self.heads, comm.world_size)[comm.rank]
        self._served = self._served_by(self._mine)

    @property
    def cached_heads(self) -> int:
        """Heads of keys and values that this rank's cache keeps of this layer; may be 0."""
        return len(self._served)

    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """[..., length, dim] to [..., length, dim], the same on all ranks or this rank's part of the sequence.

        `mask` broadcasts to [..., heads, length, length], of all heads; `positions` [length] are those of the rotation.
        `cache` is as in `fp.Attention`, of this rank's `cached_heads`.
        """
        positions = check_cache(cache, x, mask, positions, self.causal)
        query, key, value = (split_heads(layer(x), self.head_size) for layer in (self.query, self.key, self.value))
        if not len(self._mine):
            # Without heads nothing is to be computed, but gradients flow through here to the collectives of all ranks.
            return self.out(join_heads(query + key + value))
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        if cache is not None:
            return self.out(join_heads(cache.attend(query, key, value, self._groups())))
        key, value = self._for_each_query(key), self._for_each_query(value)
        if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
            mask = mask[..., self._mine.start : self._mine.stop, :, :]
        return self.out(join_heads(scaled_dot_product_attention(query, key, value, mask=mask, causal=self.causal)))

    def _for_each_query(self, x: Tensor) -> Tensor:
        """Key heads as attention takes them: each for one number of query heads, else one for each query head."""
        groups = self._groups()
        serving = [head for head, count in enumerate(groups) for _ in range(count)]
        return x if len(set(groups)) == 1 else indexing.take(x, serving, axis=-3)

    def _groups(self) -> list[int]:
        """For each of this rank's key heads, how many of its query heads it serves."""
        group = self.heads // self.kv_heads
        serving = [head // group for head in self._mine]
        return [serving.count(head) for head in self._served]

    def _served_by(self, queries: range) -> range:
        """The key heads that a range of query heads needs."""
        group = self.heads // self.kv_heads
        return range(queries.start // group, (queries.stop - 1) // group + 1) if len(queries) else range(0)

    def _key_columns(self, comm: Communicator) -> list[range]:
        size = self.head_size
        served = [self._served_by(queries) for queries in partition(self.heads, comm.world_size)]
        return [range(heads.start * size, heads.stop * size) for heads in served]

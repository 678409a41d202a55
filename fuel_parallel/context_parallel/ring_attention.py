"""Attention over a sequence of which each rank holds a part: keys and values go round (Liu et al., 2023,
arXiv:2310.01889).

In each of n turns a rank adds what its queries see of the keys and values it has now, sends these on to the next rank,
and receives those of the rank before it meanwhile. Softmax is kept by the logarithm of each query's sum. Going back,
keys and values go round once more, and their cotangents with them until they are home. No rank ever holds more than its
own part and two that travel, and no matrix of scores; neither does the graph between forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.meeting import meeting
from fuel_parallel.context_parallel.layout import check_sequence, sequence_chunks, whole_length
from fuel_parallel.lazy import dtypes, effects
from fuel_parallel.lazy.node import Op, Spec, apply, define
from fuel_parallel.lazy.ops import creation, manipulation
from fuel_parallel.lazy.ops.attention import scaled_dot_product_attention
from fuel_parallel.lazy.ops.attention_blocks import attention_backward_into, attention_into
from fuel_parallel.lazy.tensor import Tensor

Shape = tuple[int, ...]
Array = Any


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    comm: Communicator,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    length: int | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` of a sequence that is cut over ranks: this rank's queries see all keys.

    Args:
        query: [..., heads, my length, dim].
        key: [..., kv heads, my length, dim]; `heads` is a multiple of `kv heads`.
        value: [..., kv heads, my length, value dim].
        comm: The ranks.
        causal: Each position sees itself and those before it. What nobody sees is not computed.
        scale: Of the scores; None for 1 / sqrt(dim).
        layout: Which positions a rank holds; with `causal`, 'zigzag' gives all ranks the same work. See `layout`.
        length: Of the whole sequence; None when all ranks hold the same number of positions.

    Half precision is computed in float32, and travels as it is. The gradient is that of the sum of all ranks' losses;
    it has no gradient of its own.

    Raises `ShapeError` for shapes that do not fit together or are not this rank's part of `length`.

    >>> from fuel_parallel import SymbolicComm
    >>> q = creation.ones((1, 4, 3, 8))
    >>> ring_attention(q, q[:, :2], q[:, :2], SymbolicComm(1, 2), causal=True).shape     # 3 of 6 positions
    (1, 4, 3, 8)
    """
    check_sequence("ring_attention", query, key, value)
    whole = whole_length("ring_attention", query.shape[-2], comm, length)
    chunks = tuple(sequence_chunks(whole, comm.world_size, layout))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if comm.world_size == 1:
        return scaled_dot_product_attention(query, key, value, causal=causal, scale=factor)
    common = creation.result_type(query, key, value)
    parts = [creation.astype(t, common) for t in (query, key, value)]
    ring = _Ring(
        query.shape[:-3], query.shape[-3], key.shape[-3], query.shape[-1], value.shape[-1], chunks, causal, factor
    )
    flat = manipulation.concat([manipulation.reshape(t, (-1,)) for t in parts])
    node = apply(RING_ATTENTION, (flat.node,), comm, ring)
    effects.note(node)
    return creation.astype(Tensor(node)[..., : value.shape[-1]], common)


@dataclass(frozen=True)
class _Ring:
    """What is the same on all ranks."""

    batch: Shape
    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    chunks: tuple[tuple[range, ...], ...]
    causal: bool
    scale: float

    def __str__(self) -> str:
        return f"{self.heads} heads, length {sum(map(self.held, range(len(self.chunks))))}"

    def held(self, rank: int) -> int:
        """How many positions a rank holds."""
        return sum(map(len, self.chunks[rank]))

    def query_shape(self, rank: int) -> Shape:
        """[..., heads, length, dim] of a rank."""
        return (*self.batch, self.heads, self.held(rank), self.dim)

    def key_shapes(self, rank: int) -> tuple[Shape, Shape]:
        """Of the keys and the values of a rank."""
        front = (*self.batch, self.kv_heads, self.held(rank))
        return (*front, self.dim), (*front, self.value_dim)

    def keys_and_values(self, flat: Array, rank: int) -> tuple[Array, Array]:
        """Views of those of a rank in the array that travels."""
        key, value = self.key_shapes(rank)
        middle = math.prod(key)
        return flat[:middle].reshape(key), flat[middle : middle + math.prod(value)].reshape(value)

    def travelling(self, rank: int) -> int:
        """Elements of a rank's keys and values."""
        return sum(map(math.prod, self.key_shapes(rank)))

    def seen(self, rank: int, source: int) -> Iterator[tuple[slice, slice, bool]]:
        """Which queries of `rank` see which keys of `source`, and whether the last of these are themselves."""
        keys = self.held(source)
        if not self.causal:
            if self.held(rank) and keys:
                yield slice(0, self.held(rank)), slice(0, keys), False
            return
        start = 0
        for chunk in self.chunks[rank]:
            rows = slice(start, start + len(chunk))
            start = rows.stop
            # Chunks are seen whole or not at all, but for the queries' own.
            visible = sum(len(other) for other in self.chunks[source] if other.start <= chunk.start)
            if len(chunk) and visible:
                yield rows, slice(0, visible), source == rank


def _unpack(xp: Any, flat: Array, ring: _Ring, rank: int) -> tuple[Array, Array]:
    """This rank's queries, and its keys and values as they travel: as long as those of any rank."""
    shape = ring.query_shape(rank)
    size = math.prod(shape)
    query = flat[:size].reshape(shape).astype(dtypes.accumulated_in(flat.dtype), copy=False)
    own, longest = flat[size:], ring.travelling(0)
    if own.size < longest:
        own = xp.concatenate([own, xp.zeros(longest - own.size, dtype=own.dtype)])
    return query, own


def _turns(transport: Any, travelling: Array, rank: int, ranks: int) -> Iterator[tuple[int, Array]]:
    """Whose keys and values are here in each turn; the next ones are on their way meanwhile."""
    for turn in range(ranks):
        last = turn == ranks - 1
        coming = None if last else transport.start_exchange(travelling, (rank + 1) % ranks, (rank - 1) % ranks)
        yield (rank - turn) % ranks, travelling
        if coming is not None:
            travelling = coming.wait()


def _infer(flat: Spec, comm: Communicator, ring: _Ring) -> Spec:
    """The result, and in the last column the logarithm of each query's sum."""
    return Spec((*ring.query_shape(comm.rank)[:-1], ring.value_dim + 1), dtypes.accumulated_in(flat.dtype), flat.device)


def _kernel(xp: Any, flat: Array, comm: Communicator, ring: _Ring) -> Array:
    flat = xp.ascontiguousarray(flat)
    query, travelling = _unpack(xp, flat, ring, comm.rank)
    result = xp.zeros((*query.shape[:-1], ring.value_dim + 1), dtype=query.dtype)
    result[..., -1] = -math.inf
    with meeting(xp, flat, comm) as transport:
        for source, arrived in _turns(transport, travelling, comm.rank, comm.world_size):
            key, value = (x.astype(query.dtype, copy=False) for x in ring.keys_and_values(arrived, source))
            for rows, columns, diagonal in ring.seen(comm.rank, source):
                inputs = query[..., rows, :], key[..., columns, :], value[..., columns, :]
                block = xp.empty((*inputs[0].shape[:-1], ring.value_dim + 1), dtype=query.dtype)
                attention_into(xp, block, inputs, diagonal, ring.scale)
                _merge(xp, result[..., rows, :], block)
    return result


def _merge(xp: Any, result: Array, block: Array) -> None:
    """Adds what queries found at more keys: results count by the sums that they were divided by."""
    before, more = result[..., -1:], block[..., -1:]
    level = xp.logaddexp(before, more)
    result[..., :-1] *= xp.exp(before - level)
    result[..., :-1] += block[..., :-1] * xp.exp(more - level)
    result[..., -1:] = level


def _vjp(g: Tensor, y: Tensor, flat: Tensor, comm: Communicator, ring: _Ring) -> Tensor:
    node = apply(RING_ATTENTION_BACKWARD, (flat.node, g[..., : ring.value_dim].node, y.node), comm, ring)
    effects.note(node)
    return Tensor(node)


def _backward_kernel(xp: Any, flat: Array, g: Array, y: Array, comm: Communicator, ring: _Ring) -> Array:
    """The cotangent of `flat`. That of keys and values follows them, one exchange behind."""
    flat = xp.ascontiguousarray(flat)
    rank, ranks = comm.rank, comm.world_size
    query, travelling = _unpack(xp, flat, ring, rank)
    d_query = xp.zeros(query.shape, dtype=query.dtype)
    carried = xp.zeros(travelling.size, dtype=query.dtype)
    coming: Any = None
    with meeting(xp, flat, comm) as transport:
        for source, arrived in _turns(transport, travelling, rank, ranks):
            key, value = (x.astype(query.dtype, copy=False) for x in ring.keys_and_values(arrived, source))
            found = []
            for rows, columns, diagonal in ring.seen(rank, source):
                inputs = query[..., rows, :], key[..., columns, :], value[..., columns, :]
                packed = xp.empty(sum(x.size for x in inputs), dtype=query.dtype)
                attention_backward_into(xp, packed, (g[..., rows, :], y[..., rows, :], *inputs), diagonal, ring.scale)
                of_query, of_key, of_value = _cut(packed, inputs)
                d_query[..., rows, :] += of_query
                found.append((columns, of_key, of_value))
            if coming is not None:
                carried = coming.wait()
            d_key, d_value = ring.keys_and_values(carried, source)
            for columns, of_key, of_value in found:
                d_key[..., columns, :] += of_key
                d_value[..., columns, :] += of_value
            coming = transport.start_exchange(carried, (rank + 1) % ranks, (rank - 1) % ranks)
        home = coming.wait()[: ring.travelling(rank)]
    return xp.concatenate([d_query.reshape(-1), home]).astype(flat.dtype, copy=False)


def _cut(packed: Array, like: tuple[Array, ...]) -> list[Array]:
    parts, start = [], 0
    for x in like:
        parts.append(packed[start : start + x.size].reshape(x.shape))
        start += x.size
    return parts


RING_ATTENTION = define(
    Op(
        "ring_attention",
        _infer,
        _kernel,
        vjp=(_vjp,),
        crosses_ranks=True,
        aliases=False,
        attr_names=("comm", "ring"),
        shapes="query, key and value in one vector -> [..., heads, m, v + 1]",
    )
)
RING_ATTENTION_BACKWARD = define(
    Op(
        "ring_attention_backward",
        lambda flat, g, y, comm, ring: flat,
        _backward_kernel,
        crosses_ranks=True,
        aliases=False,
        attr_names=("comm", "ring"),
        shapes="[n], cotangent and result of ring_attention -> [n]",
    )
)

"""Attention over a sequence of which each rank holds a part: heads are exchanged for positions and back (Jacobs et al.,
2023, arXiv:2309.14509).

For the time of the attention each rank has the whole sequence for its share of the heads. With many ranks it sends less
than a ring, but it needs a head for each rank, which holds keys and values of the whole length.
"""

from __future__ import annotations

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.context_parallel.layout import check_sequence, whole_length
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.ops import creation, manipulation
from fuel_parallel.lazy.ops.attention import scaled_dot_product_attention
from fuel_parallel.lazy.tensor import Tensor


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    comm: Communicator,
    *,
    causal: bool = False,
    scale: float | None = None,
    length: int | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` of a sequence that is cut over ranks into contiguous parts.

    Arguments and result are those of `ring_attention`. Numbers of heads that do not divide are cut by `partition`.
    Where the key heads cannot be cut like the query heads, they are repeated for each query head before they travel.

    Raises `ArgumentError` when there are fewer query heads than ranks.

    >>> from fuel_parallel import SymbolicComm
    >>> q = creation.ones((1, 4, 3, 8))
    >>> ulysses_attention(q, q, q, SymbolicComm(1, 2)).shape
    (1, 4, 3, 8)
    """
    check_sequence("ulysses_attention", query, key, value)
    ranks, heads, kv_heads = comm.world_size, query.shape[-3], key.shape[-3]
    whole = whole_length("ulysses_attention", query.shape[-2], comm, length)
    if heads < ranks:
        raise ArgumentError(
            f"ulysses_attention: {ranks} ranks share {heads} heads, and one would have none; use ring_attention"
        )
    if kv_heads % ranks:
        key, value = (manipulation.repeat(t, heads // kv_heads, axis=-3) for t in (key, value))
    common = creation.result_type(query, key, value)
    query, key, value = (comm.all_to_all(creation.astype(t, common), -3, -2, size=whole) for t in (query, key, value))
    result = scaled_dot_product_attention(query, key, value, causal=causal, scale=scale)
    return comm.all_to_all(result, -2, -3, size=heads)

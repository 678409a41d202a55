"""The attention layer of a model whose sequences are cut over ranks."""

from __future__ import annotations

from fuel_parallel.attention import Attention, join_heads, split_heads
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.context_parallel.layout import sequence_positions, whole_length
from fuel_parallel.context_parallel.ring_attention import ring_attention
from fuel_parallel.errors import ShapeError
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module


class RingAttention(Module):
    """An `fp.Attention` on this rank's part of the sequence; its parameters are those of the dense layer.

    Args:
        dense: The layer, the same on all ranks.
        comm: The ranks that share each sequence.
        layout: Which positions a rank holds, 'contiguous' or 'zigzag'; rotary positions follow it.

    >>> from fuel_parallel import SymbolicComm
    >>> from fuel_parallel.lazy import ones, random
    >>> dense = Attention(8, 2, random.Generator(0), causal=True)
    >>> RingAttention(dense, SymbolicComm(0, 4), layout="zigzag")(ones((2, 6, 8))).shape     # 6 of 24 positions
    (2, 6, 8)
    """

    def __init__(self, dense: Attention, comm: Communicator, *, layout: str = "contiguous") -> None:
        self.dense = dense
        self.layout = layout
        self._comm = comm

    def __call__(self, x: Tensor, *, length: int | None = None) -> Tensor:
        """[..., my length, dim] to the same; `length` is that of the whole, None when all parts have one length."""
        dense = self.dense
        if x.ndim < 2:
            raise ShapeError(f"RingAttention: expected [..., my length, dim], got {x.shape}")
        whole = whole_length("RingAttention", x.shape[-2], self._comm, length)
        query, key, value = (split_heads(layer(x), dense.head_size) for layer in (dense.query, dense.key, dense.value))
        if dense.rotary is not None:
            positions = sequence_positions(whole, self._comm, self.layout)
            query, key = dense.rotary(query, positions), dense.rotary(key, positions)
        result = ring_attention(query, key, value, self._comm, causal=dense.causal, layout=self.layout, length=whole)
        return dense.out(join_heads(result))

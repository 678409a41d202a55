"""Context parallelism: each rank holds a part of every sequence, and attention sees the whole.

Weights are the same on all ranks, as in data parallelism: gradients of a mean loss over equal parts are averaged by
`data_parallel.average_gradients`.
"""

from fuel_parallel.context_parallel.attention import RingAttention
from fuel_parallel.context_parallel.layout import (
    join_sequence,
    sequence_chunks,
    sequence_part,
    sequence_positions,
)
from fuel_parallel.context_parallel.ring_attention import ring_attention
from fuel_parallel.context_parallel.ulysses import ulysses_attention

__all__ = [
    "RingAttention",
    "join_sequence",
    "ring_attention",
    "sequence_chunks",
    "sequence_part",
    "sequence_positions",
    "ulysses_attention",
]

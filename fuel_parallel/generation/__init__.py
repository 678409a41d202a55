"""Text from a model whose layers and heads are shared by ranks: continuous batching over a paged KV cache.

docs/generation.md tells how it fits together.
"""

from fuel_parallel.generation.requests import (
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParameters,
    Update,
)
from fuel_parallel.generation.sampling import Draw, choose, distribution, likeliest, sample
from fuel_parallel.generation.text import TextStream

__all__ = [
    "Completion",
    "Draw",
    "FinishReason",
    "GenerationRequest",
    "SamplingParameters",
    "TextStream",
    "Update",
    "choose",
    "distribution",
    "likeliest",
    "sample",
]

"""Text from a model whose layers and heads are shared by ranks: continuous batching over a paged KV cache.

docs/generation.md tells how it fits together.
"""

from fuel_parallel.generation.engine import Engine, PagedModel
from fuel_parallel.generation.replicas import Replicas
from fuel_parallel.generation.requests import (
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParameters,
    Update,
)
from fuel_parallel.generation.sampling import Draw, choose, distribution, likeliest, sample
from fuel_parallel.generation.scheduler import Row, Scheduler, SchedulerStatistics, StepPlan
from fuel_parallel.generation.statistics import GenerationStatistics
from fuel_parallel.generation.text import TextStream

__all__ = [
    "Completion",
    "Draw",
    "Engine",
    "FinishReason",
    "GenerationRequest",
    "GenerationStatistics",
    "PagedModel",
    "Replicas",
    "Row",
    "SamplingParameters",
    "Scheduler",
    "SchedulerStatistics",
    "StepPlan",
    "TextStream",
    "Update",
    "choose",
    "distribution",
    "likeliest",
    "sample",
]

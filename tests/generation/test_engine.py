"""What an engine writes is what the plain loop writes, whatever the pages, the batch and the pressure."""

from __future__ import annotations

import os

import numpy as np
import paged_llama
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel.lazy as ft
from fuel_parallel.distributed_cache import KVPool
from fuel_parallel.errors import ArgumentError, OutOfPagesError
from fuel_parallel.generation import Completion, Engine, GenerationRequest, SamplingParameters

COUNT = 200 if os.environ.get("FUEL_STRESS") else 20


def tokens_of(found: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[one.tokens for one in samples] for samples in found]


@pytest.mark.parametrize(
    "sampling", [SamplingParameters(), SamplingParameters(0.9, top_k=20, top_p=0.9, seed=5)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize(
    ("pages", "options"),
    [
        (256, {"max_rows": 16, "token_budget": 64}),
        (14, {"max_rows": 8, "token_budget": 16}),
        (14, {"max_rows": 8, "token_budget": 16, "reuse_prefixes": False}),
    ],
    ids=["room", "pressure", "no prefix cache"],
)
def test_texts_are_those_of_the_plain_loop(sampling: SamplingParameters, pages: int, options: dict[str, int]) -> None:
    requests = paged_llama.some_requests(COUNT, sampling=sampling)
    engine = paged_llama.engine(pages, **options)
    assert tokens_of(engine.generate(requests)) == paged_llama.plain_texts(requests)
    did = engine.statistics.scheduler
    assert did.forks > 0
    assert (did.preemptions > 0) == (pages == 14)
    assert did.peak_pages <= pages
    reuses = options.get("reuse_prefixes", True)
    assert (did.reused_tokens > 0) == reuses
    assert (engine.cache.replica.prefixes.statistics.evictions > 0) == (pages == 14 and reuses)

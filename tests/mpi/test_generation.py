"""What ranks write together, each with a part of the model, is what the plain loop writes on one."""

from __future__ import annotations

import functools
import os

import numpy as np
import paged_llama
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
from fuel_parallel.distributed_cache import RoutingPolicy
from fuel_parallel.errors import ArgumentError, CommunicatorError
from fuel_parallel.generation import Completion, Draw, GenerationRequest, Replicas, SamplingParameters, sample

COUNT = 200 if os.environ.get("FUEL_STRESS") else 6
DRAWN = SamplingParameters(0.9, top_k=20, top_p=0.9, seed=5)

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi

parameters = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    seed=st.integers(0, 9),
)
draws = st.builds(Draw, parameters, st.integers(0, 2), st.integers(0, 99))


@settings(max_examples=20)
@given(st.integers(1, 11), st.lists(st.lists(draws, max_size=3), max_size=5), st.data())
def test_choices_from_parts_are_those_from_the_whole(
    vocabulary: int, rows: list[list[Draw]], data: st.DataObject
) -> None:
    values = st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0])
    row = st.lists(values, min_size=vocabulary, max_size=vocabulary).filter(lambda row: max(row) > -np.inf)
    logits = np.array([data.draw(row) for _ in rows]).reshape(len(rows), vocabulary)
    mine = fp.partition(vocabulary, N)[RANK]
    found = sample(logits[:, mine.start : mine.stop], rows, vocabulary, world)
    assert found == sample(logits, rows, vocabulary, fp.IdentityComm())


def test_a_rank_whose_logits_are_no_numbers_is_an_error_on_all() -> None:
    mine = fp.partition(8, N)[RANK]
    logits = np.zeros((2, len(mine)))
    if RANK == N - 1:
        logits[1, 0] = np.nan
    greedy = [Draw(SamplingParameters(), 0, 0)]
    with pytest.raises(ArgumentError, match="row 1 of the logits"):
        sample(logits, [greedy, greedy], 8, world)


Texts = list[list[tuple[int, ...]]]


@functools.cache
def requests() -> tuple[GenerationRequest, ...]:
    """Some that take the likeliest token, and some that draw."""
    half = COUNT // 2
    return (*paged_llama.some_requests(half), *paged_llama.some_requests(COUNT - half, sampling=DRAWN))


@functools.cache
def plain() -> Texts:
    """Their texts by the plain loop, which needs no other rank."""
    return paged_llama.plain_texts(requests())


def tokens_of(found: list[list[Completion]]) -> Texts:
    return [[one.tokens for one in samples] for samples in found]


@pytest.mark.parametrize("axes", [{"tp": N}, {"pp": N}, {"pp": 2, "tp": 2}], ids=str)
def test_texts_are_those_of_the_plain_loop(axes: dict[str, int]) -> None:
    """With pages shared by prompts and samples, and too few of them."""
    if np.prod(list(axes.values())) != N or axes == {"pp": 4}:
        pytest.skip(f"{axes} needs another number of ranks, or is left out for time")
    mesh = fp.Mesh(world, **{"pp": 1, "tp": 1, **axes})
    engine = paged_llama.engine(14, comm=mesh["pp", "tp"], pp=mesh["pp"], tp=mesh["tp"], max_rows=8, token_budget=24)
    found = tokens_of(engine.generate(requests() if RANK == 0 else ()))
    assert found == (plain() if RANK == 0 else [])
    did = engine.statistics.scheduler
    if RANK == 0:
        assert min(did.preemptions, did.forks, did.reused_tokens) > 0
    digests = world.all_gather_object(engine.cache.replica.digest.hex(), type=str)
    assert len(set(digests)) == 1


def test_a_rank_that_has_lost_its_pages_costs_time_and_no_token() -> None:
    some = requests()[-2:]
    engine = paged_llama.engine(comm=world, tp=world, max_rows=8, token_budget=24)
    numbers = [engine.submit(one) for one in some] if RANK == 0 else []
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for step in range(1000):
        if {4: N - 1, 8: 0}.get(step) == RANK:
            engine.pool.reset()
            engine.cache.rejoin()
        for update in engine.step():
            if update.completion is not None:
                found[update.request, update.sample] = update.completion.tokens
        if engine.idle:
            break
    if RANK == 0:
        texts = [
            [found[number, index] for index in range(one.samples)] for number, one in zip(numbers, some, strict=True)
        ]
        assert texts == plain()[-2:]


@pytest.mark.skipif(N % 2 == 1, reason="needs an even number of ranks")
def test_replicas_share_the_requests() -> None:
    mesh = fp.Mesh(world, dp=2, tp=-1)
    engine = paged_llama.engine(comm=mesh["tp"], tp=mesh["tp"], max_rows=8, token_budget=24)
    replicas = Replicas(engine, mesh["dp"], policy=RoutingPolicy.LONGEST_PREFIX, round_steps=3)
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for first in range(0, COUNT, COUNT // 3):  # in waves, so that the later find prefixes
        if RANK == 0:
            for one in requests()[first : first + COUNT // 3]:
                replicas.submit(one)
        replicas.idle = False
        while not replicas.idle:
            for update in replicas.step():
                if update.completion is not None:
                    found[update.request, update.sample] = update.completion.tokens
    statistics = replicas.statistics()
    assert min(one.generated_tokens for one in statistics) > 0
    if RANK == 0:
        assert found == {
            (number, index): text for number, texts in enumerate(plain()) for index, text in enumerate(texts)
        }
    else:
        assert found == {}
        with pytest.raises(CommunicatorError, match="requests are given on rank 0 of replica 0"):
            replicas.submit(requests()[0])

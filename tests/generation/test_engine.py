"""What an engine writes is what the plain loop writes, whatever the pages, the batch and the pressure."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import numpy as np
import paged_llama
import pytest

from fuel_parallel.distributed_cache import KVPool
from fuel_parallel.errors import ArgumentError, OutOfPagesError
from fuel_parallel.generation import Completion, Engine, GenerationRequest, SamplingParameters

COUNT = 200 if os.environ.get("FUEL_STRESS") else 20


def tokens_of(found: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
    return [[one.tokens for one in samples] for samples in found]


DRAWN = SamplingParameters(0.9, top_k=20, top_p=0.9, seed=5)


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Some that take the likeliest token, and some that draw."""
    half = COUNT // 2
    return [*paged_llama.some_requests(half), *paged_llama.some_requests(COUNT - half, sampling=DRAWN)]


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> list[list[tuple[int, ...]]]:
    """Their texts by the plain loop."""
    return paged_llama.plain_texts(requests)


@pytest.mark.parametrize(
    ("pages", "options"),
    [
        (2000, {"max_rows": 16, "token_budget": 64}),
        (14, {"max_rows": 8, "token_budget": 16}),
        (14, {"max_rows": 8, "token_budget": 16, "reuse_prefixes": False}),
    ],
    ids=["room", "pressure", "no prefix cache"],
)
def test_texts_are_those_of_the_plain_loop(
    pages: int, options: dict[str, int], requests: list[GenerationRequest], plain: list[list[tuple[int, ...]]]
) -> None:
    engine = paged_llama.engine(pages, **options)
    assert tokens_of(engine.generate(requests)) == plain
    did = engine.statistics.scheduler
    assert did.forks > 0
    assert (did.preemptions > 0) == (pages == 14)
    assert did.peak_pages <= pages
    reuses = options.get("reuse_prefixes", True)
    assert (did.reused_tokens > 0) == reuses
    assert (engine.cache.replica.prefixes.statistics.evictions > 0) == (pages == 14 and reuses)


def test_a_text_does_not_depend_on_what_else_is_computed(
    requests: list[GenerationRequest], plain: list[list[tuple[int, ...]]]
) -> None:
    """Requests that come one by one, while others are written, into an engine that has seen them before."""
    engine = paged_llama.engine(64, max_rows=4, token_budget=8)
    found: dict[int, dict[int, Completion]] = {number: {} for number in range(12)}
    coming = list(requests[-6:]) * 2
    while coming or not engine.idle:
        if coming:
            engine.submit(coming.pop(0))
        for update in engine.step():
            if update.completion is not None:
                found[update.request][update.sample] = update.completion
    texts = [[one.tokens for _, one in sorted(samples.items())] for samples in found.values()]
    assert texts == [*plain[-6:], *plain[-6:]]


def test_a_shared_prefix_is_not_computed_again() -> None:
    """Nine in ten tokens of later prompts are shared, and just the others are computed: in tokens, and so in FLOP."""
    draw = np.random.default_rng(1)
    shared = draw.integers(0, 53, 72).tolist()
    requests = [GenerationRequest(prompt=(*shared, *draw.integers(0, 53, 8).tolist()), max_tokens=2) for _ in range(4)]
    computed = {}
    for reuse in (False, True):
        engine = paged_llama.engine(reuse_prefixes=reuse)
        for request in requests:
            engine.generate([request])
        computed[reuse] = engine.statistics.scheduler.prefill_tokens
    assert computed == {False: 4 * 80, True: 80 + 3 * 8}


def test_text_is_what_the_tokens_say_and_ends_at_a_stop_string() -> None:
    def decode(tokens: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)

    request = GenerationRequest(prompt=(1, 2, 3), max_tokens=20, sampling=SamplingParameters(1.0, seed=2))
    ((whole,),) = paged_llama.engine(decode=decode).generate([request])
    assert (whole.text, whole.finish_reason) == (decode(whole.tokens), "length")
    stop = whole.text[8:11]
    engine = paged_llama.engine(decode=decode)
    engine.submit(msgspec.structs.replace(request, stop_strings=(stop, "not there")))
    said, completion = "", None
    while not engine.idle:
        for update in engine.step():
            said += update.text
            completion = update.completion
    assert completion is not None
    assert said == completion.text == whole.text[: whole.text.index(stop)]
    assert (completion.finish_reason, len(completion.tokens)) == ("stop", whole.text.index(stop) + 3)
    stopped = msgspec.structs.replace(request, stop_tokens=frozenset([whole.tokens[4]]))
    ((ended,),) = paged_llama.engine(decode=decode).generate([stopped])
    first = whole.tokens.index(whole.tokens[4])
    assert (ended.tokens, ended.text) == (whole.tokens[: first + 1], whole.text[:first])
    assert ended.finish_reason == "stop"


def test_the_cache_takes_its_pages_and_no_byte_more() -> None:
    model = paged_llama.stage()
    budget = 40_000
    pool = KVPool.for_model(model, budget_bytes=budget, page_size=4, dtype="float64")
    held = sum(one.nbytes for one in pool.__tensors__())
    assert held == pool.num_pages * pool.bytes_per_page <= budget < held + pool.bytes_per_page
    engine = Engine(model, pool, vocabulary=53, max_rows=8, token_budget=16)
    engine.generate(paged_llama.some_requests(10))
    assert sum(one.nbytes for one in pool.__tensors__()) == held
    assert 0 < engine.statistics.scheduler.peak_pages <= pool.num_pages


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"prompt": (1, 53)}, ArgumentError, "the model knows tokens 0 to 52, not 53"),
        (
            {"max_tokens": 510},
            ArgumentError,
            "3 tokens and 510 more are 513; the model was made for 512; ask for fewer",
        ),
        ({"max_tokens": 40}, OutOfPagesError, "takes 11 pages, but the cache has 10 of 4 tokens"),
        ({"stop_strings": ("a",)}, ArgumentError, "stop strings need an engine with decode="),
    ],
)
def test_requests_that_the_engine_refuses(wrong: dict[str, object], kind: type[Exception], message: str) -> None:
    engine = paged_llama.engine(10)
    request = GenerationRequest(**{"prompt": (1, 2, 3), "max_tokens": 4, **wrong})  # type: ignore[arg-type]
    with pytest.raises(kind, match=message):
        engine.submit(request)
    assert engine.generate() == []

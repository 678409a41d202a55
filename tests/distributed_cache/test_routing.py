"""Digests have the false positives that they promise; policies choose as stated, within their bound."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.distributed_cache import (
    CacheConfig,
    PageHashes,
    PrefixDigest,
    Router,
    RoutingPolicy,
    TraceConfig,
    chat_trace,
    simulate,
)
from fuel_parallel.distributed_cache.hashing import prefix_id, token_array
from fuel_parallel.errors import ArgumentError, OutOfPagesError

HASHES = PageHashes(2, b"secret")
CACHE = CacheConfig(num_pages=400, page_tokens=16)


def names(first: int, count: int) -> list[bytes]:
    return [hashlib.blake2b(str(n).encode(), digest_size=16).digest() for n in range(first, first + count)]


@given(st.integers(0, 50), st.integers(0, 50), st.sampled_from([32, 64]))
def test_a_digest_knows_the_pages_from_the_first(count: int, known: int, bits: int) -> None:
    asked = names(0, count)
    digest = PrefixDigest.of([*asked[:known], *names(1000, 30)], bits)
    assert digest.prefix_pages(asked) == min(count, known)
    assert len(digest.data) == (min(count, known) + 30) * bits // 8


def test_false_positives_are_as_rare_as_stated() -> None:
    digest = PrefixDigest.of(names(0, 2000), bits=16)
    wrong = sum(name in digest for name in names(10_000, 20_000)) / 20_000
    assert digest.false_positive_rate() == pytest.approx(2000 / 2**16)
    assert wrong == pytest.approx(digest.false_positive_rate(), rel=0.15)
    assert all(name in digest for name in names(0, 2000))


def route(policy: RoutingPolicy, loads: list[float], have: list[int], imbalance: float | None = None) -> int:
    """The choice for a prompt of 20 tokens of which replica r has `have[r]` pages."""
    router = Router(len(loads), HASHES, policy, imbalance)
    prompt = list(range(20))
    pages = list(HASHES.chain("", token_array(prompt)))
    for replica, (load, count) in enumerate(zip(loads, have, strict=True)):
        router.update(replica, PrefixDigest.of(pages[:count]))
        router.add_load(replica, load)
    chosen, cached = router.route(prompt)
    assert cached == have[chosen] * 2
    assert router.loads[chosen] == loads[chosen] + 20 - cached
    return chosen


def test_each_policy_looks_at_what_it_says() -> None:
    assert route(RoutingPolicy.LONGEST_PREFIX, [90, 0, 5], [8, 2, 8]) == 2
    assert route(RoutingPolicy.LONGEST_PREFIX, [90, 0, 95], [9, 2, 8]) == 0
    assert route(RoutingPolicy.LEAST_LOADED, [3, 2, 9], [9, 0, 9]) == 1
    assert route(RoutingPolicy.BALANCED, [10, 0, 5], [9, 0, 9]) == 2
    assert route(RoutingPolicy.BALANCED, [30, 0, 30], [9, 0, 9]) == 1


def test_equal_replicas_take_turns() -> None:
    router = Router(3, HASHES, RoutingPolicy.LEAST_LOADED)
    chosen = []
    for _ in range(6):
        chosen.append(router.route([1, 2, 3])[0])
        router.add_load(chosen[-1], -3)
    assert chosen == [0, 1, 2, 0, 1, 2]


@given(
    st.sampled_from(RoutingPolicy),
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 10)), min_size=1, max_size=5),
    st.floats(0, 2),
)
def test_no_request_goes_to_who_is_above_the_bound(
    policy: RoutingPolicy, state: list[tuple[int, int]], imbalance: float
) -> None:
    loads = [float(load) for load, _ in state]
    chosen = route(policy, loads, [pages for _, pages in state], imbalance)
    assert loads[chosen] <= max((1 + imbalance) * sum(loads) / len(loads) * (1 + 1e-12), min(loads))


def test_a_hint_names_who_has_the_longest_prefix() -> None:
    router = Router(3, HASHES)
    prompt = list(range(9))
    pages = list(HASHES.chain("me", token_array(prompt)))
    assert not router.hint(prompt, "me").has_targets()
    for replica, count in enumerate([1, 3, 3]):
        router.update(replica, PrefixDigest.of(pages[:count]))
    hint = router.hint(prompt, "me")
    assert (hint.prefix_id, hint.relevant_ranks, hint.reusable_tokens) == (prefix_id(pages[2]), (1, 2), 6)
    assert not router.hint(prompt, "you").has_targets()


def test_a_router_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="imbalance >= 0 or None, got 2 and -1"):
        Router(2, HASHES, imbalance=-1)
    with pytest.raises(ArgumentError, match="no replica 2; replicas are 0 to 1"):
        Router(2, HASHES).update(2, PrefixDigest.of([]))
    with pytest.raises(ArgumentError, match="bits is 16, 32 or 64, not 8"):
        PrefixDigest.of([], bits=8)
    with pytest.raises(ArgumentError, match="must be above 0"):
        chat_trace(TraceConfig(chats=0))
    with pytest.raises(OutOfPagesError, match="a cache has 1; give num_pages="):
        simulate(chat_trace(TraceConfig(chats=1)), 1, CacheConfig(1, 16), RoutingPolicy.BALANCED)


@settings(max_examples=5)
@given(st.integers(0, 100))
def test_a_turn_of_a_chat_begins_with_the_one_before(seed: int) -> None:
    trace = chat_trace(TraceConfig(chats=5, system_prompts=2, system_tokens=10, turn_tokens=5, seed=seed))
    assert [request.time for request in trace] == sorted(request.time for request in trace)
    assert len({request.tokens[:10] for request in trace}) <= 2
    chats: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for request in trace:
        chats.setdefault(request.tokens[:12], []).append(request.tokens)
    for turns in chats.values():
        for before, after in itertools.pairwise(turns):
            assert after[: len(before)] == before


def test_prefixes_and_loads_both_matter() -> None:
    trace = chat_trace(TraceConfig(chats=60, system_tokens=256, system_prompts=3, requests_per_second=40))
    found = {policy: simulate(trace, 3, CACHE, policy, imbalance=None) for policy in RoutingPolicy}
    longest, least = found[RoutingPolicy.LONGEST_PREFIX], found[RoutingPolicy.LEAST_LOADED]
    assert longest.hit_rate > least.hit_rate
    assert longest.imbalance > least.imbalance
    assert found[RoutingPolicy.BALANCED].mean_wait < min(longest.mean_wait, least.mean_wait) * 1.1
    assert np.isfinite(list(vars(longest).values())).all()

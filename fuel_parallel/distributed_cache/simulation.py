"""How well a routing policy does, before there is a cluster: requests as they come, replicas with real prefix caches.

The clock is simulated, the caches are not: each replica has a `CacheReplica`, so evictions and hits are those of a run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import numpy as np

from fuel_parallel.distributed_cache.hashing import PageHashes, token_array
from fuel_parallel.distributed_cache.replica import Admit, CacheConfig, CacheReplica, Confirm, End
from fuel_parallel.distributed_cache.routing import PrefixDigest, Router, RoutingPolicy
from fuel_parallel.errors import ArgumentError, OutOfPagesError


class Request(msgspec.Struct, frozen=True):
    """A prompt, when it comes (in seconds), and how many tokens are generated for it."""

    time: float
    tokens: tuple[int, ...]
    output_tokens: int


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Chats that begin with one of a few system prompts and go on for some turns, each with all that was said before.

    Args:
        chats: How many chats.
        system_prompts: How many system prompts; the k-th is chosen 1 / k as often as the first (Zipf's law).
        system_tokens: Tokens of each.
        turns: The mean number of turns, at least one.
        turn_tokens: The mean number of tokens that a user says, and that is answered.
        requests_per_second: How often a chat begins or goes on, on average.
        seed: Of the random numbers.
    """

    chats: int = 200
    system_prompts: int = 8
    system_tokens: int = 512
    turns: float = 4.0
    turn_tokens: int = 64
    requests_per_second: float = 20.0
    seed: int = 0


def chat_trace(config: TraceConfig) -> list[Request]:
    """The requests of chats, by time.

    >>> trace = chat_trace(TraceConfig(chats=2, turns=3, seed=1))
    >>> trace == chat_trace(TraceConfig(chats=2, turns=3, seed=1)), trace[0].time <= trace[-1].time
    (True, True)
    """
    if min(config.chats, config.system_prompts, config.turn_tokens) < 1 or config.requests_per_second <= 0:
        raise ArgumentError(f"chat_trace: chats, prompts, tokens and requests must be above 0; got {config}")
    draw = random.Random(config.seed)

    def words(count: int) -> list[int]:
        return [draw.randrange(50_000) for _ in range(count)]

    prompts = [words(config.system_tokens) for _ in range(config.system_prompts)]
    weights = [1 / (k + 1) for k in range(config.system_prompts)]
    requests = []
    seconds = config.chats * config.turns / config.requests_per_second
    for _ in range(config.chats):
        now = draw.uniform(0, seconds)
        text = list(draw.choices(prompts, weights)[0])
        while True:
            text += words(1 + int(draw.expovariate(1 / config.turn_tokens)))
            answer = 1 + int(draw.expovariate(1 / config.turn_tokens))
            requests.append(Request(now, tuple(text), answer))
            if draw.random() >= 1 - 1 / config.turns:
                break
            text += words(answer)
            now += draw.expovariate(0.2)
    return sorted(requests, key=lambda request: request.time)


@dataclass(frozen=True)
class SimulationResult:
    """What came of a trace.

    Args:
        hit_rate: The share of the prompts' tokens that were cached.
        imbalance: The work of the busiest replica over the mean, less 1.
        mean_wait: Seconds between a request and its first token, on average.
        worst_wait: The same that 99 of 100 requests do not exceed.
    """

    hit_rate: float
    imbalance: float
    mean_wait: float
    worst_wait: float


def simulate(
    trace: list[Request],
    replicas: int,
    cache: CacheConfig,
    policy: RoutingPolicy,
    *,
    imbalance: float | None = 0.5,
    tokens_per_second: float = 8000.0,
    digest_seconds: float = 1.0,
    bits: int = 32,
) -> SimulationResult:
    """Serves a trace on replicas that compute `tokens_per_second` each, one request after the other.

    Every `digest_seconds` the router hears what replicas have. Raises `OutOfPagesError` if one prompt with its answer
    does not fit into a cache.
    """
    router = Router(replicas, PageHashes(cache.page_tokens, cache.secret), policy, imbalance)
    caches = [CacheReplica(cache) for _ in range(replicas)]
    free_at = np.zeros(replicas)
    work = np.zeros(replicas)
    waits: list[float] = []
    heard_at = -digest_seconds
    for number, request in enumerate(trace):
        if request.time - heard_at >= digest_seconds:
            heard_at = request.time
            for replica, one in enumerate(caches):
                router.update(replica, PrefixDigest.of(one.prefixes, bits))
        router.loads[:] = np.maximum(0.0, free_at - request.time) * tokens_per_second
        chosen, _ = router.route(request.tokens)
        reused = _serve(caches[chosen], number, request)
        prefill = len(request.tokens) - reused
        begin = max(request.time, free_at[chosen])
        waits.append(begin + prefill / tokens_per_second - request.time)
        work[chosen] += prefill + request.output_tokens
        free_at[chosen] = begin + (prefill + request.output_tokens) / tokens_per_second
    asked = sum(one.prefixes.statistics.tokens_asked for one in caches)
    saved = sum(one.prefixes.statistics.tokens_saved for one in caches)
    spread = float(work.max() / work.mean() - 1) if trace else 0.0
    mean, worst = (float(np.mean(waits)), float(np.quantile(waits, 0.99))) if waits else (0.0, 0.0)
    return SimulationResult(saved / asked if asked else 0.0, spread, mean, worst)


def _serve(one: CacheReplica, number: int, request: Request) -> int:
    tokens = token_array(request.tokens).astype("<i4").tobytes()
    needed = -(-(len(request.tokens) + request.output_tokens) // one.config.page_tokens)
    if needed > one.config.num_pages:
        raise OutOfPagesError(
            f"simulate: a request of {len(request.tokens)} tokens and {request.output_tokens} of answer needs {needed} "
            f"pages, a cache has {one.config.num_pages}; give num_pages={needed} or more"
        )
    reused = one.apply(Admit(number, tokens)).reused_tokens
    one.apply(Confirm(number, len(request.tokens)))
    one.apply(End(number))
    return reused

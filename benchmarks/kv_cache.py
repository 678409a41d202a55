"""The bookkeeping of a KV cache: what a look-up costs by the size of the pool, and what routing policies are worth.

    python benchmarks/kv_cache.py            # or --json

Look-up and allocation are for a prompt of 1,000 pages of 16 tokens, in a pool that is full of other prefixes: what is
not cached is made room for by eviction. Routing is simulated: four replicas, chats with shared system prompts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np

from fuel_parallel.distributed_cache import (
    Admit,
    CacheConfig,
    CacheReplica,
    Confirm,
    End,
    RoutingPolicy,
    TraceConfig,
    chat_trace,
    simulate,
)

PAGES, PAGE_TOKENS = 1000, 16


def milliseconds(run: Callable[[int], Any], rounds: int) -> float:
    """The median time of a run."""
    times = []
    for number in range(rounds):
        began = time.perf_counter_ns()
        run(number)
        times.append((time.perf_counter_ns() - began) / 1e6)
    return statistics.median(times)


def filled(num_pages: int, draw: np.random.Generator) -> tuple[CacheReplica, bytes]:
    """A replica whose pages are all cached, and the newest prompt in it."""
    replica = CacheReplica(CacheConfig(num_pages, PAGE_TOKENS, b"secret"))
    prompt = b""
    for number in range(num_pages // PAGES):
        prompt = draw.integers(0, 50_000, PAGES * PAGE_TOKENS, dtype=np.int32).tobytes()
        replica.apply(Admit(number, prompt))
        replica.apply(Confirm(number, PAGES * PAGE_TOKENS))
        replica.apply(End(number))
    return replica, prompt


def look_ups(num_pages: int, rounds: int) -> dict[str, float]:
    """Times of one pool."""
    draw = np.random.default_rng(0)
    replica, prompt = filled(num_pages, draw)
    tokens = np.frombuffer(prompt, np.int32)
    others = [draw.integers(0, 50_000, PAGES * PAGE_TOKENS, dtype=np.int32).tobytes() for _ in range(rounds)]

    def free_pages(_: int) -> None:
        replica.pool.release(replica.pool.allocate(PAGES))

    def admit(prompts: list[bytes], first: int) -> Callable[[int], None]:
        def run(number: int) -> None:
            replica.apply(Admit(first + number, prompts[number % len(prompts)]))

        return run

    found = {"look_up_ms": milliseconds(lambda _: replica.prefixes.match("", tokens), rounds)}
    found["admit_cached_ms"] = milliseconds(admit([prompt], 10_000_000), rounds)
    for number in range(rounds):
        replica.apply(End(10_000_000 + number))
    room = min(rounds, num_pages // PAGES - 1)
    found["admit_new_ms"] = milliseconds(admit(others, 20_000_000), room)
    for number in range(room):
        replica.apply(End(20_000_000 + number))
    found["allocate_ms"] = milliseconds(free_pages, rounds)
    return found


def routing(replicas: int, chats: int) -> list[dict[str, Any]]:
    """Each policy on one trace."""
    trace = chat_trace(TraceConfig(chats=chats, system_prompts=16, system_tokens=1024, requests_per_second=90))
    cache = CacheConfig(num_pages=2000, page_tokens=PAGE_TOKENS)
    table = []
    for policy in RoutingPolicy:
        for bound in (None, 0.5):
            one = simulate(trace, replicas, cache, policy, imbalance=bound)
            table.append({"policy": policy.value, "bound": bound, **vars(one)})
    return table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--pages", default=[10_000, 100_000, 1_000_000], multiple=True, help="Sizes of pools.")
@click.option("--rounds", default=30, help="Look-ups timed.")
@click.option("--chats", default=600, help="Chats of the routing trace.")
@click.option("--replicas", default=4, help="Replicas that are routed to.")
def main(as_json: bool, pages: tuple[int, ...], rounds: int, chats: int, replicas: int) -> None:
    """Measures look-ups, then simulates routing."""
    timings = {size: look_ups(size, rounds) for size in pages}
    policies = routing(replicas, chats)
    if as_json:
        print(json.dumps({"look_ups": timings, "routing": policies}))
        return
    print(
        f"| pages in the pool | look up {PAGES} pages | and begin with them | begin with {PAGES} new ones | allocate |"
    )
    print("|---|---|---|---|---|")
    for size, found in timings.items():
        names = ("look_up_ms", "admit_cached_ms", "admit_new_ms", "allocate_ms")
        print(f"| {size:,} | " + " | ".join(f"{found[name]:.2f} ms" for name in names) + " |")
    print("\n| policy | bound | tokens cached | busiest over mean | mean wait | 99 % wait |\n|---|---|---|---|---|---|")
    for one in policies:
        bound = "none" if one["bound"] is None else f"{one['bound']:.0%}"
        print(
            f"| {one['policy']} | {bound} | {one['hit_rate']:.1%} | +{one['imbalance']:.1%} | "
            f"{one['mean_wait'] * 1000:.0f} ms | {one['worst_wait'] * 1000:.0f} ms |"
        )


if __name__ == "__main__":
    main()

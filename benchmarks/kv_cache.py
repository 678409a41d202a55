"""A KV cache: what a look-up costs by the size of the pool, what attention to pages does, what routing is worth.

    python benchmarks/kv_cache.py            # or --json

Look-up and allocation are for a prompt of 1,000 pages of 16 tokens, in a pool that is full of other prefixes: what is
not cached is made room for by eviction. Attention is that of one layer while 16 sequences of 1,000 tokens decode, with
32 query heads, 8 key heads and pages in no order. Routing is simulated: four replicas, chats with shared prompts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np

import fuel_parallel.lazy as ft
from fuel_parallel.distributed_cache import (
    Admit,
    CacheConfig,
    CacheReplica,
    Chunk,
    Confirm,
    End,
    KVPool,
    PagedBatch,
    PagePool,
    RoutingPolicy,
    SequenceTable,
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


def attention(sequences: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """By dtype, the time of a decoding step's attention, and how fast it goes through keys and values."""
    heads, kv_heads, size = 32, 8, 128
    table = SequenceTable(PagePool(sequences * (-(-(tokens + rounds) // PAGE_TOKENS))), PAGE_TOKENS)
    for sequence in range(sequences):
        table.begin(sequence)
    for _ in range(tokens):
        for sequence in range(sequences):  # by turns, so that no sequence's pages follow each other
            table.extend(sequence, 1)
    batch = PagedBatch.of(table, [Chunk(sequence, tokens - 1, 1) for sequence in range(sequences)])
    draw = np.random.default_rng(0)
    query, new = (ft.asarray(draw.normal(size=(sequences, n, size)).astype("float32")) for n in (heads, kv_heads))
    found = {}
    for dtype in ("float32", "bfloat16", "float16", "int8"):
        pool = KVPool(num_layers=1, num_kv_heads=kv_heads, head_dim=size, num_pages=table.pool.num_pages, dtype=dtype)
        everything = ft.asarray(draw.normal(size=(pool.num_pages * PAGE_TOKENS, kv_heads, size)).astype("float32"))
        pool.write(0, ft.arange(pool.num_pages * PAGE_TOKENS), everything, everything)

        def step(_: int, pool: KVPool = pool) -> None:
            pool.attend(0, query, new, new, batch).realize()

        step(0)
        time_ms = milliseconds(step, rounds)
        read = sequences * tokens * pool.bytes_per_page / PAGE_TOKENS
        found[dtype] = {"step_ms": time_ms, "gigabytes_per_second": read / time_ms / 1e6}
    return found


def memory_bandwidth(rounds: int) -> float:
    """Gigabytes per second at which numpy reads a large array, on one core."""
    memory = np.ones(1 << 25, np.float32)
    return memory.nbytes / milliseconds(lambda _: memory.sum(), rounds) / 1e6


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
@click.option("--rounds", default=30, help="Look-ups and steps timed.")
@click.option("--tokens", default=1000, help="Tokens of each sequence that is attended to.")
@click.option("--chats", default=600, help="Chats of the routing trace.")
@click.option("--replicas", default=4, help="Replicas that are routed to.")
def main(as_json: bool, pages: tuple[int, ...], rounds: int, tokens: int, chats: int, replicas: int) -> None:
    """Measures look-ups and attention, then simulates routing."""
    timings = {size: look_ups(size, rounds) for size in pages}
    steps, bandwidth = attention(16, tokens, rounds), memory_bandwidth(rounds)
    policies = routing(replicas, chats)
    if as_json:
        print(json.dumps({"look_ups": timings, "attention": steps, "memory": bandwidth, "routing": policies}))
        return
    print(
        f"| pages in the pool | look up {PAGES} pages | and begin with them | begin with {PAGES} new ones | allocate |"
    )
    print("|---|---|---|---|---|")
    for size, found in timings.items():
        names = ("look_up_ms", "admit_cached_ms", "admit_new_ms", "allocate_ms")
        print(f"| {size:,} | " + " | ".join(f"{found[name]:.2f} ms" for name in names) + " |")
    print(f"\n| pages of | a step's attention | reads, where numpy sums {bandwidth:.1f} GB/s |\n|---|---|---|")
    for dtype, one in steps.items():
        print(f"| {dtype} | {one['step_ms']:.1f} ms | {one['gigabytes_per_second']:.1f} GB/s |")
    print("\n| policy | bound | tokens cached | busiest over mean | mean wait | 99 % wait |\n|---|---|---|---|---|---|")
    for one in policies:
        bound = "none" if one["bound"] is None else f"{one['bound']:.0%}"
        print(
            f"| {one['policy']} | {bound} | {one['hit_rate']:.1%} | +{one['imbalance']:.1%} | "
            f"{one['mean_wait'] * 1000:.0f} ms | {one['worst_wait'] * 1000:.0f} ms |"
        )


if __name__ == "__main__":
    main()

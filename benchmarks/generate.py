"""Generation: time to the first token with and without cached prefixes, and tokens a second by how many write at once.

    python benchmarks/generate.py            # or --json; under fuelrun -n N, all ranks share each layer

A Llama of random weights. The prompts have a prefix of 512 tokens in common and 16 of their own; each is asked for when
the one before is answered, so the times are those of an idle engine. Each figure is the median of the prompts after the
first, whose shapes have plans by then.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

import fuel_parallel as fp
from fuel_parallel.distributed_cache import KVPool
from fuel_parallel.generation import Engine, GenerationRequest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

PREFIX, OWN = 512, 16


def first_tokens(make: Any, prompts: int, vocabulary: int, reuse: bool) -> dict[str, float]:
    """Milliseconds from a request to its first token, and tokens of prompts that were computed."""
    draw = np.random.default_rng(0)
    shared = draw.integers(0, vocabulary, PREFIX).tolist()
    engine: Engine = make(reuse)
    for _ in range(prompts + 2):
        prompt = (*shared, *draw.integers(0, vocabulary, OWN).tolist())
        engine.generate([GenerationRequest(prompt=prompt, max_tokens=2)] if engine.comm.is_root else [])
    did, times = engine.statistics.scheduler, engine.statistics.first_token_seconds
    milliseconds = 1e3 * statistics.median(times[2:]) if times else 0.0  # the first two made the plans
    return {"first_token_ms": milliseconds, "prefill_tokens": did.prefill_tokens, "prompt_tokens": did.prompt_tokens}


def decoding(make: Any, sequences: int, tokens: int, vocabulary: int) -> float:
    """Tokens a second where so many sequences write, after their prompts and the first tokens."""
    draw = np.random.default_rng(1)
    engine: Engine = make(True)
    if engine.comm.is_root:
        for _ in range(sequences):
            prompt = tuple(draw.integers(0, vocabulary, OWN).tolist())
            engine.submit(GenerationRequest(prompt=prompt, max_tokens=tokens + OWN))
    times = []
    while not engine.idle:
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return sequences / statistics.median(times[OWN:])


@click.command(context_settings={"show_default": True})
@click.option("--dim", type=click.IntRange(min=8), default=256, help="Features of the model.")
@click.option("--layers", type=click.IntRange(min=1), default=4)
@click.option("--prompts", type=click.IntRange(min=1), default=5)
@click.option("--tokens", type=click.IntRange(min=2), default=24, help="Tokens that each sequence writes.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def main(dim: int, layers: int, prompts: int, tokens: int, as_json: bool) -> None:
    """Measures and reports."""
    from generate import load
    from models import llama

    world = fp.init()
    config = llama.Config(1024, dim, 4 * dim, layers, 8, 1024, num_key_value_heads=4)
    model = load(config, None, fp.IdentityComm(), world, "float32")

    def make(reuse: bool) -> Engine:
        pool = KVPool.for_model(model, num_pages=256, page_size=16)
        return Engine(model, pool, vocabulary=config.vocab_size, comm=world, reuse_prefixes=reuse, token_budget=640)

    cold, warm = (first_tokens(make, prompts, config.vocab_size, reuse) for reuse in (False, True))
    found = {
        "ranks": world.world_size,
        "cold": cold,
        "warm": warm,
        "speedup": cold["first_token_ms"] / warm["first_token_ms"] if world.is_root else 0.0,
        "tokens_per_s": {n: decoding(make, n, tokens, config.vocab_size) for n in (1, 4, 16)},
    }
    if not world.is_root:
        return
    if as_json:
        print(json.dumps(found))
        return
    print(f"dim {dim}, {layers} layers, {world.world_size} rank(s); prompts of {PREFIX} shared and {OWN} own tokens\n")
    print("prefix cache   first token   tokens of prompts computed")
    for name, one in (("off", cold), ("on", warm)):
        share = f"{one['prefill_tokens']:,.0f} of {one['prompt_tokens']:,.0f}"
        print(f"{name:12} {one['first_token_ms']:10.1f} ms   {share:>26}")
    print(f"\nthe first token comes {found['speedup']:.1f} times as soon\n")
    print("sequences   tokens/s")
    for n, rate in found["tokens_per_s"].items():
        print(f"{n:9} {rate:10.1f}")


if __name__ == "__main__":
    main()

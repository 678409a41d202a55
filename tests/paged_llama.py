"""A small Llama of random weights, and the plain loop to compare generated text with: no cache, no pages, no ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from generate import load
from models import llama
from models.stage import Stage

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.distributed_cache import KVPool
from fuel_parallel.generation import Draw, Engine, GenerationRequest, choose

CONFIG = llama.Config(53, 16, 24, 4, 4, 512, num_key_value_heads=2)


def stage(pp: fp.Communicator | None = None, tp: fp.Communicator | None = None) -> Stage:
    """A rank's part; the weights are those of `plain_texts`."""
    alone = fp.IdentityComm()
    return load(CONFIG, None, pp or alone, tp or alone, "float64")


def engine(
    num_pages: int = 256,
    page_size: int = 4,
    *,
    pp: fp.Communicator | None = None,
    tp: fp.Communicator | None = None,
    comm: fp.Communicator | None = None,
    **options: object,
) -> Engine:
    """An engine of the small Llama, in float64."""
    model = stage(pp, tp)
    pool = KVPool.for_model(model, num_pages=num_pages, page_size=page_size, dtype="float64")
    tp = tp or fp.IdentityComm()
    comm = comm or tp
    options = {"logits_from": comm.world_size - tp.world_size, "context": CONFIG.context, **options}
    return Engine(model, pool, vocabulary=CONFIG.vocab_size, comm=comm, tp=tp, **options)  # type: ignore[arg-type]


def plain_texts(requests: Sequence[GenerationRequest]) -> list[list[tuple[int, ...]]]:
    """The tokens of each sample of each request, by computing all of each text for each token."""
    model = llama.Llama(CONFIG, ft.random.Generator(0), "float64")
    places = [(number, index) for number, one in enumerate(requests) for index in range(one.samples)]
    longest = max(len(one.prompt) + one.max_tokens for one in requests)
    rows = np.zeros((len(places), longest), np.int64)
    ends = np.array([len(requests[number].prompt) for number, _ in places])
    for row, (number, _) in enumerate(places):
        rows[row, : ends[row]] = requests[number].prompt
    open_rows = set(range(len(places)))
    while open_rows:
        # One shape, one plan: what comes later is not seen, and rows that are complete are computed for nothing.
        features = model.features(ft.asarray(rows))
        last = ft.take_along_axis(features, ft.asarray((ends - 1)[:, None, None]), axis=1)
        logits = model.head(last[:, 0]).numpy()
        for row in list(open_rows):
            request = requests[places[row][0]]
            token = choose(logits[row], Draw(request.sampling, places[row][1], int(ends[row])))
            rows[row, ends[row]] = token
            ends[row] += 1
            if token in request.stop_tokens or ends[row] == len(request.prompt) + request.max_tokens:
                open_rows.remove(row)
    texts: list[list[tuple[int, ...]]] = [[] for _ in requests]
    for row, (number, _) in enumerate(places):
        texts[number].append(tuple(rows[row, len(requests[number].prompt) : ends[row]].tolist()))
    return texts


def some_requests(count: int, seed: int = 0, **options: object) -> list[GenerationRequest]:
    """Prompts of which many begin alike; the same on all ranks."""
    draw = np.random.default_rng(seed)
    prefixes = [draw.integers(0, CONFIG.vocab_size, length).tolist() for length in (0, 9, 16, 30)]
    found = []
    for _ in range(count):
        own = draw.integers(0, CONFIG.vocab_size, draw.integers(1, 8)).tolist()
        prompt = (*prefixes[draw.integers(len(prefixes))], *own)
        most, samples = (int(draw.integers(1, most)) for most in (10, 4))
        found.append(
            GenerationRequest(
                prompt=prompt,
                max_tokens=most,
                samples=samples,
                stop_tokens=frozenset([7]),
                **options,  # type: ignore[arg-type]
            )
        )
    return found

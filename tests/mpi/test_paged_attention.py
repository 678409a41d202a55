"""A Llama cut over ranks, its keys and values in pages, gives the logits of the dense one that reads whole texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from models import gpt2
from models.llama import Config, Llama

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import tensor_parallel as tp
from fuel_parallel.distributed_cache import CacheConfig, CacheGroup, Chunk, HostSpill, KVPool, PagedBatch
from fuel_parallel.errors import ArgumentError
from fuel_parallel.runtime.plan import plans

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi
VOCABULARY, PAGE = 31, 4
HEADS = [(6, 2), (3, 3), (4, 1)]
"""Query and key heads: cut within a group, fewer than ranks, and one key head for all."""


def llama(heads: tuple[int, int]) -> fp.Module:
    config = Config(VOCABULARY, 4 * heads[0], 24, 2, heads[0], 64, num_key_value_heads=heads[1])
    return Llama(config, ft.random.Generator(3), dtype="float64")


class Served:
    """A model on all ranks with its cache; rank 0 decides, and all compute the same chunks."""

    def __init__(self, build: Callable[[], Any], dtype: str = "float64", pages: int = 24) -> None:
        self.dense, self.model = build(), build()
        tp.parallelize(self.model, tp.LayerParallelPlan.ready(self.model.plan), world)
        self.group = CacheGroup(world, CacheConfig(pages, PAGE))
        self.pool = KVPool.for_model(self.model, num_pages=pages, page_size=PAGE, dtype=dtype)
        self.spill = HostSpill(10**6)
        self.texts: dict[int, list[int]] = {}
        self.exchange()

    def exchange(self) -> list[Any]:
        outcomes = self.group.step().outcomes
        self.pool.follow(outcomes, self.spill)
        return outcomes

    def decide(self, function: str, *arguments: Any) -> Any:
        if RANK == 0:
            getattr(self.group, function)(*arguments)
        return self.exchange()[-1]

    def step(self, *chunks: tuple[int, int, int]) -> np.ndarray[Any, Any]:
        """The logits after each chunk (sequence, first, tokens), which is then reported as written."""
        batch = PagedBatch.of(self.group.replica.table, [Chunk(*chunk) for chunk in chunks])
        tokens = [t for s, first, count in chunks for t in self.texts[s][first : first + count]]
        logits = self.model(batch.padded_tokens(tokens), cache=self.pool, batch=batch).numpy()[: len(chunks)]
        for s, first, count in chunks:
            self.group.wrote(s, first + count)
        return logits

    def wanted(self, *chunks: tuple[int, int, int]) -> np.ndarray[Any, Any]:
        """What the dense model says after these parts of the texts."""
        return np.stack([self.dense(ft.asarray([self.texts[s][: first + n]])).numpy()[0, -1] for s, first, n in chunks])

    def check(self, *chunks: tuple[int, int, int], tolerance: float = 1e-10) -> np.ndarray[Any, Any]:
        found, wanted = self.step(*chunks), self.wanted(*chunks)
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
        return found.argmax(-1)


@pytest.mark.parametrize("heads", HEADS)
def test_prompts_in_chunks_and_decoding_side_by_side_give_the_dense_logits(heads: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    served = Served(lambda: llama(heads))
    texts = served.texts = {s: rng.integers(0, VOCABULARY, length).tolist() for s, length in ((1, 11), (2, 5), (3, 9))}
    for s in texts:
        served.decide("admit", s, texts[s])
    served.check((1, 0, 6))
    greedy = served.check((1, 6, 5), (2, 0, 5), (3, 0, 2))
    for s, token in zip((1, 2), greedy[:2], strict=True):
        texts[s].append(int(token))
        served.decide("extend", s, [int(token)])
    greedy = served.check((3, 2, 7), (1, 11, 1), (2, 5, 1))
    # A fork goes on with another token than its parent, each in a copy of the page that they began to share.
    served.decide("fork", 1, 4)
    texts[4] = [*texts[1], 7]
    copied = served.decide("extend", 4, [7]).copies
    assert [copy.tokens for copy in copied] == ([] if len(texts[1]) % PAGE == 0 else [len(texts[1]) % PAGE])
    texts[1].append(int(greedy[1]))
    served.decide("extend", 1, [int(greedy[1])])
    served.check((4, 12, 1), (1, 12, 1))


def test_a_second_prompt_computes_what_the_first_one_did_not() -> None:
    served = Served(lambda: llama((6, 2)))
    served.texts = {1: [5, 4, 3, 2, 1, 6, 7, 8, 9, 1], 2: [5, 4, 3, 2, 1, 6, 7, 8, 2, 2, 2]}
    served.decide("admit", 1, served.texts[1])
    served.check((1, 0, 10))
    for _ in range(2):
        served.exchange()
    reused = served.decide("admit", 2, served.texts[2]).reused_tokens
    assert reused == 8
    served.check((2, reused, 3))


def test_positions_that_are_embedded_are_those_in_each_sequence() -> None:
    config = gpt2.Config(VOCABULARY, 12, 2, 3, 64)
    served = Served(lambda: gpt2.GPT2(config, ft.random.Generator(5), dtype="float64"))
    served.texts = {1: [1, 2, 3, 4, 5], 2: [9, 8, 7]}
    for s in (1, 2):
        served.decide("admit", s, served.texts[s])
    served.check((1, 0, 3))
    served.check((2, 0, 3), (1, 3, 2))
    with pytest.raises(ArgumentError, match="cache= was given without batch="):
        served.model(ft.asarray([1]), cache=served.pool)


def test_decoding_has_one_plan_and_the_pool_stays_where_it_is() -> None:
    served = Served(lambda: llama((6, 2)))
    served.texts = {1: [1] * 9, 2: [2] * 10}
    for s in (1, 2):
        served.decide("admit", s, served.texts[s])
    greedy = served.step((1, 0, 9), (2, 0, 10)).argmax(-1)
    made, places = [], []
    for _ in range(6):
        for s, token in zip((1, 2), greedy.tolist(), strict=True):
            served.texts[s].append(token)
            served.decide("extend", s, [token])
        before = plans.made
        greedy = served.step(*[(s, len(served.texts[s]) - 1, 1) for s in (1, 2)]).argmax(-1)
        made.append(plans.made - before)
        places.append([variable.node.value.ctypes.data for variable in served.pool.__tensors__()])
    assert made[1:] == [0] * 5
    assert places == [places[0]] * 6


def test_all_ranks_take_as_many_pages_as_fit_on_the_one_where_fewest_do() -> None:
    model = llama((3, 3))
    tp.parallelize(model, tp.LayerParallelPlan.ready("llama"), world)
    form = {"page_size": PAGE, "dtype": "int8", "comm": world}
    pool = KVPool.for_model(model, budget_bytes=20_000, **form)
    pools = world.all_gather_object([pool.num_pages, pool.bytes_per_page])
    assert [pages for pages, _ in pools] == [20_000 // max(size for _, size in pools)] * N
    with pytest.raises(ArgumentError, match=r"the budgets hold .*0.* pages, by rank, .* the budget is 9"):
        KVPool.for_model(model, budget_bytes=9, **form)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.03), ("int8", 0.03)])
def test_fewer_bits_are_off_by_as_much_as_they_round(dtype: str, tolerance: float) -> None:
    served = Served(lambda: llama((6, 2)), dtype)
    served.texts = {1: [9, 8, 7, 6, 5, 4, 3]}
    served.decide("admit", 1, served.texts[1])
    size = float(np.abs(served.wanted((1, 0, 7))).max())
    served.check((1, 0, 4), tolerance=tolerance * size)
    served.check((1, 4, 3), tolerance=tolerance * size)

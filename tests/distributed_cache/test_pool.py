"""A pool keeps what was written, never takes a byte more than its budget, and a step costs its own pages alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.distributed_cache import (
    Admit,
    CacheConfig,
    CacheReplica,
    Chunk,
    Confirm,
    End,
    Extend,
    Fork,
    HostSpill,
    KVPool,
    PagedBatch,
    PagePool,
    SequenceTable,
)
from fuel_parallel.distributed_cache.batch import padded
from fuel_parallel.errors import ArgumentError, CacheError, FuelError, OutOfPagesError, ShapeError
from fuel_parallel.runtime.plan import plans

Array = np.ndarray[Any, Any]
DTYPES = ["float64", "float32", "float16", "bfloat16", "int8"]


def arrays(pool: KVPool) -> list[Array]:
    fp.realize(pool)
    return [variable.node.value for variable in pool.__tensors__()]


def drawn(seed: int, *shape: int) -> ft.Tensor:
    return ft.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.sampled_from(DTYPES),
    st.integers(0, 5000),
)  # fmt: skip
def test_a_pool_takes_all_it_can_of_a_budget_and_not_a_byte_more(
    layers: int, heads: int, dim: int, page: int, dtype: str, budget: int
) -> None:
    form: dict[str, Any] = {"num_layers": layers, "num_kv_heads": heads, "head_dim": dim, "page_size": page}
    one = sum(x.nbytes for x in arrays(KVPool(**form, num_pages=1, dtype=dtype)))
    if budget < one:
        with pytest.raises(ArgumentError, match=f"a page takes {one} bytes, the budget is {budget}"):
            KVPool(**form, budget_bytes=budget, dtype=dtype)
        return
    pool = KVPool(**form, budget_bytes=budget, dtype=dtype)
    taken = sum(x.nbytes for x in arrays(pool))
    assert taken == pool.num_pages * pool.bytes_per_page
    assert taken <= budget < taken + pool.bytes_per_page


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give either num_pages or budget_bytes"),
        ({"num_pages": 1, "budget_bytes": 9}, "give either num_pages or budget_bytes"),
        ({"num_pages": 0}, "num_pages must be 1 or more, not 0"),
        ({"num_pages": 1, "dtype": "int4"}, "dtype is one of float64, float32, float16, bfloat16, int8, not 'int4'"),
        ({"num_pages": 1, "head_dim": 0}, "head_size must be 1 or more, not 0"),
        ({"budget_bytes": 99, "num_kv_heads": 0}, "pages of a rank without layers or heads take no bytes"),
    ],
)
def test_a_pool_that_cannot_be_is_an_error(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        KVPool(**({"num_layers": 1, "num_kv_heads": 1, "head_dim": 2} | options))


def test_a_rank_without_heads_has_pages_of_no_bytes() -> None:
    pool = KVPool(num_layers=2, num_kv_heads=0, head_dim=4, num_pages=3)
    assert pool.bytes_per_page == 0
    pool.copy_pages([0], [2])
    pool.write_page(1, pool.read_page(0))
    fp.realize(pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_go_out_as_bytes_and_come_back(dtype: str) -> None:
    pool = KVPool(num_layers=2, num_kv_heads=2, head_dim=4, page_size=3, num_pages=4, dtype=dtype)
    for layer in range(2):
        pool.write(layer, ft.asarray([3, 4, -1, 5]), drawn(layer, 4, 2, 4), drawn(layer + 9, 4, 2, 4))
    content = pool.read_page(1)
    assert len(content) == pool.bytes_per_page
    assert len(set(content)) > 8
    pool.copy_pages([1], [0])
    pool.write_page(3, content)
    for x in arrays(pool):
        np.testing.assert_array_equal(x[0], x[1])
        np.testing.assert_array_equal(x[3], x[1])
        assert not x[2].any()
    with pytest.raises(CacheError, match=f"has {len(content)} bytes, the content {len(content) - 1}; it is of another"):
        pool.write_page(3, content[1:])
    with pytest.raises(CacheError, match="read_page: there is no page 4; pages are 0 to 3"):
        pool.read_page(4)
    with pytest.raises(CacheError, match="copy_pages: there is no page -1"):
        pool.copy_pages([-1], [0])
    with pytest.raises(ArgumentError, match="1 sources and 2 targets"):
        pool.copy_pages([1], [0, 1])


@settings(max_examples=30)
@given(st.integers(0, 99), st.floats(1e-6, 1e6))
def test_int8_is_off_by_half_a_step_of_the_largest_element(seed: int, size: float) -> None:
    pool = KVPool(num_layers=1, num_kv_heads=2, head_dim=5, page_size=4, num_pages=1, dtype="int8")
    given_ = drawn(seed, 4, 2, 5) * size
    pool.write(0, ft.arange(4), given_, ft.zeros((4, 2, 5)))
    keys, values, key_scales, value_scales = arrays(pool)
    error = np.abs(keys[0] * key_scales[0][..., None].astype(np.float64) - given_.numpy())
    assert (error <= np.abs(given_.numpy()).max(-1, keepdims=True) / 254 * 1.0001).all()
    assert not values.any()
    assert not value_scales.any()


class Model:
    """Attention of one layer, whose text is known: token t has drawn query, key and value."""

    HEADS, KV_HEADS, DIM = 4, 2, 3

    def __init__(self, page: int, pages: int, dtype: str = "float64") -> None:
        self.replica = CacheReplica(CacheConfig(pages, page))
        form = {"num_kv_heads": self.KV_HEADS, "head_dim": self.DIM, "page_size": page}
        self.pool = KVPool(num_layers=1, num_pages=pages, dtype=dtype, **form)
        self.spill = HostSpill(10**6)
        self.texts: dict[int, list[int]] = {}
        rng = np.random.default_rng(0)
        self.of = {kind: rng.normal(size=(9, heads, self.DIM)) for kind, heads in (("q", 4), ("k", 2), ("v", 2))}

    def apply(self, command: Any) -> Any:
        outcome = self.replica.apply(command)
        self.pool.follow([outcome], self.spill)
        return outcome

    def step(self, *chunks: tuple[int, int, int]) -> None:
        """Computes chunks and compares with dense attention to each sequence's whole text."""
        batch = PagedBatch.of(self.replica.table, [Chunk(*chunk) for chunk in chunks])
        tokens = batch.padded_tokens([t for s, first, count in chunks for t in self.texts[s][first : first + count]])
        q, k, v = (ft.asarray(self.of[kind])[tokens] for kind in "qkv")
        found = self.pool.attend(0, q, k, v, batch).numpy()
        at = 0
        for s, first, count in chunks:
            text = self.texts[s][: first + count]
            q, k, v = (ft.asarray(self.of[kind][text].swapaxes(0, 1)) for kind in "qkv")
            wanted = ft.scaled_dot_product_attention(q, k, v, causal=True).numpy().swapaxes(0, 1)[first:]
            np.testing.assert_allclose(found[at : at + count], wanted, rtol=1e-12, atol=1e-13)
            at += count
        assert not found[at:].any()


def encoded(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


@settings(max_examples=1000 if os.environ.get("FUEL_STRESS") else 40)
@given(st.data())
def test_prompts_in_chunks_forks_and_reused_prefixes_attend_to_their_own_texts(data: Any) -> None:
    """Sequences begin, fork, go on and end in any order, over a pool so small that pages change hands."""
    draw = data.draw
    model = Model(page=draw(st.integers(1, 3)), pages=16)
    computed: dict[int, int] = {}
    for number in range(draw(st.integers(2, 9))):
        kind = draw(st.sampled_from(["begin", "fork", "end", "go on", "go on"]))
        ready = [s for s, n in computed.items() if n == len(model.texts[s])]
        try:
            if kind == "begin" or not computed:
                prompt = [1, 2, 3, 4, 5][: draw(st.integers(0, 5))] + draw(
                    st.lists(st.integers(0, 8), min_size=1, max_size=5)
                )
                computed[number] = model.apply(Admit(number, encoded(prompt))).reused_tokens
                model.texts[number] = prompt
            elif kind == "fork" and ready:
                parent = draw(st.sampled_from(ready))
                model.apply(Fork(parent, number))
                model.texts[number], computed[number] = list(model.texts[parent]), computed[parent]
            elif kind == "end":
                ended = draw(st.sampled_from(sorted(computed)))
                model.apply(Confirm(ended, computed.pop(ended)))
                model.apply(End(ended))
            for s in [s for s in ready if s in computed and kind == "go on"]:
                model.apply(Extend(s, encoded([s % 9])))
                model.texts[s].append(s % 9)
        except OutOfPagesError:
            pass  # nothing was changed, and the others go on
        waiting = [s for s, n in computed.items() if n < len(model.texts[s]) and draw(st.booleans())]
        counts = {s: draw(st.integers(1, len(model.texts[s]) - computed[s])) for s in waiting}
        if counts:
            model.step(*[(s, computed[s], count) for s, count in counts.items()])
            for s, count in counts.items():
                computed[s] += count
                model.apply(Confirm(s, computed[s]))


def test_what_was_evicted_is_there_again_from_the_store() -> None:
    model = Model(page=2, pages=4)
    model.texts = {1: [1, 2, 3, 4, 5], 2: [8, 7, 6, 5, 4, 3, 2], 3: [1, 2, 3, 4, 7]}
    model.apply(Admit(1, encoded(model.texts[1])))
    model.step((1, 0, 5))
    model.apply(Confirm(1, 5))
    model.apply(End(1))
    model.apply(Admit(2, encoded(model.texts[2])))
    model.step((2, 0, 7))
    model.apply(End(2))
    outcome = model.apply(Admit(3, encoded(model.texts[3])))
    assert outcome.reused_tokens == 0, "its pages were taken by sequence 2"
    hashes = list(model.replica.prefixes.hashes.chain("", np.array(model.texts[3], np.int32)))
    assert model.pool.restore(outcome.pages, [*hashes, b"not there"], model.spill) == 2
    model.step((3, 4, 1))


def test_a_step_touches_its_own_pages_and_makes_no_plan_twice() -> None:
    """A pool of which most was never touched takes no memory for that, and a step is done where the pages lie."""
    pool = KVPool(num_layers=2, num_kv_heads=4, head_dim=64, page_size=16, num_pages=4096)
    whole = pool.num_pages * pool.bytes_per_page
    assert whole == 2**28
    before = resident_bytes()
    table = SequenceTable(PagePool(pool.num_pages), 16)
    for s in range(3):
        table.begin(s)
        table.extend(s, 20)
    places = [x.ctypes.data for x in arrays(pool)]
    new = drawn(0, 3, 4, 64)
    counts = []
    for step in range(12):
        chunks = [Chunk(s, 20 + step, 1) for s in range(3)]
        for s in range(3):
            table.extend(s, 1)
        batch = PagedBatch.of(table, chunks)
        made = plans.made
        for layer in range(2):
            out = pool.attend(layer, new, new, new, batch)
        out.numpy()
        counts.append(plans.made - made)
        assert fp.memory_stats().peak < 2**17
    assert counts == [1, *[0] * 11], "three pages become four in the table's eyes only at 33 tokens, where it has room"
    assert [x.ctypes.data for x in arrays(pool)] == places
    assert resident_bytes() - before < whole // 8


def resident_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("resident memory is read from /proc")
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def test_after_a_step_that_failed_half_way_a_pool_can_begin_anew() -> None:
    pool = KVPool(num_layers=1, num_kv_heads=1, head_dim=2, num_pages=2)
    pool.write(0, ft.asarray([99]), ft.ones((1, 1, 2)), ft.ones((1, 1, 2)))
    with pytest.raises(FuelError, match="there is no slot 99: these pages have 32"):
        fp.realize(pool)
    with pytest.raises(FuelError, match="is lost"):
        pool.read_page(0)
    pool.reset()
    assert pool.read_page(0) == bytes(pool.bytes_per_page)


@given(st.integers(1, 10**6))
def test_padding_is_at_most_an_eighth_and_has_few_sizes(count: int) -> None:
    assert count <= padded(count) <= count + count // 8
    assert padded(padded(count)) == padded(count)
    octave = {padded(n) for n in range(65, 129)}
    assert len(octave) == 8


def test_a_batch_is_a_part_of_what_its_sequences_have() -> None:
    table = SequenceTable(PagePool(8), 2)
    table.begin(1)
    table.extend(1, 3)
    assert PagedBatch.of(table, [Chunk(1, 0, 3)]).padded_tokens([4, 5, 6]).tolist() == [4, 5, 6]
    with pytest.raises(ArgumentError, match="at least one chunk"):
        PagedBatch.of(table, [])
    with pytest.raises(ArgumentError, match="sequence 1 has 3 tokens; a chunk of 2 from position 2 on is not a part"):
        PagedBatch.of(table, [Chunk(1, 2, 2)])
    with pytest.raises(ArgumentError, match="one chunk for each sequence"):
        PagedBatch.of(table, [Chunk(1, 0, 1), Chunk(1, 1, 1)])
    with pytest.raises(CacheError, match="there is no sequence 2"):
        PagedBatch.of(table, [Chunk(2, 0, 1)])
    with pytest.raises(ArgumentError, match="its chunks have 3 tokens, but 2 were given"):
        PagedBatch.of(table, [Chunk(1, 0, 3)]).padded_tokens([4, 5])


def test_attention_says_what_it_cannot_do_with_a_cache() -> None:
    generator = ft.random.Generator(0)
    layer = fp.Attention(8, 2, generator, causal=True)
    table = SequenceTable(PagePool(8), 2)
    table.begin(1)
    table.extend(1, 3)
    pool = KVPool.for_model(layer, num_pages=8, page_size=2)
    cache = pool.layer(0, PagedBatch.of(table, [Chunk(1, 0, 3)]))
    assert layer(ft.ones((3, 8)), cache=cache).shape == (3, 8)
    with pytest.raises(ArgumentError, match="there is no layer -1; those of this rank are 0 to 0"):
        pool.layer(-1, cache.batch)
    with pytest.raises(ShapeError, match=r"the cache's batch has 3 tokens, but x has shape \(2, 8\)"):
        layer(ft.ones((2, 8)), cache=cache)
    with pytest.raises(
        ArgumentError, match="causal and without mask, and the cache gives the positions; got causal=True, mask given"
    ):
        layer(ft.ones((3, 8)), cache=cache, mask=ft.ones((3, 3), dtype="bool"))
    with pytest.raises(ArgumentError, match="got causal=False"):
        fp.Attention(8, 2, generator)(ft.ones((3, 8)), cache=cache)
    with pytest.raises(
        ArgumentError, match="must be alike in heads of keys and values and their size; Linear has none"
    ):
        KVPool.for_model(fp.Linear(2, 2, generator), num_pages=1)

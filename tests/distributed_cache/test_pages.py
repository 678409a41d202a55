"""Pages are owned by whom they were given to, cost what the layout says, and none is lost or given twice."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fuel_parallel.distributed_cache import PageLayout, PagePool, SequenceTable
from fuel_parallel.errors import ArgumentError, CacheError, OutOfPagesError

sizes = st.integers(1, 40)


def numbers(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


@given(sizes, sizes, sizes, sizes, st.sampled_from(["float32", "float16", "int8"]), st.integers(0, 10**7))
def test_a_page_takes_what_its_arrays_take(
    layers: int, heads: int, size: int, tokens: int, dtype: str, budget: int
) -> None:
    layout = PageLayout(layers, heads, size, tokens, dtype)
    nbytes = 2 * layers * np.empty((tokens, heads, size), dtype).nbytes
    if dtype == "int8":
        nbytes += 2 * layers * np.empty((tokens, heads), np.float32).nbytes
    assert layout.page_bytes == nbytes
    if budget < nbytes:
        with pytest.raises(ArgumentError, match=f"a page takes {nbytes} bytes, the budget is {budget}; give"):
            layout.pages_in(budget)
    else:
        assert layout.pages_in(budget) * nbytes <= budget < (layout.pages_in(budget) + 1) * nbytes


def test_a_layout_that_cannot_be_is_an_error() -> None:
    assert PageLayout(2, 2, 8, 4, "bfloat16").page_bytes == PageLayout(2, 2, 8, 4, "float16").page_bytes
    with pytest.raises(ArgumentError, match="kv_heads must be 0 or more, not -1"):
        PageLayout(1, -1, 1)
    with pytest.raises(ArgumentError, match="page_tokens must be 1 or more, not 0"):
        PageLayout(1, 1, 1, 0)
    with pytest.raises(ArgumentError, match="dtype is one of float64, float32, float16, bfloat16, int8, not 'int4'"):
        PageLayout(1, 1, 1, dtype="int4")
    with pytest.raises(ArgumentError, match="from 1 to 2147483647 pages, got 0"):
        PagePool(0)


class PoolMachine(RuleBasedStateMachine):
    """A pool against a dict of owners."""

    SIZE = 7

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.SIZE)
        self.twin = PagePool(self.SIZE)
        self.owned: dict[int, int] = {}

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count > self.SIZE - len(self.owned):
            with pytest.raises(OutOfPagesError, match=f"{count} pages were asked for, {self.pool.free_count} of 7"):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert pages.tolist() == self.twin.allocate(count).tolist()
        assert not set(pages.tolist()) & self.owned.keys()
        self.owned.update(dict.fromkeys(pages.tolist(), 1))

    @rule(pages=st.lists(st.integers(-1, 7), max_size=4))
    def retain(self, pages: list[int]) -> None:
        if any(page not in self.owned for page in pages):
            with pytest.raises(CacheError, match=r"used after it was freed|there is no page"):
                self.pool.retain(numbers(*pages))
            return
        self.pool.retain(numbers(*pages))
        self.twin.retain(numbers(*pages))
        for page in pages:
            self.owned[page] += 1

    @rule(pages=st.lists(st.integers(-1, 7), max_size=6))
    def release(self, pages: list[int]) -> None:
        if any(self.owned.get(page, 0) < pages.count(page) for page in pages):
            with pytest.raises(CacheError, match=r"freed twice|there is no page|more often than it has owners"):
                self.pool.release(numbers(*pages))
            return
        left = {page: self.owned[page] - pages.count(page) for page in pages}
        freed = self.pool.release(numbers(*pages))
        assert freed.tolist() == self.twin.release(numbers(*pages)).tolist()
        assert sorted(freed.tolist()) == sorted(page for page in left if not left[page])
        self.owned = {page: count for page, count in (self.owned | left).items() if count}

    @invariant()
    def every_page_is_owned_or_free(self) -> None:
        assert [self.pool.owners(page) for page in range(self.SIZE)] == [self.owned.get(p, 0) for p in range(self.SIZE)]
        assert self.pool.used_count == len(self.owned)
        assert self.pool.free_count == self.SIZE - len(self.owned)


class SequenceMachine(RuleBasedStateMachine):
    """Sequences that write their tokens into pages, against lists of what they wrote."""

    SIZE, TOKENS = 9, 3

    def __init__(self) -> None:
        super().__init__()
        self.table = SequenceTable(PagePool(self.SIZE), self.TOKENS)
        self.memory = np.full((self.SIZE, self.TOKENS), -1)
        self.texts: dict[int, list[int]] = {}
        self.clock = 0

    @rule(sequence=st.integers(0, 3))
    def begin(self, sequence: int) -> None:
        if sequence in self.texts:
            with pytest.raises(CacheError, match=f"sequence {sequence} has begun already"):
                self.table.begin(sequence)
            return
        self.table.begin(sequence)
        self.texts[sequence] = []

    @rule(sequence=st.integers(0, 3), count=st.integers(0, 5))
    def extend(self, sequence: int, count: int) -> None:
        if sequence not in self.texts:
            with pytest.raises(CacheError, match=f"no sequence {sequence}: it has ended, or never began"):
                self.table.extend(sequence, count)
            return
        if self.table.pages_needed(sequence, count) > self.table.pool.free_count:
            with pytest.raises(OutOfPagesError):
                self.table.extend(sequence, count)
            return
        free = self.table.pool.free_count
        needed = self.table.pages_needed(sequence, count)
        for copy in self.table.extend(sequence, count):
            self.memory[copy.target, : copy.tokens] = self.memory[copy.source, : copy.tokens]
        assert free - self.table.pool.free_count == needed
        for _ in range(count):
            self.clock += 1
            at = len(self.texts[sequence])
            self.memory[self.table.pages(sequence)[at // self.TOKENS], at % self.TOKENS] = self.clock
            self.texts[sequence].append(self.clock)

    @precondition(lambda self: self.texts)
    @rule(child=st.integers(4, 6), data=st.data())
    def fork(self, child: int, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.texts)))
        if child not in self.texts:
            self.table.fork(parent, child)
            self.texts[child] = list(self.texts[parent])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.texts)))
        self.table.end(sequence)
        del self.texts[sequence]

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        assert set(self.table) == self.texts.keys()
        for sequence, text in self.texts.items():
            assert self.table.length(sequence) == len(text)
            assert self.memory[self.table.pages(sequence)].reshape(-1)[: len(text)].tolist() == text

    @invariant()
    def no_page_leaks(self) -> None:
        in_use = {page for sequence in self.texts for page in self.table.pages(sequence).tolist()}
        assert self.table.pool.used_count == len(in_use)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestSequences = SequenceMachine.TestCase
TestSequences.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_sequence_takes_other_pages_of_the_same_content() -> None:
    table = SequenceTable(PagePool(6), 2)
    table.begin(0)
    table.extend(0, 4)
    table.begin(1)
    table.extend(1, 4)
    table.replace(1, 0, table.pages(0)[:1])
    assert table.pages(1).tolist() == [0, 3]
    assert table.pool.used_count == 3


def test_allocation_does_not_grow_with_the_pool() -> None:
    def best_seconds(size: int) -> float:
        pool = PagePool(size)
        pool.release(pool.allocate(size))
        times = []
        for _ in range(30):
            began = time.perf_counter()
            pool.release(pool.allocate(1000))
            times.append(time.perf_counter() - began)
        return min(times)

    assert best_seconds(1_000_000) < 0.002

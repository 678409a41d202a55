"""The longest cached prefix is found, and is the right one; leaves go first; what is owned or pinned stays."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fuel_parallel.distributed_cache import FileSpill, HostSpill, PagePool, PrefixCache, SequenceTable
from fuel_parallel.distributed_cache.hashing import PageHashes, token_array
from fuel_parallel.distributed_cache.lru import PageOrder
from fuel_parallel.distributed_cache.prefixes import Match
from fuel_parallel.errors import ArgumentError, CacheError

prompts = st.lists(st.integers(0, 1), max_size=9)


Node = tuple[str, tuple[int, ...]]  # a tenant, and all tokens up to the end of a page


class CacheMachine(RuleBasedStateMachine):
    """Sequences that begin with what is cached and leave what they had, against a dict of prompts."""

    SIZE, TOKENS = 12, 2

    def __init__(self) -> None:
        super().__init__()
        pool = PagePool(self.SIZE)
        self.cache = PrefixCache(pool, self.TOKENS, b"secret")
        self.table = SequenceTable(pool, self.TOKENS)
        self.page_of: dict[Node, int] = {}
        self.idle: list[Node] = []  # the least recently used first
        self.running: dict[int, tuple[str, list[int]]] = {}
        self.pins: list[Match] = []
        self.count = 0

    def nodes(self, tenant: str, prompt: list[int]) -> list[Node]:
        return [(tenant, tuple(prompt[:end])) for end in range(self.TOKENS, len(prompt) + 1, self.TOKENS)]

    def used(self) -> set[int]:
        owned = {page for sequence in self.table for page in self.table.pages(sequence).tolist()}
        return owned | {page for match in self.pins for page in match.pages.tolist()}

    def settle(self) -> None:
        used = self.used()
        idle = {node for node, page in self.page_of.items() if page not in used}
        new = sorted(idle.difference(self.idle), key=lambda node: -len(node[1]))  # all of one prompt
        self.idle = [node for node in self.idle if node in idle] + new

    @rule(tenant=st.sampled_from(["a", "b"]), prompt=prompts)
    def begin(self, tenant: str, prompt: list[int]) -> None:
        match = self.cache.match(tenant, prompt)
        nodes = self.nodes(tenant, prompt)
        known = [node for node in nodes if node in self.page_of]
        assert known == nodes[: len(known)], "a page went before those that follow it"
        assert match.pages.tolist() == [self.page_of[node] for node in known]
        rest = len(prompt) - len(known) * self.TOKENS
        more = -(-rest // self.TOKENS)
        room = self.table.pool.free_count + self.cache.evictable_count - self.cache.count_evictable(match)
        if more > room:
            return
        self.count += 1
        self.table.begin(self.count, match.pages)
        self.cache.take(match, len(prompt))
        self.settle()
        gone = self.cache.evict(more - self.table.pool.free_count)
        assert [one.page for one in gone] == [self.page_of.pop(node) for node in self.idle[: len(gone)]]
        assert not [one for one in gone if one.page_hash in self.cache]
        self.idle = self.idle[len(gone) :]
        self.table.extend(self.count, rest)
        self.running[self.count] = (tenant, prompt)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.running)))
        tenant, prompt = self.running.pop(sequence)
        nodes = self.nodes(tenant, prompt)
        own = self.table.pages(sequence)[: len(nodes)]
        places = self.cache.insert(tenant, token_array(prompt[: len(nodes) * self.TOKENS]), own)
        for node, page in zip(nodes, own.tolist(), strict=True):
            self.page_of.setdefault(node, page)
        assert places.tolist() == [self.page_of[node] for node in nodes]
        self.table.replace(sequence, 0, places)
        self.settle()
        self.cache.let_go(self.table.end(sequence))

    @rule(tenant=st.sampled_from(["a", "b"]), prompt=prompts)
    def pin(self, tenant: str, prompt: list[int]) -> None:
        if len(self.pins) < 2:
            self.pins.append(self.cache.pin(tenant, prompt))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.cache.unpin(self.pins.pop())

    @invariant()
    def no_page_leaks(self) -> None:
        self.settle()
        assert len(self.cache) == len(self.page_of)
        assert self.cache.evictable_count == len(self.idle)
        assert self.table.pool.used_count == len(self.used()) + len(self.idle)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_an_order_is_that_of_a_list(history: list[tuple[bool, int]]) -> None:
    order, model = PageOrder(6), list[int]()
    for add, page in history:
        if add:
            order.append([page])
            model += [] if page in model else [page]
        else:
            order.discard([page])
            model = [other for other in model if other != page]
        assert list(order) == model
        assert len(order) == len(model)
        assert order.first == (model[0] if model else None)
        assert order.count(np.arange(6, dtype=np.int32)) == len(model)


def small_cache() -> tuple[PagePool, PrefixCache]:
    pool = PagePool(8)
    return pool, PrefixCache(pool, 2, b"secret")


class SameHashes(PageHashes):
    """Every page has the same hash as any other at its place: the worst that hashes can do."""

    def chain(self, tenant, tokens, before=None):
        depth = 0 if before is None else before[0] + 1
        for index in range(len(tokens) // self.page_tokens):
            yield bytes([depth + index] * 16)


def test_a_collision_is_no_hit() -> None:
    pool, cache = small_cache()
    cache.hashes = SameHashes(2, b"")
    cache.insert("", token_array([1, 2, 3, 4]), pool.allocate(2))
    assert cache.match("", [1, 2, 3, 4]).pages.tolist() == [0, 1]
    assert cache.match("", [1, 2, 3, 5]).pages.tolist() == [0]
    assert cache.match("", [9, 2, 3, 4]).pages.tolist() == []
    assert cache.statistics.collisions == 2
    assert cache.insert("", token_array([1, 2, 7, 7]), pool.allocate(2)).tolist() == [0]
    assert len(cache) == 2


class SameLaterHashes(PageHashes):
    """Only first pages can be told apart by their hashes."""

    def chain(self, tenant, tokens, before=None):
        for index in range(len(tokens) // self.page_tokens):
            yield bytes([tokens[0] if index == 0 and before is None else 255] * 16)


def test_the_same_tokens_after_others_are_no_hit() -> None:
    pool, cache = small_cache()
    cache.hashes = SameLaterHashes(2, b"")
    cache.insert("", token_array([1, 1, 3, 4]), pool.allocate(2))
    cache.insert("", token_array([2, 2]), pool.allocate(1))
    assert cache.match("", [1, 1, 3, 4]).pages.tolist() == [0, 1]
    assert cache.match("", [2, 2, 3, 4]).pages.tolist() == [2]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=12))
def test_a_tenant_cannot_tell_what_others_have(tokens: list[int]) -> None:
    def hashes(tenant: str, secret: bytes) -> list[bytes]:
        return list(PageHashes(2, secret).chain(tenant, token_array(tokens)))

    mine = hashes("me", b"s")
    assert mine == hashes("me", b"s")
    assert not {*mine} & {*hashes("you", b"s"), *hashes("me", b"t")}
    longer = PageHashes(2, b"s").chain("me", token_array([*tokens, 1, 2]))
    assert [page for page, _ in zip(longer, mine, strict=False)] == mine


def test_tokens_and_secrets_that_cannot_be_are_errors() -> None:
    for wrong in ([-1], [2**31], [[1]], [0.5]):
        with pytest.raises(ArgumentError, match="numbers from 0 to 2147483647"):
            token_array(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="at most 64 bytes, not 65"):
        PageHashes(2, bytes(65))


def test_a_pin_is_taken_back_once() -> None:
    pool, cache = small_cache()
    pages = pool.allocate(2)
    cache.insert("", token_array([1, 2, 3, 4]), pages)
    pool.release(pages)
    cache.let_go(pages)
    pin = cache.pin("", [1, 2])
    assert [one.page for one in cache.evict(5)] == [1]
    cache.unpin(pin)
    with pytest.raises(CacheError, match="a pin is taken back once"):
        cache.unpin(pin)
    assert [one.page for one in cache.evict(5)] == [0]
    assert pool.used_count == 0


def test_statistics_count_what_was_saved() -> None:
    pool, cache = small_cache()
    cache.take(cache.match("", [1, 2, 3]), 3)
    cache.insert("", token_array([1, 2]), pool.allocate(1))
    cache.take(cache.match("", [1, 2, 3]), 3)
    assert (cache.statistics.hits, cache.statistics.misses) == (1, 1)
    assert cache.statistics.hit_rate == pytest.approx(2 / 6)


@pytest.mark.parametrize("kind", ["host", "file", "host over file"])
def test_a_store_gives_back_what_fits(kind: str, tmp_path: Path) -> None:
    files = FileSpill(tmp_path, 3 * (24 + 10)) if "file" in kind else None
    store = HostSpill(30, below=files) if "host" in kind else files
    assert store is not None
    for number in range(5):
        store.save(bytes([number] * 16), bytes([number] * 10))
    kept = [number for number in range(5) if bytes([number] * 16) in store]
    assert kept == ([0, 1, 2, 3, 4] if kind == "host over file" else [2, 3, 4])
    for number in range(5):
        assert store.load(bytes([number] * 16)) == (bytes([number] * 10) if number in kept else None)
    store.discard(bytes([4] * 16))
    assert store.load(bytes([4] * 16)) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=20), st.integers(0, 60))
def test_a_store_never_takes_more_than_its_budget(saves: list[tuple[int, int]], budget: int) -> None:
    store, newest = HostSpill(budget), dict[bytes, bytes]()
    for name, size in saves:
        newest[bytes([name])] = bytes(size)
        store.save(bytes([name]), bytes(size))
        held = {key: store.load(key) for key in newest if key in store}
        assert store.used_bytes == sum(len(content or b"") for content in held.values()) <= budget
        assert all(content == newest[key] for key, content in held.items())
        assert (bytes([name]) in store) == (size <= budget)
    with pytest.raises(ArgumentError, match="budget is 0 bytes or more, not -1"):
        HostSpill(-1)


def test_a_damaged_file_was_never_there(tmp_path: Path) -> None:
    store = FileSpill(tmp_path, 10_000)
    for name in (b"a", b"b", b"c", b"d"):
        store.save(name * 16, name * 50)
    paths = {name: tmp_path / f"{(name * 16).hex()}.page" for name in (b"a", b"b", b"c")}
    flipped = bytearray(paths[b"a"].read_bytes())
    flipped[-1] ^= 1
    paths[b"a"].write_bytes(flipped)
    paths[b"b"].write_bytes(paths[b"c"].read_bytes())  # a sound page, but another one
    paths[b"c"].unlink()
    (tmp_path / "x.part").write_bytes(b"half")
    again = FileSpill(tmp_path, 10_000)
    assert [again.load(name * 16) for name in (b"a", b"b", b"c", b"d")] == [None, None, None, b"d" * 50]
    assert again.damaged == 2
    assert [path.name for path in tmp_path.iterdir()] == [f"{(b'd' * 16).hex()}.page"]
    assert again.used_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_a_long_look_up_does_not_grow_with_the_pool() -> None:
    pool = PagePool(1_000_000)
    cache = PrefixCache(pool, 16, b"secret")
    tokens = np.random.default_rng(0).integers(0, 50_000, 16_000, dtype=np.int32)
    pages = pool.allocate(1000)
    cache.insert("", tokens, pages)
    times = []
    for _ in range(15):
        began = time.perf_counter()
        found = cache.match("", tokens).pages
        new = pool.allocate(1000)
        times.append(time.perf_counter() - began)
        pool.release(new)
        assert len(found) == 1000
    assert min(times) < 0.002 * 2  # twice the claim: other processes share the core

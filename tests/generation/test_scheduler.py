"""Whatever is asked for in whatever order: steps keep to their budget, pages to the cache, and every request ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel import IdentityComm
from fuel_parallel.distributed_cache import CacheConfig, CacheGroup
from fuel_parallel.errors import ArgumentError, OutOfPagesError
from fuel_parallel.generation import GenerationRequest
from fuel_parallel.generation.scheduler import Continuation, Scheduler, StepPlan


def next_token(text: list[int], index: int) -> int:
    """What the stand-in for a model says: it depends on all that was before, and on the sample."""
    return hash((index, *text)) % 5


def text_of(request: GenerationRequest, index: int) -> list[int]:
    text = list(request.prompt)
    for _ in range(request.max_tokens):
        text.append(next_token(text, index))
    return text


@dataclass
class Machine:
    """Carries plans out on pages that hold token numbers in place of keys and values."""

    scheduler: Scheduler
    group: CacheGroup
    ended: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    computed: int = 0

    def __post_init__(self) -> None:
        config = self.group.replica.config
        self.pages = np.full((config.num_pages, config.page_tokens), -1)

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for outcome in self.group.step().outcomes:
            for one in outcome.evicted:
                self.pages[one.page] = -1
            for copy in outcome.copies:
                self.pages[copy.target, : copy.tokens] = self.pages[copy.source, : copy.tokens]
        assert len(plan.rows) <= self.scheduler.max_rows
        assert sum(row.count for row in plan.rows) <= self.scheduler.token_budget
        assert len({row.sequence for row in plan.rows}) == len(plan.rows)
        drawn = []
        step = self.group.replica.config.page_tokens
        for row in plan.rows:
            pages = self.group.replica.table.pages(row.sequence)
            tokens = np.frombuffer(row.tokens, "<i4").tolist()
            for place, token in enumerate(tokens, row.first):
                self.pages[pages[place // step], place % step] = token
            self.computed += row.count
            end = row.first + row.count
            text = [int(self.pages[pages[place // step], place % step]) for place in range(end)]
            assert -1 not in text, "a page was used that nobody had written"
            drawn.append([next_token(text, draw.sample) for draw in row.draws])
            assert all(draw.position == end for draw in row.draws)
        if self.scheduler.reuse_prefixes:
            for row in plan.rows:
                self.group.wrote(row.sequence, row.first + row.count)
        for one, _ in self.scheduler.advance(plan, drawn):
            self.note(one)
        return plan

    def note(self, one: Continuation) -> None:
        if len(one.tokens) == len(one.request.prompt) + one.request.max_tokens:
            self.ended[one.number, one.index] = one.tokens
            self.scheduler.end(one)


prompts = st.tuples(st.sampled_from([(), (1, 2, 3, 4, 5), (1, 2, 3, 9)]), st.lists(st.integers(0, 4), max_size=9)).map(
    lambda parts: (*parts[0], *parts[1], 7)
)
requests = st.builds(
    GenerationRequest,
    prompt=prompts,
    max_tokens=st.integers(1, 8),
    samples=st.integers(1, 3),
    tenant=st.sampled_from("ab"),
)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 6), requests), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 10),
    st.integers(1, 5),
    st.integers(0, 8),
    st.booleans(),
)
def test_every_request_ends_with_the_text_that_it_has_alone(
    arrivals: list[tuple[int, GenerationRequest]], page: int, spare: int, rows: int, more: int, reuse: bool
) -> None:
    most = max(-(-(len(one.prompt) + one.max_tokens - 1) // page) for _, one in arrivals)
    group = CacheGroup(IdentityComm(), CacheConfig(most + spare, page))
    machine = Machine(Scheduler(group, token_budget=rows + more, max_rows=rows, reuse_prefixes=reuse), group)
    asked: list[GenerationRequest] = []
    for steps in range(1000):
        while arrivals and arrivals[0][0] <= steps:
            machine.scheduler.submit(arrivals[0][1])
            asked.append(arrivals.pop(0)[1])
        machine.step()
        if machine.scheduler.idle and not arrivals:
            break
    else:
        raise AssertionError("it does not end")
    assert machine.ended == {
        (number, index): text_of(one, index) for number, one in enumerate(asked) for index in range(one.samples)
    }
    statistics = machine.scheduler.statistics
    assert statistics.prompt_tokens >= sum(len(one.prompt) for one in asked)
    assert statistics.prefill_tokens + statistics.decode_tokens == machine.computed
    assert statistics.peak_pages <= most + spare
    pool, prefixes = group.replica.pool, group.replica.prefixes
    assert pool.used_count == prefixes.evictable_count == len(prefixes) <= (most + spare if reuse else 0)


def alone(request: GenerationRequest, pages: int = 64, page: int = 4, **options: int) -> Machine:
    group = CacheGroup(IdentityComm(), CacheConfig(pages, page))
    machine = Machine(Scheduler(group, **{"token_budget": 16, "max_rows": 4, **options}), group)
    machine.scheduler.submit(request)
    return machine


def test_a_prompt_is_computed_once_for_all_that_begin_alike() -> None:
    """Also for those that come while it is being computed, and whose pages are not confirmed yet."""
    shared = tuple(range(40))
    machine = alone(GenerationRequest(prompt=(*shared, 1), max_tokens=5))
    for number in range(3):
        machine.scheduler.submit(GenerationRequest(prompt=(*shared, 50 + number, 1), max_tokens=5))
    while not machine.scheduler.idle:
        machine.step()
    statistics = machine.scheduler.statistics
    assert statistics.prompt_tokens == 41 + 3 * 42
    assert statistics.reused_tokens == 3 * 40
    assert statistics.prefill_tokens == 41 + 3 * 2


def test_samples_share_the_pages_of_their_prompt() -> None:
    machine = alone(GenerationRequest(prompt=tuple(range(18)), max_tokens=6, samples=4), page=4, token_budget=32)
    while not machine.scheduler.idle:
        machine.step()
    # Four full pages of the prompt, and for each sample its own copy of the fifth and one more.
    assert machine.scheduler.statistics.peak_pages == 4 + 4 * 2
    assert machine.scheduler.statistics.prefill_tokens == 18
    assert machine.scheduler.statistics.forks == 3


def test_the_youngest_makes_way_and_comes_again() -> None:
    machine = alone(GenerationRequest(prompt=(1, 2, 3), max_tokens=14), pages=6, page=4)
    machine.scheduler.submit(GenerationRequest(prompt=(2, 2, 2), max_tokens=14))
    while not machine.scheduler.idle:
        machine.step()
    assert machine.scheduler.statistics.preemptions > 0
    assert list(machine.ended) == [(0, 0), (1, 0)]


def test_long_prompts_do_not_stop_those_that_write() -> None:
    machine = alone(GenerationRequest(prompt=(1,), max_tokens=30), token_budget=4, max_rows=2)
    machine.step()
    machine.scheduler.submit(GenerationRequest(prompt=tuple(range(40)), max_tokens=2))
    for _ in range(10):
        plan = machine.step()
        assert [row.count for row in plan.rows] == [1, 3]


def test_an_era_that_ends_begins_all_again() -> None:
    request = GenerationRequest(prompt=(1, 2, 3, 4, 5, 6), max_tokens=6, samples=2)
    for at in range(7):
        machine = alone(request)
        for _ in range(at):
            machine.step()
        machine.group.flush()
        machine.scheduler.restart()
        while not machine.scheduler.idle:
            machine.step()
        assert machine.ended == {(0, index): text_of(request, index) for index in range(2)}


def test_what_cannot_fit_is_refused_at_once() -> None:
    with pytest.raises(
        OutOfPagesError, match="a prompt of 30 tokens with 4 more takes 9 pages, but the cache has 8 of 4"
    ):
        alone(GenerationRequest(prompt=(1,) * 30, max_tokens=4), pages=8)
    with pytest.raises(ArgumentError, match=r"token_budget must be max_rows or more.* got 3 and 4"):
        alone(GenerationRequest(prompt=(1,), max_tokens=4), token_budget=3)

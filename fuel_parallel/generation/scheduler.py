"""What each step computes: continuous batching (Orca: Yu et al., OSDI 2022) over the pages of a cache.

A step takes up to `token_budget` tokens. Sequences that already write come first, one token each; what is left goes to
prompts, in the order in which requests came, in chunks if need be (Sarathi: Agrawal et al., 2024, arXiv:2403.02310). A
request begins when a row and the pages of its prompt are free. Where pages run out while sequences grow, the youngest
is taken out: its pages are given up, and it begins again later, at the end of what is still cached of it. The oldest
is never taken out for another, so it ends, then the next is the oldest: every request ends.

A prompt that begins like one that is being computed waits for those pages, and does not compute them as well.
Samples of one prompt are forks: they share its pages, and the one that is not full is copied by those that write to it.

Only rank 0 has a scheduler, whose commands to the cache all ranks repeat. No clock, no random numbers, no tensors.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from fuel_parallel.distributed_cache.group import CacheGroup
from fuel_parallel.distributed_cache.hashing import token_array
from fuel_parallel.errors import ArgumentError, OutOfPagesError
from fuel_parallel.generation.requests import GenerationRequest
from fuel_parallel.generation.sampling import Draw


class Row(msgspec.Struct, frozen=True):
    """Tokens of one sequence that a step computes.

    Args:
        sequence: Its number in the cache.
        first: The position of the first of them.
        tokens: Which they are, as little-endian int32.
        draws: What is drawn from the logits after the last one; nothing in the middle of a prompt.
    """

    sequence: int
    first: int
    tokens: bytes
    draws: tuple[Draw, ...] = ()

    @property
    def count(self) -> int:
        """How many tokens."""
        return len(self.tokens) // 4


class StepPlan(msgspec.Struct, frozen=True):
    """What all ranks compute in a step; nothing where ranks are not together yet, or there is nothing to do.

    Args:
        rows: The sequences.
        idle: All requests have ended.
    """

    rows: tuple[Row, ...] = ()
    idle: bool = False


@dataclass(eq=False)
class Continuation:
    """A sample of a request that has not ended: all tokens that it has, and how many of them are in pages."""

    request: GenerationRequest
    number: int
    index: int
    tokens: list[int]
    sequence: int = -1
    computed: int = 0
    settled_at: int = 0
    """The step from which on what it has written may be used by others."""
    promised: set[bytes] = field(default_factory=set)
    """Hashes of pages that it will have written by then."""
    forks: list[Continuation] = field(default_factory=list)
    """Those that begin with its pages, before it writes more."""
    admitted: int = 0
    """Tokens that it had when it began."""

    @property
    def age(self) -> tuple[int, int]:
        """Less for what came earlier."""
        return self.number, self.index

    @property
    def missing(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.tokens) - self.computed


@dataclass
class SchedulerStatistics:
    """What a scheduler had computed, in tokens; `preemptions` counts sequences, `peak_pages` those that sequences had.

    `prompt_tokens` are those of prompts, and of sequences that began again; each was either `reused_tokens` or
    `prefill_tokens`.
    """

    steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    forks: int = 0
    peak_pages: int = 0


class Scheduler:
    """Decides on rank 0 what the ranks of a cache compute.

    Args:
        cache: What all ranks agree on.
        token_budget: Tokens of a step, at most.
        max_rows: Sequences of a step, at most.
        reuse_prefixes: Whether prompts begin with cached pages; then each rank tells the cache what it `wrote`.

    Raises:
        ArgumentError: A budget that does not give every row a token.

    >>> from fuel_parallel import IdentityComm
    >>> from fuel_parallel.distributed_cache import CacheConfig
    >>> cache = CacheGroup(IdentityComm(), CacheConfig(num_pages=8, page_tokens=2))
    >>> scheduler = Scheduler(cache, token_budget=4, max_rows=2)
    >>> _ = scheduler.submit(GenerationRequest(prompt=(1, 2, 3, 4, 5, 6), max_tokens=2))
    >>> [(row.first, row.count, len(row.draws)) for row in scheduler.schedule().rows]
    [(0, 4, 0)]
    """

    def __init__(
        self, cache: CacheGroup, *, token_budget: int = 512, max_rows: int = 32, reuse_prefixes: bool = True
    ) -> None:
        if max_rows < 1 or token_budget < max_rows:
            raise ArgumentError(
                "Scheduler: token_budget must be max_rows or more, and that 1 or more, so that each sequence can go "
                f"on; got {token_budget} and {max_rows}"
            )
        self.cache = cache
        self.token_budget, self.max_rows, self.reuse_prefixes = token_budget, max_rows, reuse_prefixes
        self.statistics = SchedulerStatistics()
        self.waiting: list[Continuation] = []
        self.running: list[Continuation] = []
        self._requests = 0
        self._sequences = 0

    @property
    def idle(self) -> bool:
        """Whether all requests have ended."""
        return not self.waiting and not self.running

    @property
    def load(self) -> int:
        """Tokens of prompts that are to be computed, as far as they are not known to be cached."""
        return sum(one.missing for one in (*self.waiting, *self.running))

    def check(self, request: GenerationRequest) -> None:
        """Raises `OutOfPagesError` for a request that even alone does not fit into the cache."""
        config = self.cache.replica.config
        token_array(request.prompt)  # its error for tokens that are none
        needed = -(-(len(request.prompt) + request.max_tokens - 1) // config.page_tokens)
        if needed > config.num_pages:
            raise OutOfPagesError(
                f"a prompt of {len(request.prompt)} tokens with {request.max_tokens} more takes {needed} pages, but "
                f"the cache has {config.num_pages} of {config.page_tokens} tokens; ask for fewer tokens or give it more"
            )

    def submit(self, request: GenerationRequest) -> int:
        """Takes a request in; gives its number. Raises as `check` does."""
        self.check(request)
        number = self._requests
        self._requests += 1
        self.waiting.append(Continuation(request, number, 0, list(request.prompt)))
        return number

    def schedule(self) -> StepPlan:
        """What the next step computes. Has given the cache the commands for it."""
        self.statistics.steps += 1
        preemptions = self.statistics.preemptions
        self._settle()
        rows: list[Row] = []
        for one in list(self.running):
            if one.missing == 1 and not one.forks and self._make_room(one):
                rows.append(self._row(one, 1))
        budget = self.token_budget - len(rows)
        for one in self.running:
            if one.missing > 1 and budget:
                rows.append(self._row(one, min(budget, one.missing)))
                budget -= rows[-1].count
        if budget and self.statistics.preemptions == preemptions:
            self._admit(rows, budget)
        pool, prefixes = self.cache.replica.pool, self.cache.replica.prefixes
        self.statistics.peak_pages = max(self.statistics.peak_pages, pool.used_count - prefixes.evictable_count)
        return StepPlan(tuple(rows), self.idle)

    def advance(self, plan: StepPlan, drawn: Sequence[Sequence[int]]) -> list[tuple[Continuation, int]]:
        """Takes in that a plan was carried out: the tokens that were drawn, and whose each of them is."""
        of = {one.sequence: one for one in self.running}
        found: list[tuple[Continuation, int]] = []
        for row, tokens in zip(plan.rows, drawn, strict=True):
            one = of[row.sequence]
            one.computed = row.first + row.count
            if row.first < one.admitted:
                self.statistics.prefill_tokens += row.count
            else:
                self.statistics.decode_tokens += row.count
            if not tokens:
                continue
            if one.promised:
                one.settled_at = self.statistics.steps + 2  # told in the next step, known in the one after
            one.forks = [
                Continuation(one.request, one.number, index, [*one.tokens, token])
                for index, token in enumerate(tokens[1:], one.index + 1)
            ]
            one.tokens.append(tokens[0])
            found += zip((one, *one.forks), tokens, strict=True)
        return found

    def end(self, one: Continuation) -> None:
        """A continuation is over; its pages are free, or for others that begin alike."""
        if one in self.running:
            self._stop(one)
        elif one in self.waiting:
            self.waiting.remove(one)
        for parent in self.running:
            if one in parent.forks:
                parent.forks.remove(one)

    def restart(self) -> None:
        """The cache has begun anew, with no page and no sequence: all that were running wait again."""
        for one in self.running:
            self._wait(one)
        self.running.clear()

    def _row(self, one: Continuation, count: int) -> Row:
        first, draws = one.computed, list[Draw]()
        if count == one.missing:
            sampling, position = one.request.sampling, len(one.tokens)
            first_time = position == len(one.request.prompt)
            indices = range(one.request.samples) if first_time else [one.index]
            draws = [Draw(sampling, index, position) for index in indices]
        tokens = np.array(one.tokens[first : first + count], "<i4").tobytes()
        return Row(one.sequence, first, tokens, tuple(draws))

    def _settle(self) -> None:
        """Where all ranks know of what a prompt has written: others may use it, and its samples begin."""
        for parent in list(self.running):
            if parent.computed < parent.admitted or self.statistics.steps < parent.settled_at:
                continue
            parent.promised.clear()
            for one in parent.forks:
                if len(self.running) < self.max_rows:
                    one.sequence, one.computed = self._new_sequence(), parent.computed
                    one.admitted = parent.computed
                    self.cache.fork(parent.sequence, one.sequence)
                    self._run(one)
                    self.statistics.forks += 1
                else:
                    self._wait(one)
            parent.forks = []

    def _make_room(self, one: Continuation) -> bool:
        """Gives a sequence that grows its page, by taking the youngest out as often as need be; False if itself."""
        if one not in self.running:
            return False
        length = self.cache.replica.table.length(one.sequence)
        while length < len(one.tokens):
            try:
                self.cache.extend(one.sequence, one.tokens[length:])
                break
            except OutOfPagesError:
                youngest = self.running[-1]
                if len(self.running) == 1:
                    raise  # cannot be: it was looked at when the request came
                self._stop(youngest)
                self._wait(youngest)
                self.statistics.preemptions += 1
                if youngest is one:
                    return False
        return True

    def _admit(self, rows: list[Row], budget: int) -> None:
        replica = self.cache.replica
        for one in list(self.waiting):
            if not budget or len(self.running) == self.max_rows:
                return
            tokens, tenant = token_array(one.tokens), one.request.tenant
            match = replica.prefixes.match(tenant, tokens[:-1])
            found = len(match.pages)
            promised = list(replica.prefixes.hashes.chain(tenant, tokens))[found:] if self.reuse_prefixes else []
            if promised and any(promised[0] in other.promised for other in self.running):
                continue  # others may overtake: that page comes, or its writer is taken out
            needed = -(-len(tokens) // replica.config.page_tokens) - found
            room = replica.pool.free_count + replica.prefixes.evictable_count - replica.prefixes.count_evictable(match)
            # A page for each that runs, or this one would soon have to make way for it.
            if self.running and needed + len(self.running) > room:
                return
            one.sequence = self._new_sequence()
            one.computed = self.cache.admit(one.sequence, one.tokens, tenant).reused_tokens
            one.admitted, one.promised, one.settled_at = len(tokens), set(promised), 0
            self.waiting.remove(one)
            self._run(one)
            self.statistics.prompt_tokens += len(tokens)
            self.statistics.reused_tokens += one.computed
            rows.append(self._row(one, min(budget, one.missing)))
            budget -= rows[-1].count

    def _run(self, one: Continuation) -> None:
        bisect.insort(self.running, one, key=lambda one: one.age)

    def _new_sequence(self) -> int:
        self._sequences += 1
        return self._sequences

    def _stop(self, one: Continuation) -> None:
        self.cache.end(one.sequence)
        self.running.remove(one)
        for fork in one.forks:
            self._wait(fork)
        one.forks = []

    def _wait(self, one: Continuation) -> None:
        one.sequence, one.computed, one.promised = -1, 0, set()
        for fork in one.forks:
            self._wait(fork)
        one.forks = []
        bisect.insort(self.waiting, one, key=lambda one: one.age)

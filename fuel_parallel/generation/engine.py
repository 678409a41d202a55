"""The engine: requests in on rank 0, text out there, and all ranks of a model in step between.

A step is two small messages and a forward pass. Rank 0 schedules, the cache's agreement brings its commands to all, and
the plan says which tokens each rank computes and what is drawn from which logits. Nothing else is sent: what a rank
needs to know of a sequence lies in its own tables.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.identity import IdentityComm
from fuel_parallel.distributed_cache.batch import Chunk, PagedBatch
from fuel_parallel.distributed_cache.group import CacheGroup
from fuel_parallel.distributed_cache.pool import KVPool
from fuel_parallel.distributed_cache.replica import CacheConfig
from fuel_parallel.errors import ArgumentError, CommunicatorError
from fuel_parallel.generation.requests import Completion, FinishReason, GenerationRequest, Update
from fuel_parallel.generation.sampling import sample
from fuel_parallel.generation.scheduler import Continuation, Scheduler, StepPlan
from fuel_parallel.generation.statistics import GenerationStatistics
from fuel_parallel.generation.text import Decoder, TextStream
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.runtime.realize import realize


class PagedModel(Protocol):
    """A rank's part of a model over pages."""

    def __call__(self, tokens: Tensor, *, cache: KVPool, batch: PagedBatch) -> Tensor | None:
        """Tokens [size] to logits [rows, this rank's part of the vocabulary]; None if other ranks have them."""
        ...


class Engine:
    """Generates text on the ranks of a communicator, which serve one model together.

    Every rank makes one alike and calls `step` or `generate` as often as the others; requests are given on rank 0.

    Args:
        model: This rank's part.
        pool: Its pages, as many on each rank.
        vocabulary: Tokens that the model knows.
        comm: The ranks: those of tp, or of pp and tp.
        tp: Those that share the vocabulary; None for all of `comm`.
        logits_from: The first rank of `comm` that has logits, under pp that of the last stage.
        context: Tokens that the model was made for; None for any number.
        token_budget, max_rows, reuse_prefixes: As in `Scheduler`.
        decode: Tokens to text, for text in updates and for stop strings.
        secret: Keys the hashes of prefixes, for a cache that tenants share.

    Raises:
        ArgumentError: Pools of different sizes.

    >>> import fuel_parallel.lazy as ft
    >>> from fuel_parallel.generation import GenerationRequest
    >>> def counts(tokens, *, cache, batch):                            # likeliest is the next number
    ...     return ft.astype(ft.expand_dims(tokens[batch.last] + 1, axis=1) == ft.arange(10), "float32")
    >>> engine = Engine(counts, KVPool(num_layers=1, num_kv_heads=1, head_dim=1, num_pages=8), vocabulary=10)
    >>> [[one.tokens for one in samples] for samples in engine.generate([GenerationRequest(prompt=(3,), max_tokens=4)])]
    [[(4, 5, 6, 7)]]
    """

    def __init__(
        self,
        model: PagedModel,
        pool: KVPool,
        *,
        vocabulary: int,
        comm: Communicator | None = None,
        tp: Communicator | None = None,
        logits_from: int = 0,
        context: int | None = None,
        token_budget: int = 512,
        max_rows: int = 32,
        reuse_prefixes: bool = True,
        decode: Decoder | None = None,
        secret: bytes = b"",
    ) -> None:
        self.comm = IdentityComm() if comm is None else comm
        self.model, self.pool, self.vocabulary, self.context = model, pool, vocabulary, context
        pages = self.comm.all_gather_object(pool.num_pages, type=int)
        if len(set(pages)) > 1:
            raise ArgumentError(
                f"Engine: all ranks need pools of as many pages; they have {pages}; give num_pages={min(pages)}"
            )
        self.cache = CacheGroup(self.comm, CacheConfig(pool.num_pages, pool.page_size, secret))
        self._era = self.cache.era
        self.reuse_prefixes = reuse_prefixes
        self._tp, self._logits_from, self._decode = self.comm if tp is None else tp, logits_from, decode
        self._scheduler = Scheduler(
            self.cache, token_budget=token_budget, max_rows=max_rows, reuse_prefixes=reuse_prefixes
        )
        self.statistics = GenerationStatistics(self._scheduler.statistics, pool.num_pages, pool.bytes_per_page)
        self.idle = False
        """Whether the last step found nothing to do; the same on all ranks."""
        self._began: dict[int, float] = {}
        self._streams: dict[tuple[int, int], TextStream] = {}

    @property
    def load(self) -> int:
        """Tokens that are left to compute; on rank 0."""
        return self._scheduler.load

    def submit(self, request: GenerationRequest) -> int:
        """Takes a request in, on rank 0; gives its number. Raises as `check` does."""
        if not self.comm.is_root:
            raise CommunicatorError(f"submit: requests are given on rank 0, this is rank {self.comm.rank}")
        self.check(request)
        number = self._scheduler.submit(request)
        self._began[number] = time.perf_counter()
        return number

    def check(self, request: GenerationRequest) -> None:
        """Whether the engine can ever do what is asked for.

        Raises:
            ArgumentError: Tokens that the model does not know or more than it was made for, stop strings without a
                `decode`.
            OutOfPagesError: More than the cache could hold.
        """
        if request.stop_strings and self._decode is None:
            raise ArgumentError("submit: stop strings need an engine with decode=, from tokens to text")
        strange = [token for token in request.prompt if not 0 <= token < self.vocabulary]
        if strange:
            raise ArgumentError(f"submit: the model knows tokens 0 to {self.vocabulary - 1}, not {strange[0]}")
        length = len(request.prompt) + request.max_tokens
        if self.context is not None and length > self.context:
            raise ArgumentError(
                f"submit: {len(request.prompt)} tokens and {request.max_tokens} more are {length}; the model was made "
                f"for {self.context}; ask for fewer"
            )
        self._scheduler.check(request)

    def generate(self, requests: Sequence[GenerationRequest] = ()) -> list[list[Completion]]:
        """Completes requests, those that rank 0 gives: on rank 0 the samples of each of them, elsewhere nothing."""
        numbers = [self.submit(one) for one in requests] if self.comm.is_root else []
        done: dict[int, dict[int, Completion]] = {number: {} for number in numbers}
        self.idle = False
        while not self.idle:
            for update in self.step():
                if update.completion is not None and update.request in done:
                    done[update.request][update.sample] = update.completion
        return [[done[number][index] for index in sorted(done[number])] for number in numbers]

    def step(self) -> list[Update]:
        """Computes the next tokens, on all ranks together; on rank 0, what they add to each continuation."""
        began = time.perf_counter()
        plan = self._agree()
        self.idle = plan.idle
        if not plan.rows:
            return []
        drawn = self._compute(plan)
        if self.reuse_prefixes:
            for row in plan.rows:
                self.cache.wrote(row.sequence, row.first + row.count)
        updates = self._advance(plan, drawn) if self.comm.is_root else []
        self.statistics.seconds += time.perf_counter() - began
        return updates

    def _agree(self) -> StepPlan:
        """The plan of rank 0, after the pages of this rank are where it expects them."""
        plan = StepPlan()
        if self.comm.is_root:
            if self.cache.era != self._era:  # a rank has lost its pages
                self._scheduler.restart()
                self._era = self.cache.era
            if self.cache.together:
                plan = self._scheduler.schedule()
        era, outcomes = self.cache.step()
        if self.comm.is_root and era != self.cache.era:
            plan = StepPlan()
        self.pool.follow(outcomes)
        agreed: StepPlan = self.comm.broadcast_object(plan, type=StepPlan)
        return agreed

    def _compute(self, plan: StepPlan) -> list[list[int]]:
        chunks = [Chunk(row.sequence, row.first, row.count) for row in plan.rows]
        batch = PagedBatch.of(self.cache.replica.table, chunks, device=self.pool.device)
        tokens = np.concatenate([np.frombuffer(row.tokens, "<i4") for row in plan.rows])
        logits = self.model(batch.padded_tokens(tokens), cache=self.pool, batch=batch)
        realize(self.pool, *([] if logits is None else [logits]))
        drawn: list[list[int]] = []
        asked = [number for number, row in enumerate(plan.rows) if row.draws]
        if asked:
            found: list[list[int]] = []
            if logits is not None:
                draws = [plan.rows[number].draws for number in asked]
                found = sample(logits.numpy()[asked], draws, self.vocabulary, self._tp)
            if self._logits_from:
                found = self.comm.broadcast_object(found, self._logits_from, type=list[list[int]])
            by_row = dict(zip(asked, found, strict=True))
            drawn = [by_row.get(number, []) for number in range(len(plan.rows))]
        return drawn or [[] for _ in plan.rows]

    def _advance(self, plan: StepPlan, drawn: list[list[int]]) -> list[Update]:
        now = time.perf_counter()
        updates = []
        for one, token in self._scheduler.advance(plan, drawn):
            self.statistics.generated_tokens += 1
            if one.number in self._began:
                self.statistics.first_token_seconds.append(now - self._began.pop(one.number))
            updates.append(self._update(one, token))
        return updates

    def _update(self, one: Continuation, token: int) -> Update:
        request, prompt = one.request, len(one.request.prompt)
        text, reason = "", self._reason(one, token)
        stream = self._streams.get((one.number, one.index))
        if stream is None and self._decode is not None:
            stream = TextStream(self._decode, request.prompt, request.stop_strings)
            self._streams[one.number, one.index] = stream
        if stream is not None:
            text = "" if token in request.stop_tokens else stream.push(token)
            if reason is not None:
                text += stream.finish()
            if stream.stopped:
                reason = "stop"
        completion = None
        if reason is not None:
            said = "" if stream is None else stream.text
            completion = Completion(tuple(one.tokens[prompt:]), said, reason)
            self._scheduler.end(one)
            self._streams.pop((one.number, one.index), None)
        return Update(one.number, one.index, (token,), text, completion)

    def _reason(self, one: Continuation, token: int) -> FinishReason | None:
        if token in one.request.stop_tokens:
            return "stop"
        return "length" if len(one.tokens) == len(one.request.prompt) + one.request.max_tokens else None

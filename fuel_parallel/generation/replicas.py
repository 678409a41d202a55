"""Several replicas of a model as one: requests are given in one place, and each goes where its prompt is cached."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fuel_parallel.distributed_cache.hashing import PageHashes
from fuel_parallel.distributed_cache.routing import PrefixDigest, Router, RoutingPolicy
from fuel_parallel.errors import CommunicatorError
from fuel_parallel.generation.engine import Engine
from fuel_parallel.generation.requests import GenerationRequest, Update
from fuel_parallel.generation.statistics import GenerationStatistics

if TYPE_CHECKING:
    from fuel_parallel.comm.communicator import Communicator


_Share = list[tuple[int, GenerationRequest]]


class _News(msgspec.Struct, frozen=True):
    """What a replica tells after some steps."""

    updates: tuple[Update, ...]
    digest: PrefixDigest
    load: int
    idle: bool


class Replicas:
    """The engines of the replicas on the ranks of `dp`, used as one engine.

    Every rank makes one of its replica's engine and calls `step` as often as the others. Requests are given on rank 0
    of replica 0, which routes them by what replicas have told of their prefixes and of what they have to do.

    Args:
        engine: Of this rank's replica.
        dp: The ranks that have this rank's place in the other replicas.
        policy: Where a request goes: see `Router`.
        round_steps: Steps that replicas take before they tell each other.

    >>> import fuel_parallel.lazy as ft
    >>> from fuel_parallel import IdentityComm
    >>> from fuel_parallel.distributed_cache import KVPool
    >>> def counts(tokens, *, cache, batch):                            # likeliest is the next number
    ...     return ft.astype(ft.expand_dims(tokens[batch.last] + 1, axis=1) == ft.arange(10), "float32")
    >>> engine = Engine(counts, KVPool(num_layers=1, num_kv_heads=1, head_dim=1, num_pages=8), vocabulary=10)
    >>> replicas = Replicas(engine, IdentityComm())
    >>> replicas.submit(GenerationRequest(prompt=(3,), max_tokens=2))
    0
    >>> [update.tokens for update in replicas.step()]
    [(4,)]
    """

    def __init__(
        self,
        engine: Engine,
        dp: Communicator,
        *,
        policy: RoutingPolicy = RoutingPolicy.BALANCED,
        round_steps: int = 8,
    ) -> None:
        self.engine, self.dp = engine, dp
        self.idle = False
        """Whether all replicas had nothing to do; the same on all ranks."""
        config = engine.cache.replica.config
        self.router = Router(dp.world_size, PageHashes(config.page_tokens, config.secret), policy)
        self._round_steps = round_steps if dp.world_size > 1 else 1
        self._waiting: list[tuple[int, GenerationRequest]] = []
        self._numbers: dict[int, int] = {}  # of this replica's engine, to those of all
        self._requests = 0

    @property
    def is_root(self) -> bool:
        """Whether requests are given here."""
        return self.dp.is_root and self.engine.comm.is_root

    @property
    def waiting(self) -> bool:
        """Whether there are requests that no replica has yet; where they are given."""
        return bool(self._waiting)

    def submit(self, request: GenerationRequest) -> int:
        """Takes a request in, on rank 0 of replica 0; gives its number. Raises as `Engine.submit` does."""
        if not self.is_root:
            raise CommunicatorError("submit: requests are given on rank 0 of replica 0")
        self.engine.check(request)
        self._waiting.append((self._requests, request))
        self._requests += 1
        return self._requests - 1

    def step(self) -> list[Update]:
        """Some steps of each replica; on rank 0 of replica 0, what came of them."""
        engine = self.engine
        if engine.comm.is_root:
            for number, request in self._share():
                self._numbers[engine.submit(request)] = number
        updates: list[Update] = []
        for _ in range(self._round_steps):
            updates += engine.step()
            if engine.idle:
                break
        updates = [msgspec.structs.replace(one, request=self._numbers[one.request]) for one in updates]
        return self._tell(tuple(updates))

    def statistics(self) -> list[GenerationStatistics]:
        """Those of each replica, on all ranks; a collective call."""
        mine = self.engine.comm.broadcast_object(self.engine.statistics, type=GenerationStatistics)
        return self.dp.all_gather_object(mine, type=GenerationStatistics)

    def _share(self) -> _Share:
        """The requests that this replica is to take in."""
        shares: list[_Share] = [[] for _ in range(self.dp.world_size)]
        for number, request in self._waiting:
            replica, _ = self.router.route(request.prompt, request.tenant)
            shares[replica].append((number, request))
        self._waiting.clear()
        if self.dp.world_size > 1:
            shares = self.dp.broadcast_object(shares, type=list[_Share])
        return shares[self.dp.rank]

    def _tell(self, updates: tuple[Update, ...]) -> list[Update]:
        """What all replicas have done, on the root."""
        engine = self.engine
        self.idle = engine.idle
        if self.dp.world_size == 1:
            return list(updates)
        found: list[Update] = []
        if engine.comm.is_root:
            digest = PrefixDigest.of(engine.cache.replica.prefixes)
            news = self.dp.all_gather_object(_News(updates, digest, engine.load, engine.idle), type=_News)
            self.idle = all(one.idle for one in news)
            for replica, one in enumerate(news):
                self.router.update(replica, one.digest)
                self.router.loads[replica] = one.load
            found = [update for one in news for update in one.updates] if self.dp.is_root else []
        self.idle = engine.comm.broadcast_object(self.idle, type=bool)
        return found

"""The agreement of `agreement` over a communicator: one small message of each rank a step, all in one collective."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from fuel_parallel.distributed_cache.agreement import Era, Follower, Leader, Message, Orders, Report
from fuel_parallel.distributed_cache.hashing import token_array
from fuel_parallel.distributed_cache.protocol import CacheShardInfo
from fuel_parallel.distributed_cache.replica import (
    Admit,
    CacheConfig,
    CacheReplica,
    Command,
    End,
    Extend,
    Fork,
    Outcome,
)
from fuel_parallel.errors import CommunicatorError

if TYPE_CHECKING:
    from fuel_parallel.comm.communicator import Communicator


class CacheStep(NamedTuple):
    """What every rank of a group has to do now.

    Args:
        era: Another one than before means that all pages and sequences are gone.
        outcomes: In order.
    """

    era: Era
    outcomes: list[Outcome]


class CacheGroup:
    """The cache of the ranks of a communicator, such as those of tp × pp that serve one model.

    Rank 0 decides (`admit`, `extend`, `fork`, `end`), every rank calls `step` as often as the others and gets the same
    outcomes, does what they say to its arrays, and tells by `wrote` what it has computed.

    Args:
        comm: The ranks.
        config: The same on all ranks; its secret need only be given on rank 0.
        shards: The layers of each rank; without, all ranks hold all layers.

    >>> from fuel_parallel import IdentityComm
    >>> group = CacheGroup(IdentityComm(), CacheConfig(num_pages=8, page_tokens=2))
    >>> group.admit(1, [5, 6, 7, 8, 9]).reused_tokens
    0
    >>> [outcome.pages for outcome in group.step().outcomes]
    [(0, 1, 2)]
    >>> group.wrote(1, 5)
    >>> _ = group.step()
    >>> group.admit(2, [5, 6, 7, 8, 1]).reused_tokens
    4
    """

    def __init__(self, comm: Communicator, config: CacheConfig, shards: Sequence[CacheShardInfo] | None = None) -> None:
        self.comm = comm
        self._config = comm.broadcast_object(config, type=CacheConfig)
        self._shards = shards
        self.rejoin()

    @property
    def replica(self) -> CacheReplica:
        """The bookkeeping of this rank: page tables, prefixes, statistics."""
        return self._member.replica

    @property
    def era(self) -> Era:
        """Which era this rank is in."""
        return self._member.era

    @property
    def together(self) -> bool:
        """Whether all ranks will do what is ordered before the next `step`; on rank 0. In a new era it takes a few."""
        return self._leader("together").together

    def admit(self, sequence: int, tokens: Sequence[int], tenant: str = "") -> Outcome:
        """Begins a sequence; on rank 0. Raises `OutOfPagesError` where it must wait."""
        return self._submit(Admit(sequence, token_array(tokens).astype("<i4").tobytes(), tenant))

    def extend(self, sequence: int, tokens: Sequence[int]) -> Outcome:
        """Gives a sequence more tokens; on rank 0. Raises `OutOfPagesError` where it must wait."""
        return self._submit(Extend(sequence, token_array(tokens).astype("<i4").tobytes()))

    def fork(self, sequence: int, child: int) -> Outcome:
        """Begins `child` with all that a sequence has; on rank 0."""
        return self._submit(Fork(sequence, child))

    def end(self, sequence: int) -> Outcome:
        """Ends a sequence; on rank 0."""
        return self._submit(End(sequence))

    def flush(self) -> None:
        """Drops all pages and sequences, as for other weights; on rank 0."""
        self._leader("flush").flush()

    def wrote(self, sequence: int, num_tokens: int) -> None:
        """This rank holds keys and values of the first tokens of a sequence, in all its layers; on every rank.

        Of a sequence that has ended here, or was flushed, nothing is told.
        """
        if sequence in self.replica.table:
            self._member.wrote(sequence, num_tokens)

    def step(self) -> CacheStep:
        """Tells the others, and hears what they tell: a collective call, made at once."""
        leader = self._member if isinstance(self._member, Leader) else None
        mine: Message = self._member.report() if leader is None else leader.orders()
        messages = self.comm.all_gather_object(mine, type=Message)
        if leader is None:
            orders = messages[0]
            outcomes = self._member.receive(orders) if isinstance(orders, Orders) else []
            return CacheStep(self._member.era, outcomes)
        era, outcomes = leader.era, leader.outcomes
        leader.outcomes = []
        leader.take_in(leader.report(), *(one for one in messages if isinstance(one, Report)))
        return CacheStep(era, outcomes)

    def rejoin(self) -> None:
        """Forgets all that this rank has, as after a loss of its pages. The next steps flush the cache of all ranks."""
        incarnation, ranks = time.time_ns(), self.comm.world_size
        self._member: Follower = (
            Leader(ranks, self._config, incarnation, self._shards)
            if self.comm.is_root
            else Follower(self.comm.rank, self._config, incarnation)
        )

    def _submit(self, command: Command) -> Outcome:
        return self._leader(type(command).__name__.lower()).submit(command)

    def _leader(self, function: str) -> Leader:
        if not isinstance(self._member, Leader):
            raise CommunicatorError(
                f"{function}: rank 0 decides for all ranks of the cache, this is rank {self.comm.rank}; call it there, "
                "and `step` on all ranks"
            )
        return self._member

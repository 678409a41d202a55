"""How the ranks of a group stay of one mind about their cache: one leader orders commands, all ranks apply them.

The leader, rank 0, applies each command to its own replica first, so one that cannot be done is an error there and
nowhere else. The others get the commands as a numbered log and apply them in this order; what comes of one needs not be
sent, for it is the same everywhere. They report how far they are, with a digest of what came of it, and which tokens
of which sequence they really hold. What all ranks hold, the leader confirms by one more command: only then may another
sequence begin with it.

An *era* begins with empty replicas everywhere. A rank that missed messages gets them again from the log. A rank that
was started again, one whose digest is another, or one that is further behind than the log reaches, makes the leader
begin the next era: what is in its pages cannot be known, so nobody keeps any. A leader that was started again begins
one after all that others report. Messages may be lost, doubled, late and out of order: each start of a rank has a
number, its *incarnation*, and orders to or reports of another one count for nothing.

Here is no communication and no clock: messages in, messages out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from fuel_parallel.distributed_cache.protocol import (
    CacheShardInfo,
    CacheSyncProtocol,
    FlushAll,
    PrefixConfirmed,
    ShardUpdated,
    SyncEvent,
)
from fuel_parallel.distributed_cache.replica import (
    Admit,
    CacheConfig,
    CacheReplica,
    Command,
    Confirm,
    End,
    Fork,
    Outcome,
)
from fuel_parallel.errors import ArgumentError, CacheError

Era = tuple[int, int]
"""A count, and the number that the leader who began it was started with: no two leaders begin the same."""


class Orders(msgspec.Struct, frozen=True, tag=True):
    """From the leader: the commands of an era from number `first` on, for ranks of these incarnations (0: unknown)."""

    era: Era
    to: tuple[int, ...]
    first: int
    commands: tuple[Command, ...]


class Report(msgspec.Struct, frozen=True, tag=True):
    """From a rank: how many commands of an era it has applied, the digest, and what it has written since."""

    rank: int
    incarnation: int
    era: Era
    applied: int
    digest: bytes
    events: tuple[SyncEvent, ...]


Message = Orders | Report


class Follower:
    """A rank that applies what the leader orders.

    Args:
        rank: Its number in the group.
        config: The same on all ranks.
        incarnation: A number above 0 that is greater with each start of this rank, such as the time.
    """

    def __init__(self, rank: int, config: CacheConfig, incarnation: int) -> None:
        if incarnation < 1:
            raise ArgumentError(f"{type(self).__name__}: incarnation must be above 0, not {incarnation}")
        self.rank = rank
        self.incarnation = incarnation
        self.config = config
        self.era: Era = (0, 0)
        self.replica = CacheReplica(config)
        self.flushes = 0
        """How often an era began."""
        self._written: dict[int, int] = {}

    def wrote(self, sequence: int, num_tokens: int) -> None:
        """This rank now holds keys and values of the first `num_tokens` tokens, for all of its layers and heads."""
        if sequence not in self.replica.table or not 0 < num_tokens <= self.replica.table.length(sequence):
            length = self.replica.table.length(sequence)  # or the error that there is no such sequence
            raise ArgumentError(f"wrote: sequence {sequence} has {length} tokens, not {num_tokens}")
        self._written[sequence] = max(num_tokens, self._written.get(sequence, 0))

    def receive(self, orders: Orders) -> list[Outcome]:
        """Applies what is next; orders of an older era, to another incarnation or after a gap change nothing."""
        if orders.era < self.era or orders.to[self.rank] != self.incarnation:
            return []
        if orders.era > self.era:
            self._begin(orders.era)
        outcomes = []
        done = self.replica.applied - orders.first
        for command in orders.commands[done:] if done >= 0 else ():
            try:
                outcomes.append(self.replica.apply(command))
            except (ArgumentError, CacheError):
                # What the leader could do, this rank cannot: it is of another mind, and its digest must say so.
                self.replica.digest = b"diverged"
                break
            if isinstance(command, End):
                self._written.pop(command.sequence, None)
        return outcomes

    def report(self) -> Report:
        """Where this rank is. It tells all positions that are not confirmed yet: an earlier report may be lost."""
        events = [
            ShardUpdated(self.rank, None, num_tokens - 1, sequence)
            for sequence, num_tokens in self._written.items()
            if num_tokens // self.config.page_tokens * self.config.page_tokens > self.replica.confirmed_tokens(sequence)
        ]
        return Report(self.rank, self.incarnation, self.era, self.replica.applied, self.replica.digest, tuple(events))

    def _begin(self, era: Era) -> None:
        self.era = era
        self.replica = CacheReplica(self.config)
        self._written.clear()
        self.flushes += 1


class Leader(Follower):
    """Rank 0, which orders what all apply.

    Args:
        world_size: The ranks of the group.
        config: The same on all ranks.
        incarnation: A number above 0 that is greater with each start of the leader, such as the time.
        shards: The layers of each rank; without, all ranks hold all layers.
        log_size: How many commands are kept for those that are behind.

    >>> config = CacheConfig(num_pages=8, page_tokens=2)
    >>> leader, follower = Leader(2, config, incarnation=1), Follower(1, config, incarnation=1)
    >>> outcome = leader.submit(Admit(1, bytes(20)))
    >>> leader.take_in(follower.report())
    >>> follower.receive(leader.orders()) == [outcome]
    True
    >>> for rank in (leader, follower):
    ...     rank.wrote(1, 5)
    >>> leader.take_in(leader.report(), follower.report())
    >>> leader.replica.confirmed_tokens(1)
    4
    """

    def __init__(
        self,
        world_size: int,
        config: CacheConfig,
        incarnation: int,
        shards: Sequence[CacheShardInfo] | None = None,
        log_size: int = 4096,
    ) -> None:
        if log_size < 1:
            raise ArgumentError(f"Leader: log_size must be 1 or more, not {log_size}")
        super().__init__(0, config, incarnation)
        self.world_size = world_size
        self.log_size = log_size
        self.outcomes: list[Outcome] = []
        """What commands did since this was last emptied, those that the leader itself ordered with them."""
        self.protocol = CacheSyncProtocol(world_size, 1 if shards is None else shards[0].num_layers, shards)
        self._incarnations = [incarnation, *[0] * (world_size - 1)]
        self.flush()

    def submit(self, command: Command) -> Outcome:
        """Does a command and puts it into the log. What `CacheReplica.apply` raises leaves both as they were."""
        outcome = self.replica.apply(command)
        if isinstance(command, Admit | Fork):
            self._begun[outcome.sequence] = self.replica.applied
        if isinstance(command, End):
            del self._begun[command.sequence]
            self._written.pop(command.sequence, None)
            self.protocol.forget(command.sequence)
        for one in outcome.evicted:
            self.protocol.withdraw_prefix(int.from_bytes(one.page_hash[:8], "big"))
        if outcome.prefix:
            tokens = self.replica.confirmed_tokens(outcome.sequence)
            self.protocol.record_event(PrefixConfirmed(outcome.prefix, tokens))
        self.outcomes.append(outcome)
        self._log.append(command)
        self._digests.append(self.replica.digest)
        if len(self._log) > self.log_size:
            self._drop(1)
        return outcome

    def flush(self) -> None:
        """Begins a new era: all ranks drop all pages, and all sequences are gone."""
        self._begin((self.era[0] + 1, self.incarnation))
        self._acknowledged = [0] * self.world_size
        self._heard = {0}
        self._begun: dict[int, int] = {}  # how many commands there were once a sequence had begun
        self._first = 0  # number of the first command of the log
        self._log: deque[Command] = deque()
        self.outcomes.clear()
        self._digests = deque([b""])  # before the first command of the log, and after each
        self.protocol.record_event(FlushAll())

    def take_in(self, *reports: Report) -> None:
        """Follows what ranks report: confirms what all hold, or begins a new era where one has lost its pages."""
        for report in reports:
            known = self._incarnations[report.rank]
            self._incarnations[report.rank] = max(known, report.incarnation)
            if report.era > self.era:
                self.era = report.era
                self.flush()
            elif 0 < known < report.incarnation:
                self.flush()
            elif report.era == self.era and report.incarnation >= known:
                self._follow(report)
        self._drop(min(self._acknowledged) - self._first)
        self._confirm()

    @property
    def together(self) -> bool:
        """Whether each rank has reported in this era, and so will apply the next orders."""
        return len(self._heard) == self.world_size

    def orders(self) -> Orders:
        """What the ranks are to apply, from where the one that is furthest behind is."""
        return Orders(self.era, tuple(self._incarnations), self._first, tuple(self._log))

    def _follow(self, report: Report) -> None:
        if report.applied < self._acknowledged[report.rank]:
            return  # late: a newer one was here before
        index = report.applied - self._first
        if not 0 <= index < len(self._digests) or self._digests[index] != report.digest:
            self.flush()
            return
        self._acknowledged[report.rank] = report.applied
        self._heard.add(report.rank)
        for event in report.events:
            # A number may be given again, and the report be about the sequence that had it before.
            if isinstance(event, ShardUpdated) and report.applied >= self._begun.get(event.sequence, 2**63):
                self.protocol.record_event(event)

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._log.popleft()
            self._digests.popleft()
            self._first += 1

    def _confirm(self) -> None:
        for sequence in list(self.replica.table):
            full = self.protocol.synced_tokens(sequence)
            if self.replica.can_confirm(sequence, full):
                self.submit(Confirm(sequence, full))

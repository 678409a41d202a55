"""Whatever the network does and whoever is started again: ranks that applied as much have the same, a reused page has
on every rank what the prompt says, no page leaks, and once faults end all ranks are of one mind.

`FUEL_STRESS=1` plays 100,000 steps with faults for each number of ranks.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fuel_parallel.distributed_cache import (
    Admit,
    CacheConfig,
    CacheReplica,
    Command,
    Confirm,
    End,
    Extend,
    Follower,
    Fork,
    Leader,
    Orders,
    Outcome,
    Report,
)
from fuel_parallel.errors import ArgumentError, CacheError, OutOfPagesError

STEPS = 100_000 if os.environ.get("FUEL_STRESS") else 3000
ODDS = {"admit": 3, "change": 3, "write": 8, "send": 6, "deliver": 9, "lose": 1, "restart": 0.1}
CONFIG = CacheConfig(num_pages=9, page_tokens=2, secret=b"secret")


def encoded(tokens: list[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def decoded(tokens: bytes) -> list[int]:
    return np.frombuffer(tokens, "<i4").tolist()


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=8)


class RecordingLeader(Leader):
    """Remembers the commands of all eras, for what a rank is to have."""

    history: dict[tuple[int, int], list[Command]]

    def submit(self, command: Command) -> Outcome:
        outcome = super().submit(command)
        self.history.setdefault(self.era, []).append(command)
        return outcome


class World:
    """Ranks with arrays of pages, and a network that loses, doubles, delays and reorders.

    What a rank writes for a token is all of the prompt up to it: what keys and values depend on.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.starts = 0
        self.history: dict[tuple[int, int], list[Command]] = {}
        self.seen: dict[tuple[tuple[int, int], int], bytes] = {}
        self.flying: list[tuple[int, Orders | Report]] = []
        self.members: list[Follower] = [self.start(rank) for rank in range(ranks)]
        self.memory = [self.fresh_memory() for _ in range(ranks)]
        self.texts: list[dict[int, tuple[str, list[int]]]] = [{} for _ in range(ranks)]
        self.written: list[dict[int, int]] = [{} for _ in range(ranks)]
        self.reused = self.confirmed = self.evicted = 0

    def start(self, rank: int) -> Follower:
        self.starts += 1
        if rank:
            return Follower(rank, CONFIG, self.starts)
        leader = RecordingLeader.__new__(RecordingLeader)
        leader.history = self.history
        leader.__init__(self.ranks, CONFIG, self.starts, log_size=20)  # type: ignore[misc]
        return leader

    def fresh_memory(self) -> list[list[object]]:
        return [[None] * CONFIG.page_tokens for _ in range(CONFIG.num_pages)]

    @property
    def leader(self) -> Leader:
        leader = self.members[0]
        assert isinstance(leader, Leader)
        return leader

    def restart(self, rank: int) -> None:
        self.members[rank] = self.start(rank)
        self.memory[rank] = self.fresh_memory()
        self.texts[rank], self.written[rank] = {}, {}

    def submit(self, command: Command) -> None:
        try:
            outcome = self.leader.submit(command)
        except OutOfPagesError:
            return
        self.follow(0, [command], [outcome])

    def send(self, rank: int) -> None:
        if rank:
            self.flying.append((0, self.members[rank].report()))
        else:
            self.flying += [(other, self.leader.orders()) for other in range(1, self.ranks)]
            self.take_in(self.leader.report())

    def deliver(self, index: int, keep: bool = False) -> None:
        rank, message = self.flying[index] if keep else self.flying.pop(index)
        if isinstance(message, Report):
            self.take_in(message)
            return
        member = self.members[rank]
        era, applied = member.era, member.replica.applied
        outcomes = member.receive(message)
        if member.era != era:
            self.texts[rank], self.written[rank], applied = {}, {}, 0
        assert len(outcomes) == member.replica.applied - applied
        self.follow(rank, self.history.get(member.era, [])[applied:], outcomes)

    def take_in(self, report: Report) -> None:
        era, applied = self.leader.era, self.leader.replica.applied
        self.leader.outcomes.clear()
        self.leader.take_in(report)
        if self.leader.era != era:
            self.texts[0], self.written[0], applied = {}, {}, 0
        self.follow(0, self.history.get(self.leader.era, [])[applied:], list(self.leader.outcomes))

    def follow(self, rank: int, commands: list[Command], outcomes: list[Outcome]) -> None:
        """Does with the arrays of a rank what the outcomes say."""
        texts, written, memory = self.texts[rank], self.written[rank], self.memory[rank]
        tables: dict[int, list[int]] = {}
        for command, outcome in zip(commands, outcomes, strict=False):
            self.evicted += len(outcome.evicted)
            for copy in outcome.copies:
                memory[copy.target][: copy.tokens] = memory[copy.source][: copy.tokens]
            match command:
                case Admit():
                    texts[command.sequence] = (command.tenant, decoded(command.tokens))
                    written[command.sequence] = outcome.reused_tokens
                    tables[command.sequence] = list(outcome.pages)
                    self.reused += outcome.reused_tokens
                    self.check(rank, command.sequence, outcome.pages, outcome.reused_tokens)
                case Extend():
                    texts[command.sequence][1].extend(decoded(command.tokens))
                case Fork():
                    tenant, text = texts[command.sequence]
                    texts[command.child] = (tenant, list(text))
                    written[command.child] = written[command.sequence]
                    self.check(rank, command.child, outcome.pages, written[command.child])
                case Confirm():
                    self.confirmed += 1
                    for page, place in enumerate(outcome.pages, outcome.first_page):
                        content = self.content(rank, command.sequence)[page * 2 : page * 2 + 2]
                        assert memory[place] == content, "a page was replaced by another one's content"
                case End():
                    del texts[command.sequence], written[command.sequence]

    def content(self, rank: int, sequence: int) -> list[object]:
        tenant, text = self.texts[rank][sequence]
        return [(tenant, tuple(text[: end + 1])) for end in range(len(text))]

    def check(self, rank: int, sequence: int, pages: tuple[int, ...], count: int) -> None:
        held = [slot for page in pages for slot in self.memory[rank][page]]
        assert held[:count] == self.content(rank, sequence)[:count], "a page does not hold what it is used for"

    def write(self, rank: int, sequence: int, count: int) -> None:
        """Computes up to `count` more tokens of a sequence, and says so."""
        done = self.written[rank][sequence]
        upto = min(done + count, len(self.texts[rank][sequence][1]))
        pages = self.members[rank].replica.table.pages(sequence)
        content = self.content(rank, sequence)
        for at in range(done, upto):
            self.memory[rank][pages[at // 2]][at % 2] = content[at]
        self.written[rank][sequence] = upto
        if upto:
            self.members[rank].wrote(sequence, upto)

    def check_all(self) -> None:
        for rank, member in enumerate(self.members):
            replica = member.replica
            state = (member.era, replica.applied)
            assert self.seen.setdefault(state, replica.digest) == replica.digest, "ranks are of two minds"
            assert set(replica.table) == self.texts[rank].keys()
            owned = {page for sequence in replica.table for page in replica.table.pages(sequence).tolist()}
            cached = set(replica.prefixes._page_of.values())
            assert replica.pool.used_count == len(owned | cached), "a page leaks"
            assert replica.prefixes.evictable_count == len(cached - owned)
            for sequence in replica.table:
                pages = tuple(replica.table.pages(sequence).tolist())
                self.check(rank, sequence, pages, self.written[rank][sequence])

    def settle(self) -> None:
        """Without faults a few rounds bring all ranks together."""
        self.flying.clear()
        for _ in range(6):
            for rank in range(self.ranks):
                self.send(rank)
            while self.flying:
                self.deliver(0)
            self.check_all()
        assert {(member.era, member.replica.applied) for member in self.members} == {
            (self.leader.era, self.leader.replica.applied)
        }
        assert len(self.leader.orders().commands) == 0

    # Moves, by numbers that are drawn somewhere else.

    def admit(self, sequence: int, tenant: str, tokens: list[int]) -> None:
        if sequence not in self.leader.replica.table:
            self.submit(Admit(sequence, encoded(tokens), tenant))

    def change(self, kind: str, sequence: int, child: int, tokens: list[int]) -> None:
        if sequence not in self.leader.replica.table:
            return
        if kind == "extend":
            self.submit(Extend(sequence, encoded(tokens)))
        elif kind == "end":
            self.submit(End(sequence))
        elif child not in self.leader.replica.table:
            self.submit(Fork(sequence, child))


class AgreementMachine(RuleBasedStateMachine):
    @initialize(ranks=st.integers(1, 4))
    def begin(self, ranks: int) -> None:
        self.world = World(ranks)

    @rule(
        sequence=st.integers(0, 3),
        tenant=st.sampled_from("ab"),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
    )
    def admit(self, sequence: int, tenant: str, tokens: list[int]) -> None:
        self.world.admit(sequence, tenant, tokens)

    @rule(
        kind=st.sampled_from(["extend", "fork", "end"]),
        sequence=st.integers(0, 3),
        child=st.integers(0, 3),
        tokens=st.lists(st.integers(0, 1), max_size=3),
    )
    def change(self, kind: str, sequence: int, child: int, tokens: list[int]) -> None:
        self.world.change(kind, sequence, child, tokens)

    @rule(data=st.data(), count=st.integers(1, 8))
    def write(self, data: st.DataObject, count: int) -> None:
        rank = data.draw(st.integers(0, self.world.ranks - 1))
        if self.world.texts[rank]:
            self.world.write(rank, data.draw(st.sampled_from(sorted(self.world.texts[rank]))), count)

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        self.world.send(data.draw(st.integers(0, self.world.ranks - 1)))

    @precondition(lambda self: self.world.flying)
    @rule(data=st.data(), what=st.sampled_from(["deliver", "double", "lose"]))
    def network(self, data: st.DataObject, what: str) -> None:
        index = data.draw(st.integers(0, len(self.world.flying) - 1))
        if what == "lose":
            del self.world.flying[index]
        else:
            self.world.deliver(index, keep=what == "double")

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        self.world.restart(data.draw(st.integers(0, self.world.ranks - 1)))

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @invariant()
    def all_hold_together(self) -> None:
        if hasattr(self, "world"):
            self.world.check_all()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestAgreement = AgreementMachine.TestCase
TestAgreement.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.timeout(1200 if STEPS > 10_000 else 120)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_agree_whatever_happens(ranks: int) -> None:
    draw, world = random.Random(ranks), World(ranks)
    for step in range(STEPS):
        rank = draw.randrange(ranks)
        tokens = [int(draw.random() < 0.15) for _ in range(draw.randint(1, 8))]
        match draw.choices(list(ODDS), list(ODDS.values()))[0]:
            case "admit":
                world.admit(draw.randrange(5), draw.choice("ab"), tokens)
            case "change":
                kind = draw.choice(["extend", "fork", "end", "end"])
                world.change(kind, draw.randrange(5), draw.randrange(5), tokens[:3])
            case "write" if world.texts[rank]:
                world.write(rank, draw.choice(sorted(world.texts[rank])), 8)
            case "send":
                world.send(rank)
            case "deliver" if world.flying:
                world.deliver(draw.randrange(len(world.flying)), keep=draw.random() < 0.1)
            case "lose" if world.flying:
                del world.flying[draw.randrange(len(world.flying))]
            case "restart":
                world.restart(rank)
        world.check_all()
        if step % 100 == 99:
            world.settle()
    # What would make the test empty: nothing was confirmed, reused or evicted.
    assert min(world.confirmed, world.reused, world.evicted) > 0


def test_a_rank_of_another_mind_flushes_all() -> None:
    leader, follower = Leader(2, CONFIG, 1), Follower(1, CONFIG, 1)
    leader.submit(Admit(1, encoded([1, 2, 3])))
    leader.take_in(follower.report())
    follower.receive(leader.orders())
    follower.replica.apply(Admit(7, encoded([9])))
    era = leader.era
    leader.take_in(follower.report())
    assert leader.era > era
    assert 1 not in leader.replica.table
    follower.receive(leader.orders())
    assert 7 not in follower.replica.table


def test_a_rank_that_is_further_behind_than_the_log_flushes_all() -> None:
    leader, follower = Leader(2, CONFIG, 1, log_size=3), Follower(1, CONFIG, 1)
    leader.take_in(follower.report())
    for number in range(3):
        leader.submit(Admit(number, encoded([1])))
    follower.receive(leader.orders())
    assert len(follower.replica.table) == 3
    for _ in range(2):
        leader.submit(Extend(0, encoded([1])))
        leader.submit(Extend(1, encoded([1])))
    era = leader.era
    leader.take_in(Report(1, 1, era, 0, b"", ()))
    assert leader.era > era


def joined(*commands: Command) -> tuple[Leader, Follower]:
    """Two ranks that have applied some commands, and both know it."""
    leader, follower = Leader(2, CONFIG, 1), Follower(1, CONFIG, 1)
    for command in commands:
        leader.submit(command)
    leader.take_in(follower.report())
    follower.receive(leader.orders())
    return leader, follower


def test_what_was_written_for_a_sequence_is_not_held_for_another_of_its_number() -> None:
    leader, follower = joined(Admit(1, encoded([1, 2, 3])))
    follower.wrote(1, 3)
    late = follower.report()
    leader.submit(End(1))
    leader.submit(Admit(1, encoded([4, 5, 6])))
    leader.wrote(1, 3)
    leader.take_in(leader.report(), late)
    assert leader.replica.confirmed_tokens(1) == 0
    follower.receive(leader.orders())
    follower.wrote(1, 3)
    leader.take_in(follower.report())
    assert leader.replica.confirmed_tokens(1) == 2


def test_orders_to_a_rank_before_it_was_started_again_are_not_for_it() -> None:
    leader, _ = joined(Admit(1, encoded([1, 2, 3])))
    again = Follower(1, CONFIG, 2)
    assert again.receive(leader.orders()) == []
    assert (again.era, again.replica.applied) == ((0, 0), 0)


def test_a_late_report_takes_nothing_back() -> None:
    leader, follower = joined(Admit(1, encoded([1, 2, 3])))
    late = follower.report()
    leader.submit(End(1))
    follower.receive(leader.orders())
    era = leader.era
    leader.take_in(leader.report(), follower.report())
    assert leader.orders().commands == ()
    leader.take_in(late)
    assert leader.era == era
    assert leader.orders().commands == ()


def test_a_page_that_forks_share_is_cached_when_one_of_them_is_left() -> None:
    replica = CacheReplica(CONFIG)
    replica.apply(Admit(1, encoded([1, 2, 3, 4, 5])))
    replica.apply(Fork(1, 2))
    replica.apply(Admit(3, encoded([1, 2, 9])))
    replica.apply(Confirm(3, 2))
    # Cached now, the page of 3 and 4 would follow one that sequence 2 does not own.
    assert not replica.can_confirm(1, 4)
    replica.apply(Confirm(1, 4))
    assert replica.confirmed_tokens(1) == 0
    replica.apply(End(1))
    assert replica.apply(Confirm(2, 4)).pages[0] == replica.table.pages(3)[0]
    replica.apply(End(2))
    replica.apply(End(3))
    assert replica.apply(Admit(4, encoded([1, 2, 3, 4, 5]))).reused_tokens == 4


def test_mistakes_are_errors_and_change_nothing() -> None:
    replica = CacheReplica(CONFIG)
    replica.apply(Admit(1, encoded([1, 2, 3])))
    digest = replica.digest
    for command, error, message in [
        (Admit(1, encoded([1])), CacheError, "sequence 1 has begun already"),
        (Admit(2, b""), ArgumentError, "the prompt of sequence 2 has no tokens"),
        (Admit(2, encoded([0] * 17)), OutOfPagesError, "sequence 2 needs 9 pages, 7 of 9 are free or can be evicted"),
        (Extend(1, encoded([0] * 30)), OutOfPagesError, "sequence 1 needs 15 pages, 7 of 9"),
        (Extend(3, encoded([0])), CacheError, "there is no sequence 3: it has ended, or never began"),
        (Fork(1, 1), CacheError, "sequence 1 has begun already"),
        (Confirm(1, 4), ArgumentError, "sequence 1 has 3 tokens, not 4"),
        (End(3), CacheError, "there is no sequence 3"),
    ]:
        with pytest.raises(error, match=message):
            replica.apply(command)
        assert (replica.digest, replica.applied, replica.pool.used_count) == (digest, 1, 2)
    with pytest.raises(ArgumentError, match="incarnation must be above 0, not 0"):
        Follower(1, CONFIG, 0)
    with pytest.raises(ArgumentError, match="log_size must be 1 or more, not 0"):
        Leader(1, CONFIG, 1, log_size=0)
    leader = Leader(1, CONFIG, 1)
    leader.submit(Admit(1, encoded([1, 2])))
    with pytest.raises(ArgumentError, match="sequence 1 has 2 tokens, not 3"):
        leader.wrote(1, 3)

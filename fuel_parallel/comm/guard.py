"""The guard: no collective runs before it is known that all ranks are about to run the same.

Every `MpiComm` has a `Guard`. Before a plan runs, `announce` publishes the digests of its collectives, each in its
communicator, as far as the plan will come without waiting for anything else; before each collective runs, `enter`
waits until all ranks have published the same entry. So it is the guard that waits for a rank that is late, in Python,
where signals are heard and the wait can be explained, and MPI only moves bytes between ranks that are all there. Where
entries differ, all ranks come to that same entry, tell each other what they have there, and raise one
`CollectiveMismatchError`.

The end of a script is an entry too, the last one of each communicator: `end` waits until all ranks have come to it. A
rank that ends while others wait for it is thus a mismatch like any other.

Sends and receives belong to two ranks and are no entries. They are counted, and the counts are compared at the end; a
receive waits here as well, and notices if its sender's script has ended. Ranks of a node that wait for each other in
a circle notice by following who waits for whom (see `standstill`).

`FUEL_GUARD=0` turns the comparison off; the waits for messages, and what the watchdog sees, remain.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fuel_parallel.comm.board import share
from fuel_parallel.comm.entries import END, Entry, entry_of, packed
from fuel_parallel.comm.exchange import PIECE, Exchange, NodeExchange, WireExchange
from fuel_parallel.comm.messages import Ledger, Message, is_message, lost
from fuel_parallel.comm.mismatch import Row, describe
from fuel_parallel.comm.node_local import ranks_of_my_node
from fuel_parallel.comm.shared_reduction import progress
from fuel_parallel.comm.standstill import Standstill, wait_until
from fuel_parallel.comm.transport import Receiving
from fuel_parallel.errors import CollectiveMismatchError
from fuel_parallel.lazy import effects
from fuel_parallel.lazy.node import Attrs, Line, describe_line, script_line

if TYPE_CHECKING:
    from mpi4py import MPI

_SPINS = 50  # looks before a waiting rank yields its core: see `node_memory`
_ON_ITS_WAY_S = 0.25  # what a rank sent before its script ended has come by then


class Guard:
    """The guard of one communicator, over the MPI one that carries its messages. Making one is collective.

    Entries are numbered. `published`, `verified`, `entered` and `finished` say how far this rank is; `inside` is the
    entry that it waits for at this moment, -1 while it waits for none.
    """

    def __init__(self, messages: MPI.Intracomm, name: str) -> None:
        from mpi4py import MPI

        self.name, self.rank, self.ranks = name, messages.rank, messages.size
        self.messages = messages
        group, world = messages.Get_group(), MPI.COMM_WORLD.Get_group()
        self.world_ranks: list[int] = MPI.Group.Translate_ranks(group, list(range(self.ranks)), world)
        group.Free()
        world.Free()
        self.published = self.entered = self.finished = self.verified = 0
        self.inside = -1
        self.receiving: Message | None = None
        self.ledger = Ledger()
        self._entries: Sequence[Entry] = ()
        self._lines: Sequence[Line | None] = ()
        self._base = 0
        self._last: tuple[Entry, Line | None] | None = None
        self._digests = memoryview(array("q"))
        self._runs: Sequence[int] = ()
        self._ran: deque[int] = deque(maxlen=1024)
        self.exchange = self._find_exchange()
        if self.exchange is None:
            self.verified = sys.maxsize
        guards.append(self)

    def _find_exchange(self) -> Exchange | None:
        from mpi4py import MPI

        wanted = np.array([os.environ.get("FUEL_GUARD", "1") != "0"], dtype=np.uint8)
        self.messages.Allreduce(MPI.IN_PLACE, wanted, MPI.MIN)
        if not wanted[0]:
            return None
        local = ranks_of_my_node(self.messages)
        memory = share(local, NodeExchange.nbytes(self.ranks)) if local.size == self.ranks else None
        local.Free()
        return WireExchange(self.messages.Dup()) if memory is None else NodeExchange(memory, self.rank, self.ranks)

    # Before a plan runs.

    def publish(
        self,
        entries: Sequence[Entry],
        digests: memoryview,
        lines: Sequence[Line | None],
        serials: Sequence[int],
        runs: Sequence[int] = (),
    ) -> None:
        """Tells the others about the entries that I am about to run, built at `lines`.

        `runs` are the entries, by their place, that are not told before I reach them, and those behind them neither.
        """
        base = self.published
        if self._entries:
            self._last = self._entries[-1], self._lines[-1]
        self._entries, self._lines, self._base, self._digests, self._runs = entries, lines, base, digests, runs
        self._ran.extend(serials)
        self.entered = self.finished = base  # after a plan that failed, too
        self.inside = -1
        if self.exchange is not None:
            count = min(len(digests), PIECE, runs[0] if runs else PIECE)
            self.exchange.publish(base, digests[:count] if count < len(digests) else digests)
            self.published = base + count
        else:
            self.published = base + len(digests)

    def enter(self) -> None:
        """To be called before a collective runs: returns when all ranks are there, with the same one."""
        number = self.inside = self.entered
        self.entered = number + 1
        if number >= self.verified:
            try:
                self._verify(number)
            except BaseException:
                self.inside = -1
                raise

    def leave(self) -> None:
        """To be called after a collective has run."""
        global latest
        latest = self
        self.finished = self.inside + 1
        self.inside = -1

    def go_on(self) -> int:
        """To be called after a collective has only been started: its number, for `inside` until `leave`."""
        number, self.inside = self.inside, -1
        return number

    def at_once(self, entry: Entry, line: Line | None) -> _AtOnce:
        """Around a collective that is not in the graph, called at `line`."""
        return _AtOnce(self, entry, line)

    def _verify(self, number: int) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        if number == self.published:
            done = number - self._base
            following = bisect_right(self._runs, done)
            stop = self._runs[following] if following < len(self._runs) else done + PIECE
            piece = self._digests[done : min(stop, done + PIECE)]
            exchange.publish(number, piece)
            self.published += len(piece)
        found = exchange.compare(number, self.published)
        if found == number:

            def ready() -> bool:
                nonlocal found
                found = exchange.compare(number, self.published)
                return found != number

            self._wait(ready, lambda: exchange.missing(number) or [])
        self.verified = found if found >= 0 else ~found
        if found == ~number:
            self._disagree(exchange, number)

    # Messages.

    def await_message(self, source: int, tag: int) -> None:
        """To be called before a receive: returns when a message from `source` has come."""
        probe = self.messages.Iprobe
        self._await(self.ledger.receive(source, tag), source, lambda: probe(source, tag))

    def await_posted(self, message: Message, receiving: Receiving) -> None:
        """Returns when the message of a posted receive has come."""
        self._await(message, message.source, receiving.has_come)

    def _await(self, message: Message | None, source: int, has_come: Callable[[], bool]) -> None:
        if has_come():
            return
        self.receiving = message
        try:
            self._wait(has_come, lambda: [source], self._sender_ended(source))
        finally:
            self.receiving = None

    def _sender_ended(self, source: int) -> Callable[[], None]:
        since = 0.0

        def check() -> None:
            nonlocal since
            if self.exchange is None or not self.exchange.has_ended(source):
                return
            since = since or time.monotonic()
            if time.monotonic() - since > _ON_ITS_WAY_S:
                raise CollectiveMismatchError(
                    f"rank {source} has ended its script, and rank {self.rank} waits for it\n"
                    f"  rank {self.rank}  {self.doing()} of communicator '{self.name}'\n"
                    "  Likely cause: a send under an `if`, or one step more here"
                )

        return check

    def _wait(
        self, ready: Callable[[], bool], missing: Callable[[], list[int]], check: Callable[[], None] | None = None
    ) -> None:
        for _ in range(_SPINS):
            if ready():
                return

        def drive() -> None:
            progress()  # others may be waiting for my part of what I have started
            self.messages.Iprobe()

        def look(watch: Standstill) -> None:
            watch.look([self.world_ranks[rank] for rank in missing()])
            if check is not None:
                check()

        wait_until(ready, drive, look, lambda: f"{self.doing()} of communicator '{self.name}'")

    # Words.

    def doing(self) -> str:
        """What this rank is in, with its line; empty outside of collectives."""
        receiving = self.receiving
        if receiving is not None:
            return str(receiving)
        entries, lines, place = self._entries, self._lines, self.inside - self._base
        if not 0 <= place < len(entries):
            return ""
        return "the end of its script" if entries[place] is END else _at(str(entries[place]), lines[place])

    def last(self) -> str:
        """The collective that this rank finished last, with its line; empty before the first."""
        finished, base, entries, lines = self.finished, self._base, self._entries, self._lines
        if 0 < finished - base <= len(entries):
            return _at(str(entries[finished - base - 1]), lines[finished - base - 1])
        return "" if self._last is None else _at(str(self._last[0]), self._last[1])

    def awaited(self) -> list[int]:
        """The ranks that this one waits for, as far as it can know."""
        receiving = self.receiving
        if receiving is not None:
            return [receiving.source]
        inside = self.inside
        if self.exchange is None or inside < 0:
            return []
        return self.exchange.missing(inside) or []

    def nobody_is_missing(self) -> str:
        """Why `awaited` may name nobody."""
        if isinstance(self.exchange, NodeExchange):
            return "nobody; the transfer itself does not end"
        return "not known" + (" between nodes" if self.exchange else " with FUEL_GUARD=0")

    # When ranks differ.

    def _row(self, number: int) -> Row:
        place = number - self._base
        entry = self._entries[place]
        ran = set(self._ran)
        unasked = [
            (entry_of(built.op, built.attrs, built.spec).digest, describe_line(built.line))
            for built in effects.latest()
            if guard_of(built.attrs) is self and built.serial not in ran and not is_message(built.op)
        ]
        asked = script_line()
        return Row(
            rank=self.rank,
            digest=entry.digest,
            text=str(entry),
            kind=entry.kind,
            dtype=entry.dtype,
            shape=entry.shape,
            facts=tuple(sorted(entry.facts.items())),
            line="" if entry is END else describe_line(self._lines[place]),
            asked="" if entry is END else describe_line(asked),
            following=tuple(e.digest for e in self._entries[place + 1 : place + 9]),
            unasked=tuple(unasked),
        )

    def _disagree(self, exchange: Exchange, number: int) -> None:
        """All ranks come here with the same number. Afterwards they can go on: they count from the same number."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        self._wait(self.messages.Ibarrier().Test, lambda: others)
        found: list[tuple[Row, int]] = self.messages.allgather((self._row(number), self.published))
        last = max(published for _, published in found)
        exchange.skip(self.published, last)
        self.published = self.verified = last
        raise CollectiveMismatchError(describe(self.name, number, [row for row, _ in found]))

    # The end of the script.

    def publish_end(self) -> None:
        """No collective follows."""
        if self.exchange is not None:
            self.publish((END,), packed([END]), (None,), ())
            self.exchange.say_ended()

    def all_ended(self) -> bool:
        """Whether all ranks are known to have come to the end; raises when one has a collective instead."""
        if self.exchange is None:
            return True
        number = self.inside = self._base
        found = self.exchange.compare(number, self.published)
        if found == ~number:
            self._disagree(self.exchange, number)
        if found == number:
            self.messages.Iprobe()
            return False
        self.inside = -1
        return True

    def missing_at_the_end(self) -> list[int]:
        """World ranks that have not come to the end, all others where that cannot be known: none may be gone yet."""
        known = None if self.exchange is None else self.exchange.missing(self._base)
        ranks = [rank for rank in range(self.ranks) if rank != self.rank] if known is None else known
        return [self.world_ranks[rank] for rank in ranks]

    def compare_messages(self) -> None:
        """Raises when a message was sent that nobody received. A collective call."""
        if self.exchange is None:
            return
        if found := lost(self.messages.allgather(self.ledger.summary())):
            listed = "\n  ".join(found)
            raise CollectiveMismatchError(
                f"all ranks have ended the script, but messages of communicator '{self.name}' were not received\n"
                f"  {listed}\n"
                "  Likely cause: a recv under an `if`, or one whose value was never asked for"
            )


class _AtOnce:
    """Begins when all ranks are there; without a frame of contextlib between the script and us."""

    def __init__(self, guard: Guard, entry: Entry, line: Line | None) -> None:
        self.guard, self.entry, self.line = guard, entry, line

    def __enter__(self) -> None:
        self.guard.publish((self.entry,), packed([self.entry]), (self.line,), ())
        self.guard.enter()

    def __exit__(self, *_: object) -> None:
        self.guard.leave()


def guard_of(attrs: Attrs) -> Guard | None:
    """The guard of the communicator that a collective's first attribute is; None where there is nothing to compare."""
    found: Guard | None = getattr(attrs[0], "guard", None) if attrs else None
    return found


def _at(what: str, line: Line | None) -> str:
    return f"{what} at {describe_line(line)}"


# All guards of this process, and the board of its node.

guards: list[Guard] = []
latest: Guard | None = None
"""That of the communicator in which a collective finished last."""

ended = False
"""Whether the script of this rank has come to its end."""


def end() -> None:
    """The script has ended: returns when that of all ranks has, and raises where they differ. A collective call."""
    global ended
    ended = True
    waiting = list(guards)
    for guard in waiting:
        guard.publish_end()

    def all_there() -> bool:
        waiting[:] = [guard for guard in waiting if not guard.all_ended()]
        return not waiting

    wait_until(
        all_there, progress, lambda watch: watch.look(waiting[0].missing_at_the_end()), lambda: "the end of its script"
    )
    for guard in guards:
        guard.compare_messages()

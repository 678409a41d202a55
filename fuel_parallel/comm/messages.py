"""Sends and receives, as the guard sees them: counted on both sides, compared at the end.

They belong to two ranks, so they have no place in the sequence of collectives that all ranks share.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fuel_parallel.lazy.node import Attrs, Line, Op, Spec, describe_line


class Message(NamedTuple):
    """A send or receive of a plan."""

    op: Op
    attrs: Attrs
    line: Line | None

    @property
    def source(self) -> int:
        """The rank that a receive waits for."""
        rank: int = self.attrs[self.op.attr_names.index("source")]
        return rank

    def __str__(self) -> str:
        facts = dict(zip(self.op.attr_names[1:], self.attrs[1:], strict=True))
        if "dest" in facts:
            words = f"send to rank {facts['dest']} tag={facts['tag']}"
        else:
            words = f"recv {Spec(facts['shape'], facts['dtype'])!r} from rank {facts['source']} tag={facts['tag']}"
        return f"{words} at {describe_line(self.line)}"


announced: deque[Message] = deque()
"""The messages of the plan that runs, in their order; each is taken from here when its turn comes."""


def is_message(op: Op) -> bool:
    """Whether an op that crosses ranks is point to point."""
    return "tag" in op.attr_names


@dataclass
class Ledger:
    """The messages of one rank on one communicator, by (other rank, tag). `places` are the lines of the last sends."""

    sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    received: Counter[tuple[int, int]] = field(default_factory=Counter)
    places: dict[tuple[int, int], Line | None] = field(default_factory=dict)

    def send(self, dest: int, tag: int) -> None:
        """Enters a send."""
        self.sent[dest, tag] += 1
        self.places[dest, tag] = announced.popleft().line if announced else None

    def receive(self, source: int, tag: int) -> Message | None:
        """Enters a receive; returns what is known of it."""
        self.received[source, tag] += 1
        return announced.popleft() if announced else None

    def summary(self) -> Summary:
        """What the other ranks need to know at the end."""
        return Summary(
            dict(self.sent), dict(self.received), {key: describe_line(line) for key, line in self.places.items()}
        )


class Summary(NamedTuple):
    """A ledger that travels."""

    sent: dict[tuple[int, int], int]
    received: dict[tuple[int, int], int]
    places: dict[tuple[int, int], str]


def lost(summaries: Sequence[Summary]) -> list[str]:
    """A line for each kind of message that was sent more often than received; `summaries` by rank."""
    found = []
    for source, mine in enumerate(summaries):
        for (dest, tag), count in mine.sent.items():
            missing = count - summaries[dest].received.get((source, tag), 0)
            if missing > 0:
                what = f"{missing} of {count} messages of rank {source} to rank {dest}, tag {tag}"
                found.append(f"{what}, the last of them sent at {mine.places[dest, tag]}")
    return found

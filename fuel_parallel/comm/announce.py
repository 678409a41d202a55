"""From a plan to the guards: which collectives it has on which communicator, read once for each plan.

What a rank publishes it promises: others go into MPI and wait there, where nothing can be noticed any more. So it
publishes no further than it will come whatever the others do: a *run* of collectives of one communicator. What comes
after a receive, or after a collective of another communicator, is published when it is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from fuel_parallel.comm.entries import Entry, entry_of, packed
from fuel_parallel.comm.guard import Guard, guard_of
from fuel_parallel.comm.messages import Message, announced, is_message
from fuel_parallel.lazy.node import Attrs, Node, Op, Spec


class Step(Protocol):
    """A step of a plan, as far as the guard reads it."""

    @property
    def op(self) -> Op:
        """The operation."""

    @property
    def attrs(self) -> Attrs:
        """Its attributes; for a collective the first one is the communicator."""

    @property
    def spec(self) -> Spec:
        """The result."""

    @property
    def origin(self) -> int:
        """The place of the node it comes from."""


_Share = tuple[Guard, tuple[Entry, ...], memoryview, tuple[int, ...], tuple[int, ...]]
_shares: dict[int, tuple[Any, list[_Share], list[int]]] = {}
_MOST_PLANS = 512


def announce(steps: Sequence[Step], computed: list[Node]) -> None:
    """To be called before a plan's steps run: publishes its collectives. `computed` are the nodes it stands for."""
    found = _shares.get(id(steps))
    if found is None or found[0] is not steps:
        if len(_shares) >= _MOST_PLANS:
            _shares.clear()
        found = _shares[id(steps)] = _read(steps, computed)
    for guard, entries, digests, origins, runs in found[1]:
        nodes = [computed[origin] for origin in origins]
        guard.publish(entries, digests, [node.line for node in nodes], [node.serial for node in nodes], runs)
    if found[2] or announced:
        announced.clear()
        announced.extend(Message(node.op, node.attrs, node.line) for node in map(computed.__getitem__, found[2]))


def _read(steps: Sequence[Step], computed: list[Node]) -> tuple[Any, list[_Share], list[int]]:
    """Which collectives a plan has, by communicator, and which messages."""
    entries: dict[Guard, list[tuple[Entry, int]]] = {}
    runs: dict[Guard, list[int]] = {}
    messages: list[int] = []
    latest: Guard | None = None
    reached = True  # whether the plan comes to the first run without waiting
    for step in steps:
        guard = guard_of(step.attrs) if step.op.crosses_ranks else None
        if guard is None:
            continue
        if is_message(step.op):
            messages.append(step.origin)
            if not step.op.has_effect:  # a receive
                latest, reached = None, False
            continue
        mine = entries.setdefault(guard, [])
        if guard is not latest and (mine or not reached):
            runs.setdefault(guard, []).append(len(mine))
        latest, reached = guard, False
        node = computed[step.origin]
        spec = node.inputs[0].spec if node.op is step.op else step.spec
        mine.append((entry_of(step.op, step.attrs, spec), step.origin))
    shares = [
        (
            guard,
            tuple(e for e, _ in found),
            packed([e for e, _ in found]),
            tuple(origin for _, origin in found),
            tuple(runs.get(guard, ())),
        )
        for guard, found in entries.items()
    ]
    return steps, shares, messages

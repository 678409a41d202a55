"""From a plan to the guards: which collectives it has on which communicator, read once for each plan."""

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


_Share = tuple[Guard, tuple[Entry, ...], memoryview, tuple[int, ...]]
_shares: dict[int, tuple[Any, list[_Share], list[int]]] = {}
_MOST_PLANS = 512


def announce(steps: Sequence[Step], computed: list[Node]) -> None:
    """To be called before a plan's steps run: publishes its collectives. `computed` are the nodes it stands for."""
    found = _shares.get(id(steps))
    if found is None or found[0] is not steps:
        if len(_shares) >= _MOST_PLANS:
            _shares.clear()
        found = _shares[id(steps)] = _read(steps, computed)
    for guard, entries, digests, origins in found[1]:
        nodes = [computed[origin] for origin in origins]
        guard.publish(entries, digests, [node.line for node in nodes], [node.serial for node in nodes])
    if found[2] or announced:
        announced.clear()
        announced.extend(Message(node.op, node.attrs, node.line) for node in map(computed.__getitem__, found[2]))


def _read(steps: Sequence[Step], computed: list[Node]) -> tuple[Any, list[_Share], list[int]]:
    """Which collectives a plan has, by communicator, and which messages."""
    entries: dict[Guard, list[tuple[Entry, int]]] = {}
    messages: list[int] = []
    for step in steps:
        guard = guard_of(step.attrs) if step.op.crosses_ranks else None
        if guard is None:
            continue
        if is_message(step.op):
            messages.append(step.origin)
            continue
        node = computed[step.origin]
        spec = node.inputs[0].spec if node.op is step.op else step.spec
        entries.setdefault(guard, []).append((entry_of(step.op, step.attrs, spec), step.origin))
    shares = [
        (guard, tuple(e for e, _ in found), packed([e for e, _ in found]), tuple(origin for _, origin in found))
        for guard, found in entries.items()
    ]
    return steps, shares, messages

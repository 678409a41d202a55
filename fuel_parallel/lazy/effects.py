"""Nodes that must run although no value of theirs may be asked for.

Sends, and collectives that other ranks wait for, are *kept* until the next plan takes them along. All other collectives
are *noted*: a plan that reaches a collective also runs the older ones that are still held by somebody, so that the
order on the wire is the order of the script however a rank cuts its work into realizes.

A variable that is written to bit by bit, such as pages of a cache, is *due*: the next plan takes its value along. Else
it would grow a graph behind it, and what it was would be held by that graph and could not be written over.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from fuel_parallel.lazy.node import Attrs, Line, Node, Op, Spec

if TYPE_CHECKING:
    from fuel_parallel.lazy.tensor import Tensor


class Built(NamedTuple):
    """What is remembered of a collective after its node may be gone. `spec` is that of its input."""

    serial: int
    op: Op
    attrs: Attrs
    spec: Spec
    line: Line | None


built: deque[Built] = deque(maxlen=128)
"""The collectives that were built last; for the message when ranks differ."""

_kept: list[Node] = []
_due: dict[int, Tensor] = {}
_differentiable: list[weakref.ref[Node]] = []
_noted: list[weakref.ref[Node]] = []


def keep(node: Node) -> None:
    """Holds a node until a plan has run it."""
    _kept.append(node)
    if node.op.has_effect and node.op.vjp:
        _differentiable.append(weakref.ref(node))


def make_due(variable: Tensor) -> None:
    """Has the next plan compute the value that a variable has then."""
    _due[id(variable)] = variable


def take_due() -> list[Tensor]:
    """All variables that are due; they are the caller's to compute now."""
    taken = list(_due.values())
    _due.clear()
    return taken


def note(node: Node) -> None:
    """Remembers a collective for the order of later plans, without holding it."""
    _noted.append(weakref.ref(node))
    spec = node.inputs[0].spec if node.inputs else node.spec
    built.append(Built(node.serial, node.op, node.attrs, spec, node.line))


def take() -> list[Node]:
    """All kept nodes that have not run; they are the caller's to run now."""
    taken, _kept[:] = list(_kept), []
    return [node for node in taken if node.value is None]


def take_differentiable() -> list[Node]:
    """The sends that the next backward pass answers for, each once: those not yet run."""
    taken = [node for ref in _differentiable if (node := ref()) is not None and node.value is None]
    _differentiable.clear()
    return taken


def any_noted() -> bool:
    """Whether `noted_before` may find something."""
    return bool(_noted)


def noted_before(serial: int) -> list[Node]:
    """Living collectives older than `serial` that have not run."""
    alive = [(ref, node) for ref in _noted if (node := ref()) is not None and node.value is None]
    _noted[:] = [ref for ref, _ in alive]
    return [node for _, node in alive if node.serial < serial]


def run_pending() -> None:
    """Runs what is kept now, without waiting for the next plan."""
    from fuel_parallel.runtime.realize import realize

    realize()


def run_unfinished() -> None:
    """Runs all collectives that somebody holds, too: what is then done at once has its place in the script's order."""
    from fuel_parallel.lazy.tensor import Tensor
    from fuel_parallel.runtime.realize import realize

    realize([Tensor(node) for node in noted_before(sys.maxsize)])

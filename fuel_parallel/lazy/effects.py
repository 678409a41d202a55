"""Nodes that must run although no value of theirs may be asked for.

Sends, and collectives that other ranks wait for, are *kept* until the next plan takes them along. All other collectives
are *noted*: a plan that reaches a collective also runs the older ones that are still held by somebody, so that the
order on the wire is the order of the script however a rank cuts its work into realizes.

What is kept belongs to the thread that made it, or to whichever comes first once that has ended: a thread that only
prepares data must not be the one that waits for another rank.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from typing import NamedTuple, TypeVar

from fuel_parallel.lazy.node import Attrs, Line, Node, Op, Spec


class Built(NamedTuple):
    """What is remembered of a collective after its node may be gone. `spec` is that of its input."""

    serial: int
    op: Op
    attrs: Attrs
    spec: Spec
    line: Line | None


T = TypeVar("T")
_built: deque[Built] = deque(maxlen=128)
_kept: list[tuple[threading.Thread, Node]] = []
_differentiable: list[tuple[threading.Thread, weakref.ref[Node]]] = []
_noted: list[weakref.ref[Node]] = []
# Guards the three lists. A signal handler may come here while its thread has it.
_lock = threading.RLock()


def keep(node: Node) -> None:
    """Holds a node until a plan of this thread has run it."""
    thread = threading.current_thread()
    with _lock:
        _kept.append((thread, node))
        if node.op.has_effect and node.op.vjp:
            _differentiable.append((thread, weakref.ref(node)))


def note(node: Node) -> None:
    """Remembers a collective for the order of later plans, without holding it."""
    spec = node.inputs[0].spec if node.inputs else node.spec
    with _lock:
        _noted.append(weakref.ref(node))
        _built.append(Built(node.serial, node.op, node.attrs, spec, node.line))


def take() -> list[Node]:
    """All kept nodes of this thread that have not run; they are the caller's to run now."""
    return [node for node in _take_own(_kept) if node.value is None]


def take_differentiable() -> list[Node]:
    """The sends that the next backward pass of this thread answers for, each once: those not yet run."""
    found = [ref() for ref in _take_own(_differentiable)]
    return [node for node in found if node is not None and node.value is None]


def _take_own(entries: list[tuple[threading.Thread, T]]) -> list[T]:
    """Takes what this thread, or one that has ended, has put there."""
    if not entries:
        return []
    this = threading.current_thread()
    with _lock:
        taken = [(thread is this or not thread.is_alive(), thread, what) for thread, what in entries]
        entries[:] = [(thread, what) for own, thread, what in taken if not own]
    return [what for own, _, what in taken if own]


def latest() -> list[Built]:
    """The collectives that were built last; for the message when ranks differ."""
    with _lock:
        return list(_built)


def any_kept() -> bool:
    """Whether `take` may find something."""
    return bool(_kept)


def any_noted() -> bool:
    """Whether `noted_before` may find something."""
    return bool(_noted)


def noted_before(serial: int) -> list[Node]:
    """Living collectives older than `serial` that have not run."""
    with _lock:
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

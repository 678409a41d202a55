"""Nodes that must run although no value of theirs may be asked for.

Sends, and collectives that other ranks wait for, are *kept* until the next plan takes them along. All other collectives
are *noted*: a plan that reaches a collective also runs the older ones that are still held by somebody, so that the
order on the wire is the order of the script however a rank cuts its work into realizes.

A variable that is written to bit by bit, such as pages of a cache, is *due*: the next plan takes its value along. Else
it would grow a graph behind it, and what it was would be held by that graph and could not be written over.

What is kept belongs to the thread that made it, or to whichever comes first once that has ended: a thread that only
prepares data must not be the one that waits for another rank.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, TypeVar

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


T = TypeVar("T")
_built: deque[Built] = deque(maxlen=128)
_kept: list[tuple[threading.Thread, Node]] = []
_due: dict[int, Tensor] = {}
_differentiable: list[tuple[threading.Thread, weakref.ref[Node]]] = []
_noted: list[weakref.ref[Node]] = []
_dry: ContextVar[bool] = ContextVar("dry", default=False)
# Guards all of them. A signal handler may come here while its thread has it.
_lock = threading.RLock()


def keep(node: Node) -> None:
    """Holds a node until a plan of this thread has run it."""
    if _dry.get():
        return
    thread = threading.current_thread()
    with _lock:
        _kept.append((thread, node))
        if node.op.has_effect and node.op.vjp:
            _differentiable.append((thread, weakref.ref(node)))


def make_due(variable: Tensor) -> None:
    """Has the next plan compute the value that a variable has then."""
    with _lock:
        _due[id(variable)] = variable


def take_due() -> list[Tensor]:
    """All variables that are due; they are the caller's to compute now."""
    with _lock:
        taken = list(_due.values())
        _due.clear()
    return taken


def note(node: Node) -> None:
    """Remembers a collective for the order of later plans, without holding it."""
    if _dry.get():
        return
    spec = node.inputs[0].spec if node.inputs else node.spec
    with _lock:
        _noted.append(weakref.ref(node))
        _built.append(Built(node.serial, node.op, node.attrs, spec, node.line))


@contextmanager
def dry_run() -> Iterator[None]:
    """Nodes built inside are looked at and never run: collectives among them have no place in the script's order."""
    before = _dry.set(True)
    try:
        yield
    finally:
        _dry.reset(before)


def take() -> list[Node]:
    """All kept nodes of this thread that have not run; they are the caller's to run now."""
    return [node for node in _take_own(_kept) if node.value is None]


def take_differentiable() -> list[Node]:
    """The sends that the next backward pass of this thread answers for, each once: those not yet run."""
    entries = list(_differentiable) if _dry.get() else _differentiable
    found = [ref() for ref in _take_own(entries)]
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
    """Whether `take` or `take_due` may find something."""
    return bool(_kept) or bool(_due)


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

"""Threads for the lanes of devices: started when first needed, kept from run to run, one for each name.

They are daemons, so that they hold up no interpreter that ends, and a forked child, which has none of them, starts its
own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

Work = Callable[[], None]
"""What a thread does; it lets no exception out."""


class Worker:
    """A thread that does what it is given, one after the other."""

    def __init__(self, name: str) -> None:
        self._given: SimpleQueue[Work | None] = SimpleQueue()
        threading.Thread(target=self._go_on, name=f"fuel-parallel {name}", daemon=True).start()

    def give(self, work: Work) -> None:
        """Does it when all that was given before is done."""
        self._given.put(work)

    def end(self) -> None:
        """Ends the thread when all that was given is done."""
        self._given.put(None)

    def _go_on(self) -> None:
        while True:
            work = self._given.get()
            if work is None:
                return
            work()
            del work  # it holds the values of a run


_workers: dict[str, Worker] = {}


def workers(names: Iterable[str]) -> list[Worker] | None:
    """The threads of these names; None where the interpreter starts no thread any more, as it is about to end."""
    found = []
    for name in names:
        worker = _workers.get(name)
        if worker is None:
            try:
                worker = _workers[name] = Worker(name)
            except RuntimeError:
                return None
        found.append(worker)
    return found


def leave() -> None:
    """Leaves all threads to themselves: they end with what they are at, and others take their place."""
    for worker in _workers.values():
        worker.end()
    _workers.clear()


os.register_at_fork(after_in_child=_workers.clear)

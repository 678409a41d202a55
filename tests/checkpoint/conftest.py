"""Ranks as threads of one process: what a checkpoint needs of a communicator, so that examples are cheap."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fuel_parallel import IdentityComm
from fuel_parallel.comm.communicator import CommInfo

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


class ThreadComm(IdentityComm):
    """The objects that ranks exchange, through a list that they share."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        super().__init__("threads")
        self.info = CommInfo(rank, len(shared))
        self.shared = shared
        self.meet = barrier

    def all_gather_object(self, value: Any, *, type: Any = Any) -> list[Any]:
        self.shared[self.rank] = msgspec.msgpack.encode(value)
        self.meet.wait(20)
        found = [msgspec.msgpack.decode(one, type=type) for one in self.shared]
        self.meet.wait(20)
        return found

    def broadcast_object(self, value: Any = None, root: int = 0, *, type: Any = Any) -> Any:
        self.shared[self.rank] = msgspec.msgpack.encode(value)
        self.meet.wait(20)
        found = msgspec.msgpack.decode(self.shared[root], type=type)
        self.meet.wait(20)
        return found


def run_on_ranks(count: int, work: Callable[[Any], Any]) -> list[Any]:
    """What `work(comm)` returns on each rank; the exception of the lowest rank that has one is raised."""
    shared: list[Any] = [None] * count
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count
    errors: list[BaseException | None] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadComm(rank, shared, barrier))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results


@pytest.fixture(scope="session")
def on_ranks() -> OnRanks:
    return run_on_ranks

"""A communicator of two ranks in one process, whose all-reduces are as late and as careless as they may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fuel_parallel.comm.communicator import CommInfo, Communicator, ReduceOp
from fuel_parallel.comm.transport import NoTransport, Pending

Host = np.ndarray[Any, Any]


class LatePending(Pending):
    """Reads its input at the very end, and until then checks that nobody does anything with it."""

    def __init__(self, transport: LateTransport, x: Host, op: ReduceOp, reuse: bool) -> None:
        self.transport, self.x, self.reuse = transport, x, reuse
        self.before = x.copy()
        self.factor = 1 if op is ReduceOp.AVG else 2
        if reuse:
            x[...] = 1e6
            self.during = x.copy()
        else:
            self.during = self.before

    def progress(self) -> None:
        np.testing.assert_array_equal(self.x, self.during)
        self.transport.events.append("progress")

    def wait(self) -> Host:
        self.progress()
        self.transport.events.append("wait")
        if not self.reuse:
            return self.x * self.factor
        np.multiply(self.before, self.factor, out=self.x)
        return self.x


class LateTransport(NoTransport):
    """The other rank has what this one has. `lent` is the memory that plans asked for."""

    def __init__(self) -> None:
        super().__init__("late: only all-reduces")
        self.events: list[str] = []
        self.lent: list[Host] = []
        self.lends = True
        self.all_reduce: Any = lambda x, op, out=None: x * 2

    def start_all_reduce(self, x: Host, op: ReduceOp, *, reuse: bool = False) -> Pending:
        self.events.append("start")
        return LatePending(self, x, op, reuse)

    def borrow(self, nbytes: int) -> Host | None:
        if not self.lends:
            return None
        memory = np.full(nbytes, 255, np.uint8)
        self.lent.append(memory)
        return memory


class LateComm(Communicator):
    transport: LateTransport

    def __init__(self) -> None:
        super().__init__(CommInfo(0, 2), LateTransport(), "late")

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        raise NotImplementedError

    def _group(self, ranks: tuple[int, ...], name: str) -> Communicator:
        raise NotImplementedError


@pytest.fixture
def late() -> LateComm:
    return LateComm()

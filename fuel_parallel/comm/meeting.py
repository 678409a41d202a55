"""How the kernel of a collective begins and ends: when all ranks are there, and with the transport for its arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.transport import Pending, Transport

if TYPE_CHECKING:
    from fuel_parallel.comm.guard import Guard


def together(run: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel for contiguous arrays of any device, run when all ranks are there: it gets module and transport."""

    def kernel(xp: Any, x: Any, comm: Communicator, *attrs: Any) -> Any:
        array = xp.ascontiguousarray(x).reshape(x.shape)
        guard = comm.guard
        if guard is None:
            return run(xp, transport_of(xp, array, comm), array, comm, *attrs)
        guard.enter()
        try:
            return run(xp, transport_of(xp, array, comm), array, comm, *attrs)
        finally:
            guard.leave()

    return kernel


@contextmanager
def meeting(xp: Any, x: Any, comm: Communicator) -> Iterator[Transport]:
    """Around what ranks do together on arrays like `x`: begins when all are there, and gives the transport."""
    guard = comm.guard
    if guard is not None:
        guard.enter()
    try:
        yield transport_of(xp, x, comm)
    finally:
        if guard is not None:
            guard.leave()


def transport_of(xp: Any, x: Any, comm: Communicator) -> Transport:
    """What moves an array of the module `xp`."""
    return comm.transport if xp is np else comm.transport_of(x)


def guarded(start: Callable[..., Pending]) -> Callable[..., Pending]:
    """A start that waits until all ranks are there, and whose guard is left when what it started is over."""

    def guarded_start(
        xp: Any, x: Any, comm: Communicator, *attrs: Any, reuse: bool = False, out: Any = None
    ) -> Pending:
        guard = comm.guard
        if guard is None:
            return start(xp, x, comm, *attrs, reuse=reuse, out=out)
        guard.enter()
        try:
            pending = start(xp, x, comm, *attrs, reuse=reuse, out=out)
        except BaseException:
            guard.leave()
            raise
        return _GoesOn(guard, pending, guard.go_on())

    return guarded_start


class _GoesOn(Pending):
    """A collective that was started. While this rank waits for its end it is `inside`."""

    def __init__(self, guard: Guard, pending: Pending, number: int) -> None:
        self.guard, self.pending, self.number = guard, pending, number

    def progress(self) -> None:
        """See `Pending.progress`."""
        self.pending.progress()

    def wait(self) -> Any:
        """See `Pending.wait`."""
        self.guard.inside = self.number
        try:
            return self.pending.wait()
        finally:
            self.guard.leave()

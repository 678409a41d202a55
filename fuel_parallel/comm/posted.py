"""Messages outside the graph: posted early, waited for late.

A rank that knows what it will be sent posts the receive before it needs the message, and computes meanwhile; a send
returns at once and holds its array until the message is through. Messages from one rank to another with one tag come in
the order in which they were sent. The guard counts them like those of a plan, and waits for them in the same way.
"""

from __future__ import annotations

from typing import Any

from fuel_parallel.backends import backend_of, memory_of
from fuel_parallel.comm import point_to_point
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.messages import Message
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Shape, script_line


def post_send(comm: Communicator, array: Any, dest: int, tag: int) -> None:
    """Starts to send a contiguous array that nobody writes any more."""
    if comm.guard is not None:
        comm.guard.ledger.send(dest, tag)
    comm.messenger_of(memory_of(array)).send(array, dest, tag, final=True)


class PostedReceive:
    """A receive that was posted: an array of this shape and dtype from rank `source`, in memory of `device`."""

    def __init__(
        self, comm: Communicator, shape: Shape, dtype: DType, source: int, tag: int, device: str = "cpu"
    ) -> None:
        self._guard = comm.guard
        self._message = Message(point_to_point.RECV, (comm, shape, dtype, source, tag, device), script_line())
        if comm.guard is not None:
            comm.guard.ledger.receive(source, tag)
        self._pending = comm.messenger_of(backend_of(device).memory).start_recv(shape, dtype, source, tag)

    def wait(self) -> Any:
        """The array, when it is there."""
        if self._guard is not None:
            self._guard.await_posted(self._message, self._pending)
        return self._pending.wait()

"""How bytes move between the ranks of a communicator: the seam under the collectives.

A transport works on contiguous host arrays, at once, and gives new arrays back. Reductions are of plain numeric dtypes
by SUM, PRODUCT, MIN or MAX. Gathers and scatters are along the first dimension, of which rank r has `rows[r]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.errors import CommunicatorError
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Shape

Host = np.ndarray[Any, Any]


class Transport(ABC):
    """What a communicator needs of the wire."""

    @abstractmethod
    def all_reduce(self, x: Host, op: ReduceOp, out: Host | None = None) -> Host:
        """The reduction of all ranks' arrays; into `out`, if given: a contiguous array like `x`, or `x` itself."""

    @abstractmethod
    def reduce(self, x: Host, op: ReduceOp, root: int) -> Host | None:
        """The reduction of all ranks' arrays on `root`, None elsewhere."""

    @abstractmethod
    def broadcast(self, x: Host, root: int) -> Host:
        """The array of `root`."""

    @abstractmethod
    def all_gather(self, x: Host, rows: Sequence[int]) -> Host:
        """All ranks' arrays, one after the other."""

    @abstractmethod
    def reduce_scatter(self, x: Host, op: ReduceOp, rows: Sequence[int]) -> Host:
        """My rows of the reduction of all ranks' arrays."""

    @abstractmethod
    def all_to_all(self, blocks: Sequence[Host], shapes: Sequence[Shape]) -> list[Host]:
        """`blocks[r]` goes to rank r; what comes from rank r has `shapes[r]`."""

    @abstractmethod
    def exchange(self, x: Host, dest: int | None, source: int | None) -> Host | None:
        """Sends to one rank while receiving an array like mine from another; None stands for nobody."""

    @abstractmethod
    def send(self, x: Host, dest: int, tag: int) -> None:
        """Sends without waiting for the receiver."""

    @abstractmethod
    def recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Host:
        """Waits for an array from `source`."""

    @abstractmethod
    def barrier(self) -> None:
        """Waits for all ranks."""

    def allocate(self, nbytes: int) -> Host | None:
        """Memory for arrays that are to be reduced often; None where this transport has none better than any other.

        A collective call with the same number of bytes on all ranks. What is in it is undefined. It is this rank's for
        as long as the array or a view of it is held, and readable by the other ranks of the node while they are in a
        collective on it. `all_reduce(x, op, out=x)` of such an `x` on all ranks copies nothing in and nothing out.
        """
        return None


class NoTransport(Transport):
    """Nothing to move, or nothing to move it with. `why` is the error's text."""

    def __init__(self, why: str) -> None:
        self.why = why

    def _refuse(self, *_: Any) -> Any:
        raise CommunicatorError(self.why)

    _any_call: Any = _refuse
    all_reduce = reduce = broadcast = all_gather = reduce_scatter = _any_call
    all_to_all = exchange = send = recv = barrier = _any_call

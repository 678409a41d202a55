"""How bytes move between the ranks of a communicator: the seam under the collectives.

A transport works on contiguous arrays of every dtype of the library, at once, and gives new arrays back, or fills the
contiguous `out` that it is given. What a reduction computes is in `reduction`. Gathers and scatters are along the first
dimension, of which rank r has `rows[r]`.

    host arrays      `MpiTransport`; `NodeLocalTransport` around it where ranks share a node
    device arrays    `StagedTransport`, `DirectTransport` or `NcclTransport`; `device` chooses
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from fuel_parallel.comm import sections
from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.errors import ArgumentError, CommunicatorError
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Shape

Host = np.ndarray[Any, Any]


class Pending(ABC):
    """An operation that was started. It holds its memory until it is through, whoever lets go of it meanwhile."""

    @abstractmethod
    def progress(self) -> None:
        """Does what can be done without waiting for another rank."""

    @abstractmethod
    def wait(self) -> Any:
        """The result, when it is there."""


class Done(Pending):
    """An operation that was over when it had been started."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def progress(self) -> None:
        """Nothing is left to do."""

    def wait(self) -> Any:
        """The result."""
        return self.result


class Receiving(Pending):
    """A receive that was posted."""

    @abstractmethod
    def has_come(self) -> bool:
        """Whether `wait` would return at once."""

    def progress(self) -> None:
        """See `Pending.progress`."""
        self.has_come()


class Transport(ABC):
    """What a communicator needs of the wire."""

    @abstractmethod
    def all_reduce(self, x: Host, op: ReduceOp, out: Host | None = None) -> Host:
        """The reduction of all ranks' arrays; into `out`, if given: a contiguous array like `x`, or `x` itself.

        An `out` other than `x` is given on all ranks or on none, and shares no memory with `x`. All ranks get the same
        bits where MPI lacks the operation or the ranks share a node; elsewhere as far as the MPI keeps to that.
        """

    def start_all_reduce(self, x: Host, op: ReduceOp, *, reuse: bool = False) -> Pending:
        """Starts an all-reduce that may go on while other work is done.

        With `reuse` the memory of `x` is given away: the result may lie there. Either way `x` must not be written
        before `wait`. Reductions end up in the order in which they were started, whatever order they are waited for
        in. It is this, and never `all_reduce`, on all ranks or on none: MPI does not let the two meet.
        """
        return Done(self.all_reduce(x, op, x if reuse else None))

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return 1

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return 0

    @abstractmethod
    def reduce(self, x: Host, op: ReduceOp, root: int) -> Host | None:
        """The reduction of all ranks' arrays on `root`, None elsewhere."""

    @abstractmethod
    def broadcast(self, x: Host, root: int, out: Host | None = None) -> Host:
        """The array of `root`; `out` may be `x`."""

    @abstractmethod
    def all_gather(self, x: Host, rows: Sequence[int], out: Host | None = None) -> Host:
        """All ranks' arrays, one after the other."""

    @abstractmethod
    def reduce_scatter(self, x: Host, op: ReduceOp, rows: Sequence[int], out: Host | None = None) -> Host:
        """My rows of the reduction of all ranks' arrays."""

    def start_reduce_scatter(self, x: Host, op: ReduceOp, rows: Sequence[int]) -> Pending:
        """Starts a reduce-scatter that may go on while other work is done; like `start_all_reduce`, `x` is not written
        before `wait`, and it is this on all ranks or on none.
        """
        return Done(self.reduce_scatter(x, op, rows))

    def start_all_gather(self, x: Host, rows: Sequence[int], out: Host | None = None) -> Pending:
        """Starts an all-gather that may go on while other work is done; neither array is touched before `wait`.

        It is this on all ranks or on none.
        """
        return Done(self.all_gather(x, rows, out))

    def scan(self, x: Host, op: ReduceOp, *, exclusive: bool, reverse: bool) -> Host:
        """The reduction of the arrays of all ranks up to mine; with `reverse`, from mine on."""
        return sections.scan(self, x, op, exclusive=exclusive, reverse=reverse)

    @abstractmethod
    def all_to_all(self, blocks: Sequence[Host], shapes: Sequence[Shape], most_bytes: int) -> list[Host]:
        """`blocks[r]` goes to rank r; what comes from rank r has `shapes[r]`.

        No rank gives or gets more than `most_bytes`, a number that is the same on all ranks: how the bytes move depends
        on it.
        """

    @abstractmethod
    def exchange(self, x: Host, dest: int | None, source: int | None, out: Host | None = None) -> Host | None:
        """Sends to one rank while receiving an array like mine from another; None stands for nobody."""

    def start_exchange(self, x: Host, dest: int, source: int) -> Pending:
        """Starts an exchange that may go on while other work is done; until `wait` nobody writes into `x`.

        Exchanges that are under way together end up in the order in which they were started.
        """
        return Done(self.exchange(x, dest, source))

    @abstractmethod
    def send(self, x: Host, dest: int, tag: int, *, final: bool = False) -> None:
        """Sends without waiting for the receiver. A `final` array is never written again, and need not be copied."""

    @abstractmethod
    def recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Host:
        """Waits for an array from `source`."""

    @abstractmethod
    def start_recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Receiving:
        """Posts a receive, so that the message may come while other work is done."""

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

    def borrow(self, nbytes: int) -> Host | None:
        """Memory like that of `allocate`, out of what earlier all-reduces have left; None where there is none.

        Not a collective call: ranks may ask or not, whenever they like. An all-reduce that finds a rank without such
        memory makes some, on all ranks, so that there is enough the next time.
        """
        return None


def filled(x: Host, out: Host | None) -> Host:
    """`out`, or a new array, with what is in `x`: what an all-reduce of MPI then reduces in place.

    Always in place: MPI wants all ranks to do it alike, and whether memory can be reused is each rank's own affair.
    Open MPI takes another algorithm for each, and ranks that differ get each other's messages.
    """
    if out is None:
        return x.copy()
    if out is not x:
        out[...] = x
    return out


def check_host(x: Any) -> None:
    """Refuses arrays of devices. mpi4py would hand their address to MPI, which reads it as one of the host's."""
    if not isinstance(x, np.ndarray):
        raise CommunicatorError(
            f"a transport of host arrays was given a {type(x).__module__}.{type(x).__qualname__}; "
            "use communicator.transport_of(array), or copy it to the host first"
        )


def check_buffers(x: Host, out: Host | None) -> None:
    """Refuses what MPI would take and silently get wrong: other memory orders, and buffers that overlap."""
    check_host(x)
    check_array(x, out)
    if out is None or out is x:
        return
    if np.may_share_memory(x, out) and x.__array_interface__["data"] != out.__array_interface__["data"]:
        raise ArgumentError(
            "all_reduce: x and out overlap without being the same memory; pass out=x to reduce in place, or "
            "an array apart from x"
        )


def check_array(x: Any, out: Any | None) -> None:
    """Refuses arrays, of any device, of other memory orders, and an `out` that does not fit."""
    if not x.flags.c_contiguous:
        raise ArgumentError(
            f"all_reduce: x must be C-contiguous, but has shape {x.shape} and strides {x.strides}; "
            "pass numpy.ascontiguousarray(x)"
        )
    if out is None or out is x:
        return
    if out.shape != x.shape or out.dtype != x.dtype or not out.flags.c_contiguous:
        raise ArgumentError(
            f"all_reduce: out must be a C-contiguous {x.dtype.name}{list(x.shape)} like x, but is "
            f"{out.dtype.name}{list(out.shape)} with strides {out.strides}"
        )


class NoTransport(Transport):
    """Nothing to move, or nothing to move it with. `why` is the error's text."""

    def __init__(self, why: str) -> None:
        self.why = why

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CommunicatorError(self.why)

    _any_call: Any = _refuse
    all_reduce = start_all_reduce = reduce = broadcast = all_gather = reduce_scatter = start_reduce_scatter = scan = (
        _any_call
    )
    all_to_all = exchange = start_exchange = send = recv = start_recv = barrier = _any_call

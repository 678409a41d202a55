"""Arrays of a device, handed to an MPI that reads and writes the device's memory itself (CUDA-aware).

mpi4py finds the address by `__cuda_array_interface__` or DLPack and waits for nothing, so the stream is synchronised
before every call; after a blocking call the values are there for every stream. An MPI that is not CUDA-aware takes the
address for one of the host's and crashes: hence the `Verdict`, which only a try gives (see `cuda_probe`).

What MPI does not reduce as the library does (see `reduction`) is staged, and so are scans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fuel_parallel.backends.device_memory import DeviceMemory
from fuel_parallel.comm.background import Background
from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.comm.cuda_probe import Verdict
from fuel_parallel.comm.mpi import MpiTransport
from fuel_parallel.comm.reduction import BY_MPI
from fuel_parallel.comm.transport import Pending, Transport, check_array
from fuel_parallel.errors import CommunicatorError

if TYPE_CHECKING:
    from mpi4py import MPI

Array = Any


class DirectTransport(MpiTransport):
    """MPI calls on arrays of a device; `staged` does what MPI cannot."""

    def __init__(
        self,
        comm: MPI.Comm,
        memory: DeviceMemory,
        staged: Transport,
        verdict: Verdict,
        background: Background | None = None,
    ) -> None:
        if not verdict.aware:
            raise CommunicatorError(f"MPI is not handed arrays of {memory.device}: {verdict.reason}")
        super().__init__(comm)
        self.xp = memory.array_module
        self.memory, self.staged, self.background = memory, staged, background

    def buffer(self, x: Array) -> Array:
        """See `MpiTransport.buffer`: an array of the device, after all that was to be done with it."""
        if not isinstance(x, self.xp.ndarray):
            raise CommunicatorError(
                f"a transport of arrays of {self.memory.device} was given a "
                f"{type(x).__module__}.{type(x).__qualname__}; use communicator.transport_of(array)"
            )
        self.memory.stream().synchronize()
        return x

    def check(self, x: Array, out: Array | None) -> None:
        """See `MpiTransport.check`."""
        check_array(x, out)

    def all_reduce(self, x: Array, op: ReduceOp, out: Array | None = None) -> Array:
        """See `Transport.all_reduce`."""
        return super().all_reduce(x, op, out) if x.dtype in BY_MPI[op] else self.staged.all_reduce(x, op, out)

    def start_all_reduce(self, x: Array, op: ReduceOp, *, reuse: bool = False) -> Pending:
        """See `Transport.start_all_reduce`. Never an MPI_Iallreduce: Open MPI has none for device memory."""
        if self.background is None or not self.background.takes(x):
            return Transport.start_all_reduce(self, x, op, reuse=reuse)
        return self.background.start(x, op, reuse)

    def reduce(self, x: Array, op: ReduceOp, root: int) -> Array | None:
        """See `Transport.reduce`."""
        return super().reduce(x, op, root) if x.dtype in BY_MPI[op] else self.staged.reduce(x, op, root)

    def reduce_scatter(self, x: Array, op: ReduceOp, rows: Sequence[int], out: Array | None = None) -> Array:
        """See `Transport.reduce_scatter`."""
        if x.dtype not in BY_MPI[op]:
            return self.staged.reduce_scatter(x, op, rows, out)
        return super().reduce_scatter(x, op, rows, out)

    def scan(self, x: Array, op: ReduceOp, *, exclusive: bool, reverse: bool) -> Array:
        """See `Transport.scan`."""
        return self.staged.scan(x, op, exclusive=exclusive, reverse=reverse)

"""All-reduces of device arrays that go on while the rank computes: a thread with a communicator of its own.

MPI has no non-blocking reductions of device memory that every library supports, and a staged one consists of copies and
messages that somebody must start. So a thread makes blocking calls, one all-reduce after the other, in the order in
which they were started: it is the same on all ranks. It needs an MPI that lets threads call it (MPI_THREAD_MULTIPLE).
What is small is not given to it: there is less to hide than handing over costs.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

from fuel_parallel.backends.device_memory import DeviceMemory, Event
from fuel_parallel.comm.shared_reduction import settle
from fuel_parallel.comm.transport import Pending, Transport

if TYPE_CHECKING:
    from fuel_parallel.comm.communicator import ReduceOp

LEAST_BYTES = 64 << 10
"""From this size on an all-reduce is handed to the thread."""

_POLL_S = 0.2  # a wait looks up this often, so that signals are heard
_running: list[Background] = []


def finish() -> None:
    """Waits until all that was started is through; MPI must not be finalized before."""
    for one in _running:
        one.drain()


class Background:
    """A thread that does all-reduces by `transport`, which nobody else uses. The thread begins with the first one."""

    def __init__(self, transport: Transport, memory: DeviceMemory) -> None:
        self.transport, self.memory = transport, memory
        self._queue: queue.SimpleQueue[_Reduction] = queue.SimpleQueue()
        self._last: _Reduction | None = None
        self._stream: Any = None

    def takes(self, x: Any) -> bool:
        """Whether an all-reduce of such an array is to be started here: by its size only, so alike on all ranks."""
        return bool(x.nbytes >= LEAST_BYTES)

    def start(self, x: Any, op: ReduceOp, reuse: bool) -> Pending:
        """Starts an all-reduce; into `x` itself with `reuse`."""
        if self._stream is None:
            self._stream = self.memory.new_stream()
            threading.Thread(target=self._work, name="fuel-parallel all-reduce", daemon=True).start()
            _running.append(self)
        self._last = _Reduction(self.memory, x, op, reuse)
        self._queue.put(self._last)
        return self._last

    def drain(self) -> None:
        """Waits until all that was started is over, well or not."""
        if self._last is not None:
            self._last.over.wait()

    def _work(self) -> None:
        with self.memory.running(self._stream):
            while True:
                self._queue.get().run(self.transport, self._stream)


class _Reduction(Pending):
    """One all-reduce on its way through the thread."""

    def __init__(self, memory: DeviceMemory, x: Any, op: ReduceOp, reuse: bool) -> None:
        self.x, self.op = x, op
        # Here and not in the thread: a device's pool gives memory back to the stream that it was taken for, and the
        # kernels that read the result are queued on this one.
        self.result = x if reuse else memory.array_module.empty_like(x)
        self.ready: Event = memory.stream().record()
        self.over = threading.Event()
        self.error: BaseException | None = None

    def run(self, transport: Transport, stream: Any) -> None:
        """In the thread: waits for the kernels that make the array, reduces it, and waits until it is there."""
        try:
            stream.wait_event(self.ready)
            transport.all_reduce(self.x, self.op, self.result)
            stream.synchronize()
        except BaseException as error:  # it is the script's thread that has to hear of it
            self.error = error
        finally:
            self.over.set()

    def progress(self) -> None:
        """Nothing: the thread goes on by itself."""

    def wait(self) -> Any:
        """See `Pending.wait`."""
        settle()  # another rank may come to this only when my part of what is in shared memory is done
        while not self.over.wait(_POLL_S):
            pass
        if self.error is not None:
            raise self.error
        return self.result

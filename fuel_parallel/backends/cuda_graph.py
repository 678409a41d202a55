"""A CUDA graph, by CuPy: work that was noted once, with the addresses that it works on, and is launched as one.

Memory that is taken while a graph is captured comes from a pool of the graph's own. So nobody else is given it, and
what the graph wrote there stays until it is launched again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from fuel_parallel.backends.device_memory import Event


class CudaGraph:
    """What `work` queues on the current device. While it is captured nothing is done.

    `work` must not wait for the device, and copies from and to host memory are errors, see
    `cupy.cuda.Stream.begin_capture`. What it raises is raised here, and nothing is left behind.
    """

    def __init__(self, cupy: Any, work: Callable[[], None]) -> None:
        self._cupy = cupy
        self._pool = cupy.cuda.MemoryPool()
        self._done: Event | None = None
        # The default stream cannot be captured, and a blocking one must not be while others use that.
        stream = cupy.cuda.Stream(non_blocking=True)
        with cupy.cuda.using_allocator(self._pool.malloc), stream:
            stream.begin_capture()
            try:
                work()
            except BaseException:
                # An error of CUDA has ended the capture already.
                with contextlib.suppress(Exception):
                    stream.end_capture()
                raise
            self._graph = stream.end_capture()
        self.nbytes = int(self._pool.total_bytes())
        """The memory that it holds."""

    def launch(self) -> None:
        """Queues all of it on the current stream."""
        stream = self._cupy.cuda.get_current_stream()
        try:
            self._graph.launch()
        finally:
            # Of the last launch, whichever stream it is on: a graph is never at work twice at a time.
            self._done = stream.record(self._done)

    def __del__(self) -> None:
        # Memory must not go to others while the last launch still works on it. An event knows its device; a default
        # stream is that of the current one.
        if self._done is not None:
            with contextlib.suppress(Exception):
                self._done.synchronize()

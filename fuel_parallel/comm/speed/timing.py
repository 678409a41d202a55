"""Times of collective calls: series of calls, so that clock and start do not count, timed on the slowest rank."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

Call = Callable[[], Any]

LEAST_SERIES = 3
MOST_CALLS = 100
"""Calls of one series at most."""


def series(comm: MPI.Comm, call: Call, calls: int, finish: Call = lambda: None) -> float:
    """Seconds of so many calls, one after the other, on the rank where they took longest. A collective call.

    `finish` waits for what calls have only begun.
    """
    from mpi4py import MPI

    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    finish()
    return float(comm.allreduce(time.perf_counter() - begin, MPI.MAX))


def calls_of_series(comm: MPI.Comm, call: Call, seconds: float, finish: Call = lambda: None) -> int:
    """How many calls a series has, so that ten series take `seconds`. A collective call, which makes one call."""
    once = series(comm, call, 1, finish)
    return int(comm.bcast(max(1, min(MOST_CALLS, int(seconds / 10 / once)))))


def rounds(comm: MPI.Comm, seconds: float) -> Iterator[int]:
    """Counts as long as rank 0 has time, on all ranks alike."""
    begin, number = time.perf_counter(), 0
    while comm.bcast(number < LEAST_SERIES or time.perf_counter() - begin < seconds):
        yield number
        number += 1


def machine() -> str:
    """The processor and the number of its cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux, or a processor without a name
    return f"{name}, {os.cpu_count()} cores"


def library() -> str:
    """The MPI and its version."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split()).partition(",")[0]

"""How far this rank's clock is from that of rank 0, so that the traces of all ranks lie over each other.

Ranks that share a kernel share its monotonic clock (Linux): their distance is 0 exactly. Any other rank plays ping-pong
with rank 0, as in NTP; of all rounds the fastest counts, and it is right to half of that round.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

_ROUNDS = 30


@dataclass(frozen=True, slots=True)
class Clock:
    """Add `offset_ns` to `time.perf_counter_ns()` to have rank 0's, right to `accuracy_ns`."""

    rank: int = 0
    world_size: int = 0
    offset_ns: int = 0
    accuracy_ns: int = 0


mine = Clock()
"""This rank's; its world_size is 0 before `compare`."""


def compare(comm: MPI.Intracomm) -> None:
    """Measures `mine`. Collective: all ranks of `comm` call it."""
    global mine
    rank, size = comm.Get_rank(), comm.Get_size()
    kernel = _kernel()
    others = comm.gather(kernel, 0)
    strangers = comm.bcast([r for r, name in enumerate(others or []) if r and (not name or name != kernel)], 0)
    offset, accuracy = 0, 0
    for stranger in strangers:
        if rank in (0, stranger):
            offset, accuracy = _ping(comm) if rank else _pong(comm, stranger)
    mine = Clock(rank, size, offset, accuracy)


def _kernel() -> str:
    if sys.platform != "linux":
        return ""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


def _ping(comm: MPI.Intracomm) -> tuple[int, int]:
    theirs = np.zeros(1, np.int64)
    best = (0, 1 << 62)
    for _ in range(_ROUNDS):
        began = time.perf_counter_ns()
        comm.Send(np.zeros(1, np.int64), 0)
        comm.Recv(theirs, 0)
        ended = time.perf_counter_ns()
        if ended - began < best[1]:
            best = (int(theirs[0]) - (began + ended) // 2, ended - began)
    return best[0], best[1] // 2


def _pong(comm: MPI.Intracomm, other: int) -> tuple[int, int]:
    message: np.ndarray[Any, Any] = np.zeros(1, np.int64)
    for _ in range(_ROUNDS):
        comm.Recv(message, other)
        message[0] = time.perf_counter_ns()
        comm.Send(message, other)
    return 0, 0

"""The program of `cuda_probe`: hands device memory to MPI and looks at what arrives. It may crash; that is an answer.

    mpiexec -n 2 python -m fuel_parallel.comm.cuda_try fuel_parallel.backends.cupy_memory:CupyMemory cuda:0

Each rank prints `cuda_try: right` or `cuda_try: wrong ...`, and before that what the library says of itself.
"""

from __future__ import annotations

import ctypes
import importlib
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from fuel_parallel.backends.device_memory import DeviceMemory

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES = (1, 1 << 18)
"""Elements of float32: libraries send small and large messages by different ways."""


def main(memory_type: str, device: str) -> None:
    """Tries all sizes, sending first: a library that cannot send need not be asked to reduce."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer, not a file of the size of the GPU
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive an mpirun that was ended
    module, _, name = memory_type.partition(":")
    memory: DeviceMemory = getattr(importlib.import_module(module), name)(device)
    with memory.running(memory.stream()):
        from mpi4py import MPI

        _say(f"begins, {MPI.COMM_WORLD.size} ranks")
        _say(f"hint {_hint()}")
        for size in SIZES:
            _send_and_receive(MPI.COMM_WORLD, memory, size)
        for size in SIZES:
            _reduce(MPI.COMM_WORLD, memory, size)
    _say("right")


def _send_and_receive(comm: MPI.Intracomm, memory: DeviceMemory, size: int) -> None:
    mine = _values(size, comm.rank)
    sent, received = memory.array_module.asarray(mine), memory.array_module.asarray(np.zeros_like(mine))
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    memory.stream().synchronize()
    comm.Sendrecv(sent, after, 0, received, before, 0)
    _compare("a send", received, _values(size, before))


def _reduce(comm: MPI.Intracomm, memory: DeviceMemory, size: int) -> None:
    from mpi4py import MPI

    x = memory.array_module.asarray(_values(size, comm.rank))
    memory.stream().synchronize()
    comm.Allreduce(MPI.IN_PLACE, x, MPI.SUM)
    _compare("an all-reduce", x, sum(_values(size, rank) for rank in range(comm.size)))


def _values(size: int, rank: int) -> np.ndarray[Any, Any]:
    return (np.arange(size) % 1021 + 7 * rank + 1).astype(np.float32)


def _compare(what: str, array: Any, expected: Any) -> None:
    if not np.array_equal(array.get(), expected):
        _say(f"wrong: {what} of {expected.size} float32 gave other values")
        sys.exit(1)


def _hint() -> str:
    """What the library says, after MPI_Init; mpi4py loads it where `ctypes.CDLL(None)` does not see it."""
    from fuel_parallel.comm.cuda_probe import library_path

    try:
        library = ctypes.CDLL(library_path())
        return "yes" if library.MPIX_Query_cuda_support() else "no"
    except (OSError, AttributeError):
        return "nothing"


def _say(text: str) -> None:
    sys.stdout.write(f"cuda_try: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

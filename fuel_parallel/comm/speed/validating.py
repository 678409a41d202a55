"""Predictions of the cost model beside timings on this job: what `fuelrun topology probe --validate` prints."""

from __future__ import annotations

from collections.abc import Sequence

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.speed.bench import AUTO, MPI_ALONE, Ways, timings
from fuel_parallel.errors import CommunicatorError
from fuel_parallel.lazy import dtypes
from fuel_parallel.topology import Comparison, DeviceTopology, Timing, validate

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
NAMES = {name: name for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")} | {
    "p2p": "shift"
}
"""What is predicted, and the name under which it is timed."""


def compare(
    world: Communicator, t: DeviceTopology, *, sizes: Sequence[int] = SIZES, seconds: float = 0.2
) -> dict[str, list[Comparison]]:
    """Times each collective and compares it with its prediction from the measured links of `t`; rank r is device r.

    The result is by way: MPI's own collectives, which send messages as the model supposes, and what scripts get, which
    inside a node goes through shared memory and so should be faster. A collective call.
    """
    if world.world_size == 1:
        raise CommunicatorError("predictions are about several ranks, but this is one alone; -n 2 starts two")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    ways = Ways.of_host(comm)
    chosen = Ways({way: ways.transports[way] for way in (MPI_ALONE, AUTO)}, place=ways.place)
    measured: dict[str, list[Timing]] = {MPI_ALONE: [], AUTO: []}
    for name, timed_as in NAMES.items():
        for one in timings(comm, chosen, timed_as, sizes, dtypes.float32, seconds):
            measured[one.way].append(Timing(name, world.world_size, one.bytes, one.latency_us))
    comm.Free()
    return {way: validate(t, times) for way, times in measured.items()}

"""Times collectives on the ranks of a job, way by way and size by size: what `fuelrun bench` runs on each rank."""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fuel_parallel.backends import available_devices, backend_of
from fuel_parallel.backends.device_memory import DeviceMemory
from fuel_parallel.comm.device import SETTING, choose
from fuel_parallel.comm.mpi import MpiTransport
from fuel_parallel.comm.node_local import FLOOR, NodeLocalTransport, ranks_of_my_node
from fuel_parallel.comm.speed.collectives import COLLECTIVES, Place
from fuel_parallel.comm.speed.report import Report, Skipped, Timing, plot, row, title
from fuel_parallel.comm.speed.timing import calls_of_series, library, machine, rounds, series
from fuel_parallel.comm.thresholds import KINDS, NEVER
from fuel_parallel.comm.transport import Transport
from fuel_parallel.comm.world import init
from fuel_parallel.errors import ArgumentError, CommunicatorError, FuelError
from fuel_parallel.lazy import dtypes

if TYPE_CHECKING:
    from mpi4py import MPI

AUTO, MPI_ALONE, SHARED = "auto", "mpi", "shared"
"""What a script gets; MPI alone; a node's shared memory for every size."""
OF_DEVICES = ("nccl", "mpi", "staged")
"""The settings of FUEL_TRANSPORT that are ways of their own."""


@dataclass(frozen=True)
class Ways:
    """The transports to compare, by name, those that are not to be had, and where the arrays are."""

    transports: dict[str, Transport]
    skipped: tuple[Skipped, ...] = ()
    place: Place = field(default_factory=Place)

    @staticmethod
    def of_host(comm: MPI.Intracomm) -> Ways:
        """For arrays of the host. A collective call."""
        plain = MpiTransport(comm)
        shared = NodeLocalTransport(plain)
        found: dict[str, Transport] = {AUTO: NodeLocalTransport(MpiTransport(comm)), MPI_ALONE: plain}
        if not shared.shares_one_node:
            return Ways(found, (Skipped(SHARED, "the ranks do not share the memory of one node"),))
        # Two ranks hand small arrays in; that is faster than in place where it is possible at all.
        shared.use_thresholds({**dict.fromkeys(KINDS, 0), "all_reduce_copied": NEVER})
        return Ways({**found, SHARED: shared})

    @staticmethod
    def of_device(comm: MPI.Intracomm, memory: DeviceMemory) -> Ways:
        """For arrays of each rank's device: every way that can be taken. A collective call."""
        host = NodeLocalTransport(MpiTransport(comm))
        found: dict[str, Transport] = {}
        skipped = []
        before = os.environ.get(SETTING)
        try:
            for way in OF_DEVICES:
                os.environ[SETTING] = way
                try:
                    found[way], _ = choose(comm, host, memory)
                except FuelError as reason:  # the same on all ranks
                    skipped.append(Skipped(way, str(reason)))
        finally:
            os.environ.pop(SETTING)
            if before is not None:
                os.environ[SETTING] = before
        return Ways(found, tuple(skipped), Place(memory))


def device_of(kind: str, local_rank: int) -> DeviceMemory:
    """The memory of this rank's device of a kind, `cuda` say. Raises `ArgumentError` where there is none."""
    devices = [name for name in available_devices() if name.partition(":")[0] == kind]
    memory = backend_of(devices[local_rank % len(devices)]).memory if devices else None
    if memory is None:
        have = ", ".join(available_devices())
        raise ArgumentError(f"--device {kind}: there is none on {socket.gethostname()}, which has {have}")
    return memory


def timings(
    comm: MPI.Intracomm, ways: Ways, name: str, sizes: Sequence[int], dtype: dtypes.DType, seconds: float
) -> Iterator[Timing]:
    """The times of one collective; all ranks get the same. Raises `CommunicatorError` where a result is wrong."""
    collective = COLLECTIVES[name]
    for nbytes in sizes if name != "barrier" else [0]:
        size = nbytes // dtype.itemsize
        cases = {}
        for way, transport in ways.transports.items():
            if way != SHARED or (collective.shared and nbytes >= FLOOR):
                cases[way] = collective.make(transport, ways.place, size, dtype)
                if not all(comm.allgather(cases[way].check())):
                    raise CommunicatorError(f"{name} of {nbytes} bytes, way {way}: the result is wrong on some rank")
        finish = ways.place.finish
        counts = {way: calls_of_series(comm, case.call, seconds, finish) for way, case in cases.items()}
        took: dict[str, list[float]] = {way: [] for way in cases}
        # In turns, so that what else the machine does meets all ways alike.
        for _ in rounds(comm, seconds * len(cases)):
            for way, case in cases.items():
                took[way].append(series(comm, case.call, counts[way], finish) / counts[way] / case.trips)
        for way, times in took.items():
            median = statistics.median(times)
            rate = size * dtype.itemsize / median / 1e9
            yield Timing(
                collective=name,
                way=way,
                bytes=size * dtype.itemsize,
                latency_us=median * 1e6,
                min_us=min(times) * 1e6,
                max_us=max(times) * 1e6,
                algorithm_gb_s=rate,
                bus_gb_s=rate * collective.bus(comm.size),
                calls=counts[way] * len(times),
            )


def main() -> None:
    """Measures what the command line names; rank 0 prints each row when it is there."""
    parser = argparse.ArgumentParser(prog="fuelrun bench")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sizes", type=lambda text: [int(n) for n in text.split(",")], required=True)
    parser.add_argument("--dtype", type=dtypes.dtype, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    world = init()
    if world.world_size == 1:
        raise CommunicatorError("a collective needs ranks, but this is one alone; fuelrun bench -n 2 starts two")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    local_rank = ranks_of_my_node(comm).rank
    nodes = comm.allreduce(int(local_rank == 0))
    host = options.device == "cpu"
    ways = Ways.of_host(comm) if host else Ways.of_device(comm, device_of(options.device, local_rank))
    found = Report(
        machine=machine(),
        mpi=library(),
        ranks=comm.size,
        nodes=nodes,
        dtype=options.dtype.name,
        device=options.device,
        timings=(),
        skipped=ways.skipped,
    )
    loud = world.is_root and not options.json
    if loud:
        _say(f"# {found.machine}", *[f"# {s.way}: skipped, {s.reason}" for s in found.skipped])
    for name in options.names or COLLECTIVES:
        if loud:
            _say("#", *title(name, found, COLLECTIVES[name].counted))
        for timing in timings(comm, ways, name, options.sizes, options.dtype, options.seconds):
            found = msgspec.structs.replace(found, timings=(*found.timings, timing))
            if loud:
                _say(row(timing))
    if world.is_root:
        if options.json:
            _say(msgspec.json.encode(found).decode())
        if options.plot is not None:
            plot(found, options.plot)


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Times collectives on the ranks of a job, way by way and size by size: what `fuelrun bench` runs on each rank."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fuel_parallel.comm.mpi import MpiTransport
from fuel_parallel.comm.node_local import FLOOR, NodeLocalTransport, ranks_of_my_node
from fuel_parallel.comm.speed.collectives import COLLECTIVES
from fuel_parallel.comm.speed.report import Report, Skipped, Timing, plot, row, title
from fuel_parallel.comm.speed.timing import calls_of_series, library, machine, rounds, series
from fuel_parallel.comm.thresholds import KINDS, NEVER
from fuel_parallel.comm.transport import Transport
from fuel_parallel.comm.world import init
from fuel_parallel.errors import CommunicatorError
from fuel_parallel.lazy import dtypes

if TYPE_CHECKING:
    from mpi4py import MPI

AUTO, MPI_ALONE, SHARED = "auto", "mpi", "shared"
"""What a script gets; MPI alone; a node's shared memory for every size."""


@dataclass(frozen=True)
class Ways:
    """The transports to compare, by name, and those that are not to be had."""

    transports: dict[str, Transport]
    skipped: tuple[Skipped, ...]

    @staticmethod
    def of(comm: MPI.Intracomm) -> Ways:
        """Those of a communicator. A collective call."""
        plain = MpiTransport(comm)
        shared = NodeLocalTransport(plain)
        found: dict[str, Transport] = {AUTO: NodeLocalTransport(MpiTransport(comm)), MPI_ALONE: plain}
        if not shared.shares_one_node:
            return Ways(found, (Skipped(SHARED, "the ranks do not share the memory of one node"),))
        # Two ranks hand small arrays in; that is faster than in place where it is possible at all.
        shared.use_thresholds({**dict.fromkeys(KINDS, 0), "all_reduce_copied": NEVER})
        return Ways({**found, SHARED: shared}, ())


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
                cases[way] = collective.make(transport, size, dtype)
                if not all(comm.allgather(cases[way].check())):
                    raise CommunicatorError(f"{name} of {nbytes} bytes, way {way}: the result is wrong on some rank")
        counts = {way: calls_of_series(comm, case.call, seconds) for way, case in cases.items()}
        took: dict[str, list[float]] = {way: [] for way in cases}
        # In turns, so that what else the machine does meets all ways alike.
        for _ in rounds(comm, seconds * len(cases)):
            for way, case in cases.items():
                took[way].append(series(comm, case.call, counts[way]) / counts[way] / case.trips)
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
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    world = init()
    if world.world_size == 1:
        raise CommunicatorError("a collective needs ranks, but this is one alone; fuelrun bench -n 2 starts two")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    nodes = comm.allreduce(int(ranks_of_my_node(comm).rank == 0))
    ways = Ways.of(comm)
    found = Report(
        machine=machine(),
        mpi=library(),
        ranks=comm.size,
        nodes=nodes,
        dtype=options.dtype.name,
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

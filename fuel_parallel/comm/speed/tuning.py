"""Measures from which size on a collective is faster in a node's shared memory than by MPI: a row of the table.

Run on ranks of one node, `python -m fuel_parallel.comm.speed.tuning`, as `fuelrun bench --tune` does. Both ways are
timed in turns, so that what else the machine does meets both alike. A threshold is the least size from which on shared
memory was faster at *every* size that was tried: one lucky measurement moves nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.comm.mpi import MpiTransport
from fuel_parallel.comm.node_local import SMALL_BYTES, NodeLocalTransport
from fuel_parallel.comm.speed.timing import Call, calls_of_series, library, machine, rounds, series
from fuel_parallel.comm.thresholds import KINDS, NEVER, CollectiveTable, Row, table_path, write_table
from fuel_parallel.comm.transport import Transport
from fuel_parallel.errors import CommunicatorError

if TYPE_CHECKING:
    from mpi4py import MPI

SMALLEST, LARGEST = 4 << 10, 16 << 20
LARGEST_OF = {"all_reduce_handed_in": SMALL_BYTES, "all_reduce_copied": 64 << 20}


def calls(kind: str, transport: Transport, nbytes: int, rank: int, ranks: int) -> Call:
    """A collective of a kind on `nbytes` bytes of float32, as the table counts them."""
    size = nbytes // 4
    if kind == "all_gather":
        rows = tuple([max(size // ranks, 1)] * ranks)
        x = np.zeros(rows[rank], np.float32)
        return lambda: transport.all_gather(x, rows)
    x = np.zeros(size, np.float32)
    if kind == "broadcast":
        return lambda: transport.broadcast(x, 0)
    if kind == "reduce_scatter":
        rows = tuple([size // ranks + (r < size % ranks) for r in range(ranks)])
        return lambda: transport.reduce_scatter(x, ReduceOp.SUM, rows)
    if kind == "all_reduce_in_place":
        return lambda: transport.start_all_reduce(x, ReduceOp.SUM, reuse=True).wait()
    return lambda: transport.all_reduce(x, ReduceOp.SUM, x)


def sizes(kind: str) -> list[int]:
    """The sizes that are tried: each twice the one before."""
    end = LARGEST_OF.get(kind, LARGEST)
    return [size for size in (SMALLEST << n for n in range(32)) if size <= end]


def threshold(speedups: Mapping[int, float]) -> int:
    """The least size from which on shared memory is faster at all sizes; NEVER if it is not at the largest.

    >>> threshold({4096: 1.5, 8192: 0.9, 16384: 1.1, 32768: 2.0})
    16384
    """
    found = NEVER
    for size in sorted(speedups, reverse=True):
        if speedups[size] < 1.0:
            break
        found = size
    return found


def measure_row(comm: MPI.Intracomm, seconds: float) -> Row:
    """The thresholds for the ranks of `comm`, which share a node. A collective call; all ranks get the same."""
    plain = MpiTransport(comm)
    shared = NodeLocalTransport(plain)
    if not shared.shares_one_node:
        raise CommunicatorError(
            f"the {comm.size} ranks of this job do not share the memory of one node, so there is nothing to tune; "
            "run fuelrun bench --tune on a single node, without FUEL_NODE_LOCAL=0"
        )
    least = {}
    for kind in KINDS:
        shared.use_thresholds({**dict.fromkeys(KINDS, NEVER), kind: 0, **_WITH.get(kind, {})})
        speedups = {size: _speedup(comm, kind, plain, shared, size, seconds) for size in sizes(kind)}
        least[kind] = threshold(speedups)
    if comm.size > 2:
        least["all_reduce_handed_in"] = NEVER
    return Row(ranks=comm.size, **least)


_WITH = {"all_reduce_copied": {"all_reduce_in_place": 0}}


def _speedup(comm: MPI.Intracomm, kind: str, plain: Transport, shared: Transport, nbytes: int, seconds: float) -> float:
    """How many times faster shared memory is: the median over pairs of neighbouring series."""
    # MPI's own best is the blocking call in place, whatever a plan would do.
    by_mpi = calls("all_reduce" if kind.startswith("all_reduce") else kind, plain, nbytes, comm.rank, comm.size)
    by_memory = calls(kind, shared, nbytes, comm.rank, comm.size)
    by_memory()
    count = calls_of_series(comm, by_mpi, seconds)
    ratios = []
    for _ in rounds(comm, seconds):
        slow, fast = (series(comm, call, count) for call in (by_mpi, by_memory))
        ratios.append(slow / fast)
    return float(comm.bcast(statistics.median(ratios)))


def measure(comm: MPI.Intracomm, seconds: float) -> CollectiveTable:
    """The table of this machine: a row for 2 ranks, 4, and so on, and one for all. A collective call."""
    from mpi4py import MPI

    rows = []
    for count in sorted({*(1 << n for n in range(1, 16) if 1 << n < comm.size), comm.size}):
        part = MPI.Intracomm(comm.Split(0 if comm.rank < count else 1, comm.rank))
        rows.append(comm.bcast(measure_row(part, seconds) if comm.rank < count else None))
        # Asleep, not in MPI, where those who wait would take the cores from those who measure.
        arrived = comm.Ibarrier()
        while not arrived.Test():
            time.sleep(0.01)
    return CollectiveTable(machine=machine(), mpi=library(), rows=tuple(rows))


def main() -> None:
    """Measures, writes the table, and says what is in it."""
    from fuel_parallel.comm.world import init

    parser = argparse.ArgumentParser(prog="fuelrun bench --tune")
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    world = init()
    if world.world_size == 1:
        raise CommunicatorError("tuning compares ranks, but this is one alone; fuelrun bench --tune -n 2 starts two")
    from mpi4py import MPI

    table = measure(MPI.COMM_WORLD.Dup(), options.seconds)
    if not world.is_root:
        return
    path = write_table(table, options.output or table_path())
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(table)).decode() + "\n")
    else:
        sys.stdout.write("\n".join(describe(table, path)) + "\n")


def describe(table: CollectiveTable, path: Path) -> Iterator[str]:
    """The table in words."""
    yield f"{table.machine}; {table.mpi}"
    for row in table.rows:
        yield f"up to {row.ranks} ranks, shared memory is faster"
        for kind in KINDS:
            yield f"  {kind:22}{_from(getattr(row, kind))}"
    yield f"written to {path}; remove it to go back to the built-in table"


def _from(nbytes: int) -> str:
    if nbytes >= NEVER:
        return "at no size"
    return f"from {nbytes >> 20} MiB on" if nbytes >= 1 << 20 else f"from {nbytes >> 10} KiB on"


if __name__ == "__main__":
    main()

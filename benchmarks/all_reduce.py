"""All-reduce inside a node: fuel-parallel against the MPI that it runs on, size by size.

    fuelrun -n 2 benchmarks/all_reduce.py
    fuelrun -n 2 benchmarks/all_reduce.py --json --sizes 4MiB,16MiB
    fuelrun -n 2 benchmarks/all_reduce.py --peer gloo --peer-python /path/to/python-with-torch

Ways to sum a float32 array over all ranks, measured in turns, so that what else the machine does meets all alike:

- *ours*: of an array that was born in shared memory, in place, as gradient buckets are;
- *moved*: of an array in private memory, as other tensors are; the result is where plans have it, in shared memory;
- *copied*: `transport.all_reduce(x, SUM, out=y)` of an array in private memory, into another;
- *MPI*: `comm.Allreduce(MPI.IN_PLACE, x)`.

A time is that of the slowest rank, for one call out of a series, after the results were checked. Ratios are medians
over pairs of neighbouring series. The peer is measured by processes of its own, after all else: gloo, in place as well.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

import fuel_parallel as fp
from fuel_parallel import ReduceOp

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

PEER = """
import datetime, json, os, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, ranks, sizes, seconds = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), float(sys.argv[4])
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[5], rank=rank, world_size=ranks,
                        timeout=datetime.timedelta(seconds=120))
times = {}
for size in sizes:
    x = torch.zeros(size // 4)
    for _ in range(3):
        dist.all_reduce(x)
    series = []
    count = torch.ones(1)
    begin = time.perf_counter()
    while True:
        start = time.perf_counter()
        for _ in range(3):
            dist.all_reduce(x)
        took = torch.tensor([(time.perf_counter() - start) / 3])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        series.append(took.item())
        go_on = torch.tensor([float(len(series) < 5 or time.perf_counter() - begin < seconds)])
        dist.broadcast(go_on, 0)
        if not go_on.item():
            break
    times[size] = series
if rank == 0:
    print(json.dumps(times), flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads may abort a process that ends while they run
"""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, one number for each series."""

    series: list[float]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.series)

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"median_s": self.median, "min_s": min(self.series), "max_s": max(self.series)}


def ratio(slow: Timing, fast: Timing) -> float:
    """How many times faster: the median over pairs of neighbouring series."""
    return statistics.median(s / f for s, f in zip(slow.series, fast.series, strict=True))


def main() -> None:
    """Measures all sizes; rank 0 prints."""
    options = arguments()
    world = fp.init()
    if world.world_size == 1:
        sys.exit("all_reduce.py compares ranks: start it with fuelrun -n 2")
    comm = MPI.COMM_WORLD.Dup()
    table = {size: measure(world, comm, size, options.seconds) for size in options.sizes}
    peer = measure_peer(world, comm, options) if options.peer else {}
    if not world.is_root:
        return
    report = {
        "ranks": world.world_size,
        "mpi": " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split()).partition(",")[0],
        "load_average": os.getloadavg()[0],
        "speedup_over_mpi": {size: ratio(t["mpi"], t["ours"]) for size, t in table.items()},
        "speedup_over_mpi_moved": {size: ratio(t["mpi"], t["moved"]) for size, t in table.items()},
        "speedup_over_mpi_copied": {size: ratio(t["mpi"], t["copied"]) for size, t in table.items()},
        "speedup_over_peer": {size: peer[size].median / t["ours"].median for size, t in table.items() if peer},
        "seconds": {
            size: {way: t.as_dict() for way, t in [*times.items(), *([("gloo", peer[size])] if peer else [])]}
            for size, times in table.items()
        },
    }
    if options.json:
        print(json.dumps(report))
    else:
        show(report, table, peer)


def measure(world: fp.Communicator, comm: MPI.Intracomm, size: int, seconds: float) -> dict[str, Timing]:
    """All ways, in turns for about `seconds`."""
    transport = world.transport
    born = transport.allocate(size)
    x = np.empty(size // 4, np.float32) if born is None else born.view(np.float32)
    given, private, out, raw = (np.empty(size // 4, np.float32) for _ in range(4))
    add = ReduceOp.SUM  # looked up once, as a plan does
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: transport.all_reduce(x, add, x),
        "mpi": lambda: comm.Allreduce(MPI.IN_PLACE, raw, MPI.SUM),
        "moved": lambda: transport.start_all_reduce(given, add).wait(),
        "copied": lambda: transport.all_reduce(private, add, out),
    }
    for array in (x, given, private, raw):
        array[:] = world.rank + 1
    expected = world.world_size * (world.world_size + 1) / 2
    for run in ways.values():
        found = run()
        assert ((raw if found is None else found) == expected).all()
    assert (out == expected).all()
    for array in (x, given, private, raw):  # zeros stay zeros, however often they are summed in place
        array[:] = 0
    calls = max(1, min(200, (4 << 20) // size))
    series: dict[str, list[float]] = {way: [] for way in ways}
    for _ in rounds(comm, seconds):
        for way, run in ways.items():
            run()
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            took = (time.perf_counter() - start) / calls
            series[way].append(comm.allreduce(took, MPI.MAX))
    return {way: Timing(times) for way, times in series.items()}


def rounds(comm: MPI.Intracomm, seconds: float) -> Iterator[int]:
    """Counts as long as rank 0 has time; at least 7."""
    begin, number = time.perf_counter(), 0
    while comm.bcast(number < 7 or time.perf_counter() - begin < seconds):
        yield number
        number += 1


def measure_peer(world: fp.Communicator, comm: MPI.Intracomm, options: argparse.Namespace) -> dict[int, Timing]:
    """gloo between processes that each rank starts; nothing else runs meanwhile."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = comm.bcast(free.getsockname()[1])
    command = [options.peer_python, "-c", PEER, str(world.rank), str(world.world_size)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE"))}
    with subprocess.Popen(
        [*command, json.dumps(options.sizes), str(options.seconds), str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    ) as process:
        while process.poll() is None:  # a rank that waited inside MPI would take the core from its peer
            time.sleep(0.05)
        printed = process.stdout.read() if process.stdout else ""
    statuses = comm.allgather(process.returncode)
    if any(statuses):
        sys.exit(f"{options.peer_python} could not measure gloo: exit statuses of the ranks {statuses}")
    times = comm.bcast(json.loads(printed) if world.is_root else None)
    return {int(size): Timing(series) for size, series in times.items()}


def show(report: dict[str, Any], table: dict[int, dict[str, Timing]], peer: dict[int, Timing]) -> None:
    """A table for people."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=f"all-reduce, {report['ranks']} ranks, {report['mpi']}: median (min to max)")
    for heading in ("bytes", "ours", "moved", "copied", "MPI in place", *(["gloo"] if peer else []), "faster than MPI"):
        grid.add_column(heading, justify="right")
    for size, times in table.items():
        cells = [cell(times[way]) for way in ("ours", "moved", "copied", "mpi")]
        speedups = [report[f"speedup_over_mpi{way}"][size] for way in ("", "_moved", "_copied")]
        faster = "{:.2f}x, moved {:.2f}x, copied {:.2f}x".format(*speedups)
        grid.add_row(named(size), *cells, *([cell(peer[size])] if peer else []), faster)
    Console().print(grid)


def cell(timing: Timing) -> str:
    """Microseconds or milliseconds."""
    scale, unit = (1e6, "us") if timing.median < 1e-3 else (1e3, "ms")
    low, middle, high = (scale * s for s in (min(timing.series), timing.median, max(timing.series)))
    return f"{middle:.3g} {unit} ({low:.3g} to {high:.3g})"


def named(size: int) -> str:
    """A size as people write it."""
    unit = next((u for u in ("GiB", "MiB", "KiB") if size % UNITS[u] == 0), "")
    return f"{size // UNITS.get(unit, 1)} {unit}"


def parsed(text: str) -> int:
    """A size as people write it, in bytes."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--sizes", type=lambda s: [parsed(part) for part in s.split(",")], default=SIZES)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each size")
    parser.add_argument("--peer", choices=["gloo"])
    parser.add_argument("--peer-python", default=sys.executable, help="a Python that has torch")
    return parser.parse_args()


if __name__ == "__main__":
    main()

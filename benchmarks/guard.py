"""What the guard costs: `fuelrun -n 2 benchmarks/guard.py`.

Times `realize` of all-reduces of 8 elements with the guard on and off, in turns within one job, since a busy machine
changes from minute to minute.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.comm.guard import Guard


def realizes(world: fp.Communicator, collectives: int, count: int) -> list[float]:
    """Seconds of each of `count` realizes of so many all-reduces."""
    x = ft.ones(8).realize()
    times = []
    for _ in range(count):
        sums = [world.all_reduce(x) for _ in range(collectives)]
        begin = time.perf_counter()
        fp.realize(sums)
        times.append(time.perf_counter() - begin)
    return times


def switch(guard: Guard, exchange: object) -> None:
    """Turns the guard on or off; all ranks do, between two realizes."""
    guard.exchange = exchange  # type: ignore[assignment]
    guard.verified = guard.published if exchange else sys.maxsize


def main() -> None:
    """Prints a line for each number of collectives in a plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="how often it is turned on and off")
    parser.add_argument("--count", type=int, default=200, help="realizes in each round")
    options = parser.parse_args()
    world = fp.init()
    guard = world.guard
    if guard is None or guard.exchange is None:
        raise SystemExit("start it on two ranks or more, without FUEL_GUARD=0: fuelrun -n 2 benchmarks/guard.py")
    exchange = guard.exchange
    realizes(world, 1, 100)
    for collectives in (1, 8, 32):
        on: list[float] = []
        off: list[float] = []
        differences = []
        for _ in range(options.rounds):
            switch(guard, None)
            off += (plain := realizes(world, collectives, options.count // collectives + 5))
            switch(guard, exchange)
            on += (guarded := realizes(world, collectives, options.count // collectives + 5))
            differences.append(np.median(guarded) - np.median(plain))
        if world.is_root:
            print(
                f"{collectives:3d} all-reduces a realize: {np.median(off) * 1e6:7.1f} us without, "
                f"{np.median(on) * 1e6:7.1f} us with the guard; median difference of a round "
                f"{np.median(differences) * 1e6:+.1f} us"
            )


if __name__ == "__main__":
    main()

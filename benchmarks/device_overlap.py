"""How much of two devices' work overlaps in one plan: a chain of matrix products on each, side by side or in turn.

    OPENBLAS_NUM_THREADS=1 python benchmarks/device_overlap.py            # or --json

One device is the CPU. The other is numpy's as well, as a backend of its own kind that has a thread: on two cores that
are free, both chains take half of the time that they take one after the other. Both ways are measured in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import click
import numpy as np

import fuel_parallel.lazy as ft
from fuel_parallel import backends
from fuel_parallel.backends.backend import Backend
from fuel_parallel.runtime.execute import execute
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan


class Board(np.ndarray[Any, Any]):
    """An array of the second device."""


class BoardModule:
    """numpy's products for arrays of the second device."""

    __name__ = "board"
    ndarray = Board

    def matmul(self, a: Any, b: Any) -> Any:
        """numpy's."""
        return np.matmul(a, b)


class BoardBackend(Backend):
    """A device that is numpy on a thread of its own."""

    def __init__(self) -> None:
        self.array_module = BoardModule()
        self.dlpack_device = (12, 0)

    def runs(self, op: str, inputs: Any, attrs: tuple[Any, ...]) -> bool:
        """See `Backend.runs`."""
        return op in ("matmul", "copy")

    def holds(self, array: Any) -> bool:
        """See `Backend.holds`."""
        return type(array) is Board

    def to_host(self, array: Any) -> Any:
        """See `Backend.to_host`."""
        return np.array(array)

    def from_host(self, array: Any) -> Any:
        """See `Backend.from_host`."""
        return np.array(array).view(Board)

    def settle(self, value: Any) -> Any:
        """See `Backend.settle`."""
        return value


def chain(size: int, length: int, device: str) -> ft.Tensor:
    """A product of `length` equal matrices, all on one device."""
    x = (ft.asarray(np.full((size, size), 1 / size, np.float32))).to(device).realize()
    y = x
    for _ in range(length):
        y = ft.matmul(y, x)
    return y


def milliseconds(run: Callable[[], Any]) -> float:
    """The time of one run."""
    began = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - began) / 1e6


def _bare_threads(size: int, length: int, rounds: int) -> float:
    """The ratio that two threads reach that do nothing but these products."""
    x = np.full((size, size), 1 / size, np.float32)

    def products() -> None:
        y = x
        for _ in range(length):
            y = np.matmul(y, x)

    def together() -> None:
        other = threading.Thread(target=products)
        other.start()
        products()
        other.join()

    def in_turn() -> None:
        products()
        products()

    pairs = [(milliseconds(together), milliseconds(in_turn)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


@click.command()
@click.option("--size", default=512, show_default=True, help="Rows and columns of each matrix.")
@click.option("--length", default=20, show_default=True, help="Products of each chain.")
@click.option("--rounds", default=15, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(size: int, length: int, rounds: int, as_json: bool) -> None:
    """Measures both ways in turns and prints medians."""
    backends._found["board:0"] = BoardBackend()
    graph, leaves, computed = trace([chain(size, length, device).node for device in ("cpu", "board:0")])
    plan = make_plan(graph, ("overlap",))
    values = [leaf.value for leaf in leaves]
    ways = {"side by side": plan, "one after the other": replace(plan, lanes=None)}
    assert plan.lanes is not None
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, each in ways.items():
            times[name].append(milliseconds(lambda each=each: execute(each, values, computed)))  # type: ignore[misc]
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    bare = _bare_threads(size, length, rounds)
    ratio = medians["side by side"] / medians["one after the other"]
    limit = 1 / min(2, os.cpu_count() or 1)
    if as_json:
        print(
            json.dumps(
                {"milliseconds": medians, "ratio": ratio, "limit": limit, "bare_threads": bare, "cores": os.cpu_count()}
            )
        )
        return
    print(f"two chains of {length} products of {size} x {size}, one on each device, medians of {rounds} runs")
    for name, taken in medians.items():
        print(f"{name:20} {taken:8.1f} ms")
    print(f"{'ratio':20} {ratio:8.2f}    ({limit:.2f} is the limit on {os.cpu_count()} cores)")
    print(f"{'two bare threads':20} {bare:8.2f}    (the same products without any plan: what the machine allows now)")


if __name__ == "__main__":
    main()

"""The worker's side of a race: builds a framework's step and runs it whenever the driver says so.

A worker is one process (one rank) of one framework. It connects to the driver (BENCHMARK_DRIVER is host:port) and
answers its lines, each with one line of JSON:

    step 3        one training step on batch 3: {"ms": 351.2, "cpu_ms": 350.9, "loss": 8.318}
    memory        {"peak_bytes": ...}, the most that the process grew since before its model was built
    (end)         ends
"""

from __future__ import annotations

import functools
import json
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpt import Array, Config, batch

Step = Callable[[Array, Array], float]
Prepare = Callable[[int], Callable[[], float]]
Build = Callable[[Config, dict[str, Array], int, int], Step]


def serve(build: Build, version: str) -> None:
    """Answers until the driver hangs up. `build(config, weights, rank, world_size)` gives the function of one step."""
    rank, size = place()
    folder = Path(sys.argv[1])
    config = Config.load(folder)

    def prepare() -> Prepare:
        with np.load(folder / "weights.npz", allow_pickle=False) as file:
            step = build(config, {name: file[name] for name in file.files}, rank, size)
        return lambda number: functools.partial(step, *batch(config, number, rank))

    answer(prepare, version)


def place() -> tuple[int, int]:
    """Rank and number of ranks."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def device() -> str:
    """Where the driver wants the step to run: `cpu`, `cuda:0`."""
    return os.environ.get("BENCHMARK_DEVICE", "cpu")


def answer(prepare: Callable[[], Prepare], version: str) -> None:
    """Answers until the driver hangs up. What `prepare()` gives makes of a number the function of that step."""
    host, port = os.environ["BENCHMARK_DRIVER"].rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rw") as lines:
        before = _reset_peak()
        step_of = prepare()
        _say(lines, {"rank": place()[0], "version": version, "python": platform.python_version()})
        for line in lines:
            word, *rest = line.split()
            if word == "memory":
                _say(lines, {"peak_bytes": _peak() - before})
                continue
            step = step_of(int(rest[0]))
            began, busy = time.perf_counter_ns(), time.process_time_ns()
            loss = step()
            ended, busy = time.perf_counter_ns(), time.process_time_ns() - busy
            _say(lines, {"ms": (ended - began) / 1e6, "cpu_ms": busy / 1e6, "loss": loss})


def _say(lines: Any, answer: dict[str, Any]) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


def _reset_peak() -> int:
    """Bytes resident now. Where the kernel lets it (Linux), the record of the peak starts anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    try:
        return _status("VmHWM")
    except OSError:
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")

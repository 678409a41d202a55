"""How long an empty script takes on two ranks: fuelrun, the MPI's own mpirun, and torchrun, in turns.

    python benchmarks/start_up.py
    python benchmarks/start_up.py --torch-python PATH_OF_A_PYTHON_WITH_TORCH

The empty script imports nothing; `with init` is one that makes the communicator (`fp.init()`, mpi4py's COMM_WORLD, a
gloo process group), which is what ranks are started for. What fuelrun itself takes is its time less mpirun's for the
same script: the empty one, and the one of mpi4py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import race

from fuelrun.launch.find import library, mpirun_of

RANKS = "2"
SCRIPTS = {
    "empty.py": "",
    "fuel_init.py": "import fuel_parallel as fp\nfp.init()\n",
    "mpi_init.py": "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n",
    "torch_init.py": "from torch import distributed\ndistributed.init_process_group('gloo')\ndistributed.barrier()\n",
}


def timed(command: list[str], folder: Path) -> Callable[[int], float]:
    """Milliseconds that the command takes; it must end well."""
    environ = race.environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's Python compiles a module once

    def run(number: int) -> float:
        began = time.perf_counter_ns()
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise click.ClickException(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return (time.perf_counter_ns() - began) / 1e6

    return run


def commands(torch_python: str | None) -> dict[str, list[str]]:
    """What takes turns, by the name it has in the report."""
    fuelrun = [sys.executable, "-m", "fuelrun", "--quiet", "-n", RANKS]
    found = mpirun_of(library())
    if found is None:
        raise click.ClickException("mpi4py's MPI has no mpirun here")
    shared = [] if (os.cpu_count() or 1) >= int(RANKS) or "mpich" in str(found.path) else ["--oversubscribe"]
    mpirun = [str(found.path), *shared, "-n", RANKS, sys.executable]
    every = {
        "fuelrun": [*fuelrun, "empty.py"],
        "mpirun": [*mpirun, "empty.py"],
        "fuelrun_with_init": [*fuelrun, "fuel_init.py"],
        "mpirun_with_init": [*mpirun, "mpi_init.py"],
        "fuelrun_with_mpi4py": [*fuelrun, "mpi_init.py"],
    }
    if torch_python:
        torchrun = [torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
        every |= {"torchrun": [*torchrun, "empty.py"], "torchrun_with_init": [*torchrun, "torch_init.py"]}
    return every


def measure(torch_python: str | None, rounds: int) -> dict[str, Any]:
    """The report."""
    with tempfile.TemporaryDirectory(prefix="start-up-") as name:
        folder = Path(name)
        for script, text in SCRIPTS.items():
            (folder / script).write_text(text)
        every = commands(torch_python)
        runs = [timed(command, folder) for command in every.values()]
        for run in runs:
            run(0)
        times = dict(zip(every, race.take_turns(runs, rounds), strict=True))
    found: dict[str, Any] = {}
    for of, mine, bare in (
        ("empty", "fuelrun", "mpirun"),
        ("mpi4py", "fuelrun_with_mpi4py", "mpirun_with_init"),
    ):
        more = [a - b for a, b in zip(times[mine], times[bare], strict=True)]
        found |= race.summary(f"overhead_{of}", more)
    for command, taken in times.items():
        found |= race.summary(command, taken)
        base = "fuelrun_with_init" if command.endswith("_with_init") else "fuelrun"
        if command != base and not command.endswith("_with_mpi4py"):
            found[f"fuelrun_over_{command}"] = race.ratio(times[base], taken)
    if not torch_python:
        found["torchrun"] = "skipped: no Python with torch was named (--torch-python)"
    return found


@click.command(help="Time the start of two ranks.", context_settings={"show_default": True})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--torch-python", help="A Python that has torch, for torchrun.")
@click.option("--rounds", type=click.IntRange(min=1), default=20)
def main(as_json: bool, torch_python: str | None, rounds: int) -> None:
    """Prints the report."""
    found = measure(torch_python, rounds)
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name}: {value if isinstance(value, str) else format(value, '.3f' if '_over_' in name else '.0f')}")


if __name__ == "__main__":
    main()

"""The driver's side of a race: workers of several frameworks take turns, step by step, in one run.

What disturbs the machine then disturbs all of them alike, and the ratio of two neighbouring steps hardly feels it:
the median of those ratios is what the benchmarks report.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HERE = Path(__file__).parent
ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "BLIS_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    ),
    "1",
)
TUNING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
START_S = 180.0
STEP_S = 300.0


class WorkerFailed(Exception):
    """A worker ended, or did not answer in time."""


def environment(**more: str) -> dict[str, str]:
    """The environment of workers: one thread, no tuning of a BLAS by hand."""
    plain = {name: value for name, value in os.environ.items() if name not in TUNING}
    path = os.pathsep.join(filter(None, [str(HERE), plain.get("PYTHONPATH", "")]))
    return {**plain, **ONE_THREAD, "PYTHONPATH": path, **more}


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Workers:
    """The ranks of one framework. Each is asked over a connection of its own, so that none waits inside of an MPI."""

    def __init__(
        self, name: str, commands: Sequence[Sequence[str]], ranks: int, environs: Sequence[dict[str, str]]
    ) -> None:
        self.name = name
        self.ranks = ranks
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Any] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self._driver = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._commands, self._environs = commands, environs
        self.version = ""
        self.cpu_ms: list[float] = []

    def __enter__(self) -> Self:
        try:
            for command, environ in zip(self._commands, self._environs, strict=True):
                environ = {**environ, "BENCHMARK_DRIVER": self._driver}
                # Standard output is kept for the driver's report.
                self._processes.append(subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=2))
            self._greet()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _greet(self) -> None:
        waited, rank_of = 0.0, {}
        self._server.settimeout(0.5)
        while len(self._lines) < self.ranks:
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                waited += 0.5
                if waited > START_S or any(p.poll() is not None for p in self._processes):
                    raise WorkerFailed(f"{self.name} did not start") from None
                continue
            connection.settimeout(STEP_S)
            self._lines.append(connection.makefile("rw"))
        for lines in list(self._lines):
            hello = self._answer(lines)
            rank_of[id(lines)] = hello["rank"]
            self.version = f"{hello['version']}, Python {hello['python']}"
        self._lines.sort(key=lambda lines: rank_of[id(lines)])

    def _answer(self, lines: Any) -> dict[str, Any]:
        try:
            text = lines.readline()
        except OSError as reason:
            raise WorkerFailed(f"{self.name} did not answer: {reason}") from None
        if not text:
            raise WorkerFailed(f"{self.name} ended in the middle of the run")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def ask(self, question: str) -> list[dict[str, Any]]:
        """Every rank's answer."""
        for lines in self._lines:
            try:
                lines.write(question + "\n")
                lines.flush()
            except OSError as reason:
                raise WorkerFailed(f"{self.name} is gone: {reason}") from None
        return [self._answer(lines) for lines in self._lines]

    def step(self, number: int) -> tuple[float, float]:
        """Milliseconds of the slowest rank, and the mean loss. `cpu_ms` gets what the busiest rank computed."""
        answers = self.ask(f"step {number}")
        self.cpu_ms.append(max(a["cpu_ms"] for a in answers))
        return max(a["ms"] for a in answers), statistics.fmean(a["loss"] for a in answers)

    def peak_bytes(self) -> int:
        """The peak of the rank that needs most."""
        return max(int(a["peak_bytes"]) for a in self.ask("memory"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lines in self._lines:
            lines.close()
        self._server.close()
        for process in self._processes:
            try:
                process.wait(0.1 if kind or not self._lines else 20)
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def under_fuelrun(name: str, script: str, folder: Path, ranks: int, *options: str, **more: str) -> Workers:
    """Workers in this Python, started by fuelrun, with `more` in their environment."""
    fuelrun = [sys.executable, "-m", "fuelrun", "--quiet", *options, "-n", str(ranks)]
    command = [*fuelrun, str(HERE / script), str(folder)]
    return Workers(name, [command], ranks, [environment(**more)])


def by_hand(name: str, python: str, script: str, folder: Path, ranks: int, **more: str) -> Workers:
    """Workers in another Python, which find each other by the usual variables."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    commands = [[python, str(HERE / script), str(folder)]] * ranks
    return Workers(name, commands, ranks, [environment(RANK=str(rank), **shared) for rank in range(ranks)])


def take_turns(racers: Sequence[Callable[[int], float]], rounds: int, first: int = 0) -> list[list[float]]:
    """The times of each racer. Every second round goes backwards, so that nobody is always the first."""
    times: list[list[float]] = [[] for _ in racers]
    for number in range(first, first + rounds):
        order = range(len(racers)) if number % 2 == 0 else reversed(range(len(racers)))
        for racer in order:
            times[racer].append(racers[racer](number))
    return times


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios, pair by pair."""
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))


def summary(name: str, times: Sequence[float]) -> dict[str, float]:
    """Median, least and most, as entries of a report."""
    return {
        f"{name}_ms": statistics.median(times),
        f"{name}_min_ms": min(times),
        f"{name}_max_ms": max(times),
    }


@dataclass(frozen=True)
class Machine:
    """Where the benchmarks ran."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    python: str
    numpy: str
    mpi: str

    @classmethod
    def this(cls) -> Machine:
        """The one we are on."""
        import numpy

        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        system = f"{platform.system()} {platform.release().partition('-')[0]}"
        return cls(_cpu(), _cores(), round(memory, 1), system, platform.python_version(), numpy.__version__, _mpi())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _mpi() -> str:
    try:
        binding = f"mpi4py {version('mpi4py')}"
    except PackageNotFoundError:
        return "none"
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    library = " ".join(done.stdout.strip("\0\n").partition("\n")[0].replace(",", " ").split()[:3])
    return f"{library or 'no library'} ({binding})"

"""A SLURM for the tests that need one, and jobs in it. Where it cannot be started, tests are skipped and say why."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the scripts beside the tests are imported by name

from cluster import Cluster, NotHere, start_cluster, wait_until

from fuel_parallel.environment import without_launcher
from fuelrun.launch import network
from fuelrun.launch.find import library, mpirun_of


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    try:
        cluster = start_cluster()
    except NotHere as reason:
        pytest.skip(str(reason))
    yield cluster
    cluster.stop()
    assert cluster.left() == []


@dataclass
class User:
    """Somebody who works with the cluster in a folder of their own."""

    folder: Path
    cluster: Cluster
    environ: dict[str, str]

    def write(self, text: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(text)
        return name

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """A command, to its end."""
        return subprocess.run(
            words,
            cwd=self.folder,
            env={**self.environ, **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def fuelrun(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "fuelrun", *words, **environ)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "fuelrun", *words],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def in_shell(self, options: str, line: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """A line of bash in the shell of an `salloc`; `fuelrun` and `python` are those of this environment."""
        return self.run("salloc", "--quiet", *options.split(), "bash", "-c", line, **environ)

    def submit(self, *words: str) -> str:
        """`fuelrun sbatch --submit`; returns the job's id."""
        done = self.fuelrun("sbatch", "--submit", *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().isdecimal(), done.stdout
        return done.stdout.strip()

    def log(self, job: str) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.rglob(f"*-{job}.log")))

    def lines(self, pattern: str) -> list[str]:
        """What the files that match hold, by line, sorted."""
        return sorted(line for path in self.folder.glob(pattern) for line in path.read_text().splitlines())

    def wait_for(self, pattern: str, count: int, seconds: float = 40.0) -> None:
        """Until the ranks have written so many files."""
        wait_until(lambda: len(list(self.folder.glob(pattern))) >= count, seconds, f"{count} files {pattern}")

    def wait_for_lines(self, pattern: str, count: int, seconds: float) -> None:
        wait_until(lambda: len(self.lines(pattern)) >= count, seconds, f"{count} lines in {pattern}")


@pytest.fixture
def user(tmp_path: Path, cluster: Cluster) -> Iterator[User]:
    ours = ("FUEL_", "FUELRUN_", "SLURM_", "SBATCH_", "SRUN_")
    environ = {name: value for name, value in without_launcher(os.environ).items() if not name.startswith(ours)}
    environ |= cluster.environ
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ.get('PATH', '')}"
    # Both nodes are this machine, and no name server knows them. UCX takes loopback for no way to another host.
    names = [interface.name for interface in network.interfaces()]
    environ["FUELRUN_INTERFACE"] = next((name for name in names if name != "lo"), "lo")
    environ["XDG_CONFIG_HOME"] = str(tmp_path / "no defaults")
    yield User(tmp_path, cluster, environ)
    cluster.empty()


@pytest.fixture(scope="session")
def pmi() -> str:
    """What goes after --mpi= for the MPI of this environment."""
    return "pmix" if library().flavour == "Open MPI" else "pmi2"


@pytest.fixture(scope="session")
def mpirun() -> str:
    found = mpirun_of(library())
    assert found is not None
    return str(found.path)

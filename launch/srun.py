"""Starting ranks with SLURM's own srun, inside of a job.

That is the best way where srun and the MPI library speak the same PMI: SLURM knows every rank, accounts for it, and its
SIGTERM before a preemption reaches the ranks, while ranks of an mpirun are processes of the batch script, which SLURM
does not warn. Where they do not, `srun_for` says why, and the MPI's mpirun starts the ranks on the job's nodes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fuelrun.launch.allocation import Allocation
from fuelrun.launch.engine import Banner, Death, Engine, Job, lines
from fuelrun.launch.find import MPIRUN, Library, find_engine, library

_OVERLAP = (20, 11)  # since then steps do not share cores unless they say so
_BANNERS = (
    Banner(lines(r"srun: (error|launch/slurm|Job step|Terminating|Step|First task|got SIG).*")),
    Banner(lines(r"slurmstepd(-\S+)?: error: +(\*\*\* STEP|mpi/pmix|Step|\*\*\* JOB).*")),
    Banner(lines(r"srun: cluster configuration lacks support for cpu binding")),
)
_TASK = re.compile(r"srun: error: \S+: tasks? (?P<tasks>[\d,-]+): (?P<how>.+)")
_SIGNALS = {
    "Hangup": 1,
    "Interrupt": 2,
    "Illegal instruction": 4,
    "Aborted": 6,
    "Bus error": 7,
    "Floating point exception": 8,
    "Killed": 9,
    "User defined signal 1": 10,
    "Segmentation fault": 11,
    "User defined signal 2": 12,
    "Terminated": 15,
    "Out Of Memory": 9,
}


@dataclass(frozen=True)
class Srun:
    """srun for ranks of one MPI.

    Args:
        mpirun: srun.
        version: Of SLURM.
        pmi: What goes after --mpi=.
        allocation: The job.
        mpi: The MPI of the ranks, in words.
    """

    mpirun: Path
    version: str
    pmi: str
    allocation: Allocation
    mpi: str = ""
    banners: tuple[Banner, ...] = _BANNERS
    starts_steps: bool = True

    @property
    def name(self) -> str:
        """As in "srun --mpi=pmi2 for MPICH 5.0.2, SLURM"."""
        return f"srun --mpi={self.pmi} for {self.mpi}, SLURM" if self.mpi else f"srun --mpi={self.pmi}, SLURM"

    def command(self, job: Job) -> list[str]:
        """All that srun would otherwise take from variables is said here, so that those of the job do no harm.

        Cores are bound by the ranks themselves (--cpu-bind=none), which know about devices and NUMA domains. GPUs stay
        as SLURM gives them: all of the node after --gpus-per-node. `--gpu-bind=none` would not show more but none at
        all: it leaves CUDA_VISIBLE_DEVICES out (measured with 22.05).
        """
        version = tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])
        job_here = self.allocation
        words = [str(self.mpirun), f"--mpi={self.pmi}", f"--nodes={self._nodes(job)}", f"--ntasks={job.ranks}"]
        if job.per_node is not None:
            words.append(f"--ntasks-per-node={job.per_node}")
        if job_here.cpus_per_task is not None:  # since SLURM 22.05 srun does not take it from sbatch
            words.append(f"--cpus-per-task={job_here.cpus_per_task}")
        words.append("--cpu-bind=none")
        if job_here.in_step and version >= _OVERLAP:
            words.append("--overlap")
        words += ["--kill-on-bad-exit=1", "--export=ALL", "--input=0"]
        return [*words, *job.arguments, *job.command]

    def _nodes(self, job: Job) -> int:
        if job.per_node is not None:
            return -(-job.ranks // job.per_node)
        return self.allocation.nodes_for(job.ranks)

    def variables(self, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
        """Open MPI's own settings, which it reads in the ranks."""
        if self.pmi.startswith("pmix") and "OMPI_MCA_osc" not in environ:
            return {"OMPI_MCA_osc": "^ucx"}  # as under mpirun, see `openmpi`
        return {}

    def death(self, message: str) -> Death | None:
        """Read "srun: error: n1: task 1: Killed"."""
        found = _TASK.search(message)
        if found is None:
            return None
        first = re.match(r"\d+\Z", found["tasks"])
        rank = int(first[0]) if first else None
        how = found["how"].strip().partition(" (")[0]
        if (number := _SIGNALS.get(how)) is not None:
            return Death(rank, signal=number)
        return Death(rank) if rank is not None and how.startswith("Exited") else None

    def exit_code(self, status: int) -> int:
        """srun's status is the highest of its tasks, 128+n for a signal; a negative one is a signal to srun itself."""
        return 128 - status if status < 0 else status


def plugins(text: str) -> frozenset[str]:
    r"""The names in what `srun --mpi=list` prints.

    >>> sorted(plugins("MPI types are...\n\tpmi2\n\tnone\nspecific pmix plugin versions available: pmix_v4"))
    ['none', 'pmi2', 'pmix_v4']
    """
    found: set[str] = set()
    for line in text.splitlines():
        head, colon, tail = line.rpartition(":")
        words = tail.replace(",", " ").split() if colon else line.split()
        if len(words) == 1 or (colon and "available" in head):
            found.update(words)
    return frozenset(found)


def choose_pmi(flavour: str | None, environ: Mapping[str, str], offered: frozenset[str]) -> tuple[str, str]:
    """What goes after --mpi=, or "" and why there is nothing: ("pmi2", "") or ("", "srun has no pmix …")."""
    wanted: tuple[str, ...]
    if flavour == "Open MPI":
        wanted = ("pmix",)
    elif flavour == "MPICH":
        wanted = ("pmi2", "cray_shasta")
    elif flavour == "Intel MPI":
        wanted = ("pmi2",) if environ.get("I_MPI_PMI_LIBRARY") else ()
        if not wanted:
            return "", "Intel MPI needs I_MPI_PMI_LIBRARY, the path of SLURM's libpmi2.so, to be started by srun"
    else:
        return "", f"which PMI {flavour or 'this MPI'} speaks is not known"
    for name in wanted:
        if name in offered:
            return name, ""
    versions = sorted(name for name in offered if name.startswith("pmix_") and "pmix" in wanted)
    if versions:
        return versions[-1], ""
    return "", f"srun has no {' or '.join(wanted)} for {flavour} (it has {', '.join(sorted(offered)) or 'none'})"


def engine_in(allocation: Allocation, given: str | None, environ: Mapping[str, str]) -> tuple[Engine, str]:
    """What starts ranks in a job, and why that is not srun where it is not.

    Args:
        allocation: The job.
        given: An mpirun that the user asks for.
        environ: May name one as well.
    """
    if given or environ.get(MPIRUN):
        return find_engine(given), "an mpirun was asked for"
    srun, reason = srun_for(library(), allocation, environ)
    return (srun, "") if srun is not None else (find_engine(), reason)


def srun_for(lib: Library, allocation: Allocation, environ: Mapping[str, str]) -> tuple[Srun | None, str]:
    """The engine, or None and why srun cannot start ranks of this MPI."""
    path = shutil.which("srun", path=environ.get("PATH"))
    if path is None:
        return None, "there is no srun on PATH"
    pmi, reason = choose_pmi(lib.flavour, environ, plugins(_ask(path, "--mpi=list")))
    if not pmi:
        return None, reason
    version = _ask(path, "--version").strip().rpartition(" ")[2]
    return Srun(Path(path), version, pmi, allocation, f"{lib.flavour} {lib.version}".strip()), ""


def _ask(path: str, option: str) -> str:
    """What srun prints; some versions print it as an error."""
    try:
        child = subprocess.run(
            [path, option], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return child.stdout + child.stderr

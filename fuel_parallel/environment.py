"""What the launcher's environment variables claim: which rank this process is, of how many.

Nothing is imported for it, neither mpi4py nor numpy, so that asking costs microseconds and starts no MPI.
The answer is a *claim*: variables are inherited, left over, and set by launchers of another MPI than the one that
is loaded. The truth is `COMM_WORLD` after `MPI_Init`; `fp.init()` compares the two and `explain_mismatch` words the
difference.

    >>> detect({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"})
    LauncherClaim(launcher='MPICH (Hydra)', rank=1, world_size=4, local_rank=1, local_size=4, ...)
    >>> detect({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "64"}) is None    # a batch shell is no task
    True
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

Environ = Mapping[str, str]

HOSTS = "FUEL_HOSTS"
"""The machines of a job and how many ranks each has, in blocks, where fuelrun has dealt them: "a:2,b:2"."""


class LauncherClaim(NamedTuple):
    """What one launcher's variables say about this process.

    Args:
        launcher: Name of the launcher, as a person would say it.
        rank: Rank of this process, counted from 0.
        world_size: Number of ranks; None where the launcher does not say.
        local_rank: Rank among those on this host; None where the launcher does not say.
        local_size: Number of ranks on this host; None where the launcher does not say.
        node_rank: Which of the job's hosts this is; None where the launcher does not say.
        evidence: The variables that were read, as (name, value).
    """

    launcher: str
    rank: int
    world_size: int | None
    local_rank: int | None
    local_size: int | None
    evidence: tuple[tuple[str, str], ...]
    node_rank: int | None = None

    @property
    def parallel(self) -> bool:
        """False for a world of one: `srun --pty bash` and some login shells claim to be rank 0 of 1."""
        return self.world_size != 1

    def rank_variables(self) -> dict[str, str]:
        """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and NODE_RANK for scripts that read those; what is known.

        Where all ranks share this host the local rank is the rank: Open MPI 5 numbers local ranks in another order
        than ranks when it oversubscribes cores (0, 2, 1 for three ranks on two cores).
        """
        local_rank, node_rank = self.local_rank, self.node_rank
        if self.world_size is not None and self.local_size == self.world_size:
            local_rank, node_rank = self.rank, 0
        known = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
            "NODE_RANK": node_rank,
        }
        return {name: str(value) for name, value in known.items() if value is not None}


class _Launcher(NamedTuple):
    """One row of the table: the variables of one launcher.

    `markers` must all be set for the row to apply. Of `rank`, `size` and the like the first name that holds a number is
    taken. `holds` is for what names alone cannot tell.
    """

    name: str
    markers: tuple[str, ...]
    rank: tuple[str, ...]
    size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    holds: Callable[[Environ], bool] = lambda environ: True
    count_local: Callable[[Environ], int | None] = lambda environ: None


def _number(environ: Environ, *names: str) -> int | None:
    for name in names:
        text = environ.get(name, "").strip()
        if text.isascii() and text.isdigit():
            return int(text)
    return None


# SLURM numbers the batch, extern and interactive steps from the top of 32 bits: those are shells, not tasks.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


def _is_slurm_task(environ: Environ) -> bool:
    step = _number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step < _FIRST_SPECIAL_STEP


def _slurm_tasks_on_this_node(environ: Environ) -> int | None:
    """Tasks of this node, from SLURM's run-length list: "2(x3),1" is 2, 2, 2, 1."""
    node = _number(environ, "SLURM_NODEID")
    if node is None:
        return None
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    return None


_SLURM_MARKERS = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


def _srun(name: str, *plugin_markers: str) -> _Launcher:
    return _Launcher(
        name,
        markers=(*_SLURM_MARKERS, *plugin_markers),
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node=("SLURM_NODEID",),
        holds=_is_slurm_task,
        count_local=_slurm_tasks_on_this_node,
    )


# The innermost launcher comes first: mpirun inside a SLURM job leaves the SLURM_ variables of its daemons in every
# rank, and mpirun inside a Flux or jsrun task those of that task. Rows that share variables with a later, more
# general row (PALS, MVAPICH, Intel MPI all set PMI_RANK) come before it.
_LAUNCHERS: tuple[_Launcher, ...] = (
    _Launcher(
        "jsrun",  # sets OMPI_ variables of the same meaning as well
        markers=("JSM_NAMESPACE_RANK",),
        rank=("JSM_NAMESPACE_RANK",),
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        holds=lambda environ: "PRTE_LAUNCHED" not in environ and "OMPI_MCA_orte_hnp_uri" not in environ,
    ),
    _Launcher(
        "Open MPI",
        markers=("OMPI_COMM_WORLD_RANK",),
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "PRRTE",  # prterun without its Open MPI personality
        markers=("PRTE_LAUNCHED", "PMIX_NAMESPACE", "PMIX_RANK"),
        rank=("PMIX_RANK",),
    ),
    _Launcher(
        "MVAPICH",
        markers=("MV2_COMM_WORLD_RANK",),
        rank=("MV2_COMM_WORLD_RANK",),
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "MVAPICH",
        markers=("MVP_COMM_WORLD_RANK",),
        rank=("MVP_COMM_WORLD_RANK",),
        size=("MVP_COMM_WORLD_SIZE",),
        local_rank=("MVP_COMM_WORLD_LOCAL_RANK",),
        local_size=("MVP_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "Cray PALS",
        markers=("PALS_APID",),
        rank=("PALS_RANKID", "PMI_RANK"),
        size=("PALS_SIZE", "PMI_SIZE"),
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PMI_LOCAL_SIZE",),
        node=("PALS_NODEID",),
    ),
    _Launcher(
        "Intel MPI",
        markers=("HYDRA_BSTRAP_LOCALHOST", "PMI_RANK"),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
    _Launcher(
        "MPICH (Hydra)",
        markers=("MPI_LOCALRANKID", "PMI_RANK"),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
    _Launcher(
        "Flux",
        markers=("FLUX_TASK_RANK",),
        rank=("FLUX_TASK_RANK",),
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
    ),
    _srun("srun --mpi=pmix", "PMIX_RANK"),
    _srun("srun --mpi=pmi2", "PMI_RANK"),
    _srun("srun --mpi=none"),
    _Launcher("Cray ALPS", markers=("ALPS_APP_PE",), rank=("ALPS_APP_PE",)),
    _Launcher(
        "MPICH (gforker)",
        markers=("PMI_RANK", "PMI_SIZE"),
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
    ),
)


def detect(environ: Environ | None = None) -> LauncherClaim | None:
    """What the launcher around this process claims; None when no launcher started it.

    A shell inside an allocation (`salloc`, the batch script of `sbatch`, a PBS job) was started by no launcher,
    whatever its variables say about the number of tasks. A claim of one rank is returned as such; ask `.parallel`.
    """
    environ = os.environ if environ is None else environ
    for launcher in _LAUNCHERS:
        if not all(marker in environ for marker in launcher.markers) or not launcher.holds(environ):
            continue
        rank = _number(environ, *launcher.rank)
        if rank is None:
            continue
        size = _number(environ, *launcher.size)
        local_size = _number(environ, *launcher.local_size)
        claim = LauncherClaim(
            launcher=launcher.name,
            rank=rank,
            world_size=size,
            local_rank=_number(environ, *launcher.local_rank),
            local_size=launcher.count_local(environ) if local_size is None else local_size,
            evidence=tuple(_evidence(launcher, environ)),
            node_rank=_number(environ, *launcher.node),
        )
        return _as_dealt(claim, environ)
    return None


def _as_dealt(claim: LauncherClaim, environ: Environ) -> LauncherClaim:
    """The place on its machine as fuelrun has dealt it: most launchers do not tell which machine it is.

    What does not fit the launcher's own numbers is of another job, and left out.
    """
    counts = [_number({"": word.rpartition(":")[2]}, "") or 0 for word in environ.get(HOSTS, "").split(",")]
    if sum(counts) != claim.world_size:
        return claim
    first = 0
    for node, count in enumerate(counts):
        if claim.rank < first + count:
            if claim.local_size not in (None, count):
                break
            return claim._replace(local_rank=claim.rank - first, local_size=count, node_rank=node)
        first += count
    return claim


def _evidence(launcher: _Launcher, environ: Environ) -> Iterator[tuple[str, str]]:
    names = (*launcher.markers, *launcher.rank, *launcher.size, *launcher.local_rank, *launcher.local_size)
    for name in dict.fromkeys(names):
        if name in environ:
            yield name, environ[name]


# What a launcher tells its own ranks. A process that starts an MPI job of its own must not pass these on.
# OMPI_MCA_*, PRTE_MCA_* and PMIX_MCA_* stay, for that is how people tune Open MPI; only what mpirun itself writes goes.
_OF_A_RANK = (  # a text: ranks that start nothing need not compile it
    r"(PMIX|PRTE)_(?!MCA_).*|(PMI|HYDI|HYDRA_BSTRAP|PALS|JSM|MV2_COMM_WORLD|MVP_COMM_WORLD)_.*"
    r"|(OMPI_COMM_WORLD|OMPI_WORLD|SLURM_STEP|FLUX_TASK)_.*"
    r"|MPI_LOCAL(RANKID|NRANKS)|SLURM_(PROCID|LOCALID|STEPID)"
    r"|OMPI_(ARGV|COMMAND|FILE_LOCATION|LIBDIR_LOC|NUM_APP_CTX|TOOL_NAME|UNIVERSE_SIZE|VERSION|APP_CTX_NUM_PROCS"
    r"|FIRST_RANKS|MCA_PREFIXES|MCA_cpu_type|MCA_initial_wdir|MCA_num_procs|MCA_ess_base_.*|MCA_orte_.*)"
)


def without_launcher(environ: Environ) -> dict[str, str]:
    """A copy of `environ` without what a launcher tells its ranks, for starting other programs from inside a rank.

    A child that imports mpi4py with its parent's PMI or PMIx variables would try to join the job as the same rank,
    which ends in a crash or a hang. What users set to tune their MPI is kept.
    """
    return {name: value for name, value in environ.items() if not re.fullmatch(_OF_A_RANK, name)}


def explain_mismatch(claim: LauncherClaim, world_size: int, library_version: str) -> str:
    """Why the launcher and the MPI library disagree about the number of ranks, and what to run instead.

    Args:
        claim: What `detect` returned.
        world_size: `MPI.COMM_WORLD.size` after `MPI_Init`.
        library_version: `MPI.Get_library_version()`; its first line is quoted.
    """
    library = library_version.strip().splitlines()[0].split(", package")[0].strip() if library_version.strip() else "?"
    claimed = "an unknown number of" if claim.world_size is None else str(claim.world_size)
    size_variables = ", ".join(f"{name}={value}" for name, value in claim.evidence if "SIZE" in name or "TASKS" in name)
    told = f" ({size_variables})" if size_variables else ""
    if claim.launcher.startswith("srun"):
        remedy = (
            "srun and the MPI library do not speak the same PMI: run `srun --mpi=list` and choose one that the library "
            "knows (--mpi=pmix for Open MPI, --mpi=pmi2 for MPICH), or start the ranks with `fuelrun -n N script.py` "
            "from the batch script"
        )
    else:
        remedy = (
            "the launcher belongs to another MPI than the library that mpi4py loads: start the ranks with "
            "`fuelrun -n N script.py`, which takes the library's own mpirun, or call that mpirun by its full path; "
            "`fuelrun doctor` shows both"
        )
    return (
        f"{claim.launcher} started {claimed} ranks{told}, but the MPI library sees a world of {world_size} "
        f"(library: {library}). Every rank would believe to be rank 0 of {world_size}; {remedy}."
    )

"""The SLURM job around this process: its nodes, and what it gives a rank. Read from variables, checked with SLURM.

An interactive shell of `salloc` and a batch script are inside of a job, but no ranks of it; `fuel_parallel.environment`
tells ranks. The variables of a job outlive it in a shell or a `screen` that was started there: mpirun then asks for
nodes that are no longer ours, so a job that SLURM does not call a running one is none.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fuel_parallel.errors import LaunchError

_ALIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")
_ANSWER_S = 15.0  # a busy slurmctld takes its time; without an answer the variables are believed
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # SLURM's numbers of the batch and interactive steps

_DOUBLE = ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK")
"""What srun refuses when two of them differ; it sets them for the ranks, as of --cpus-per-task."""


@dataclass(frozen=True)
class Allocation:
    """What SLURM gave to a job.

    Args:
        job_id: The job.
        nodes: Its nodes, in the order of its ranks.
        tasks: How many ranks were asked for.
        slots: How many ranks each node has room for.
        cpus: Cores of each node.
        cpus_per_task: Cores of a rank; None when nobody has said.
        gpus_per_node: GPUs of each node that the job may use; 0 for none.
        gpus_per_task: They were asked for by --gpus-per-task, so each rank sees its own only.
        per_node: How many ranks each node is to get; None to leave that to SLURM.
        own_address: Where ranks on other nodes reach this process; "" where there are none.
        network: The network that the user wants the ranks to take, "" for the MPI's choice.
        in_step: This shell is a step itself (`srun --pty bash`) and holds the job's cores.
    """

    job_id: str
    nodes: tuple[str, ...]
    tasks: int
    slots: tuple[int, ...]
    cpus: tuple[int, ...] = ()
    cpus_per_task: int | None = None
    gpus_per_node: int = 0
    gpus_per_task: bool = False
    in_step: bool = False
    per_node: int | None = None
    own_address: str = ""
    network: str = ""

    def nodes_for(self, ranks: int) -> int:
        """How many of the nodes have room for so many ranks.

        >>> Allocation("7", ("n1", "n2", "n3"), 5, (2, 2, 1)).nodes_for(3)
        2
        """
        room = itertools.accumulate(self.slots)
        return next((count for count, slots in enumerate(room, 1) if slots >= ranks), len(self.nodes))

    def on_nodes(self, count: int) -> Allocation:
        """The job with its first nodes only. Raises `LaunchError` when it has fewer."""
        if count > len(self.nodes):
            raise LaunchError(
                f"--nnodes {count} is more than the {len(self.nodes)} nodes of SLURM job {self.job_id} "
                f"({self.node_list()}): ask salloc or sbatch for more, or leave it out"
            )
        slots = self.slots[:count]
        tasks = self.tasks if count == len(self.nodes) else min(self.tasks, sum(slots))
        return replace(self, nodes=self.nodes[:count], tasks=tasks, slots=slots, cpus=self.cpus[:count])

    def check(self, ranks: int) -> None:
        """Raises `LaunchError` when the job has no room for so many ranks."""
        if ranks > (most := max(self.tasks, sum(self.slots))):
            raise LaunchError(
                f"-n {ranks} is more than the {most} task{'s' if most > 1 else ''} of SLURM job {self.job_id} on "
                f"{len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''} ({self.node_list()}): ask for more with "
                f"--ntasks={ranks} of salloc or sbatch, or leave -n out to start {self.tasks}"
            )

    def holds_this_machine(self, environ: Mapping[str, str]) -> bool:
        """False in the shell of an `salloc` that stays on the login node."""
        return any(is_this_machine(node, environ) for node in self.nodes)

    def node_list(self) -> str:
        """The nodes as SLURM writes them: `n[1-4]`."""
        from ClusterShell.NodeSet import NodeSet

        return str(NodeSet.fromlist(self.nodes))

    def cleaned(self, environ: Mapping[str, str], ranks: int) -> dict[str, str]:
        """The environment for srun, or for an mpirun that calls srun, without what contradicts its options."""
        kept = {name: value for name, value in environ.items() if name not in _DOUBLE}
        # Without PATH, an srun that an mpirun calls for its daemons does not find them; and they are not to be bound,
        # as every rank of the node inherits from them.
        kept |= {"SLURM_EXPORT_ENV": "ALL", "SLURM_CPU_BIND": "none"}
        if ranks != self.tasks:
            kept.pop("SLURM_NTASKS_PER_NODE", None)
        return kept

    def advice(self) -> list[str]:
        """What could be better, a line each."""
        if not self.gpus_per_task:
            return []
        return [
            "--gpus-per-task shows each rank its own GPU only, so that ranks of a node cannot reach each other's "
            "memory; ask SLURM for --gpus-per-node instead"
        ]

    def describe(self) -> str:
        """In words, for notes."""
        return f"SLURM job {self.job_id}: {len(self.nodes)} nodes ({self.node_list()}), {self.tasks} tasks"


def read(environ: Mapping[str, str]) -> Allocation | None:
    """What the variables say; None outside of a job.

    Raises `LaunchError` for a heterogeneous job, and for variables that cannot be read.
    """
    job_id = environ.get("SLURM_JOB_ID", "")
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not job_id or not nodes:
        return None
    for name in ("SLURM_HET_SIZE", "SLURM_PACK_SIZE"):
        if name in environ:
            raise LaunchError(
                f"SLURM job {job_id} is heterogeneous ({name}={environ[name]} components): neither fuelrun nor mpirun "
                "can start ranks there; let srun do it: `srun --het-group=0,1 --mpi=pmix fuelrun train.py`"
            )
    hosts = _expand(nodes)
    slots = _repeated(environ, "SLURM_TASKS_PER_NODE", len(hosts)) or (1,) * len(hosts)
    cpus = _repeated(environ, "SLURM_JOB_CPUS_PER_NODE", len(hosts)) or slots
    step = environ.get("SLURM_STEP_ID", "")
    in_step = step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    allocation = Allocation(
        job_id=job_id,
        nodes=hosts,
        tasks=0,
        slots=cpus if in_step else slots,  # of a step, the variables tell what it has itself: one task
        cpus=cpus,
        cpus_per_task=None if in_step else _number(environ, "SLURM_CPUS_PER_TASK"),
        gpus_per_node=_gpus(environ, slots[0]),
        gpus_per_task="SLURM_GPUS_PER_TASK" in environ,
        in_step=in_step,
    )
    return _with_tasks(allocation, environ)


def _with_tasks(allocation: Allocation, environ: Mapping[str, str]) -> Allocation:
    """How many ranks were meant: as was asked for, else one a GPU, else one a node, which is what srun does."""
    nodes = len(allocation.nodes)
    per_node = _number(environ, "SLURM_NTASKS_PER_NODE")
    tasks = _number(environ, "SLURM_NTASKS") or _number(environ, "SLURM_NPROCS")
    tasks = tasks or nodes * (per_node or allocation.gpus_per_node or 1)
    return replace(allocation, tasks=tasks)


def _gpus(environ: Mapping[str, str], slots: int) -> int:
    """GPUs of the first node. A shell of `salloc` knows what was asked for only: 2, a100:2, or so many a task."""
    on_node, per_node, per_task, listed = (
        environ.get(f"SLURM_{name}", "") for name in ("GPUS_ON_NODE", "GPUS_PER_NODE", "GPUS_PER_TASK", "JOB_GPUS")
    )
    for text, times in ((on_node, 1), (per_node, 1), (per_task, slots)):
        counts = [word.rpartition(":")[2] for word in text.split(",") if word]
        if counts and all(count.isdecimal() for count in counts):
            return sum(int(count) for count in counts) * times
    return len([word for word in listed.split(",") if word])


def _expand(nodes: str) -> tuple[str, ...]:
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        return tuple(NodeSet(nodes))
    except NodeSetException as reason:
        raise LaunchError(f"SLURM_JOB_NODELIST={nodes} is no list of nodes such as n[1-4]: {reason}") from None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and int(text) > 0 else None


def _repeated(environ: Mapping[str, str], name: str, nodes: int) -> tuple[int, ...]:
    """SLURM's run-length list, 2(x3),1 for 2, 2, 2, 1; () where it is not set."""
    text = environ.get(name, "")
    if not text:
        return ()
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None:
            raise LaunchError(f"{name}={text}: expected a number for each node, such as 2(x3),1")
        counts += [int(match[1])] * min(int(match[2] or 1), nodes + 1)
    if len(counts) != nodes:
        raise LaunchError(
            f"{name}={text} is about {len(counts)} nodes, but SLURM_JOB_NODELIST names {nodes}: "
            "the variables are of different jobs; unset those that begin with SLURM_"
        )
    return tuple(counts)


def is_this_machine(node: str, environ: Mapping[str, str]) -> bool:
    """Whether a node of a job is the machine of this process; slurmd tells its name, which need not be the host's."""
    here = environ.get("SLURMD_NODENAME") or socket.gethostname()
    return node.partition(".")[0] == here.partition(".")[0]


def why_stale(allocation: Allocation) -> str:
    """Why the job is not one to start ranks in, in a few words; "" when it is one."""
    squeue = shutil.which("squeue")
    if squeue is None:
        here = socket.gethostname().partition(".")[0]
        if any(node.partition(".")[0] == here for node in allocation.nodes):
            return ""
        return f"there is no squeue here, and {here} is none of its nodes"
    try:
        child = subprocess.run(
            [squeue, "--noheader", "--jobs", allocation.job_id, "--format=%A %T %N"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if child.returncode != 0:
        return "SLURM does not know it any more" if "Invalid job id" in child.stderr else ""
    # One task of an array has the number of the whole array, so all of them are listed.
    rows = (line.split() for line in child.stdout.splitlines())
    row = next((row for row in rows if len(row) > 1 and row[0] == allocation.job_id), None)
    if row is None:
        return "it has ended"
    state, nodes = row[1], "".join(row[2:])
    if state not in _ALIVE:
        return f"its state is {state}"
    if nodes and not set(allocation.nodes) <= set(_expand(nodes)):
        return f"it has other nodes now ({nodes})"
    return ""


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without the job, for a machine of its own: no MPI then looks for SLURM.

    It does what `--prtemca ras ^slurm --prtemca plm ^slurm` does for Open MPI 5, `-launcher fork` for MPICH.
    """
    ours = re.compile(r"S(LURM|RUN|BATCH|ALLOC)_.*")
    return {name: value for name, value in environ.items() if not ours.fullmatch(name) or name == "SLURM_CONF"}


def find(environ: Mapping[str, str] = os.environ) -> tuple[Allocation | None, str]:
    """The job to start ranks in, or None; and a note for the user where variables are left over from another job."""
    allocation = read(environ)
    if allocation is None:
        return None, ""
    if reason := why_stale(allocation):
        return None, (
            f"SLURM_JOB_ID={allocation.job_id} is left over from a job that is not running ({reason}): "
            "ranks start on this machine, without SLURM; `unset ${!SLURM_@}` in bash makes an end of it"
        )
    return allocation, ""

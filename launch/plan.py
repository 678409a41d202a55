"""What fuelrun is about to start, as a value: made here, printed by `--dry-run`, acted on by `supervise`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fuel_parallel.environment import without_launcher
from fuelrun.launch import rendezvous
from fuelrun.launch.engine import Engine, Job
from fuelrun.launch.network import NETWORK
from fuelrun.launch.processes import cores
from fuelrun.launch.rank import TAG_OUTPUT, THREADS, rank_command
from fuelrun.launch.script import Script

if TYPE_CHECKING:
    from fuelrun.launch.allocation import Allocation
    from fuelrun.launch.machines import Machines

TERMINAL = "FUEL_TERMINAL"


@dataclass(frozen=True)
class Options:
    """What a user can say about a launch.

    Args:
        threads: Threads a rank, or `auto`; None for 1 unless the environment says otherwise.
        tag_output: Put `[rank/N]` before every line.
        settings: Variables for the library in each rank.
        mpi_arguments: Options for mpirun itself.
        grace: Seconds that scripts get after Ctrl-C or SIGTERM.
        verbose: Show mpirun's own messages too.
        terminal: Columns of the terminal behind our standard error; None when there is none.
    """

    threads: str | None = None
    tag_output: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    mpi_arguments: tuple[str, ...] = ()
    grace: float = 5.0
    verbose: bool = False
    terminal: int | None = None


@dataclass(frozen=True)
class Plan:
    """A job that is ready to be started.

    Args:
        engine: Whose mpirun.
        ranks: Number of ranks.
        command: The command line.
        environ: The environment around it, ours without what an outer launcher may have left there.
        added: What is added to that environment.
        options: The user's wishes.
        notes: What the user should know about it, one line each.
        details: What only `--verbose` tells.
        reachable_at: Our address for the ranks on other machines, "" when there are none.
        told_by_slurm: The ranks are a step of SLURM, which sends them SIGTERM itself when it ends the job.
    """

    engine: Engine
    ranks: int
    command: tuple[str, ...]
    environ: Mapping[str, str]
    added: Mapping[str, str]
    options: Options = field(default_factory=Options)
    notes: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    reachable_at: str = ""
    told_by_slurm: bool = False

    def shell_line(self) -> str:
        """The plan as one line for a shell. Run by hand it starts the same ranks, with nobody watching them."""
        added = [f"{name}={value}" for name, value in sorted(self.added.items())]
        return shlex.join([*(("env", *added) if added else ()), *self.command])


def make_plan(
    engine: Engine,
    script: Script,
    ranks: int,
    options: Options,
    machines: Machines | None = None,
    allocation: Allocation | None = None,
) -> Plan:
    """How `engine` would start `script`, on this machine alone unless others or a SLURM job are given."""
    available = cores() if allocation is None else sum(allocation.cpus)
    job = Job(
        ranks=ranks,
        command=tuple(rank_command(script)),
        shared_cores=(ranks if machines is None else machines.ranks_here()) > available,
        arguments=options.mpi_arguments,
        per_node=allocation.per_node if allocation is not None else None,
    )
    added: dict[str, str] = {}
    if options.threads is not None:
        added[THREADS] = options.threads
    if options.tag_output:
        added[TAG_OUTPUT] = "1"
    if options.terminal is not None:
        added[TERMINAL] = str(options.terminal)
    environ = without_launcher(os.environ)
    if allocation is not None:
        added |= rendezvous.of_nodes(allocation.nodes, allocation.job_id, os.environ)
        environ = allocation.cleaned(environ, ranks)
        if allocation.network:
            added[NETWORK] = allocation.network
    else:
        added |= rendezvous.of_this_machine(os.environ) if machines is None else machines.told(options.mpi_arguments)
    added |= options.settings
    if machines is not None:
        job = machines.joined(job, {*os.environ, *added}, options.settings)
    added = engine.variables(job, os.environ) | added
    notes, details = [], [f"{engine.name} {engine.version}: {engine.mpirun}"]
    if job.shared_cores:
        notes.append(f"{ranks} ranks share {available} core{'s' if available > 1 else ''}: correct, but slow")
    if "OMPI_ALLOW_RUN_AS_ROOT" in added:
        details.append("Open MPI refuses to run as root; OMPI_ALLOW_RUN_AS_ROOT is set for it")
    if machines is not None:
        details.append(machines.described())
    if allocation is not None:
        details.append(allocation.describe())
        notes += allocation.advice()
    return Plan(
        engine=engine,
        ranks=ranks,
        command=tuple(engine.command(job)),
        environ=environ,
        added=added,
        options=options,
        notes=tuple(notes),
        details=tuple(details),
        reachable_at=next((others.own_address for others in (machines, allocation) if others is not None), ""),
        told_by_slurm=engine.starts_steps,
    )

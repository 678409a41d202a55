"""`fuelrun run` inside of a SLURM job: how many ranks, and what starts them."""

from __future__ import annotations

import os
from dataclasses import replace

import click
from click.core import ParameterSource

from fuel_parallel.errors import LaunchError
from fuel_parallel.failure import PREEMPTED
from fuelrun.launch import allocation
from fuelrun.launch.allocation import Allocation, is_this_machine
from fuelrun.launch.engine import Engine

SRUN = "srun"


def around_us(quiet: bool) -> Allocation | None:
    """The job around us. What is left over from one that has ended is taken out of the environment."""
    found, note = allocation.find(os.environ)
    if note:
        if not quiet:
            click.echo(f"fuelrun: {note}", err=True)
        kept = allocation.without_job(os.environ)
        for name in set(os.environ) - set(kept):
            del os.environ[name]
    return found


def with_numbers(
    job: Allocation, ranks: int | None, nodes: int | None, per_node: int | None, context: click.Context
) -> tuple[Allocation, int]:
    """The job as it is to be used, and the number of ranks: as many as were asked for, else the job's tasks.

    A number of ranks from a file of defaults does not count: it is for other machines.
    """
    if context.get_parameter_source("ranks") is ParameterSource.DEFAULT_MAP:
        ranks = None
    if nodes is not None:
        job = job.on_nodes(nodes)
    if per_node is not None:
        if ranks not in (None, per_node * len(job.nodes)):
            raise click.UsageError(
                f"-n {ranks} is not --ppn {per_node} on each of {len(job.nodes)} nodes of SLURM job {job.job_id}, "
                f"which are {per_node * len(job.nodes)}; leave one of the numbers out"
            )
        ranks = per_node * len(job.nodes)
        job = replace(job, per_node=per_node)
    if ranks is None:
        return job, job.tasks
    job.check(ranks)
    return job, ranks


def reachable(job: Allocation, interface: str | None) -> Allocation:
    """With an address at which ranks on other nodes reach this process, and leave word. Raises `LaunchError`."""
    others = tuple(node for node in job.nodes if not is_this_machine(node, os.environ))
    if not others:
        return job
    from fuelrun.launch import network

    choice = network.choose(others, interface or "")
    # Which network MPI takes is its own affair in a cluster, unless the user has said something else.
    return replace(job, own_address=choice.interface.address, network=choice.interface.network if interface else "")


def engine(job: Allocation, mpirun: str | None, wanted: str) -> tuple[Engine, str]:
    """What starts the ranks, and a line that says why it is not srun, where it is not."""
    from fuelrun.launch.find import find_engine
    from fuelrun.launch.srun import engine_in

    if wanted not in ("auto", SRUN):
        return find_engine(mpirun, wanted), f"not srun: --engine {wanted} was asked for"
    found, reason = engine_in(job, mpirun, os.environ)
    if reason and wanted == SRUN:
        raise LaunchError(f"--engine srun: {reason}; --engine auto takes the MPI's own mpirun then")
    return found, f"not srun: {reason}" if reason else ""


def requeue(job: Allocation, code: int) -> None:
    """For the end of a job that has not ended well: when SLURM preempts it, or it made room, it is to come back."""
    from fuelrun.launch.preemption import requeue_if_preempted

    requeue_if_preempted(
        job, os.environ, lambda text: click.echo(f"fuelrun: {text}", err=True), wants_more=code == PREEMPTED
    )

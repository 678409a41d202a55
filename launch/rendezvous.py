"""MASTER_ADDR and MASTER_PORT, where ranks of torch.distributed and others meet when a script starts them by `env://`.

fuel-parallel itself meets over MPI and needs neither.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from fuel_parallel.environment import LauncherClaim
from fuelrun.launch.placing import hosts_of_the_job
from fuelrun.launch.processes import JOB_ID

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
FIRST_PORT, PORTS = 20_000, 12_000
"""Below the range from which Linux takes ports by itself."""

JOB_IDS = (("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID"), ("PALS_APID",), ("FLUX_JOB_ID",), ("PBS_JOBID",))
"""What all ranks of a job have in common, and other jobs have not; the first that is set counts."""


def of_this_machine(environ: Mapping[str, str]) -> dict[str, str]:
    """For ranks that are about to be started here: a port that is free now, unless the user has said where to meet.

    Inside of a rank of ours it is the outer job's meeting place that is set.
    """
    if JOB_ID not in environ and (ADDRESS in environ or PORT in environ):
        return {}
    import socket  # not at every start of a rank

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return {ADDRESS: "127.0.0.1", PORT: str(listener.getsockname()[1])}


def of_nodes(nodes: tuple[str, ...], job_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """For ranks that are about to be started on the nodes of a batch job: they meet on the first one.

    Which ports are free there is not known; the one here follows from the job and this process.
    """
    if len(nodes) == 1:
        return of_this_machine(environ)
    if JOB_ID not in environ and (ADDRESS in environ or PORT in environ):
        return {}
    return {ADDRESS: nodes[0], PORT: _port(f"{job_id}/{os.getpid()}")}


def of_a_rank(claim: LauncherClaim, environ: Mapping[str, str]) -> dict[str, str]:
    """For a rank that another launcher has started: the same on all ranks of its job, or nothing where that is unknown.

    The port follows from the job's id, so that two jobs of one machine have different ones, most likely.
    """
    if not claim.parallel or ADDRESS in environ or PORT in environ:
        return {}
    alone = claim.local_size is not None and claim.local_size == claim.world_size
    ids = next((names for names in JOB_IDS if all(name in environ for name in names)), ())
    job = "/".join(environ[name] for name in ids) or (str(os.getppid()) if alone else "")
    hosts = ("127.0.0.1",) if alone else hosts_of_the_job(environ)
    if not job or not hosts:
        return {}
    return {ADDRESS: hosts[0], PORT: _port(job)}


def _port(job: str) -> str:
    import zlib

    return str(FIRST_PORT + zlib.crc32(job.encode()) % PORTS)

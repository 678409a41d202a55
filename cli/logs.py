"""`fuelrun logs JOBID`: the output of a job of SLURM."""

from __future__ import annotations

import glob
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fuel_parallel.errors import LaunchError

if TYPE_CHECKING:
    from fuelrun.launch.jobs import JobInfo

_ASK_EVERY_S = 2.0  # whether the job has ended: slurmctld is asked, which serves everybody
_READ_EVERY_S = 0.2
_LATE_S = 2.0  # how long after the end of a job its last lines may come


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--log-dir", metavar="DIR", default=".", help="Where to look for files of jobs that SLURM has forgotten.")
@click.argument("job_id", metavar="JOBID")
def logs(follow: bool, log_dir: str, job_id: str) -> int:
    """Print what a job of SLURM has written to its standard output; JOBID_TASK for a task of an array.

    SLURM knows the file while a job waits and runs, and some minutes longer. After that, NAME-JOBID.log, as `fuelrun
    sbatch` calls it, is looked for in the working folder or in --log-dir.
    """
    job = _job(job_id, log_dir)
    path = Path(job.output) if job is not None else _old(job_id, log_dir)
    if follow and job is not None:
        _wait_for(path, job)
    try:
        with path.open("rb") as file:
            _copy(file.fileno(), None if not follow or job is None else job)
    except OSError as error:
        state = f"; the job is {job.state}{f' ({job.reason})' if job.reason else ''}" if job is not None else ""
        raise LaunchError(f"cannot read {path}: {error.strerror}{state}") from None
    return 0


def _job(job_id: str, log_dir: str) -> JobInfo | None:
    """The job; None when SLURM does not know its file any more."""
    from fuelrun.launch import jobs

    try:
        found = jobs.named([job_id])
    except LaunchError:
        if _matches(job_id, log_dir):
            return None
        raise
    if len(found) > 1:
        some = ", ".join(job.id for job in found[:4])
        raise LaunchError(
            f"job {job_id} is an array of {len(found)} parts, each with a file: name one of them ({some})"
        )
    if found[0].output:
        return found[0]
    if _matches(job_id, log_dir):
        return None
    raise LaunchError(
        f"job {job_id} ({found[0].name}) is {found[0].state}, and SLURM has forgotten its file; there is none that "
        f"ends in -{job_id}.log in {log_dir} either: name its folder with --log-dir"
    )


def _matches(job_id: str, log_dir: str) -> list[str]:
    return sorted(glob.glob(f"*-{glob.escape(job_id)}.log", root_dir=log_dir))


def _old(job_id: str, log_dir: str) -> Path:
    return Path(log_dir, _matches(job_id, log_dir)[0])


def _wait_for(path: Path, job: JobInfo) -> None:
    """Until the job has begun to write, or has ended."""
    told = False
    while not path.exists() and not _is_over(job.id):
        if not told:
            click.echo(f"fuelrun: job {job.id} is {job.state}; waiting for {path}", err=True)
            told = True
        time.sleep(_ASK_EVERY_S)


def _copy(source: int, job: JobInfo | None) -> None:
    """To standard output: what is there, and with a `job` what it adds until it has ended."""
    asked, ended_at = time.monotonic(), None
    while True:
        data = os.read(source, 1 << 16)
        if data:
            while data:
                data = data[os.write(1, data) :]
            continue
        now = time.monotonic()
        if job is None or (ended_at is not None and now - ended_at > _LATE_S):
            return
        if ended_at is None and now - asked > _ASK_EVERY_S:
            asked = now
            ended_at = now if _is_over(job.id) else None
        time.sleep(_READ_EVERY_S)


def _is_over(job_id: str) -> bool:
    """Whether SLURM says so, or has forgotten the job."""
    from fuelrun.launch import jobs

    try:
        return all(job.over for job in jobs.named([job_id]))
    except LaunchError:
        return True

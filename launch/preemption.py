"""A SLURM job that is preempted while its ranks run, and how it comes back.

SLURM sends SIGTERM to the ranks, waits for the partition's grace time, kills what is left and starts the job again
later, if that may be. But a job whose batch script ends within the grace time has ended, and is not started again. So a
fuelrun that sees its ranks end then asks for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping

from fuelrun.launch.allocation import Allocation

_ANSWER_S = 20.0
_ENDS_US_S = 60.0  # how long SLURM may take to end the batch script of a job that it has requeued


def requeue_if_preempted(
    allocation: Allocation,
    environ: Mapping[str, str],
    tell: Callable[[str], object] = lambda text: None,
    *,
    wants_more: bool = False,
) -> bool:
    """For the end of a job that has not ended well: True when SLURM will start it again. Only in a batch script.

    Waits for SLURM to end this process then, for the script's own end would call the job failed. `wants_more` says that
    the ranks have saved and want to go on: then SLURM need not have asked, the time limit may be near.
    """
    if "SLURM_JOB_ID" not in environ or environ.get("SLURM_JOB_ID") != allocation.job_id or not _in_batch(environ):
        return False
    fields = show(allocation.job_id)
    preempted, running = is_preempted(fields), fields.get("JobState") == "RUNNING"
    if fields.get("Requeue") != "1" or not (preempted or (wants_more and running)):
        return False
    why = f"SLURM preempts job {allocation.job_id}" if preempted else f"job {allocation.job_id} wants to go on later"
    tell(f"{why}: it is requeued, and starts again when there is room")
    if running and _scontrol("requeue", allocation.job_id) is None:
        return False
    time.sleep(_ENDS_US_S)
    return True


def is_preempted(fields: Mapping[str, str]) -> bool:
    """Whether a job, as `show` gives it, has been told to make room.

    >>> is_preempted({"PreemptTime": "2026-01-02T10:00:00"}), is_preempted({"PreemptTime": "None"})
    (True, False)
    """
    return fields.get("PreemptTime", "None") not in ("None", "Unknown", "N/A", "")


def show(job_id: str) -> dict[str, str]:
    """What `scontrol show job` says, by name; empty when it says nothing."""
    text = _scontrol("--oneliner", "show", "job", job_id) or ""
    return dict(word.partition("=")[::2] for word in text.split() if "=" in word)


def _in_batch(environ: Mapping[str, str]) -> bool:
    """In the batch script itself, which SLURM starts again; not in a shell of `salloc`."""
    return "SLURM_JOB_ID" in environ and environ.get("ENVIRONMENT") == "BATCH"


def _scontrol(*words: str) -> str | None:
    path = shutil.which("scontrol")
    if path is None:
        return None
    try:
        child = subprocess.run(
            [path, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
            env=dict(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return child.stdout if child.returncode == 0 else None

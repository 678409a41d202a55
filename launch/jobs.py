"""Jobs of SLURM, as squeue, scontrol and sacct tell of them.

squeue knows jobs that wait or run, scontrol also those that ended some minutes ago (MinJobAge), sacct all of them,
where the cluster keeps accounts. What SLURM does not tell is an empty text.
"""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from collections.abc import Iterable

import msgspec

from fuel_parallel.errors import LaunchError

_ANSWER_S = 30.0
_FIELDS = {
    "id": "%i",
    "state": "%T",
    "partition": "%P",
    "nodes": "%D",
    "node_list": "%N",
    "elapsed": "%M",
    "limit": "%l",
    "start": "%S",
    "reason": "%r",
    "name": "%j",
}
_OF_SACCT = "JobID,State,ExitCode,Partition,NNodes,NodeList,Elapsed,Timelimit,Start,Reason,JobName"
_ID = re.compile(r"\d+(_\d+|_\[[\d,\-%]+\]|\+\d+)?")
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")
_OVER_TOO = ("OUT_OF_MEMORY", "REVOKED", "SPECIAL_EXIT")


class JobInfo(msgspec.Struct, frozen=True):
    """A job, or a task of an array.

    `exit_code` is that of the batch script, None while it runs; `restarts` how often it was requeued; `output` the file
    of its standard output, where SLURM still knows it.
    """

    id: str
    state: str
    name: str = ""
    partition: str = ""
    nodes: str = ""
    node_list: str = ""
    elapsed: str = ""
    limit: str = ""
    start: str = ""
    reason: str = ""
    exit_code: int | None = None
    restarts: int = 0
    output: str = ""

    @property
    def over(self) -> bool:
        """True when it will not run any more."""
        return self.state.partition(" ")[0] in (*_OVER, *_OVER_TOO)


def of_user() -> list[JobInfo]:
    """The jobs of this user that wait or run."""
    # A name may hold anything, so it comes last.
    answer = _run("squeue", "--noheader", f"--user={getpass.getuser()}", f"--format={'|'.join(_FIELDS.values())}")
    if answer is None or answer.returncode != 0:
        raise LaunchError(f"squeue does not answer: {_said(answer)}")
    rows = (line.split("|", len(_FIELDS) - 1) for line in answer.stdout.splitlines())
    told = (dict(zip(_FIELDS, map(_known, row), strict=True)) for row in rows if len(row) == len(_FIELDS))
    return [msgspec.convert(fields, JobInfo) for fields in told]


def named(ids: Iterable[str]) -> list[JobInfo]:
    """Jobs by their numbers, running or ended; those of an array one by one. Raises `LaunchError` for unknown ones."""
    found: list[JobInfo] = []
    for job_id in ids:
        if _ID.fullmatch(job_id) is None:
            raise LaunchError(f"'{job_id}' is no job: expected a number such as 1234, or 1234_5 for a task of an array")
        found += _from_scontrol(job_id) or _from_sacct(job_id)
    return found


def _from_scontrol(job_id: str) -> list[JobInfo]:
    answer = _run("scontrol", "--oneliner", "show", "job", job_id)
    if answer is None:
        raise LaunchError("there is no scontrol on PATH: jobs of SLURM are asked about on a machine of its cluster")
    if answer.returncode != 0:
        if "Invalid job id" in answer.stderr:
            return []
        raise LaunchError(f"scontrol does not answer: {_said(answer)}")
    return [read_scontrol(line) for line in answer.stdout.splitlines() if line.strip()]


def read_scontrol(line: str) -> JobInfo:
    """A line of `scontrol --oneliner show job`.

    >>> read_scontrol("JobId=8 JobName=a b=c UserId=me(1) JobState=RUNNING ExitCode=0:0 StdOut=/tmp/a b.log Power=")
    JobInfo(id='8', state='RUNNING', name='a b=c', ... exit_code=None, restarts=0, output='/tmp/a b.log')
    """
    words = _KEY.split(f" {line.strip()}")
    # The job's name comes second and may look like anything; what SLURM itself says comes later, and wins.
    fields = dict(zip(words[1::2], words[2::2], strict=True))
    name = re.search(r"JobName=(.*?) UserId=", line)
    get = fields.get
    job_id = get("JobId", "")
    if "ArrayJobId" in fields and get("ArrayTaskId", "N/A") != "N/A":
        job_id = f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}"
    job = JobInfo(
        id=job_id,
        state=get("JobState", ""),
        name=name[1] if name else get("JobName", ""),
        partition=_known(get("Partition", "")),
        nodes=_known(get("NumNodes", "")).partition("-")[0],
        node_list=_known(get("NodeList", "")),
        elapsed=_known(get("RunTime", "")),
        limit=_known(get("TimeLimit", "")),
        start=_known(get("StartTime", "")),
        reason=_known(get("Reason", "")),
        restarts=int(get("Restarts", "0")) if get("Restarts", "0").isdecimal() else 0,
        output=_known(get("StdOut", "")),
    )
    return msgspec.structs.replace(job, exit_code=_status(get("ExitCode", ""))) if job.over else job


_KEY = re.compile(
    r" (JobId|ArrayJobId|ArrayTaskId|JobName|UserId|JobState|Reason|Dependency|Requeue|Restarts|BatchFlag|Reboot"
    r"|ExitCode|RunTime|TimeLimit|TimeMin|SubmitTime|EligibleTime|AccrueTime|StartTime|EndTime|Deadline|Partition|AllocNode:Sid"
    r"|ReqNodeList|ExcNodeList|NodeList|BatchHost|NumNodes|NumCPUs|Command|WorkDir|StdErr|StdIn|StdOut|Power"
    r"|TresPerNode|TresPerTask|Comment|AdminComment|MailUser|MailType|Priority|Nice|Account|QOS)="
)
"""The names that `scontrol show job` uses around those read here. Values may hold blanks, so a blank ends nothing."""


def _status(code: str) -> int | None:
    """The exit status of ExitCode=STATUS:SIGNAL, in the shell's terms."""
    status, _, number = code.partition(":")
    if not status.isdecimal():
        return None
    return 128 + int(number) if number.isdecimal() and int(number) else int(status)


def _from_sacct(job_id: str) -> list[JobInfo]:
    answer = _run("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}", f"--format={_OF_SACCT}")
    if answer is None or answer.returncode != 0:
        raise LaunchError(
            f"squeue and scontrol do not know job {job_id} (any more), and this cluster keeps no accounts that could "
            f"be asked: {_said(answer)}"
        )
    found = []
    for line in answer.stdout.splitlines():
        row = line.split("|", _OF_SACCT.count(","))
        if len(row) == _OF_SACCT.count(",") + 1:
            one, state, code, partition, nodes, node_list, elapsed, limit, start, reason, name = map(_known, row)
            status = _status(code)
            found.append(
                JobInfo(one, state, name, partition, nodes, node_list, elapsed, limit, start, reason, exit_code=status)
            )
    if not found:
        raise LaunchError(f"there is no job {job_id}: neither squeue, scontrol nor sacct know it")
    return found


def _known(text: str) -> str:
    """Without SLURM's ways of saying nothing."""
    return "" if text.strip() in ("(null)", "N/A", "None", "Unknown") else text.strip()


def _run(*words: str) -> subprocess.CompletedProcess[str] | None:
    """None when there is no such program."""
    path = shutil.which(words[0])
    if path is None:
        return None
    try:
        return subprocess.run(
            [path, *words[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{words[0]} has not answered within {_ANSWER_S:g} s; is slurmctld up? (scontrol ping)"
        ) from None


def _said(answer: subprocess.CompletedProcess[str] | None) -> str:
    if answer is None:
        return "there is no such program on PATH"
    lines = (answer.stderr.strip() or answer.stdout.strip() or f"exit status {answer.returncode}").splitlines()
    return lines[-1].strip()

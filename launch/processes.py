"""Processes of a job on this host: who they are, and ending them."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

from fuel_parallel import failure
from fuel_parallel.topology.cgroup import quota
from fuel_parallel.topology.sysfs import Sysfs

JOB_ID = "FUEL_JOB_ID"
CLEANER, LOGGER = "fuelrun-cleaner", "fuelrun-log"
OWN = (CLEANER, LOGGER)
"""Processes that are left behind for a moment; their work is not done when the ranks are gone. 15 letters at most."""
_PR_SET_PDEATHSIG = 1


def cores() -> int:
    """Cores that this process may use; a container or a batch job often gives fewer than the machine has.

    The time that a container gets counts as well: that of two and a half cores is three.
    """
    return granted(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def granted(count: int) -> int:
    """So many of `count` cores as this process gets the time of."""
    limit = quota(Sysfs())
    return count if limit is None else max(1, min(count, math.ceil(limit)))


def belongs(pid: int, job_id: str) -> bool:
    """True when `pid` was started for this job: process ids are used again, a job's id is not."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{JOB_ID}={job_id}".encode() in environ.split(b"\0")


def of_job(job_id: str) -> list[int]:
    """Every living process of this host that was started for the job, whoever started it.

    What has another host's name is on another host, though a namespace alone lies between.
    """
    with contextlib.suppress(OSError):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        here = _host_of("self")
        return [pid for pid in pids if pid != os.getpid() and belongs(pid, job_id) and _host_of(pid) == here]
    return []


def _host_of(pid: int | str) -> str:
    """The namespace of a process's host name; "" where there is no such thing."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/uts")
    return ""


def send(pids: list[int], number: int) -> None:
    """Send a signal to each; one that is gone has nothing to hear."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def has_loaded_mpi(pid: int) -> bool:
    """Whether the library of an MPI is in the memory of a process."""
    with contextlib.suppress(OSError):
        return "/libmpi" in Path(f"/proc/{pid}/maps").read_text()
    return False


def killed_by(pid: int) -> int | None:
    """The signal that ended a process, as long as its parent has not asked for its status; None if not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if words[0] == "Z":
            return int(words[49]) & 0x7F or None
    return None


def name_of(pid: int) -> str:
    """The command of a process, for messages."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "?"


def leave_behind(name: str, work: Callable[[], None]) -> bool:
    """Does `work` in a process called `name` that outlives this one; False where there cannot be one.

    To be called before this process has any thread or connection of its own.
    """
    try:
        first = os.fork()
    except OSError:
        return False
    if first:
        os.waitpid(first, 0)
        return True
    try:
        os.setsid()  # what ends or stops the ranks does not end it
        if os.fork() == 0:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.chdir("/")
            with contextlib.suppress(OSError):
                Path("/proc/self/comm").write_text(name)
            work()
    finally:
        os._exit(0)


class Watch:
    """Tells when a process that is not our child has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd: int | None = None  # readable when the process has ended
        self._ended = False
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._ended = True
        except (OSError, AttributeError):
            self.fd = None  # no pidfd on this system: ask by signal 0

    def ended(self) -> bool:
        """True from the moment on when the process has ended."""
        if not self._ended:
            if self.fd is not None:
                self._ended = bool(select.select([self.fd], [], [], 0)[0])
            else:
                self._ended = not failure.lives(self.pid)
        return self._ended

    def close(self) -> None:
        """Give the descriptor back."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def ending_with_parent() -> Callable[[], None]:
    """What to call between fork and exec: on Linux, the kernel sends SIGTERM when the parent is gone."""
    import ctypes  # not at every start of a rank

    libc = ctypes.CDLL(None)  # loaded here: nothing may be loaded between fork and exec

    def ask() -> None:
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask

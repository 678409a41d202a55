"""What an MPI keeps in /dev/shm, and taking away what a job left there.

An MPI removes its files itself when a job ends well. Of ranks that were killed it leaves them: 16 MiB a rank and more,
until the machine is started again. Which files are a job's is seen in the memory maps of its ranks while they live.
Some can be missed, of a rank that is killed at its start; so of a job that failed, files of its time count as well, if
they have the name of an MPI's, are mine, and no process has them in its memory. But that holds for those of another job
for a moment, too, between making a file and mapping it; and ranks that do not find each other's files wait for ever. So
these are taken away some seconds later, if they still belong to nobody.

`fuelrun -n` does this when the job has ended. Where an mpirun has started the ranks, or fuelrun is on another machine,
the first rank of each node leaves a process behind that does it when that mpirun is gone. It ends what the scripts have
started there as well, where the job has an id by which that is found.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from fuelrun.launch import processes

FOLDER = Path("/dev/shm")

_OF_AN_MPI = re.compile(
    r"mpich_sh.*|sm_segment\..*|vader_segment\..*|osc_(sm|rdma).*|psm[23]?_shm.*|Intel_MPI_.*|impi_shm.*"
)
_ONE_OF_A_RANK = re.compile(r"((?:sm|vader)_segment\..*\.)\d+")  # Open MPI: host, user, job, rank

_LOOKS_S = 0.1  # between two looks at ranks that have not initialised MPI
_RARE_LOOKS_S = 2.0  # the same, of a job that seems to have no MPI
_RANKS_LOOK_S = 0.5  # between two looks at whether ranks live
_RANKS_END_S = 3.0  # how long the ranks may outlive their launcher
_STARTS_S = 10.0  # how long a rank of another job may take between making a file and mapping it


class SharedFiles:
    """The files of one job on this host."""

    def __init__(self) -> None:
        self.since = time.time()
        self.names: set[str] = set()

    def note(self, pids: Iterable[int]) -> None:
        """Remembers what these ranks have in their memory now."""
        for pid in pids:
            self.names.update(_mapped(pid))

    def remove(self, *, failed: bool) -> None:
        """To be called when the ranks are gone. Of a job that failed it also finds files that nobody has noted.

        Those are removed some seconds later, by a process that is left behind.
        """
        listed = list(_listed())
        prefixes = {found[1] for name in self.names if (found := _ONE_OF_A_RANK.fullmatch(name))}
        mine = {
            name
            for name in listed
            if name in self.names or ((found := _ONE_OF_A_RANK.fullmatch(name)) and found[1] in prefixes)
        }
        _unlink(mine)
        if failed and (rest := _of_nobody([name for name in listed if name not in mine], self.since, time.time())):
            processes.leave_behind(processes.CLEANER, lambda: _remove_if_still_nobodys(rest))


def _listed() -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from filter(_OF_AN_MPI.fullmatch, os.listdir(FOLDER))


def _mapped(pid: int | str) -> set[str]:
    """Names in /dev/shm of files that a process has in its memory, as far as they are an MPI's."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        paths = {line.split(None, 5)[5] for line in lines if str(FOLDER) in line}
        return {path.removeprefix(f"{FOLDER}/") for path in paths if _OF_AN_MPI.fullmatch(path[len(str(FOLDER)) + 1 :])}
    return set()


def _unlink(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            (FOLDER / name).unlink()


def _remove_if_still_nobodys(names: list[str]) -> None:
    _let_go()
    until = time.time()
    time.sleep(_STARTS_S)
    _unlink(_of_nobody(names, 0.0, until))  # one that was made anew is another's


def _of_nobody(names: list[str], since: float, until: float) -> list[str]:
    """Those that are mine, of this time, and in no process's memory."""
    young = []
    for name in names:
        with contextlib.suppress(OSError):
            status = (FOLDER / name).stat()
            if status.st_uid == os.getuid() and since <= status.st_ctime <= until:
                young.append(name)
    if not young:
        return []
    used = {name for pid in os.listdir("/proc") if pid.isdigit() for name in _mapped(pid)}
    return [name for name in young if name not in used]


def remove_after(launcher: int, job_id: str = "") -> None:
    """Leaves a process behind that waits for the end of `launcher`, our parent, and then removes what its ranks left.

    With the id of a job its processes are ended, too, and then it is enough that all ranks are gone: what they left in
    the background keeps Hydra's proxy waiting.

    To be called before this process has any thread or connection of its own.
    """
    ranks_are_enough = bool(job_id) and launcher == os.getppid()
    if FOLDER.is_dir() and hasattr(os, "pidfd_open"):
        processes.leave_behind(processes.CLEANER, lambda: _wait_and_remove(launcher, job_id, ranks_are_enough))


def _let_go() -> None:
    """Nobody may wait for us to close what we inherited: the output of the job, the rank's line to its launcher."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    os.closerange(3, max(int(name) for name in os.listdir("/proc/self/fd")) + 1)


def _wait_and_remove(launcher: int, job_id: str, ranks_are_enough: bool) -> None:
    _let_go()
    files = SharedFiles()
    files.since = time.time() - 1.0  # other ranks may have come a little earlier
    ranks: set[int] = set()
    end = select.poll()
    end.register(os.pidfd_open(launcher), select.POLLIN)
    pause = _LOOKS_S
    while not end.poll(_RANKS_LOOK_S * 1000 if ranks_are_enough else None if files.names else pause * 1000):
        ranks.update(_children(launcher))
        if not files.names:
            files.note(ranks)
        if ranks_are_enough and ranks and not any(_lives(rank) for rank in ranks):
            break
        pause = min(pause * 1.02, _RARE_LOOKS_S)
    deadline = time.monotonic() + _RANKS_END_S
    while any(_lives(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    if job_id:
        processes.send(processes.of_job(job_id), signal.SIGKILL)
    files.remove(failed=True)


def _lives(pid: int) -> bool:
    """Whether a process is there and more than a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []

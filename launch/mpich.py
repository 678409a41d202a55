"""Starting ranks with MPICH, whose mpiexec is Hydra. MVAPICH and Intel MPI have Hydras of their own, see `mvapich` and
`intelmpi`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fuelrun.launch.engine import Banner, Death, Job, lines

_RULE = "={60,100}"
_BANNERS = (
    Banner(
        lines("", _RULE, "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"),
        re.compile("Please see the FAQ page for debugging suggestions"),
    ),
    Banner(lines(r"Abort\(\d+\) on node \d+ \(rank \d+ in comm \d+\): application called MPI_Abort\(.*")),
    Banner(lines(r"\[(proxy:\d+(:\d+)?|mpiexec)@\S+\] .*")),  # Hydra about itself, when a rank dies in MPI_Finalize
)
_ABORT = re.compile(r"^Abort\(\d+\) on node \d+ \(rank (\d+) in comm 0\)")
_SIGNAL = re.compile(r"EXIT STRING: .* \(signal (\d+)\)")


@dataclass(frozen=True)
class Mpich:
    """Hydra's mpiexec."""

    mpirun: Path
    version: str
    name: str = "MPICH"
    banners: tuple[Banner, ...] = _BANNERS
    starts_steps: bool = False

    def command(self, job: Job) -> list[str]:
        """Hydra binds nothing and counts no slots unless asked to."""
        return [str(self.mpirun), "-n", str(job.ranks), *self._between_hosts(job), *job.arguments, *job.command]

    def variables(self, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
        """Options of the remote shell cannot stand on the command line."""
        if len(job.agent) < 2 or "HYDRA_LAUNCHER_EXTRA_ARGS" in environ:
            return {}
        return {"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(job.agent[1:])}

    def _between_hosts(self, job: Job) -> list[str]:
        """What a job on other machines needs besides.

        `-iface` is about this machine: it says where Hydra's daemons come back to.
        """
        if not job.hosts:
            return []
        words = ["-launcher", "ssh", "-launcher-exec", job.agent[0], "-rmk", "user"]
        words += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in job.hosts), "-wdir", os.getcwd()]
        if mine := self.interface(job):
            words += ["-iface", mine]
        return [*words, "-genvlist", ",".join(job.forwarded)]

    @staticmethod
    def interface(job: Job) -> str:
        """The name of this machine's interface to the others, "" for the launcher's choice."""
        from fuelrun.launch.network import mine_in

        mine = mine_in(job.interface) if job.interface else None
        return mine.name if mine is not None else ""

    def death(self, message: str) -> Death | None:
        """Read "EXIT STRING: Killed (signal 9)"; the process id beside it may be that of a rank killed later."""
        if found := _ABORT.search(message):
            return Death(int(found[1]), aborted=True)
        found = _SIGNAL.search(message)
        return Death(signal=int(found[1])) if found else None

    def exit_code(self, status: int) -> int:
        """Hydra's status is a rank's exit status or the bare number of its signal; `death` tells the two apart."""
        return 128 - status if status < 0 else status

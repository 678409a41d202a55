"""Starting ranks with Open MPI (4 and 5)."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fuelrun.launch.engine import Banner, Death, Job, lines

_RULE = "-{74}"
_FIRST_LINES = (
    r"(prterun|mpirun|mpiexec)(\.real)? has exited due to process rank .*",
    r"(prterun|mpirun|mpiexec)(\.real)? noticed that process rank .*",
    r"(prterun|mpirun|mpiexec)(\.real)? detected that one or more processes exited with non-zero status.*",
    r"MPI_ABORT was invoked on rank .*",
    r"An MPI communication peer process has unexpectedly disconnected\..*",
    r"(PRTE|ORTE) has lost communication with a remote daemon.*",
    r"Primary job  ?terminated normally, but .*",
)
_BANNERS = (
    *(Banner(lines(_RULE, first), re.compile(_RULE)) for first in _FIRST_LINES),
    Banner(
        lines(r"\[[^\]]+:\d+\] \*\*\* An error occurred in Socket closed"),
        re.compile(r"\[[^\]]+:\d+\] \*\*\*    and MPI will try to terminate your MPI job as well\)"),
    ),
    Banner(lines(r"\[[^\]]+:\d+\] plm:(ssh|rsh): Warning: setpgid\(\d+,\d+\) failed in parent with errno=.*")),
    Banner(lines(r"\[[^\]]+:\d+\] PMIX ERROR: .* in file .* at line \d+")),
)
_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+\s+exited\s+on\s+signal\s+(\d+)")
_RANK = re.compile(r"MPI_ABORT was invoked on rank (\d+)|process rank (\d+) with PID|Process name: \[\S+,(\d+)\]")


@dataclass(frozen=True)
class OpenMpi:
    """Open MPI's mpirun."""

    mpirun: Path
    version: str
    name: str = "Open MPI"
    banners: tuple[Banner, ...] = _BANNERS
    starts_steps: bool = False

    @property
    def _is_4(self) -> bool:
        """Whether it is of the line before PRRTE, whose daemon is orted."""
        return self.version.startswith(("2.", "3.", "4."))

    def command(self, job: Job) -> list[str]:
        """No rank is bound to a core: Open MPI would put two jobs on one machine onto the same cores.

        `slot:OVERSUBSCRIBE`, because slots are counted in whole cores of the machine, while a container may hold
        hardware threads or half of them; and because local ranks are numbered in another order than ranks without.
        """
        command = [str(self.mpirun), "-n", str(job.ranks), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
        if os.getuid() == 0 and self._is_4:
            command.append("--allow-run-as-root")  # 4.0 refuses in spite of the variables
        if job.hosts:
            command += ["--prefix", str(self.mpirun.parent.parent), "--wdir", os.getcwd()]
            command += ["--host", ",".join(f"{host.name}:{host.slots}" for host in job.hosts)]
            command += [word for name in job.forwarded for word in ("-x", name)]
        return [*command, *job.arguments, *job.command]

    def variables(self, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
        """Settings go by the environment, so that a user's own `OMPI_MCA_…` wins."""
        # The one-sided component on UCX prints an error for every shared window that it then does not serve.
        wanted = {"OMPI_MCA_osc": "^ucx"}
        if job.shared_cores:
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"  # else a waiting rank keeps the core from the one it waits for
        if os.getuid() == 0:  # both, or it refuses
            wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if job.hosts:
            wanted |= self._between_hosts(job, environ)
        return {name: value for name, value in wanted.items() if name not in environ}

    def _between_hosts(self, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
        """The remote shell, and the network: of the runtime's daemons, and of ranks where TCP is what they use."""
        runtime = "OMPI_MCA_" if self._is_4 else "PRTE_MCA_"
        agent, network = ("plm_rsh_agent", "oob_tcp_if_include") if self._is_4 else ("plm_ssh_agent", "prte_if_include")
        wanted = {runtime + agent: shlex.join(job.agent)}
        if job.interface:
            wanted |= {runtime + network: job.interface, "OMPI_MCA_btl_tcp_if_include": job.interface}
        if "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ:  # the hosts were named: they are not that job's
            wanted |= {runtime + "ras": "^slurm", runtime + "plm": "^slurm"}
        return wanted

    def death(self, message: str) -> Death | None:
        """Read "process rank 1 with PID 123 on node n exited on signal 9" and the like."""
        if found := _SIGNAL.search(message):
            return Death(int(found[1]), signal=int(found[2]))
        if found := _RANK.search(message):
            return Death(int(found[1] or found[2] or found[3]), aborted=found[1] is not None)
        return None

    def exit_code(self, status: int) -> int:
        """Open MPI says 128+n itself; a negative status is a signal to mpirun."""
        return 128 - status if status < 0 else status

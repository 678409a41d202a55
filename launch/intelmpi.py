"""Starting ranks with Intel MPI: a Hydra with words of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from fuelrun.launch.engine import Job
from fuelrun.launch.mpich import Mpich


@dataclass(frozen=True)
class IntelMpi(Mpich):
    """Intel MPI's mpirun. Unlike MPICH's it binds ranks, and counts the machines' cores."""

    name: str = "Intel MPI"

    def command(self, job: Job) -> list[str]:
        """One argument set for each machine where their numbers of ranks differ, for `-hosts` takes no numbers."""
        start = [str(self.mpirun)]
        if not job.hosts:
            return [*start, "-n", str(job.ranks), *job.arguments, *job.command]
        start += ["-genvlist", ",".join(job.forwarded)]
        counts = {host.slots for host in job.hosts}
        if len(counts) == 1:
            start += ["-hosts", ",".join(host.name for host in job.hosts), "-ppn", str(counts.pop())]
            return [*start, "-n", str(job.ranks), "-wdir", os.getcwd(), *job.arguments, *job.command]
        words = [*start, *job.arguments]
        for index, host in enumerate(job.hosts):
            words += [":"] if index else []
            words += ["-host", host.name, "-n", str(host.slots), "-wdir", os.getcwd(), *job.command]
        return words

    def variables(self, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
        """Binding is fuelrun's part; a waiting rank gives its core away where ranks share cores."""
        wanted = {"I_MPI_PIN": "0"}
        if job.shared_cores:
            wanted["I_MPI_WAIT_MODE"] = "1"
        if job.hosts:
            wanted |= {
                "I_MPI_HYDRA_BOOTSTRAP": "ssh",
                "I_MPI_HYDRA_BOOTSTRAP_EXEC": job.agent[0],
                "I_MPI_HYDRA_RMK": "user",
                "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0",  # inside of a batch job -ppn would not count
            }
            if job.agent[1:]:
                wanted["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] = " ".join(job.agent[1:])
            if mine := self.interface(job):
                wanted["I_MPI_HYDRA_IFACE"] = mine
        return {name: value for name, value in wanted.items() if name not in environ}

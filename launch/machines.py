"""A job on other machines as well: the network between them, where ranks meet, and what goes along to them.

`prepare` asks the machines, and refuses a job that could not start there; `forwarded` says which variables ranks need.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fuel_parallel.environment import HOSTS
from fuel_parallel.errors import LaunchError
from fuel_parallel.topology.files.hostfile import Host
from fuelrun.launch import network, preflight, rendezvous
from fuelrun.launch.engine import Job
from fuelrun.launch.find import library
from fuelrun.launch.hosts import as_variable, is_here
from fuelrun.launch.network import Choice
from fuelrun.launch.processes import JOB_ID
from fuelrun.launch.rank import CHANNEL, HEARTBEAT, SUPERVISOR

# What makes Python find its packages, what tunes the libraries below a rank, and our own. Everything else (HOME,
# TMPDIR, DISPLAY, credentials) is the other machine's.
_FORWARDED = re.compile(
    r"PATH|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_PREFIX|MASTER_(?:ADDR|PORT)|MALLOC_ARENA_MAX"
    r"|(?:PYTHON|FUEL_|OMP_|GOMP_|KMP_|OPENBLAS_|MKL_|BLIS_|NUMEXPR_|VECLIB_|UCX_|FI_|MPICH_|MPIR_CVAR_|I_MPI_|MV2_|MVP_"
    r"|NCCL_|RCCL_|GLOO_|CUDA_|HIP_|ROCR_|HSA_|TORCH_).*"
)
_OF_ONE_PROCESS = re.compile(r"FUEL_(?:JOB_DIR|RANK_PID|POSITION|MPIRUN|LAUNCH_AGENT)")
_SET_AT_THE_START = (JOB_ID, SUPERVISOR, CHANNEL, HEARTBEAT)
_DEALS = re.compile(r"-+(map-?by|rank-?by|rankfile|by(node|slot)|ppn|perhost|rr|N|npernode)")  # options of an mpirun
_PYTHON = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Machines:
    """The machines of a job with others than this one.

    Args:
        hosts: In order; `slots` is the number of ranks on each.
        choice: This machine's interface to the others.
        meeting: MASTER_ADDR and MASTER_PORT: an address of the first machine, and a port that was free there.
        agent: The remote shell and its options.
    """

    hosts: tuple[Host, ...]
    choice: Choice
    meeting: tuple[str, int]
    agent: tuple[str, ...]

    @property
    def own_address(self) -> str:
        """Where the ranks reach this process."""
        return self.choice.interface.address

    @property
    def network(self) -> str:
        """The network between the machines."""
        return self.choice.interface.network

    def described(self) -> str:
        """In one line, for `--verbose`."""
        return (
            f"{len(self.hosts)} machines ({', '.join(f'{host.name}: {host.slots}' for host in self.hosts)}), joined by "
            f"{self.network}: {self.choice.interface}, because {self.choice.why}"
        )

    def ranks_here(self) -> int:
        """How many of the ranks share this machine's cores."""
        return sum(host.slots or 0 for host in self.hosts if is_here(host.name))

    def host_of(self, rank: int) -> Host:
        """The machine of a rank: they are dealt in blocks."""
        for host in self.hosts:
            rank -= host.slots or 0
            if rank < 0:
                return host
        return self.hosts[-1]

    def told(self, mpi_arguments: Sequence[str]) -> dict[str, str]:
        """What the ranks are told about the machines."""
        address, port = self.meeting
        told = {network.NETWORK: self.network, rendezvous.ADDRESS: address, rendezvous.PORT: str(port)}
        if not any(_DEALS.match(word) for word in mpi_arguments):  # else the user deals the ranks, as only mpirun knows
            told[HOSTS] = as_variable(self.hosts)
        return told

    def joined(self, job: Job, variables: Iterable[str], wanted: Iterable[str]) -> Job:
        """The job on these machines. Of the `variables` those that matter go along, and the `wanted` ones."""
        return replace(
            job,
            hosts=self.hosts,
            interface=self.network,
            forwarded=forwarded(variables, (*wanted, *_SET_AT_THE_START)),
            agent=self.agent,
        )


def prepare(
    hosts: tuple[Host, ...], *, interface: str, agent: str | None, script: tuple[str, ...], environ: Mapping[str, str]
) -> Machines | None:
    """Find out whether ranks can be started; None when all of them are on this machine. Raises LaunchError.

    Args:
        hosts: The machines.
        interface: What the user said about the network, "" for nothing.
        agent: What the user said about the remote shell.
        script: `[-m] NAME` of what is to be run.
        environ: Ours.
    """
    others = tuple(host.name for host in hosts if not is_here(host.name))
    if not others:
        return None
    choice = network.choose(others, interface)
    words = preflight.agent_words(agent, environ)
    answers = preflight.ask(others, words, script, {name: environ[name] for name in _PYTHON if name in environ})
    for host, answer in answers.items():
        if problem := preflight.compare(host, answer, mpi=library().text, network=choice.interface.network):
            raise LaunchError(problem)
    first = answers.get(hosts[0].name)
    if first is None:
        with socket.socket() as listener:
            listener.bind((choice.interface.address, 0))
            meeting = (choice.interface.address, int(listener.getsockname()[1]))
    else:
        meeting = (first.address_in(choice.interface.network) or hosts[0].name, first.port)
    return Machines(hosts, choice, meeting, words)


def forwarded(variables: Iterable[str], wanted: Iterable[str] = ()) -> tuple[str, ...]:
    """Those of the variables that go to other machines; `wanted` ones always do."""
    fitting = {name for name in variables if _FORWARDED.fullmatch(name) and not _OF_ONE_PROCESS.fullmatch(name)}
    return tuple(sorted(fitting | set(wanted)))

"""What fuelrun asks of an MPI: how to start ranks with it, and how to read what its mpirun says when they end.

An engine is one small frozen class in a file of its own (`openmpi`, `mpich`, `intelmpi`, `mvapich`). It builds values
and starts nothing; `supervise` acts on them. To add a launcher is to add a file and its line in `find`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fuel_parallel.topology.files.hostfile import Host


@dataclass(frozen=True)
class Job:
    """What is to be started.

    Args:
        ranks: Number of ranks.
        command: What each rank runs.
        shared_cores: There are more ranks than cores, so a waiting rank should give its core away.
        arguments: Options of the user's own for mpirun. They come last, so that they win.
        hosts: The machines, in order, with the number of ranks on each as `slots`; () for this one alone, or for those
            of the batch job around us.
        per_node: Ranks on each machine of a batch job; None to fill one after the other.
        interface: The network between the machines (`10.0.0.0/24`); "" for the MPI's choice.
        forwarded: Variables that ranks on other machines need as well.
        agent: The remote shell that starts something on another machine, with its options.
    """

    ranks: int
    command: tuple[str, ...]
    shared_cores: bool = False
    arguments: tuple[str, ...] = ()
    hosts: tuple[Host, ...] = ()
    per_node: int | None = None
    interface: str = ""
    forwarded: tuple[str, ...] = ()
    agent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Death:
    """How a rank ended, as its mpirun tells it. What mpirun does not say is None.

    Args:
        rank: Which rank ended first.
        signal: The signal that killed it.
        aborted: It called `MPI_Abort`.
    """

    rank: int | None = None
    signal: int | None = None
    aborted: bool = False


@dataclass(frozen=True)
class Banner:
    """The shape of a message that mpirun prints when a job fails: its first lines, and the line that ends it.

    Args:
        opening: One pattern for each of the first lines; all must match in full.
        closing: The last line; None when the opening is the whole message.
    """

    opening: tuple[re.Pattern[str], ...]
    closing: re.Pattern[str] | None = None


class Engine(Protocol):
    """One MPI's launcher."""

    @property
    def name(self) -> str:
        """As a person would say it: "Open MPI"."""

    @property
    def mpirun(self) -> Path:
        """The program that starts the ranks."""

    @property
    def version(self) -> str:
        """Version of `mpirun`."""

    @property
    def starts_steps(self) -> bool:
        """Whether its ranks are tasks of SLURM."""

    @property
    def banners(self) -> tuple[Banner, ...]:
        """Messages that say no more than fuelrun does in one line."""

    def command(self, job: Job) -> list[str]:
        """The command line that starts the job."""

    def variables(self, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
        """What has to be added to the environment of that command."""

    def death(self, message: str) -> Death | None:
        """Who ended and how, read from one of the `banners`; None when it does not say."""

    def exit_code(self, status: int) -> int:
        """The exit status of mpirun in the shell's terms: 128+n for signal n."""


def lines(*patterns: str) -> tuple[re.Pattern[str], ...]:
    """Patterns for the lines of a banner."""
    return tuple(re.compile(pattern) for pattern in patterns)

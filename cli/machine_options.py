"""The options that say which machines a job runs on, for `run` and `doctor`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fuelrun.option_types import Count

if TYPE_CHECKING:
    from fuelrun.launch.hosts import Wish
    from fuelrun.launch.machines import Machines
    from fuelrun.launch.script import Script

_Command = TypeVar("_Command", bound=Callable[..., Any])
ENGINES = ("auto", "openmpi", "mpich", "intelmpi", "mvapich", "srun")


def machine_options(command: _Command) -> _Command:
    """Add the options to a command; they come as the arguments `host`, `hostfile`, `interface` and `launch_agent`."""
    options = (
        click.option("-H", "--host", metavar="HOSTS", help="Machines, with the ranks of each: a,b:4 or node[1-8]:4."),
        click.option("--hostfile", metavar="FILE", help="A file of machines, in the way of Open MPI, MPICH or MLX."),
        click.option(
            "--interface",
            metavar="NAME|NETWORK",
            help="The network between the machines: eth1 or 10.0.0.0/24 [default: the way to the first other].",
        ),
        click.option(
            "--launch-agent",
            metavar="COMMAND",
            help="What starts a command on another machine [default: ssh, without questions].",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


engine_option = click.option(
    "--engine", type=click.Choice(ENGINES), default="auto", help="Whose mpirun [default: that of mpi4py's MPI]."
)
nodes_option = click.option("--nnodes", type=Count("the number of machines"), metavar="N", help="How many machines.")
per_node_option = click.option("--ppn", type=Count("ranks of a machine"), metavar="N", help="Ranks on each machine.")


def wish(
    ranks: int | None, nodes: int | None, per_node: int | None, host: str | None, hostfile: str | None
) -> Wish | None:
    """What was said about machines; None when it was nothing."""
    if (nodes, per_node, host, hostfile) == (None, None, None, None):
        return None
    if host is not None and hostfile is not None:
        raise click.UsageError("-H and --hostfile both name the machines; give one of the two")
    from fuelrun.launch.hosts import Wish, parse_hosts, read_hosts

    hosts = parse_hosts(host) if host is not None else read_hosts(Path(hostfile)) if hostfile is not None else ()
    return Wish(hosts, ranks, nodes, per_node)


def prepare(
    wish: Wish, script: Script | None, *, interface: str | None, launch_agent: str | None
) -> tuple[int, Machines | None]:
    """The number of ranks, and the machines where there are others than this one; asks those whether they can."""
    if not wish.hosts and (wish.nodes or 1) == 1 and (wish.ranks or 0) <= (wish.per_node or wish.ranks or 0):
        return wish.ranks or wish.per_node or 1, None
    from fuelrun.launch.hosts import deal
    from fuelrun.launch.machines import prepare

    hosts = deal(wish)
    words = script.command()[: 2 if script.module else 1] if script is not None else ()
    machines = prepare(hosts, interface=interface or "", agent=launch_agent, script=words, environ=os.environ)
    return sum(host.slots or 0 for host in hosts), machines

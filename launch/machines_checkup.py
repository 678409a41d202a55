"""Whether ranks can be started on other machines: the facts behind `fuelrun doctor -H a,b`."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fuel_parallel.errors import LaunchError
from fuel_parallel.topology.files.hostfile import Host
from fuelrun.launch import find, network, preflight
from fuelrun.launch.checkup import Finding
from fuelrun.launch.hosts import is_here
from fuelrun.launch.machines import variables_of_python


def examine_interfaces() -> Finding:
    """What this machine has, and what of it is never taken for the way to another one."""
    listed = [
        f"{one} (never taken: leads nowhere)" if network.INSIDE.fullmatch(one.name) else str(one)
        for one in network.interfaces()
    ]
    return Finding("interfaces", ", ".join(listed) or "none that is up with an IPv4 address")


def examine_machines(hosts: tuple[Host, ...], interface: str, agent: str | None) -> Iterator[Finding]:
    """The way to the machines, and what each says about itself.

    Args:
        hosts: The machines.
        interface: `--interface`, "" if it was not given.
        agent: `--launch-agent`.
    """
    others = tuple(host.name for host in hosts if not is_here(host.name))
    if not others:
        yield Finding("network between machines", "none needed: all of them are this one")
        return
    try:
        choice = network.choose(others, interface)
        words = preflight.agent_words(agent, os.environ)
        mpi = find.library().text
    except LaunchError as error:
        yield Finding("network between machines", "none", ok=False, remedy=str(error))
        return
    mine = choice.interface
    yield Finding("network between machines", f"{mine.network} by {mine}: {choice.why}")
    for host in others:
        try:
            (answer,) = preflight.ask([host], words, (), variables_of_python(os.environ)).values()
        except LaunchError as error:
            yield Finding(f"machine {host}", "cannot be used", ok=False, remedy=str(error))
            continue
        problem = preflight.compare(host, answer, mpi=mpi, network=mine.network, own=mine.address)
        if problem:
            yield Finding(f"machine {host}", "does not fit", ok=False, remedy=problem)
        else:
            yield Finding(f"machine {host}", f"{answer.name}, {answer.address_in(mine.network)}, the same MPI as here")

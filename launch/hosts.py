"""Which machines a job runs on and how many ranks each takes: `-H a,b:4`, `--hostfile`, `--nnodes` and `--ppn`.

Ranks are dealt in blocks: the first ones are all on the first machine. What comes out says for each machine exactly how
many ranks it gets, so that no MPI has to count slots, which each of them does in its own way.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fuel_parallel.errors import LaunchError
from fuel_parallel.partitioning import partition
from fuel_parallel.topology.files import hostfile
from fuel_parallel.topology.files.hostfile import Host
from fuel_parallel.topology.files.hostlist import MOST, expand
from fuel_parallel.topology.files.source import Source

_TERM = re.compile(r"(?P<names>[A-Za-z0-9_][A-Za-z0-9_.\-]*(?:\[[0-9,\-]+\][A-Za-z0-9_.\-]*)*)(?::(?P<slots>[0-9]+))?")
_LOCAL_NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Wish:
    """What a user said about machines and numbers of ranks; None where nothing was said.

    Args:
        hosts: The machines, in order.
        ranks: Ranks in all.
        nodes: How many of the machines.
        per_node: Ranks on each.
    """

    hosts: tuple[Host, ...] = ()
    ranks: int | None = None
    nodes: int | None = None
    per_node: int | None = None

    def count(self) -> int | None:
        """Ranks in all as the numbers alone give it. Raises LaunchError where they contradict each other."""
        if self.per_node is None:
            return self.ranks
        nodes = self.nodes if self.nodes is not None else len(self.hosts) or None
        if nodes is None:
            if self.ranks is not None and self.ranks % self.per_node:
                raise LaunchError(
                    f"-n {self.ranks} cannot be --ppn {self.per_node} ranks on each of some machines; "
                    f"take a multiple of {self.per_node}"
                )
            return self.ranks
        if self.ranks is not None and self.ranks != nodes * self.per_node:
            raise LaunchError(
                f"-n {self.ranks} is not --ppn {self.per_node} ranks on each of {nodes} machine{'s' * (nodes != 1)}, "
                f"which are {nodes * self.per_node}; leave one of the numbers out"
            )
        return nodes * self.per_node

    def without(self, lost: Collection[str], least: int) -> Wish:
        """The same on the machines that are left: as many ranks as they take. LaunchError for fewer than `least`."""
        left = tuple(host for host in self.hosts if host.name not in lost)
        usual = self.per_node or (-(-self.ranks // len(self.hosts)) if self.ranks is not None else 1)
        slots = sum(host.slots or usual for host in left)
        ranks = slots if self.ranks is None else min(slots, self.ranks)
        if not left or ranks < least:
            raise LaunchError(
                f"without {', '.join(sorted(lost))} there is room for {slots} ranks, less than --min-np {least}"
            )
        nodes = None if self.nodes is None else min(self.nodes, len(left))
        return Wish(left, ranks if self.per_node is None else None, nodes, self.per_node)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The machines of `-H`; one that comes again gets slots more.

    >>> [(host.name, host.slots) for host in parse_hosts("a,b:4,n[1-2]:2")]
    [('a', None), ('b', 4), ('n1', 2), ('n2', 2)]
    """
    found: dict[str, Host] = {}
    for term in re.split(r",(?![^\[]*\])", text):
        match = _TERM.fullmatch(term.strip())
        if match is None or match["slots"] == "0":
            raise LaunchError(
                f"-H {text}: '{term.strip()}' is no machine; expected NAME or NAME:RANKS, separated by commas, as in "
                "-H node1:4,node2:4 or -H node[1-8]:4; a user to log in as stands in ~/.ssh/config"
            )
        for name in expand(Source("-H", ""), match["names"]):
            host = Host(name, int(match["slots"]) if match["slots"] else None)
            if name in found:
                host = replace(host, slots=(found[name].slots or 1) + (host.slots or 1))
            found[name] = host
            if len(found) > MOST:
                raise LaunchError(f"-H names more than {MOST} machines")
    return tuple(found.values())


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The machines of a host file, in any of its dialects. Raises `TopologyFileError` with file and line."""
    source = Source.open(path)
    hosts = hostfile.parse(source)
    named = next((host for host in hosts if host.user), None)
    if named is not None:
        raise source.error(
            f"the user '{named.user}' for {named.name} would be known to one MPI and not to the next; "
            f"write `Host {named.name}` and `User {named.user}` into ~/.ssh/config",
            line=named.line or None,
        )
    return hosts


def deal(wish: Wish) -> tuple[Host, ...]:
    """The machines that are used, each with the number of its ranks as `slots`. Raises LaunchError."""
    hosts = wish.hosts
    if not hosts:
        said = f"--nnodes {wish.nodes}" if wish.nodes is not None else f"-n {wish.ranks} with --ppn {wish.per_node}"
        raise LaunchError(
            f"{said} needs the names of the machines: -H node1,node2 or --hostfile FILE "
            "(inside of a SLURM job they are known)"
        )
    if wish.nodes is not None and wish.nodes > len(hosts):
        raise LaunchError(
            f"--nnodes {wish.nodes} asks for more machines than the {len(hosts)} of -H or --hostfile ({_names(hosts)})"
        )
    hosts = hosts[: wish.nodes]
    ranks = wish.count()
    if wish.per_node is not None:
        _refuse_too_many(hosts, [wish.per_node] * len(hosts), len(hosts) * wish.per_node)
        return tuple(replace(host, slots=wish.per_node) for host in hosts)
    if ranks is None:
        return tuple(replace(host, slots=host.slots or 1) for host in hosts)
    if all(host.slots is None for host in hosts):
        if wish.nodes is not None and ranks < wish.nodes:
            raise LaunchError(f"-n {ranks} is less than one rank for each of --nnodes {wish.nodes}")
        parts = partition(ranks, len(hosts))
        return tuple(replace(host, slots=len(part)) for host, part in zip(hosts, parts, strict=True) if len(part))
    return _fill(hosts, ranks, wish.nodes)


def is_here(name: str) -> bool:
    """Whether a name is this machine's own."""
    if name in (*_LOCAL_NAMES, socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return False
    return is_own_address(address)


def is_own_address(address: str) -> bool:
    """Whether one of this machine's interfaces has an address: nothing can be bound to those of others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def as_variable(hosts: Sequence[Host]) -> str:
    """The machines and their ranks for the variable FUEL_HOSTS, "a:2,b:2"."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def _fill(hosts: tuple[Host, ...], ranks: int, nodes: int | None) -> tuple[Host, ...]:
    """One machine after the other; with a number of machines said, as evenly as their slots allow."""
    slots = [host.slots or 1 for host in hosts]
    _refuse_too_many(hosts, slots, ranks)
    given = [0] * len(hosts)
    left = ranks
    while left:
        for index, most in enumerate(slots):
            step = min(left, most - given[index], 1 if nodes is not None else most)
            given[index] += step
            left -= step
    return tuple(replace(host, slots=count) for host, count in zip(hosts, given, strict=True) if count)


def _refuse_too_many(hosts: tuple[Host, ...], wanted: list[int], ranks: int) -> None:
    slots = sum(min(count, host.slots or count) for host, count in zip(hosts, wanted, strict=True))
    if slots >= ranks:
        return
    listed = ", ".join(f"{host.name} {host.slots or 1}" for host in hosts[:6]) + (", …" if len(hosts) > 6 else "")
    raise LaunchError(
        f"not enough slots: {ranks} ranks, but the machines take {slots} ({listed}); "
        f"take -n {slots}, more machines, or larger numbers behind their names (-H {hosts[0].name}:{ranks}, slots=)"
    )


def _names(hosts: Sequence[Host]) -> str:
    return ", ".join(host.name for host in hosts[:6]) + (", …" if len(hosts) > 6 else "")

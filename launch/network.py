"""The network between the machines of a job: which interface leads to the others, and telling every MPI about it.

Left alone, an MPI may choose a bridge of containers (docker0) that has the same address on every machine, and hang.
So the interface is the one by which this machine reaches the first other one, and what is passed on is its network, not
its name: `eth0` here may be `ens3` there. Each rank finds its own interface in that network.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fuel_parallel.errors import LaunchError

NETWORK = "FUEL_NETWORK"
"""The network between the machines, as in 10.0.0.0/24, for the ranks."""

INSIDE = re.compile(r"lo\d*|docker\d*|virbr\d+.*|br-[0-9a-f]{6,}|veth.*|cni\d*|lxcbr\d+|lxdbr\d+|podman\d*|cilium_.*")
"""Interfaces that lead nowhere outside of a machine: loopback, and the bridges of containers and virtual machines."""

_FLAGS, _ADDRESS, _MASK = 0x8913, 0x8915, 0x891B  # SIOCGIFFLAGS, SIOCGIFADDR, SIOCGIFNETMASK of Linux
_UP = 1
_CARDS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Interface:
    """A network interface of this machine with its IPv4 address."""

    name: str
    address: str
    prefix: int

    @property
    def network(self) -> str:
        """The network that it is in: "10.0.0.0/24"."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix}", strict=False))

    def __str__(self) -> str:
        return f"{self.name} ({self.address}/{self.prefix})"


@dataclass(frozen=True)
class Choice:
    """An interface, and why it was taken."""

    interface: Interface
    why: str


def interfaces() -> tuple[Interface, ...]:
    """This machine's interfaces that are up and have an IPv4 address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name[:15].encode())
            try:
                (flags,) = struct.unpack_from("H", fcntl.ioctl(probe, _FLAGS, request), 16)
                address = socket.inet_ntoa(fcntl.ioctl(probe, _ADDRESS, request)[20:24])
                mask = int.from_bytes(fcntl.ioctl(probe, _MASK, request)[20:24], "big")
            except OSError:  # no IPv4 address
                continue
            if flags & _UP:
                found.append(Interface(name, address, mask.bit_count()))
    return tuple(found)


def choose(others: tuple[str, ...], wanted: str = "") -> Choice:
    """The interface that leads to the other machines. Raises LaunchError.

    Args:
        others: Names or addresses of the other machines.
        wanted: `--interface`: the name of an interface, or a network or address such as 10.0.0.0/24.
    """
    here = interfaces()
    if wanted:
        return _wanted(wanted, here)
    for other in others[:1]:
        address = resolve(other)
        source = _source_towards(address, other)
        found = next((one for one in here if one.address == source), None)
        if found is None:
            raise LaunchError(
                f"the address {source}, from which {other} is reached, is that of no interface ({_listed(here)}); "
                "name one with --interface"
            )
        if INSIDE.fullmatch(found.name):
            raise LaunchError(
                f"{other} ({address}) is reached by {found.name}, which leads to nothing outside of this machine; give "
                f"the machine's address in a network that both are in, or say --interface {found.name} if it is meant"
            )
        return Choice(found, f"by it {other} is reached")
    raise LaunchError("there is no other machine to reach")


def resolve(name: str) -> str:
    """The IPv4 address of a machine. Raises LaunchError."""
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise LaunchError(
            f"'{name}' is not known here ({error.strerror or error}); check the name (`getent hosts {name}`) "
            "or give its address"
        ) from None


def mine_in(network: str) -> Interface | None:
    """This machine's interface in a network."""
    inside = ipaddress.ip_network(network, strict=False)
    return next((one for one in interfaces() if ipaddress.ip_address(one.address) in inside), None)


def rank_variables(environ: Mapping[str, str], cards: Path = _CARDS) -> dict[str, str]:
    """What the libraries under a rank read about its interface, where the user has not set it.

    Of UCX it is all that it may use, so a machine with InfiniBand or RoCE cards is left to UCX, which tries them first.
    """
    network = environ.get(NETWORK)
    mine = mine_in(network) if network else None
    if mine is None:
        return {}
    wanted = {"FI_TCP_IFACE": mine.name, "GLOO_SOCKET_IFNAME": mine.name, "NCCL_SOCKET_IFNAME": f"={mine.name}"}
    if not (cards.is_dir() and os.listdir(cards)):
        wanted["UCX_NET_DEVICES"] = mine.name
    return {name: value for name, value in wanted.items() if name not in environ}


def _wanted(wanted: str, here: tuple[Interface, ...]) -> Choice:
    if found := next((one for one in here if one.name == wanted), None):
        return Choice(found, "--interface names it")
    try:
        network = ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        expected = "this machine has" if here else "this machine has no interface that is up, but expected is"
        raise LaunchError(
            f"--interface {wanted}: there is no such interface; {expected} {_listed(here) or 'a name'}; a network such "
            "as 10.0.0.0/24 is taken as well"
        ) from None
    if found := next((one for one in here if ipaddress.ip_address(one.address) in network), None):
        return Choice(found, f"its address is in --interface {wanted}")
    raise LaunchError(f"--interface {wanted}: no interface of this machine is in that network; it has {_listed(here)}")


def _source_towards(address: str, name: str) -> str:
    """Our address on the way to another one. No packet is sent: a datagram socket only looks the route up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise LaunchError(
                f"there is no way from here to {name} ({address}): {error.strerror}; see `ip route get {address}`"
            ) from None
        source: str = probe.getsockname()[0]
        return source


def _listed(here: tuple[Interface, ...]) -> str:
    return ", ".join(str(one) for one in here)

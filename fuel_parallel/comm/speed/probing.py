"""Probes every machine of a job, and measures what lies between its ranks: what `fuelrun topology probe` runs.

One rank of each machine probes it for all; what they find becomes one topology. Machines are joined by a switch, for
nothing is known of the network but its cards. With `measure` the links of CPUs and of the network get figures that were
measured rather than assumed.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.speed.bench import AUTO, MPI_ALONE
from fuel_parallel.comm.speed.device_links import Measured, measure_devices, with_measured
from fuel_parallel.comm.speed.validating import compare
from fuel_parallel.comm.world import init
from fuel_parallel.lazy import dtypes
from fuel_parallel.topology import (
    Comparison,
    Description,
    DeviceInfo,
    DeviceKind,
    DeviceTopology,
    Interconnect,
    Link,
    Origin,
    Switch,
)
from fuel_parallel.topology.probe import probe
from fuel_parallel.topology.text import emit
from fuel_parallel.topology.validation import table

NETWORK = "network"
LARGE = 16 << 20
"""Bytes of the arrays by which bandwidth is measured: beyond the caches of a core."""
SMALL_ROUNDS, LARGE_ROUNDS = 200, 7


class Seat(msgspec.Struct, frozen=True):
    """Where a rank runs: the machine, and the cores that it may use there."""

    host: str
    cores: tuple[int, ...]


class Finding(msgspec.Struct, frozen=True):
    """What a rank found: its machine and devices if it is the one that looked, and figures in MB/s and microseconds."""

    machine: Description | None = None
    copy_mb_s: float | None = None
    peer_mb_s: float | None = None
    peer_us: float | None = None
    devices: tuple[Measured, ...] = ()


def probe_all(world: Communicator, measure: bool = False, per_rank: bool = False) -> DeviceTopology:
    """The machines of all ranks as one topology; all ranks get the same. A collective call.

    With `per_rank` a machine has as many CPU devices as it has ranks, `cpu:0` that of the first.
    """
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    seats = world.all_gather_object(Seat(socket.gethostname(), cores), type=Seat)
    hosts = list(dict.fromkeys(seat.host for seat in seats))
    me = seats[world.rank]
    leader = next(rank for rank, seat in enumerate(seats) if seat.host == me.host)
    machine = None
    if world.rank == leader:
        here = [seat for seat in seats if seat.host == me.host]
        allowed = frozenset(core for seat in here for core in seat.cores)
        node = me.host if len(hosts) > 1 else ""
        machine = probe(node, allowed=allowed or None, ranks=len(here) if per_rank else None)
    devices = measure_devices(machine) if measure and machine is not None else []
    description = None if machine is None else machine.description()
    copy_mb_s, peer_mb_s, peer_us = _measured(world, seats) if measure else (None, None, None)
    finding = Finding(description, copy_mb_s, peer_mb_s, peer_us, tuple(devices))
    findings = world.all_gather_object(finding, type=Finding)
    t = _joined([f.machine for f in findings if f.machine is not None])
    if not measure:
        return t
    return with_measured(_with_figures(t, seats, findings), [one for f in findings for one in f.devices])


def _joined(machines: list[Description]) -> DeviceTopology:
    """One topology. Each card reaches the network, or each NUMA domain where a machine has no card that is known."""
    if len(machines) == 1:
        return DeviceTopology.from_description(machines[0])
    parts = [part for machine in machines for part in machine.parts]
    connections = [c for machine in machines for c in machine.connections]
    t = DeviceTopology.from_description(Description(name="cluster", parts=tuple(parts), connections=tuple(connections)))
    t.add_switch(Switch(id=NETWORK, kind=Interconnect.NETWORK))
    for machine in machines:
        one = DeviceTopology.from_description(machine)
        fast = [nic for nic in one.nics if nic.speed_mb_s == max((n.speed_mb_s or 0.0 for n in one.nics), default=None)]
        for nic in fast or one.nics:
            link = Link(interconnect=Interconnect.NETWORK, bandwidth_mb_s=nic.speed_mb_s, origin=Origin.STATED)
            t.add_link(nic.id, NETWORK, link)
        if not one.nics:
            for numa in one.numa_domains:
                t.add_link(numa.id, NETWORK, Link(interconnect=Interconnect.NETWORK))
    return t


# Measuring.


def _measured(world: Communicator, seats: list[Seat]) -> tuple[float, float | None, float | None]:
    """MB/s of a copy in memory; MB/s and microseconds to the next rank of this machine, or else to another machine.

    Pairs are measured one after the other, so that none disturbs the next.
    """
    copy = _copy_rate() if world.rank % 2 == 0 else 0.0
    world.barrier()
    copy = _copy_rate() if world.rank % 2 else copy
    world.barrier()
    best: tuple[float | None, float | None] = (None, None)
    for a, b in pairs([seat.host for seat in seats]):
        if world.rank in (a, b):
            best = _ping_pong(world, b if world.rank == a else a, first=world.rank == a)
        world.barrier()
    return copy, *best


def pairs(hosts: list[str]) -> list[tuple[int, int]]:
    """Which ranks are measured against each other: neighbours on a machine, and the first of each with the next's.

    >>> pairs(["a", "a", "b", "b"])
    [(0, 1), (2, 3), (0, 2)]
    """
    ranks = {host: [r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)}
    inside = [(mine[0], mine[1]) for mine in ranks.values() if len(mine) > 1]
    firsts = [mine[0] for mine in ranks.values()]
    return [*inside, *((firsts[0], other) for other in firsts[1:])]


def _copy_rate() -> float:
    x = np.ones(4 * LARGE // 8)
    y = np.empty_like(x)
    return 2 * x.nbytes / 2**20 / _median(lambda: np.copyto(y, x), LARGE_ROUNDS)


def _ping_pong(world: Communicator, peer: int, first: bool) -> tuple[float, float]:
    """MB/s one way, and half of there and back of a message of 8 bytes in microseconds."""
    small, large = np.zeros(1), np.zeros(LARGE // 8)

    def exchange(x: np.ndarray[Any, Any]) -> None:
        if first:
            world.transport.send(x, peer, 0)
            world.transport.recv(x.shape, dtypes.float64, peer, 0)
        else:
            world.transport.recv(x.shape, dtypes.float64, peer, 0)
            world.transport.send(x, peer, 0)

    latency = _median(lambda: exchange(small), SMALL_ROUNDS) / 2
    took = _median(lambda: exchange(large), LARGE_ROUNDS) / 2
    # On a busy machine a small message may have taken as long as the large one.
    rate = LARGE / 2**20 / max(took - latency, took / 2)
    return rate, latency * 1e6


def _median(call: Callable[[], None], rounds: int) -> float:
    call()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _with_figures(t: DeviceTopology, seats: list[Seat], findings: list[Finding]) -> DeviceTopology:
    """The topology with measured links: of each CPU to its domain, and of each machine to the network.

    From a rank to another of its machine it is two such links, from CPU to domain and back, so each has half of the
    latency. From machine to machine it is the two of CPUs and the two of the network.
    """
    hosts = [seat.host for seat in seats]
    inside: dict[str, Finding] = {}
    across: dict[str, Finding] = {}
    for a, b in pairs(hosts):
        if hosts[a] == hosts[b]:
            inside[hosts[a]] = findings[b]
        else:
            across[hosts[b]] = across[hosts[a]] = findings[b]  # the first machine takes part in every pair
    copies = {seat.host: f.copy_mb_s for seat, f in zip(seats, findings, strict=True)}
    cards = Counter(c.source.partition("/")[0] for c in t.connections() if c.target == NETWORK)

    def change(source: str, target: str, link: Link) -> Link:
        ends = t.part(source), t.part(target)
        host = ends[0].node or ends[1].node or hosts[0]  # the network is of none
        near = inside.get(host, Finding())
        if any(map(_is_cpu, ends)):
            return _figures(link, near.peer_mb_s or copies.get(host), near.peer_us)
        if NETWORK in (source, target) and host in across:
            met = across[host]
            # What one rank reached counts for all cards of a machine together.
            rate = None if met.peer_mb_s is None else met.peer_mb_s / cards[host]
            return _figures(link, rate, max((met.peer_us or 0.0) - (near.peer_us or 0.0), 0.0))
        return link

    return t.with_links(change)


def _is_cpu(part: Any) -> bool:
    return isinstance(part, DeviceInfo) and part.kind is DeviceKind.CPU


def _figures(link: Link, rate: float | None, there_us: float | None) -> Link:
    """The link with what was measured; of the time to the other end of two such links it has a half."""
    if rate is None:
        return link
    half = None if there_us is None else there_us / 2
    return msgspec.structs.replace(link, bandwidth_mb_s=rate, latency_us=half, origin=Origin.MEASURED)


def main() -> None:
    """Probes the machines of this job; rank 0 prints or writes what was found."""
    parser = argparse.ArgumentParser(prog="fuelrun topology probe")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--per-rank", action="store_true")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    world = init()
    validated = options.validate
    t = probe_all(world, measure=options.measure or validated, per_rank=options.per_rank or validated)
    if world.is_root and not (validated and options.output is None):
        emit(t, options.json, options.output, measured=options.measure or validated)
    if validated:
        found = compare(world, t)
        if world.is_root:
            sys.stdout.write(_as_json(found) if options.json else _as_text(found))


def _as_text(found: dict[str, list[Comparison]]) -> str:
    titles = {MPI_ALONE: "MPI's own collectives", AUTO: "what scripts get: inside a node through shared memory"}
    return "\n".join(f"# {titles[way]}\n{table(comparisons)}\n" for way, comparisons in found.items())


def _as_json(found: dict[str, list[Comparison]]) -> str:
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


if __name__ == "__main__":
    main()

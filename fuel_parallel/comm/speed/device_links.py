"""Measures the links of this machine's GPUs: copies from and to the host, and between each two of them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from fuel_parallel.backends import available_devices, backend_of
from fuel_parallel.backends.device_memory import DeviceMemory
from fuel_parallel.topology import DeviceKind, DeviceTopology, Interconnect, Link, Origin

NBYTES = 64 << 20
SMALL_ROUNDS, LARGE_ROUNDS = 50, 7
BETWEEN_GPUS = (Interconnect.NVLINK, Interconnect.INFINITY_FABRIC)


class Measured(msgspec.Struct, frozen=True):
    """What was measured of one direction of a link: MB/s, and microseconds of a small copy."""

    source: str
    target: str
    mb_s: float
    us: float


def measure_devices(t: DeviceTopology, *, nbytes: int = NBYTES) -> list[Measured]:
    """The figures of links of the GPUs of `t`, one machine, that this process can use; none where there are none.

    A copy from or to the host counts for the link between the device and what is next on the way to its NUMA domain.
    A copy between two devices counts for their direct link, or for their links to the switch of GPUs that is between
    them; what goes over PCIe is not taken apart into links.
    """
    usable = set(available_devices())
    memories: dict[str, DeviceMemory] = {}
    for device in t.devices:
        memory = backend_of(_short(device.id)).memory if _short(device.id) in usable else None
        if memory is not None and device.kind is not DeviceKind.CPU:
            memories[device.id] = memory
    found: dict[tuple[str, str], Measured] = {}
    for device_id, memory in memories.items():
        _keep_best(found, _host_links(t, device_id, memory, nbytes))
    for a, b in itertools.permutations(memories, 2):
        _keep_best(found, _peer_links(t, a, b, memories, nbytes))
    return list(found.values())


def with_measured(t: DeviceTopology, figures: list[Measured]) -> DeviceTopology:
    """The topology with these figures in the directions of links that they are about."""
    known = {(one.source, one.target): one for one in figures}

    def change(source: str, target: str, link: Link) -> Link:
        one = known.get((source, target))
        if one is None:
            return link
        return msgspec.structs.replace(link, bandwidth_mb_s=one.mb_s, latency_us=one.us, origin=Origin.MEASURED)

    return t.with_links(change)


def _host_links(t: DeviceTopology, device: str, memory: DeviceMemory, nbytes: int) -> list[Measured]:
    """There and back over the device's own link."""
    node = t.device(device).node
    ways = [t.route(device, numa.id) for numa in t.numa_domains if numa.node == node]
    above = min((way.parts for way in ways if way is not None), key=len, default=())
    if len(above) < 2:
        return []
    with memory.running(memory.new_stream()):
        array, host = memory.array_module.empty(nbytes, np.uint8), memory.pinned(nbytes)
        down = _figures(memory, lambda n: memory.copy_to_device(array[:n], host[:n]), nbytes)
        up = _figures(memory, lambda n: memory.copy_to_host(host[:n], array[:n]), nbytes)
    return [Measured(above[1], device, *down), Measured(device, above[1], *up)]


def _peer_links(t: DeviceTopology, a: str, b: str, memories: Mapping[str, DeviceMemory], nbytes: int) -> list[Measured]:
    """From one device to another, over links of GPUs only."""
    way = t.route(a, b)
    if way is None or any(link.interconnect not in BETWEEN_GPUS for link in way.links):
        return []
    source, target = memories[a], memories[b]
    with source.running(source.new_stream()):
        sent = source.array_module.empty(nbytes, np.uint8)
    with target.running(target.new_stream()):
        array = target.array_module.empty(nbytes, np.uint8)
        rate, us = _figures(target, lambda n: target.copy_from_peer(array[:n], source, sent[:n]), nbytes)
    return [Measured(x, y, rate, us / len(way.links)) for x, y in itertools.pairwise(way.parts)]


def _figures(memory: DeviceMemory, queue: Callable[[int], None], nbytes: int) -> tuple[float, float]:
    """MB/s of large copies without their latency, and microseconds of small ones."""

    def median(n: int, rounds: int) -> float:
        times = []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            queue(n)
            memory.stream().synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    latency = median(8, SMALL_ROUNDS)
    took = median(nbytes, LARGE_ROUNDS)
    rate = nbytes / 2**20 / max(took - latency, took / 2)  # the latency was measured by itself, and may be too long
    return rate, latency * 1e6


def _keep_best(found: dict[tuple[str, str], Measured], new: list[Measured]) -> None:
    """A switch is measured by every pair; the widest is what it can do."""
    for one in new:
        key = one.source, one.target
        if key not in found or found[key].mb_s < one.mb_s:
            found[key] = one


def _short(device: str) -> str:
    return device.rpartition("/")[2]

"""What looks wrong in a topology although it holds together: mostly what a file leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fuel_parallel.topology.model import Interconnect
from fuel_parallel.topology.topology import DeviceTopology


def problems(t: DeviceTopology) -> list[str]:
    """Each in a sentence, with an example; none where all is well.

    >>> from fuel_parallel.topology import DeviceInfo, DeviceKind
    >>> t = DeviceTopology()
    >>> t.add_device(DeviceInfo(id="cuda:0", kind=DeviceKind.CUDA))
    >>> t.add_device(DeviceInfo(id="cuda:1", kind=DeviceKind.CUDA))
    >>> problems(t)[0]
    '2 devices have no links, such as cuda:0'
    """
    if not len(t):
        return ["there are no devices"]
    return [text for one in _PROBLEMS for text in one(t)]


def _unlinked(t: DeviceTopology) -> Iterator[str]:
    reached = {target for part in t.description().parts for target in t.links_of(part.id)}
    alone = [d.id for d in t.devices if not t.links_of(d.id) and d.id not in reached]
    if alone and len(t) > 1:
        yield f"{_count(len(alone), 'device has', 'devices have')} no links, such as {alone[0]}"


def _unconnected(t: DeviceTopology) -> Iterator[str]:
    """Groups of linked devices between which there is no way, whatever the direction of the links."""
    neighbours: dict[str, set[str]] = {part.id: set() for part in t.description().parts}
    for c in t.connections():
        neighbours[c.source].add(c.target)
        neighbours[c.target].add(c.source)
    firsts, seen = [], set[str]()
    for device in t.device_ids():
        if device in seen or not neighbours[device]:
            continue
        firsts.append(device)
        seen.add(device)
        ways = [device]
        while ways:
            new = neighbours[ways.pop()] - seen
            seen |= new
            ways += new
    if len(firsts) > 1:
        yield f"{len(firsts)} groups of devices are not connected, such as those of {firsts[0]} and {firsts[1]}"


def _one_way(t: DeviceTopology) -> Iterator[str]:
    single = [c for c in t.connections() if c.one_way and t.link(c.target, c.source) is None]
    if single:
        first = single[0]
        yield f"{_count(len(single), 'link has', 'links have')} no way back, such as {first.source} to {first.target}"


def _unequal_counts(t: DeviceTopology) -> Iterator[str]:
    for c in t.connections():
        back = t.link(c.target, c.source)
        if c.link.interconnect is Interconnect.NVLINK and back is not None and back.count != c.link.count:
            yield f"{c.source} to {c.target} has {c.link.count} NVLinks, and {back.count} back"
            return


def _unknown(t: DeviceTopology) -> Iterator[str]:
    every = list(t.connections())
    silent = [c for c in every if c.link.bandwidth_mb_s is None]
    if silent:
        example = f"such as {silent[0].source} to {silent[0].target}"
        yield f"of {len(silent)} of {len(every)} links the bandwidth is unknown, {example}"


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


_PROBLEMS: tuple[Callable[[DeviceTopology], Iterator[str]], ...] = (
    _unlinked,
    _unconnected,
    _one_way,
    _unequal_counts,
    _unknown,
)

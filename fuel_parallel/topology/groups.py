"""Groups of devices in which every pair is joined by a link of its own: where tensor parallelism runs best."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations

from fuel_parallel.errors import ArgumentError, TopologyError
from fuel_parallel.topology.model import DeviceId, Interconnect
from fuel_parallel.topology.topology import DeviceTopology

MOST_STEPS = 20_000_000
"""How many pairs of devices are compared; it takes a second or two."""


@dataclass(frozen=True)
class LinkedGroup:
    """Devices of which each has a link to each other. `weakest` is the least count of links between two of them."""

    devices: tuple[DeviceId, ...]
    weakest: int


def linked_groups(
    topology: DeviceTopology, size: int, kinds: Collection[Interconnect] = (Interconnect.NVLINK,), most: int = 10_000
) -> list[LinkedGroup]:
    """All sets of `size` devices in which every pair is joined, both ways, by a direct link of one of these kinds.

    Those whose weakest pair has most links come first, equal ones in the order of the devices. A pair that is joined
    by a switch has no direct link.

    Args:
        topology: Where to look.
        size: Devices of a group, 2 at least.
        kinds: What a link may be made of.
        most: How many groups are listed at most.

    Raises:
        ArgumentError: `size` is less than 2.
        TopologyError: There are more than `most` groups, or too many sets to look at.

    >>> from fuel_parallel.topology import DeviceInfo, DeviceKind, Link
    >>> t = DeviceTopology()
    >>> for n in range(3):
    ...     t.add_device(DeviceInfo(id=f"cuda:{n}", kind=DeviceKind.CUDA))
    >>> t.add_link("cuda:0", "cuda:2", Link(interconnect=Interconnect.NVLINK, count=4))
    >>> linked_groups(t, 2)
    [LinkedGroup(devices=('cuda:0', 'cuda:2'), weakest=4)]
    """
    if size < 2:
        raise ArgumentError(f"a group of {size} devices has no links; expected a size of 2 or more")
    counts = _counts(topology, frozenset(kinds))
    found: list[LinkedGroup] = []
    for group in _cliques({device: set(peers) for device, peers in counts.items()}, size):
        if len(found) == most:
            raise TopologyError(f"more than {most} groups of {size} linked devices; ask for others, or raise `most`")
        found.append(LinkedGroup(group, min(counts[a][b] for a, b in combinations(group, 2))))
    return sorted(found, key=lambda group: -group.weakest)  # stable: equal ones stay in the order of the devices


def _counts(topology: DeviceTopology, kinds: frozenset[Interconnect]) -> dict[DeviceId, dict[DeviceId, int]]:
    """How many links lead to each peer; those of the direction that has fewer."""
    links = {
        device: {peer: link.count for peer, link in topology.links_of(device).items() if link.interconnect in kinds}
        for device in topology.device_ids()
    }
    return {
        device: {
            peer: min(count, links[peer][device])
            for peer, count in peers.items()
            if peer in links and device in links[peer]
        }
        for device, peers in links.items()
    }


def _cliques(peers: dict[DeviceId, set[DeviceId]], size: int) -> Iterator[tuple[DeviceId, ...]]:
    """Sets of `size` devices that are all each other's peers, in the order of the devices, without recursion."""
    place = {device: n for n, device in enumerate(peers)}
    later = {d: sorted((p for p in mine if place[p] > place[d]), key=place.__getitem__) for d, mine in peers.items()}
    stack: list[tuple[tuple[DeviceId, ...], list[DeviceId]]] = [((), list(peers))]
    steps = 0
    while stack:
        group, candidates = stack.pop()
        if len(group) == size:
            yield group
            continue
        steps += len(candidates) ** 2
        if steps > MOST_STEPS:
            raise TopologyError(f"too many sets of {size} devices to look at; ask for smaller groups")
        for n in range(len(candidates) - size + len(group), -1, -1):  # the first device is pushed last, and comes next
            device = candidates[n]
            shared = [c for c in candidates[n + 1 :] if c in peers[device]] if group else later[device]
            stack.append(((*group, device), shared))

"""The best assignment of a few ranks to a few devices, with certainty: branch and bound.

Assignments of the first k ranks grow breadth first, all of one length at once. What the assigned ranks cost among
themselves can only grow, so an assignment that costs as much as the best one known is given up, and of devices that
an automorphism of the machine maps onto each other the first rank tries one only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from fuel_parallel.topology.batch import Batch
from fuel_parallel.topology.model import DeviceInfo, Link
from fuel_parallel.topology.network import Array
from fuel_parallel.topology.topology import DeviceTopology


def exact(batch: Batch, ranks: int, known: Array, first: list[int] | None = None) -> Array:
    """The best assignment, or `known` if nothing costs less.

    Args:
        batch: Prices assignments.
        ranks: How many ranks to assign.
        known: A good assignment [ranks].
        first: The devices that rank 0 has to try; all if None.
    """
    limit = float(batch.cost(known[None])[0])
    partial = np.array([[place] for place in (range(len(batch.devices)) if first is None else first)], dtype=np.int64)
    for rank in range(1, ranks):
        partial = _grown(partial, len(batch.devices))
        complete = rank == ranks - 1
        cost = batch.cost(partial, None if complete else rank + 1)
        if complete and len(cost) and cost.min() < limit:
            return np.asarray(partial[cost.argmin()])
        # Sums are rounded; what looks equal is as good as known.
        partial = partial[cost < limit * (1 - 1e-12)]
    return known


def _grown(partial: Array, devices: int) -> Array:
    """Each assignment with each device that it does not use."""
    rows = np.repeat(partial, devices, axis=0)
    more = np.tile(np.arange(devices), len(partial))[:, None]
    free = (rows != more).all(axis=1)
    grown: Array = np.concatenate([rows, more], axis=1)[free]
    return grown


def representatives(topology: DeviceTopology, devices: list[str], batch: Batch) -> list[int]:
    """Places in `devices`, one for each set of devices that automorphisms of the topology map onto each other.

    Whether there is one is searched part by part, for small topologies only, and of those found only one that leaves
    all costs as they are counts (of equal ways, one is taken). In doubt devices count as different.
    """
    description = topology.description()
    parts = [part.id for part in description.parts]
    if len(parts) > 64:
        return list(range(len(devices)))
    links = {part: topology.links_of(part) for part in parts}
    usable = set(devices)
    colour: dict[str, object] = {
        part.id: (
            type(part).__name__,
            part.id in usable,
            part.kind if isinstance(part, DeviceInfo) else None,
            bool(part.node),
        )
        for part in description.parts
    }
    machine = {part.id: part.node for part in description.parts}
    # Colour refinement: parts differ when their neighbours do.
    for _ in range(len(parts)):
        finer = {
            part: (colour[part], tuple(sorted(repr((link, colour[t])) for t, link in links[part].items())))
            for part in parts
        }
        names = {key: i for i, key in enumerate(sorted(set(finer.values()), key=repr))}
        new: dict[str, object] = {part: names[finer[part]] for part in parts}
        done = len(set(new.values())) == len(set(map(repr, colour.values())))
        colour = new
        if done:
            break
    found: list[int] = []
    for place, device in enumerate(devices):
        images = (_mapped(devices[other], device, parts, links, colour, machine) for other in found)
        if not any(image and batch.same_after([devices.index(image[name]) for name in devices]) for image in images):
            found.append(place)
    return found


def _mapped(
    a: str,
    b: str,
    parts: list[str],
    links: Mapping[str, Mapping[str, Link]],
    colour: dict[str, object],
    machine: dict[str, str],
) -> dict[str, str] | None:
    """An automorphism that maps a onto b, part by part; None if there is none, or none in some thousand steps."""
    order = [a, *(part for part in _connected(a, links) if part != a)]
    order += [part for part in parts if part not in set(order)]
    steps = itertools.count()
    image: dict[str, str] = {}

    def fits(part: str, other: str) -> bool:
        if colour[part] != colour[other] or other in image.values():
            return False
        for one, two in image.items():
            if (machine[one] == machine[part]) != (machine[two] == machine[other]):
                return False
            if links[one].get(part) != links[two].get(other) or links[part].get(one) != links[other].get(two):
                return False
        return True

    def extend(k: int) -> bool:
        if k == len(order):
            return True
        for other in [b] if k == 0 else parts:
            if next(steps) > 5000:
                return False
            if fits(order[k], other):
                image[order[k]] = other
                if extend(k + 1):
                    return True
                del image[order[k]]
        return False

    return image if extend(0) else None


def _connected(start: str, links: Mapping[str, Mapping[str, Link]]) -> Iterator[str]:
    seen, queue = {start}, [start]
    for part in queue:
        yield part
        for neighbour in links[part]:
            if neighbour not in seen:
                seen.add(neighbour)
                queue.append(neighbour)

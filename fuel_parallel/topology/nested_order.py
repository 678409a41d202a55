"""Devices in an order in which those that are near stand next to each other, at every scale.

From it come the assignments of regular machines: a mesh laid along the order, with one axis or another innermost, has
each group in as few machines, under as few switches as can be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from fuel_parallel.topology.mesh_axes import MeshAxis
from fuel_parallel.topology.network import Array, Network

NESTINGS = 24
"""At most so many orders of the axes are tried."""


def nested_order(network: Network, devices: Sequence[int]) -> list[int]:
    """`devices` sorted: by switch outside, then by machine, then by what is near inside of it."""
    switch = network.attachments()
    switches = np.unique(switch[list(devices)])
    far = network.distances(switches)
    ordered = [int(switches[i]) for i in _nested(far)]
    place = {number: i for i, number in enumerate(ordered)}
    machines: dict[int, list[int]] = {}
    for device in devices:
        machines.setdefault(int(network.machine[device]), []).append(device)
    found: list[int] = []
    for machine in sorted(machines, key=lambda m: (min(place[int(switch[d])] for d in machines[m]), m)):
        inside = machines[machine]
        if 2 < len(inside) <= 64:
            inside = [inside[i] for i in _nested(network.near(inside))]
        found += inside
    return found


def nestings(axes: Sequence[MeshAxis], order: Sequence[int]) -> Iterator[tuple[str, Array]]:
    """Assignments along the order, an axis after the other as the innermost, and what each is called."""
    ranks = math.prod(axis.size for axis in axes)
    seen: set[bytes] = set()
    for turn in itertools.islice(itertools.permutations(range(len(axes))), NESTINGS):
        shape = [axes[i].size for i in turn]
        along = np.asarray(order[:ranks], dtype=np.int64).reshape(shape)
        assignment = np.ascontiguousarray(along.transpose(np.argsort(turn))).ravel()
        if assignment.tobytes() not in seen:
            seen.add(assignment.tobytes())
            yield " inside ".join(axes[i].name for i in reversed(turn)), assignment


def _nested(distances: Array) -> list[int]:
    """Single linkage: the components at the greatest distance, in each the components at the next one, and so on."""
    both = np.maximum(distances, distances.T)
    np.fill_diagonal(both, 0.0)

    def split(items: list[int]) -> list[int]:
        if len(items) < 3:
            return items
        inside = both[np.ix_(items, items)]
        levels = np.unique(inside[np.triu_indices(len(items), 1)])
        for level in levels[-2::-1]:
            parts = _components(inside <= level)
            if len(parts) > 1:
                return [one for part in parts for one in split([items[i] for i in part])]
        return items

    return split(list(range(len(both))))


def _components(near: Array) -> list[list[int]]:
    from scipy.sparse.csgraph import connected_components

    _, labels = connected_components(near, directed=False)
    parts: dict[int, list[int]] = {}
    for i, label in enumerate(labels):
        parts.setdefault(int(label), []).append(i)
    return list(parts.values())

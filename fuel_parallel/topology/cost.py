"""What a transfer or a collective costs on a topology: the alpha-beta model on the ways that data takes.

A step of a collective takes the longest latency on its ways, and the time that its most loaded link needs for all that
passes it in that step; the steps are summed, and the algorithm that is quickest at the size is chosen. Groups that run
at the same time share links too. A bandwidth that is unknown makes the cost unknown, never small.
Sources: see `fuel_parallel.topology.algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from fuel_parallel.errors import ArgumentError
from fuel_parallel.topology.algorithms import Collective, algorithms
from fuel_parallel.topology.model import DeviceId
from fuel_parallel.topology.topology import DeviceTopology

if TYPE_CHECKING:
    from fuel_parallel.topology.network import Array, Network


class Line(msgspec.Struct, frozen=True):
    """A time that grows with the size: alpha in us, beta in us a byte. Infinite where unknown."""

    alpha: float
    beta: float

    def us(self, nbytes: float) -> float:
        """The time of so many bytes, in us."""
        return math.inf if math.isinf(self.alpha + self.beta) else self.alpha + self.beta * nbytes


class Prediction(msgspec.Struct, frozen=True):
    """The time of a collective in us, and the algorithm that takes so long."""

    us: float
    algorithm: str


class CostModel:
    """Predicts times on a topology. What the topology says when the model is made, is what counts.

    >>> from fuel_parallel.topology import DeviceInfo, DeviceKind, DeviceTopology, Link
    >>> pair = DeviceTopology()
    >>> for name in ("cuda:0", "cuda:1"):
    ...     pair.add_device(DeviceInfo(id=name, kind=DeviceKind.CUDA))
    >>> pair.add_link("cuda:0", "cuda:1", Link(bandwidth_mb_s=1000.0, latency_us=5.0))
    >>> CostModel(pair).predict(Collective.ALL_REDUCE, pair.device_ids(), 2**20)
    Prediction(us=1010.0, algorithm='ring')
    """

    def __init__(self, topology: DeviceTopology) -> None:
        from fuel_parallel.topology.network import Network

        self.topology = topology
        self.network: Network = Network(topology)
        self._lines: dict[tuple[Collective, tuple[int, int], bytes], dict[str, Line]] = {}

    def predict(self, collective: Collective, devices: Sequence[DeviceId], nbytes: int) -> Prediction | None:
        """The quickest algorithm for one group, in the order of its ranks; None if a bandwidth is unknown.

        Args:
            collective: What they do; it says which array `nbytes` is the size of.
            devices: The group's devices by rank; as long as the group is.
            nbytes: Size of the array in bytes.
        """
        return self.predict_all(collective, [devices], nbytes)

    def predict_all(
        self, collective: Collective, groups: Sequence[Sequence[DeviceId]], nbytes: int
    ) -> Prediction | None:
        """The same for several groups, all of one length, that do it at the same time and share links."""
        import numpy as np

        if not groups or len({len(group) for group in groups}) > 1:
            raise ArgumentError(
                f"groups that run at the same time have one length, got {sorted({len(g) for g in groups})}"
            )
        for group in groups:
            if len(set(group)) < len(group):
                raise ArgumentError(f"each device is one rank of a group, got {list(group)}")
        for device in (device for group in groups for device in group):
            self.topology.device(device)
        if nbytes < 0:
            raise ArgumentError(f"nbytes is a size in bytes, 0 or more, got {nbytes}")
        index = self.network.index
        numbers = np.array([[index[device] for device in group] for group in groups], dtype=np.int64)
        return best(self.lines(collective, numbers), nbytes)

    def lines(self, collective: Collective, groups: Array) -> dict[str, Line]:
        """Each algorithm's line. `groups` holds indices of devices, a row for each group that runs at that time."""
        key = collective, (groups.shape[0], groups.shape[1]), groups.tobytes()
        if key not in self._lines:
            found = {}
            for name, steps in algorithms(collective, groups.shape[1]).items():
                alpha = beta = 0.0
                for step in steps:
                    sources, targets = groups[:, step.sources].ravel(), groups[:, step.targets].ravel()
                    a, b = self.network.step(sources, targets, step.fraction)
                    alpha, beta = alpha + a * step.times, beta + b * step.times
                found[name] = Line(alpha, beta)
            self._lines[key] = found
        return self._lines[key]

    def unknown(self, devices: Sequence[DeviceId]) -> str | None:
        """Says between which two of these devices the bandwidth is unknown, and why; None if all are known."""
        for a in devices:
            for b in devices:
                route = self.topology.route(a, b)
                if route is None:
                    return f"nothing is known of a way from {a} to {b}"
                for source, target, link in zip(route.parts, route.parts[1:], route.links, strict=False):
                    if link.bandwidth_mb_s is None:
                        return f"the bandwidth from {a} to {b} is unknown: that of the link {source} to {target}"
        return None


def best(lines: dict[str, Line], nbytes: float) -> Prediction | None:
    """The quickest at a size, the first of equals; None if all are unknown."""
    name = min(lines, key=lambda one: lines[one].us(nbytes))
    us = lines[name].us(nbytes)
    return None if math.isinf(us) else Prediction(us, name)

"""Costs of many assignments of mesh coordinates to devices at once, for searches among some dozens of devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fuel_parallel.topology.algorithms import Step, algorithms
from fuel_parallel.topology.mesh_axes import MeshAxis, groups_of
from fuel_parallel.topology.network import Array, Network

AT_ONCE = 1 << 20
"""Loads of links that are held at the same time."""


class Batch:
    """Costs in us of assignments: arrays [M, ranks] of places in `devices`. Infinite: unknown, or not allowed."""

    def __init__(self, network: Network, devices: Sequence[int], axes: Sequence[MeshAxis]) -> None:
        self.devices, self.axes = list(devices), tuple(axes)
        latencies, costs = network.dense(self.devices)
        n = len(self.devices)
        self._latencies, self._costs = latencies.ravel(), np.ascontiguousarray(costs)
        self._devices = n
        self._machine = network.machine[self.devices]
        self._groups = groups_of(axes)

    def cost(self, assignments: Array, known: int | None = None) -> Array:
        """The sum over the axes. With `known`, only the first so many ranks are assigned: what they cost at least."""
        total: Array = np.zeros(len(assignments))
        for axis in range(len(self.axes)):
            total = total + self.axis_cost(axis, assignments, known)
        return total

    def axis_cost(self, axis: int, assignments: Array, known: int | None = None) -> Array:
        """That of one axis."""
        rows = max(1, AT_ONCE // max(1, self._costs.shape[1]))
        parts = [self._axis_cost(axis, assignments[i : i + rows], known) for i in range(0, len(assignments), rows)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def pairs(self) -> tuple[Array, Array]:
        """Latency, and time of a byte on the narrowest link, of each pair of devices; infinite where unknown."""
        n = self._devices
        slowest = np.where(np.isfinite(self._latencies), self._costs.max(axis=1, initial=0.0), np.inf)
        return self._latencies.reshape(n, n), slowest.reshape(n, n)

    def same_after(self, order: list[int]) -> bool:
        """Whether assignments cost the same when device i takes the place of device `order[i]`."""
        n, links = self._devices, self._costs.shape[1]
        pairs = np.arange(n * n).reshape(n, n)[np.ix_(order, order)].ravel()
        if not np.array_equal(self._latencies[pairs], self._latencies):
            return False
        before, after = self._costs, self._costs[pairs]
        return links == 0 or np.array_equal(before[:, np.lexsort(before)], after[:, np.lexsort(after)])

    def _axis_cost(self, number: int, assignments: Array, known: int | None) -> Array:
        axis, groups = self.axes[number], self._groups[number]
        best: Array = np.full(len(assignments), np.inf)
        for steps in algorithms(axis.collective, axis.size).values():
            time: Array = np.zeros(len(assignments))
            for step in steps:
                alpha, beta = self._step(step, groups, assignments, known)
                time += step.times * (alpha + beta * (step.fraction * axis.nbytes))
            best = np.minimum(best, time)
        if axis.within_node:
            best[self._strays(groups, assignments, known)] = np.inf
        return best * axis.count if axis.count else np.zeros(len(assignments))

    def _step(self, step: Step, groups: Array, assignments: Array, known: int | None) -> tuple[Array, Array]:
        sources, targets = groups[:, step.sources].ravel(), groups[:, step.targets].ravel()
        if known is not None:
            both = (sources < known) & (targets < known)
            sources, targets = sources[both], targets[both]
        pairs = assignments[:, sources] * self._devices + assignments[:, targets]
        alpha = self._latencies[pairs].max(axis=1, initial=0.0)
        load = np.zeros((len(assignments), self._costs.shape[1]))
        for column in pairs.T:
            load += self._costs[column]
        return alpha, load.max(axis=1, initial=0.0)

    def _strays(self, groups: Array, assignments: Array, known: int | None) -> Array:
        machine = self._machine[assignments[:, : groups.size]]
        wrong: Array = np.zeros(len(assignments), dtype=bool)
        for group in groups:
            members = group if known is None else group[group < known]
            if len(members) > 1:
                wrong |= (machine[:, members] != machine[:, members[:1]]).any(axis=1)
        return wrong

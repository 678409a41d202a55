"""Good assignments of some dozens of ranks: swaps of two from several starts, with the same result on every run.

Starts are those that a caller knows, and what `scipy.optimize.quadratic_assignment` finds (Vogelstein et al., "Fast
approximate quadratic programming for graph matching", PLoS ONE 10, 2015). From each, the best swap of two ranks, or of
a rank and a free device, is made until none is better; then a few random swaps shake the best one, and so on.
"""

from __future__ import annotations

import itertools

import numpy as np

from fuel_parallel.topology.algorithms import algorithms
from fuel_parallel.topology.batch import Batch
from fuel_parallel.topology.mesh_axes import groups_of
from fuel_parallel.topology.network import Array

SHAKES = 400
"""How often the best assignment is shaken, divided by the number of devices."""

AT_MOST = 600
"""How many swaps are tried at once; of more, a random choice."""


def local_search(batch: Batch, starts: list[Array], seed: int) -> Array:
    """The best assignment that is found, never worse than any start."""
    random = np.random.default_rng(seed)
    ends = [descend(batch, start, random) for start in starts]
    best, cost = min(ends, key=lambda end: end[1])
    for _ in range(SHAKES // len(batch.devices)):
        other, found = descend(batch, _shaken(batch, best, random), random)
        if found < cost:
            best, cost = other, found
    return best


def descend(batch: Batch, start: Array, random: np.random.Generator) -> tuple[Array, float]:
    """Swaps two while that helps, the best swap each time; and what the result costs."""
    current = np.concatenate([start, np.setdiff1d(np.arange(len(batch.devices)), start)])
    ranks = len(start)
    swaps = np.array(list(itertools.combinations(range(len(current)), 2)))
    swaps = swaps[swaps[:, 0] < ranks] if len(swaps) else swaps
    cost = float(batch.cost(current[None, :ranks])[0])
    while len(swaps):
        tried = swaps if len(swaps) <= AT_MOST else random.choice(swaps, AT_MOST, replace=False)
        rows = np.repeat(current[None], len(tried), axis=0)
        at = np.arange(len(tried))
        rows[at, tried[:, 0]], rows[at, tried[:, 1]] = current[tried[:, 1]], current[tried[:, 0]]
        costs = batch.cost(rows[:, :ranks])
        if not costs.min() < cost * (1 - 1e-12):
            break
        cost, current = float(costs.min()), rows[costs.argmin()]
    return current[:ranks], cost


def assigned_by_scipy(batch: Batch, ranks: int, seed: int) -> Array:
    """Ranks that send each other much on devices that are near, as a quadratic assignment problem."""
    from scipy.optimize import quadratic_assignment

    n = len(batch.devices)
    flow = np.zeros((n, n))
    for axis, groups in zip(batch.axes, groups_of(batch.axes), strict=True):
        steps = next(iter(algorithms(axis.collective, axis.size).values()))
        for step in steps:
            sent = step.times * step.fraction * axis.nbytes * axis.count
            np.add.at(flow, (groups[:, step.sources].ravel(), groups[:, step.targets].ravel()), sent)
    latencies, slowest = batch.pairs()
    distance = latencies / max(flow.max(), 1.0) + slowest
    distance[~np.isfinite(distance)] = 10 * np.max(distance, initial=1.0, where=np.isfinite(distance))
    scale = flow.max() * distance.max()
    flow, distance = (flow / flow.max(), distance / distance.max()) if scale > 0 else (flow, distance)
    result = quadratic_assignment(flow, distance, method="faq", options={"rng": np.random.default_rng(seed)})
    return np.asarray(result.col_ind[:ranks], dtype=np.int64)


def _shaken(batch: Batch, best: Array, random: np.random.Generator) -> Array:
    current = np.concatenate([best, np.setdiff1d(np.arange(len(batch.devices)), best)])
    for _ in range(3):
        a, b = random.integers(len(best)), random.integers(len(current))
        current[a], current[b] = current[b], current[a]
    return current[: len(best)]

"""The links of a topology as arrays: what many transfers at the same time cost, on the ways that they take.

Transfers that pass one link at the same time share it. Ways are worked out by class, not by pair: machines that are
alike once, from each device to the network card by which it leaves its machine once, and between the switches to which
machines are attached once; a way between devices of two machines is put together from these. Between switches, data
is spread evenly over equal ways, as networks do. The cost of 4,096 devices therefore takes no millions of searches.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from fuel_parallel.topology.model import DeviceInfo
from fuel_parallel.topology.topology import MB, DeviceTopology
from fuel_parallel.topology.ways import Core, Inside

Array = np.ndarray[Any, np.dtype[Any]]
EMPTY, UNKNOWN = 0, 1
"""Segments of ways: one without links, and one of which nothing is known."""


class Network:
    """Ways between devices, by their index in `devices`."""

    def __init__(self, topology: DeviceTopology) -> None:
        self.topology = topology
        self.devices: list[str] = topology.device_ids()
        self.index = {name: i for i, name in enumerate(self.devices)}
        self._links: dict[tuple[str, str], int] = {}
        self._us_per_byte: list[float] = []
        self._segments: list[tuple[list[int], list[float], float, bool]] = [([], [], 0.0, True), ([], [], 0.0, False)]
        self._flat: tuple[Array, ...] | None = None
        self._chunks: list[Array] = []
        self._known: Array = np.zeros(0, dtype=bool)
        self._orders: dict[tuple[int, tuple[int, ...]], Array] = {}
        self._read_machines()
        self._core = Core(topology, self._outside)

    def step(self, sources: Array, targets: Array, fractions: Array | float) -> tuple[float, float]:
        """Alpha (us) and beta (us a byte) of transfers at the same time; infinite if a bandwidth is unknown."""
        ways = self._ways(sources, targets)
        flat_links, flat_parts, flat_segments, latencies, known, us_per_byte = self._flattened()
        if not known[ways].all():
            return math.inf, math.inf
        alpha = float(latencies[ways].sum(axis=0).max(initial=0.0))
        weights = np.broadcast_to(fractions, sources.shape)
        carried = np.bincount(ways.ravel(), weights=np.tile(weights, 3), minlength=len(known))
        load = np.bincount(flat_links, weights=flat_parts * carried[flat_segments], minlength=len(us_per_byte))
        return alpha, float((load * us_per_byte).max(initial=0.0))

    def dense(self, devices: list[int]) -> tuple[Array, Array]:
        """For all pairs: latencies in us (infinite where unknown), and what a byte takes of each link, in us."""
        n = len(devices)
        pairs = np.array(list(itertools.product(devices, repeat=2))).reshape(-1, 2)
        ways = self._ways(pairs[:, 0], pairs[:, 1])
        links, parts, segments, latencies, known, us_per_byte = self._flattened()
        used, ways_used = np.unique(ways, return_inverse=True)
        number = np.full(len(known), -1)
        number[used] = np.arange(len(used))
        here = number[segments] >= 0
        columns, column = np.unique(links[here], return_inverse=True)
        by_segment = np.zeros((len(used), len(columns)))
        np.add.at(by_segment, (number[segments[here]], column), (parts * us_per_byte[links])[here])
        costs = sum(by_segment[way] for way in ways_used.reshape(ways.shape))
        alpha = np.where(known[ways].all(axis=0), latencies[ways].sum(axis=0), np.inf)
        costs = np.asarray(costs)
        return alpha.reshape(n, n), costs[:, _telling(costs)]

    def near(self, devices: list[int]) -> Array:
        """How far devices of one machine are from each other: us for a MiB and the latency, infinite where unknown."""
        inside = self._machines[self.machine[devices[0]]][2]
        key = id(inside), tuple(int(self._local[i]) for i in devices)
        if key not in self._orders:
            found = np.zeros((len(devices), len(devices)))
            for (a, i), (b, j) in itertools.permutations(enumerate(devices), 2):
                links, parts, latency, known = self._segments[self._inside(i, j)]
                slowest = max((self._us_per_byte[x] * p for x, p in zip(links, parts, strict=True)), default=0.0)
                found[a, b] = latency + MB * slowest if known else math.inf
            self._orders[key] = found
        return self._orders[key]

    def attachments(self) -> Array:
        """By device, the number of the switch outside to which its machine is attached by its own card; -1 if none."""
        return self._outer

    def distances(self, switches: Array) -> Array:
        """How far the switches outside are from each other: us for a MiB and the latency, infinite where unknown."""
        found = np.full((len(switches), len(switches)), np.inf)
        for i, u in enumerate(switches):
            for j, v in enumerate(switches):
                way = self._core.way(self._outside[u], self._outside[v]) if u >= 0 and v >= 0 else None
                if way is not None:
                    found[i, j] = way[1] + MB * max((self._cost(*link)[0] for link in way[0]), default=0.0)
        return found

    # Reading the topology.

    def _read_machines(self) -> None:
        machines: dict[str, list[str]] = {}
        outside: list[str] = []
        for part in self.topology.description().parts:
            around = not part.node and not isinstance(part, DeviceInfo)
            (outside if around else machines.setdefault(part.node, [])).append(part.id)
        if "" in machines:  # devices that are in no machine: all that is outside is around them
            machines[""] += outside
        self._outside = outside
        self._inner_outside = {name: i for i, name in enumerate(outside)}
        n = len(self.devices)
        self.machine = np.zeros(n, dtype=np.int64)
        self._local = np.zeros(n, dtype=np.int64)
        self._outer = np.full(n, -1, dtype=np.int64)
        self._up, self._down = (np.full(n, UNKNOWN, dtype=np.int64) for _ in range(2))
        self._machines: list[tuple[list[str], list[str], Inside]] = []
        alike: dict[object, Inside] = {}
        for number, (node, parts) in enumerate(machines.items()):
            devices = [part for part in parts if part in self.index]
            inside = Inside(self.topology, parts, devices, self._inner_outside if node else {})
            inside = alike.setdefault(inside.signature, inside)
            self._machines.append((parts, devices, inside))
            for place, device in enumerate(devices):
                i = self.index[device]
                self.machine[i], self._local[i] = number, place
        most = max((len(devices) for _, devices, _ in self._machines), default=0)
        self._inner = np.full((n, most), -1, dtype=np.int64)
        self._across = np.full((len(outside), len(outside)), -1, dtype=np.int64)
        for parts, devices, inside in self._machines:
            for place, device in enumerate(devices):
                self._leave(self.index[device], parts, inside, place)

    def _leave(self, i: int, parts: list[str], inside: Inside, place: int) -> None:
        """Notes by which card a device leaves its machine."""
        exits = [
            (-min(width, self._width(parts[end], outer)), latency, end, outer)
            for width, latency, end in inside.exits(place)
            for outer in self._steps_outside(parts[end])
        ]
        best = min((one[:2] for one in exits), default=None)
        ties = [one for one in exits if one[:2] == best]
        if not ties or best is None or best[0] == 0:
            return
        _, _, end, outer = ties[place % len(ties)]
        there = [parts[p] for p in inside.way(place, end)]
        back = [parts[p] for p in inside.way_back(end, place)]
        if not back or self.topology.link(outer, parts[end]) is None:
            return
        self._outer[i] = self._inner_outside[outer]
        self._up[i] = self._add_segment([*there, outer])
        self._down[i] = self._add_segment([outer, *back])

    def _steps_outside(self, part: str) -> list[str]:
        return [target for target in self.topology.links_of(part) if target in self._inner_outside]

    def _width(self, source: str, target: str) -> float:
        link = self.topology.link(source, target)
        return 0.0 if link is None else link.bandwidth_mb_s or 1e-9

    # Segments.

    def _ways(self, sources: Array, targets: Array) -> Array:
        """Three segments for each transfer."""
        same = self.machine[sources] == self.machine[targets]
        inner = self._inner[sources, self._local[targets] * same]
        for i, j in {
            (int(a), int(b)) for a, b in zip(sources[same & (inner < 0)], targets[same & (inner < 0)], strict=True)
        }:
            self._inner[i, self._local[j]] = self._inside(i, j)
        inner = self._inner[sources, self._local[targets] * same]
        u, v = self._outer[sources], self._outer[targets]
        lost = (u < 0) | (v < 0)
        across = self._across[u, v] if len(self._outside) else np.full(len(sources), UNKNOWN)
        missing = ~same & ~lost & (across < 0)
        for i, j in {(int(a), int(b)) for a, b in zip(u[missing], v[missing], strict=True)}:
            self._across[i, j] = self._between(i, j)
        across = self._across[u, v] if len(self._outside) else across
        outside = ~same
        return np.stack(
            [
                np.where(outside, self._up[sources], inner),
                np.where(outside, np.where(lost, UNKNOWN, across), EMPTY),
                np.where(outside, self._down[targets], EMPTY),
            ]
        )

    def _inside(self, i: int, j: int) -> int:
        if i == j:
            return EMPTY
        parts, _, inside = self._machines[self.machine[i]]
        way = inside.between(int(self._local[i]), int(self._local[j]))
        if way:
            return self._add_segment([parts[p] for p in way])
        route = self.topology.route(self.devices[i], self.devices[j])  # through the outside
        return UNKNOWN if route is None else self._add_segment(list(route.parts))

    def _between(self, u: int, v: int) -> int:
        way = self._core.way(self._outside[u], self._outside[v])
        if way is None:
            return UNKNOWN
        shares, latency = way
        links = [self._link(*link) for link in shares]
        known = all(self._us_per_byte[link] < math.inf for link in links)
        self._segments.append((links, list(shares.values()), latency, known))
        self._flat = None
        return len(self._segments) - 1

    def _add_segment(self, parts: list[str]) -> int:
        pairs = list(itertools.pairwise(parts))
        links = [self._link(*pair) for pair in pairs]
        latency = sum(self._cost(*pair)[1] for pair in pairs)
        known = all(self._us_per_byte[link] < math.inf for link in links)
        self._segments.append((links, [1.0] * len(links), latency, known))
        self._flat = None
        return len(self._segments) - 1

    def _link(self, source: str, target: str) -> int:
        key = source, target
        if key not in self._links:
            self._links[key] = len(self._links)
            self._us_per_byte.append(self._cost(source, target)[0])
        return self._links[key]

    def _cost(self, source: str, target: str) -> tuple[float, float]:
        link = self.topology.link(source, target)
        if link is None or link.bandwidth_mb_s is None:
            return math.inf, 0.0 if link is None else link.latency_us or 0.0
        return 1e6 / (link.bandwidth_mb_s * MB), link.latency_us or 0.0

    def _flattened(self) -> tuple[Array, ...]:
        """The segments as arrays; only those that are new are converted."""
        if self._flat is None:
            done = len(self._known)
            links, parts, latencies, known = zip(*self._segments[done:], strict=True)
            numbers = np.repeat(np.arange(done, len(self._segments)), [len(one) for one in links])
            new = [
                np.array(list(itertools.chain(*links)), dtype=np.int64),
                np.array(list(itertools.chain(*parts)), dtype=np.float64),
                numbers,
                np.array(latencies, dtype=np.float64),
            ]
            self._chunks = [np.concatenate([a, b]) for a, b in zip(self._chunks, new, strict=True)] if done else new
            self._known = np.concatenate([self._known, np.array(known, dtype=bool)])
            us_per_byte = np.array(self._us_per_byte or [0.0])
            self._flat = (*self._chunks, self._known, np.where(np.isfinite(us_per_byte), us_per_byte, 0.0))
        return self._flat


def _telling(costs: Array) -> Array:
    """The links that can be the most loaded one: not those of which another carries all that they carry, as slowly."""
    kept: list[int] = []
    for link in np.argsort(-costs.sum(axis=0), kind="stable"):
        column = costs[:, link]
        if column.any() and not any((costs[:, other] >= column).all() for other in kept):
            kept.append(int(link))
    return np.array(sorted(kept), dtype=np.int64)

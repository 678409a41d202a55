"""Ways through a machine, worked out once for all machines that are alike, and equal ways between switches."""

from __future__ import annotations

import heapq
import math

from fuel_parallel.topology.model import DeviceInfo, DeviceKind, Link
from fuel_parallel.topology.routes import Route, Router, likely_width
from fuel_parallel.topology.topology import DeviceTopology


class Inside:
    """The ways inside of a machine, its parts by number, so that machines that are alike can share them."""

    def __init__(self, topology: DeviceTopology, parts: list[str], devices: list[str], outside: dict[str, int]) -> None:
        number = {part: i for i, part in enumerate(parts)}
        links: dict[str, dict[str, Link]] = {}
        ends: list[str] = []
        doors: list[int] = []
        for part, i in number.items():
            of_part = topology.links_of(part)
            links[str(i)] = {str(number[t]): link for t, link in of_part.items() if t in number}
            info = topology.part(part)
            if isinstance(info, DeviceInfo) and info.kind is not DeviceKind.CPU:
                ends.append(str(i))
            if any(target in outside and target not in number for target in of_part):
                doors.append(i)
        self._places = [number[device] for device in devices]
        self._doors = doors
        self._router = Router(links, ends)
        rows = tuple((i, tuple(sorted(row.items(), key=lambda item: item[0]))) for i, row in links.items())
        self.signature = (rows, tuple(ends), tuple(doors), tuple(self._places))
        self._exits: dict[int, list[tuple[float, float, int]]] = {}

    def between(self, a: int, b: int) -> list[int]:
        """The way between two devices, by their place."""
        return self.way(a, self._places[b])

    def way(self, place: int, end: int) -> list[int]:
        """The parts on the way from a device to a part."""
        return _numbers(self._router.route(str(self._places[place]), str(end)))

    def way_back(self, end: int, place: int) -> list[int]:
        """The parts on the way from a part to a device."""
        return _numbers(self._router.route(str(end), str(self._places[place])))

    def exits(self, place: int) -> list[tuple[float, float, int]]:
        """Width, latency and part of each way to a part with links to the outside."""
        if place not in self._exits:
            found = []
            for door in self._doors:
                route = self._router.route(str(self._places[place]), str(door))
                if route is not None:
                    # Where the width is unknown, a way is taken only if there is no other.
                    found.append(
                        (route.bandwidth_mb_s or 1e-9, (route.latency_us or 0.0) + 1e-3 * len(route.links), door)
                    )
            self._exits[place] = found
        return self._exits[place]


class Core:
    """The switches between machines, and the equal ways from one to another."""

    def __init__(self, topology: DeviceTopology, outside: list[str]) -> None:
        inside = set(outside)
        self._links = {part: {t: x for t, x in topology.links_of(part).items() if t in inside} for part in outside}
        self._router = Router(self._links, ())
        self._found: dict[tuple[str, float], tuple[dict[str, tuple[float, int]], dict[str, list[str]]]] = {}

    def way(self, source: str, target: str) -> tuple[dict[tuple[str, str], float], float] | None:
        """The share of the data that each link carries, and the latency; None if there is no way."""
        if source == target:
            return {}, 0.0
        width = self._router.widths(source).get(target)
        if width is None:
            return None
        best, came = self._shortest(source, width)
        shares: dict[tuple[str, str], float] = {}
        amount = {target: 1.0}
        for part in sorted(best, key=lambda p: best[p], reverse=True):
            for before in came.get(part, ()) if part in amount else ():
                part_of = amount[part] / len(came[part])
                shares[before, part] = part_of
                amount[before] = amount.get(before, 0.0) + part_of
        return shares, best[target][0]

    def _shortest(self, source: str, width: float) -> tuple[dict[str, tuple[float, int]], dict[str, list[str]]]:
        """Latency and links to each part over links that are wide enough, and from where all equal ways come."""
        if (source, width) not in self._found:
            best: dict[str, tuple[float, int]] = {source: (0.0, 0)}
            came: dict[str, list[str]] = {}
            heap = [(0.0, 0, source)]
            while heap:
                latency, hops, part = heapq.heappop(heap)
                if (latency, hops) > best[part]:
                    continue
                for neighbour, link in self._links[part].items():
                    cost = latency + (link.latency_us or 0.0), hops + 1
                    if likely_width(link) < width or cost > best.get(neighbour, (math.inf, 0)):
                        continue
                    if cost < best.get(neighbour, (math.inf, 0)):
                        best[neighbour], came[neighbour] = cost, []
                        heapq.heappush(heap, (*cost, neighbour))
                    if part not in came[neighbour]:
                        came[neighbour].append(part)
            self._found[source, width] = best, came
        return self._found[source, width]


def _numbers(route: Route | None) -> list[int]:
    return [] if route is None else [int(part) for part in route.parts]

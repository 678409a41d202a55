"""Ways through a topology: of most bandwidth first, then of least latency and fewest links."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Mapping

import msgspec

from fuel_parallel.topology.model import Interconnect, Link

Links = Mapping[str, Mapping[str, Link]]

LIKELY_MB_S: dict[Interconnect, float] = {
    Interconnect.NVLINK: 20_000.0,
    Interconnect.INFINITY_FABRIC: 30_000.0,
    Interconnect.SHARED_MEMORY: 20_000.0,
    Interconnect.PCIE: 12_000.0,
    Interconnect.NETWORK: 10_000.0,
    Interconnect.UNKNOWN: 1.0,
}
"""By what to choose between ways whose bandwidth is unknown. For choosing only: an unknown bandwidth stays unknown."""


LIKELY_SHARE = {"PIX": 1.0, "PXB": 0.9, "PHB": 0.7, "NODE": 0.6, "SYS": 0.4}
"""The same of ways over PCIe by the class that nvidia-smi and NCCL name: the fewer bridges and sockets, the wider."""


class Route(msgspec.Struct, frozen=True):
    """A way: the parts on it, both ends included, and the links between them."""

    parts: tuple[str, ...]
    links: tuple[Link, ...]

    @property
    def bandwidth_mb_s(self) -> float | None:
        """That of the narrowest link; None if any is unknown; infinite without links."""
        known = [link.bandwidth_mb_s for link in self.links if link.bandwidth_mb_s is not None]
        return None if len(known) < len(self.links) else min(known, default=math.inf)

    @property
    def latency_us(self) -> float | None:
        """The sum of what is known; None if nothing is."""
        known = [link.latency_us for link in self.links if link.latency_us is not None]
        return sum(known) if known or not self.links else None

    @property
    def interconnect(self) -> Interconnect:
        """What the narrowest link is made of."""
        narrowest = min(self.links, key=likely_width, default=None)
        return Interconnect.SHARED_MEMORY if narrowest is None else narrowest.interconnect


class Router:
    """Finds ways in a graph of links and remembers them. `ends` pass nothing on."""

    def __init__(self, links: Links, ends: Collection[str]) -> None:
        self._links, self._ends = links, ends
        self._found: dict[tuple[str, str], Route | None] = {}
        self._widths: dict[str, dict[str, float]] = {}

    def route(self, source: str, target: str) -> Route | None:
        """The way from one part to another; None if there is none."""
        key = source, target
        if key not in self._found:
            self._found[key] = self._find(source, target)
        return self._found[key]

    def widths(self, source: str) -> Mapping[str, float]:
        """For each part that can be reached the bandwidth of the widest way, likely ones for what is unknown."""
        if source not in self._widths:
            self._widths[source] = self._widest(source)
        return self._widths[source]

    def _find(self, source: str, target: str) -> Route | None:
        if source == target:
            return Route((source,), ())
        direct = self._links[source].get(target)
        if direct is not None:
            return Route((source, target), (direct,))
        width = self.widths(source).get(target)
        if width is None:
            return None
        # Of the links that are wide enough, the shortest way.
        best: dict[str, tuple[float, int]] = {source: (0.0, 0)}
        came: dict[str, str] = {}
        heap = [(0.0, 0, source)]
        while heap:
            latency, hops, part = heapq.heappop(heap)
            if part == target:
                break
            if (latency, hops) > best[part] or (part in self._ends and part != source):
                continue
            for neighbour, link in self._links[part].items():
                cost = latency + (link.latency_us or 0.0), hops + 1
                if likely_width(link) >= width and cost < best.get(neighbour, (math.inf, 0)):
                    best[neighbour], came[neighbour] = cost, part
                    heapq.heappush(heap, (*cost, neighbour))
        parts = [target]
        while parts[-1] != source:
            parts.append(came[parts[-1]])
        parts.reverse()
        return Route(tuple(parts), tuple(self._links[a][b] for a, b in itertools.pairwise(parts)))

    def _widest(self, source: str) -> dict[str, float]:
        widths = {source: math.inf}
        done: set[str] = set()
        heap = [(-math.inf, source)]
        while heap:
            _, part = heapq.heappop(heap)
            if part in done:
                continue
            done.add(part)
            if part in self._ends and part != source:
                continue
            for neighbour, link in self._links[part].items():
                width = min(widths[part], likely_width(link))
                if width > widths.get(neighbour, 0.0):
                    widths[neighbour] = width
                    heapq.heappush(heap, (-width, neighbour))
        return widths


def likely_width(link: Link) -> float:
    """The bandwidth in MB/s by which ways are chosen: the known one, else that of likely links of its kind."""
    if link.bandwidth_mb_s is not None:
        return link.bandwidth_mb_s
    return LIKELY_MB_S[link.interconnect] * link.count * LIKELY_SHARE.get(link.path, 1.0)

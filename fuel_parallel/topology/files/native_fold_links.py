"""Links as few entries: all pairs of some parts, each of some with each of others, or one with one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from fuel_parallel.topology.files.expressions import fold, fold_set, natural, skeleton
from fuel_parallel.topology.files.native_schema import LinkEntry, Pairs
from fuel_parallel.topology.files.units import format_rate, format_time
from fuel_parallel.topology.model import Connection, Interconnect, Link

Ends = tuple[str, str]


def fold_links(connections: Iterable[Connection]) -> list[LinkEntry]:
    """The entries, of equal links together."""
    groups: dict[tuple[Link, bool], list[Ends]] = {}
    for c in connections:
        groups.setdefault((c.link, c.one_way), []).append((c.source, c.target))
    return [
        LinkEntry(between=ends, pairs=pairs, one_way=one_way, **figures(link))
        for (link, one_way), edges in groups.items()
        for ends, pairs in fold_edges(edges, one_way)
    ]


def figures(link: Link) -> dict[str, Any]:
    """The fields of a link."""
    bits = link.interconnect is Interconnect.NETWORK
    return {
        "kind": link.interconnect,
        "bandwidth": None if link.bandwidth_mb_s is None else format_rate(link.bandwidth_mb_s, bits=bits),
        "latency": None if link.latency_us is None else format_time(link.latency_us),
        "count": link.count,
        "path": link.path,
        "origin": link.origin,
    }


def fold_edges(edges: list[Ends], one_way: bool) -> Iterator[tuple[Ends, Pairs | None]]:
    """The two ends of each entry, as expressions, and how they pair; of edges that are each there once."""
    rest: list[Ends] = []
    for part in [edges] if one_way else _connected(edges):
        every = {end for edge in part for end in edge}
        if not one_way and len(every) > 2 and len(part) == len(every) * (len(every) - 1) // 2:
            yield (fold_set(every), fold_set(every)), Pairs.ALL
        else:
            rest += part
    alike: dict[Ends, list[Ends]] = {}
    for edge in rest:
        kinds = sorted(map(_kind, edge))
        alike.setdefault((kinds[0], kinds[1]), []).append(edge)
    for group in alike.values():
        yield from _stars(group, one_way)


def _kind(name: str) -> str:
    """`cuda` of `n1/cuda:0`: what keeps unlike parts apart where an entry could hold both."""
    return name.rpartition("/")[2].rpartition(":")[0]


def _connected(edges: list[Ends]) -> list[list[Ends]]:
    """The edges, those together that hang together."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        root.setdefault(name, name)
        while root[name] != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    for a, b in edges:
        root[find(a)] = find(b)
    groups: dict[str, list[Ends]] = {}
    for edge in edges:
        groups.setdefault(find(edge[0]), []).append(edge)
    return list(groups.values())


def _stars(edges: list[Ends], one_way: bool) -> Iterator[tuple[Ends, Pairs | None]]:
    """Each edge belongs to the end that has more of them, the hub; hubs with the same others share an entry."""
    degree = Counter(end for edge in edges for end in edge)
    stars: dict[tuple[str, bool], list[str]] = {}
    for a, b in edges:
        first = degree[a] > degree[b]  # whether the hub is the source
        hub, other = (a, b) if first else (b, a)
        stars.setdefault((hub, first and one_way), []).append(other)
    shared: dict[tuple[frozenset[str], bool], list[str]] = {}
    for (hub, first), others in stars.items():
        shared.setdefault((frozenset(others), first), []).append(hub)
    single: list[Ends] = []
    for (leaves, first), hubs in shared.items():
        if len(leaves) == len(hubs) == 1:
            (leaf,) = leaves
            single.append((hubs[0], leaf) if first else (leaf, hubs[0]))
            continue
        ends = (fold_set(hubs), fold_set(leaves)) if first else (fold_set(leaves), fold_set(hubs))
        yield ends, Pairs.ALL if len(leaves) > 1 and len(hubs) > 1 else None
    yield from _one_to_one(single)


def _one_to_one(edges: list[Ends]) -> Iterator[tuple[Ends, Pairs | None]]:
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Ends]] = {}
    for a, b in edges:
        alike.setdefault((skeleton(a), skeleton(b)), []).append((a, b))
    for group in alike.values():
        group.sort(key=lambda edge: (natural(edge[0]), natural(edge[1])))
        ends = fold([a for a, _ in group]), fold([b for _, b in group])
        yield ends, Pairs.MATCHING if len(group) > 1 else None

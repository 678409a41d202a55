"""Rank files of Open MPI: `rank 0=n01 slot=0-3` puts a rank on cores of a host.

The numbers of cores are logical, in the order of the hardware, unless they begin with `p`. A rank is a device here. Its
cores are those of the file where it counts them over the whole machine; `1:0-3`, cores of package 1, cannot be counted
so without that machine, and stays as it is written in the device's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from fuel_parallel.errors import DataError
from fuel_parallel.topology.cores import format_list, parse_list
from fuel_parallel.topology.files.hostlist import MOST, check_name
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.model import DeviceInfo, DeviceKind
from fuel_parallel.topology.topology import DeviceTopology

_SIGN = re.compile(r"^[ \t]*rank[ \t]+[0-9]+[ \t]*=", re.MULTILINE)
_LINE = re.compile(r"rank\s+(?P<rank>\d{1,9})\s*=\s*(?P<host>\S+)(?:\s+slots?\s*=\s*(?P<slot>.*))?")
_CORES = r"[0-9]+(?:-[0-9]+)?"
_SLOT = re.compile(
    rf"(?P<physical>p?)(?:(?P<cores>{_CORES}(?:[,;]{_CORES})*)|\d+:(?:\*|[0-9,\-]+)(?:[;,]\d+:(?:\*|[0-9,\-]+))*)"
)
_NAMED = "slot "


def matches(source: Source) -> bool:
    """Whether a line begins with `rank 0=`."""
    return _SIGN.search(source.text) is not None


def read(source: Source) -> DeviceTopology:
    """A CPU device for each rank, in the order of ranks. Raises `TopologyFileError`: a gap, a rank twice."""
    ranks: dict[int, tuple[int, str, str]] = {}
    for line, rank, host, slot in _lines(source):
        if rank in ranks:
            raise source.error(f"rank {rank} comes twice, first in line {ranks[rank][0]}", line=line)
        if rank >= MOST:
            raise source.error(f"rank {rank}: at most {MOST} ranks are read", line=line)
        ranks[rank] = line, host, slot
    missing = next((n for n in range(len(ranks)) if n not in ranks), None)
    if missing is not None:
        last = max(ranks)
        raise source.error(
            f"rank {missing} is missing, but there is a rank {last}; ranks go from 0 without a gap", line=ranks[last][0]
        )
    return _topology(source, [ranks[n] for n in range(len(ranks))])


def write(topology: DeviceTopology) -> str:
    """A rank for each device, in their order; only CPUs that have nothing better beside them."""
    accelerated = {d.node for d in topology.devices if d.kind is not DeviceKind.CPU}
    devices = [d for d in topology.devices if d.kind is not DeviceKind.CPU or d.node not in accelerated]
    hosts = [d.node or "localhost" for d in devices]
    counted = numbered(hosts, range(len(hosts)))
    return text_of(hosts, [_slot_of(device, slot) for device, slot in zip(devices, counted, strict=True)])


def text_of(hosts: Sequence[str], slots: Sequence[int | str]) -> str:
    r"""The lines of a rank file, from the host and the slot of each rank.

    >>> text_of(["n1", "n1"], numbered(["n1", "n1"], [1, 0]))
    'rank 0=n1 slot=1\nrank 1=n1 slot=0\n'
    """
    pairs = enumerate(zip(hosts, slots, strict=True))
    return "".join(f"rank {rank}={host} slot={slot}\n" for rank, (host, slot) in pairs)


def numbered(hosts: Sequence[str], order: Sequence[Any]) -> list[int]:
    """The slot of each rank: 0, 1, ... on each host, as `order` sorts them."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    slots = [0] * len(hosts)
    for ranks in by_host.values():
        for slot, rank in enumerate(sorted(ranks, key=order.__getitem__)):
            slots[rank] = slot
    return slots


def _lines(source: Source) -> Iterator[tuple[int, int, str, str]]:
    for line, text in enumerate(source.lines, 1):
        text = text.split("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            raise source.error(f"{text[:60]!r}: expected `rank N=HOST slot=CORES`", line=line)
        host, slot = found["host"], re.sub(r"\s+", "", found["slot"] or "")
        if host.startswith("+"):
            raise source.error(
                f"{host[:40]!r} is a host by its place among those that a job is given, which are not in this file; "
                "name the host itself",
                line=line,
            )
        if slot and (len(slot) > 1000 or not _SLOT.fullmatch(slot)):
            raise source.error(f"slot={slot[:40]}: expected cores such as 0-3, or 1:0-3 of package 1", line=line)
        yield line, int(found["rank"]), check_name(source, host.rpartition("@")[2], "host", line=line), slot


def _topology(source: Source, ranks: list[tuple[int, str, str]]) -> DeviceTopology:
    t = DeviceTopology("ranks")
    on_host: dict[str, int] = {}
    kinds: set[str] = set()
    for line, host, slot in ranks:
        number = on_host[host] = on_host.get(host, -1) + 1
        found = _SLOT.fullmatch(slot)
        try:
            cores = format_list(parse_list(found["cores"].replace(";", ","))) if found and found["cores"] else ""
        except DataError as reason:
            raise source.error(str(reason), line=line) from None
        kinds.add("physical" if found and found["physical"] else "logical" if cores else "package" if slot else "none")
        named = "" if cores or not slot else f"{_NAMED}{slot}"
        t.add_device(DeviceInfo(id=f"{host}/cpu:{number}", node=host, kind=DeviceKind.CPU, cores=cores, name=named))
    for kind in sorted(kinds):
        source.note(_NOTES[kind])
    return t


def _slot_of(device: DeviceInfo, counted: int) -> int | str:
    if device.kind is not DeviceKind.CPU:
        return counted
    return device.cores or (device.name.removeprefix(_NAMED) if device.name.startswith(_NAMED) else counted)


_NOTES = {
    "physical": "its cores are physical: numbers of the operating system",
    "logical": "its cores are logical: in the order of the hardware, which may not be the operating system's",
    "package": "cores of a package, such as 1:0-3, are unknown cores of the machine; they stay as they are written",
    "none": "ranks without a slot: their cores are unknown",
}

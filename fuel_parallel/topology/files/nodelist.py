"""The nodes of a job as SLURM prints them, `n[01-04,7],gpu1`, over one line or several."""

from __future__ import annotations

import re

from fuel_parallel.topology.files import hostfile
from fuel_parallel.topology.files.hostfile import Host
from fuel_parallel.topology.files.hostlist import MOST, expand
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.topology import DeviceTopology

_LIST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*(?:\[[^\]=\"]*|,).*")


def matches(source: Source) -> bool:
    """Whether its first line is one word with brackets or commas, and no line has a blank inside."""
    lines = [text for text in (line.split("#")[0].strip() for line in source.lines) if text]
    return bool(lines) and _LIST.fullmatch(lines[0]) is not None and not any(len(text.split()) > 1 for text in lines)


def read(source: Source) -> DeviceTopology:
    """One CPU device a host, in the order of the list. Raises `TopologyFileError`."""
    hosts: dict[str, Host] = {}
    twice = 0
    for line, text in enumerate(source.lines, 1):
        listed = text.split("#")[0].strip()
        for name in expand(source, listed, line=line) if listed else ():
            twice += name in hosts
            hosts.setdefault(name, Host(name, line=line))
        if len(hosts) > MOST:
            raise source.error(f"more than {MOST} hosts", line=line)
    if twice:
        source.note(f"{twice} hosts come again; each is taken once")
    source.note("a list of nodes says nothing of slots: each host has one device")
    return hostfile.topology_of(tuple(hosts.values()))

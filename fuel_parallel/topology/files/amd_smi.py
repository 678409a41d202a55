"""What `amd-smi topology` prints: tables by PCI address, and JSON in the shapes of older and newer versions.

Bandwidths are what the kernel's driver says of Infinity Fabric: MB/s of 10**6 bytes in one direction, that of one link
and that of all links of a pair. The greater is the link's; their ratio is how many links there are.
"""

from __future__ import annotations

import re
from typing import Any

from fuel_parallel.topology.files import amd_json
from fuel_parallel.topology.files.amd_links import MOST_GPUS, Machine, Matrix, build
from fuel_parallel.topology.files.amd_tables import sections, square
from fuel_parallel.topology.files.pasted import beginning, check_size
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.probe import pci
from fuel_parallel.topology.topology import DeviceTopology

TITLE = re.compile(r"\s*([A-Z][A-Z -]{1,40}) TABLE:?\s*")
SIGN = re.compile(r"^[ \t]*(?:ACCESS|WEIGHT|HOPS|LINK TYPE|NUMA BW) TABLE:?[ \t]*$", re.MULTILINE)
NAME = r"(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]|GPU\d{1,4}"
JSON_KEY = re.compile(r'"(?:link_type|link_status|link_accessibility|num_hops|numa_bandwidth)"\s*:')

OLD_KEYS = {"weight": "weights", "link_type": "types", "numa_bandwidth": "bandwidths"}
NEW_KEYS = {"weight": "weights", "link_type": "types", "bandwidth": "bandwidths"}
"""The matrix that each key of JSON fills."""

TABLES = {"WEIGHT": "weights", "LINK TYPE": "types", "NUMA BW": "bandwidths"}
OTHER_TABLES = ("ACCESS", "HOPS")


def matches(source: Source) -> bool:
    """Whether there is a title of a table, or JSON of GPUs with keys of links."""
    text = beginning(source)
    return bool(SIGN.search(text) or ('"gpu"' in text and JSON_KEY.search(text)))


def read(source: Source) -> DeviceTopology:
    """Devices `rocm:0` with their PCI addresses, and a direct link for each pair whose kind or weight is said.

    Raises `TopologyFileError` with the line where a table or the JSON is cut, or says different things of a pair.
    """
    check_size(source)
    if not SIGN.search(beginning(source)):
        return _from_json(source)
    found = sections(source, lambda line, _: title[1] if (title := TITLE.fullmatch(line)) else None)
    tables = {title: square(source, found[title], NAME) for title in (*TABLES, *OTHER_TABLES) if title in found}
    if not tables:
        raise source.error(f"none of the tables {', '.join((*TABLES, *OTHER_TABLES))}; paste the whole output")
    (first, (names, _)), *others = tables.items()
    for title, (other, _) in others:
        if other != names:
            raise source.error(f"the table {title} is of other GPUs than {first}", line=found[title].line)
    machine = Machine()
    for title, what in TABLES.items():
        if title in tables:
            getattr(machine, what).update(tables[title][1])
        else:
            source.note(f"there is no {title} TABLE; what it says is unknown")
    machine.buses = {n: pci.normal(name) for n, name in enumerate(names) if not name.startswith("GPU")}
    _check_buses(source, machine.buses, found[first].line)
    return build(source, list(range(len(names))), machine)


def _check_buses(source: Source, buses: dict[int, str], line: int | None) -> None:
    owner: dict[str, int] = {}
    for gpu, bus in buses.items():
        if bus and owner.setdefault(bus, gpu) != gpu:
            reason = f"GPUs {owner[bus]} and {gpu} have the same address {bus}; expected each once"
            raise source.error(reason, line=line, key=f"gpu {gpu}, bdf")


def _from_json(source: Source) -> DeviceTopology:
    value = amd_json.decode(source)
    if not isinstance(value, list) or len(value) > MOST_GPUS:
        raise source.error(f"expected a list of at most {MOST_GPUS} GPUs, each with 'gpu' and its links")
    machine = Machine()
    gpus: list[int] = []
    for place, one in enumerate(value):
        gpu = amd_json.integer(source, amd_json.entry(source, one, "gpu", f"[{place}]"), f"[{place}], gpu", 10_000)
        if gpu in gpus:
            raise source.error(f"a second GPU {gpu}; expected each once", key=f"[{place}], gpu")
        gpus.append(gpu)
        (_add_new if "links" in one else _add_old)(source, machine, gpu, one)
    _check_peers(source, machine, gpus)
    _check_buses(source, machine.buses, None)
    return build(source, gpus, machine)


def _add_old(source: Source, machine: Machine, gpu: int, one: dict[str, Any]) -> None:
    """`"weight": {"gpu_0": 0, "gpu_1": 40}` and so on."""
    if not any(key in one for key in (*OLD_KEYS, "link_accessibility", "hops")):
        raise source.error(
            "neither 'links' nor 'weight' nor 'link_type'; expected what `amd-smi topology` prints", key=f"gpu {gpu}"
        )
    for key, what in OLD_KEYS.items():
        cells = one.get(key, {})
        if not isinstance(cells, dict) or len(cells) > MOST_GPUS:
            raise source.error(f"expected an object with at most {MOST_GPUS} GPUs", key=f"gpu {gpu}, {key}")
        for name, word in cells.items():
            peer = re.fullmatch(r"gpu_(\d{1,4})", name, re.ASCII)
            if not peer:
                raise source.error(f"found {name[:40]!r}, expected a key such as 'gpu_0'", key=f"gpu {gpu}, {key}")
            _matrix(machine, what)[gpu, int(peer[1])] = amd_json.cell(source, word, f"gpu {gpu}, {key}, {name}")


def _add_new(source: Source, machine: Machine, gpu: int, one: dict[str, Any]) -> None:
    """`"links": [{"gpu": 0, "bdf": …, "weight": 0, "link_type": "SELF", "bandwidth": "N/A"}, …]`."""
    links = one["links"]
    if not isinstance(links, list) or len(links) > MOST_GPUS:
        raise source.error(f"expected a list of at most {MOST_GPUS} links", key=f"gpu {gpu}, links")
    if "bdf" in one:
        machine.buses[gpu] = _bus(source, one["bdf"], f"gpu {gpu}, bdf")
    seen: set[int] = set()
    for place, link in enumerate(links):
        key = f"gpu {gpu}, links[{place}]"
        peer = amd_json.integer(source, amd_json.entry(source, link, "gpu", key), f"{key}, gpu", 10_000)
        if peer in seen:
            raise source.error(f"a second link to GPU {peer}; expected each once", key=key)
        seen.add(peer)
        for name, what in NEW_KEYS.items():
            if name in link:
                _matrix(machine, what)[gpu, peer] = amd_json.cell(source, link[name], f"{key}, {name}")


def _matrix(machine: Machine, what: str) -> Matrix:
    found: Matrix = getattr(machine, what)
    return found


def _bus(source: Source, value: Any, place: str) -> str:
    text = amd_json.cell(source, value, place).text
    if text.upper() == "N/A":
        return ""
    if not re.fullmatch(pci.ADDRESS, text.lower()):
        raise source.error(f"found {text!r}, expected a PCI address such as 0000:0c:00.0", key=place)
    return pci.normal(text)


def _check_peers(source: Source, machine: Machine, gpus: list[int]) -> None:
    """A link to a GPU that has no entry of its own: the list was cut."""
    for matrix in (machine.weights, machine.types, machine.bandwidths):
        for (_, peer), cell in matrix.items():
            if peer not in gpus:
                raise cell.error(source, f"GPU {peer} has no entry of its own; paste the whole output")

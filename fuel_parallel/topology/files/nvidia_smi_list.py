"""Lists of GPUs: `nvidia-smi -L`, with MIG instances, and the overview that `nvidia-smi` alone prints."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from fuel_parallel.topology.files.nvidia_smi_table import plain_lines
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.probe import pci

MOST_INSTANCES = 4096
"""GPUs and MIG instances of a list."""

LISTED = re.compile(r"^[ \t]*GPU (\d{1,4}): (\S.{0,200}?) \(UUID: ?([\w-]{1,80})\)", re.ASCII | re.MULTILINE)
INSTANCE = re.compile(r"^[ \t]*MIG (\S{1,40})\s+Device\s+(\d{1,4}): \(UUID: ?([\w/-]{1,120})\)", re.ASCII)
OVERVIEW = re.compile(
    r"^\|\s{1,9}(\d{1,4})\s{1,9}(\S.{0,60}?)\s{1,60}(?:On|Off|N/A|WDDM|TCC)\s{1,9}\|\s{1,9}"
    r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s",
    re.ASCII | re.MULTILINE,
)


@dataclass
class Gpu:
    """What a list says of a GPU."""

    name: str
    bus: str = ""
    instances: dict[int, str] = field(default_factory=dict)


def listed(source: Source) -> dict[int, Gpu]:
    """The GPUs of `nvidia-smi -L` or of the overview, by their number."""
    found: dict[int, Gpu] = {}
    uuids: set[str] = set()
    current: Gpu | None = None
    for number, line in enumerate(plain_lines(source), 1):
        whole, instance, overview = LISTED.match(line), INSTANCE.match(line), OVERVIEW.match(line)
        if whole:
            current = _add_gpu(source, found, int(whole[1]), Gpu(whole[2]), number)
            _once(source, uuids, whole[3], number)
        elif instance:
            if current is None:
                raise source.error(
                    "a MIG instance before its GPU; paste the whole output of nvidia-smi -L", line=number
                )
            if int(instance[2]) in current.instances:
                raise source.error(f"two MIG instances of a GPU have the number {instance[2]}", line=number)
            current.instances[int(instance[2])] = instance[1]
            _once(source, uuids, instance[3], number)
        elif overview:
            _add_overview(found, int(overview[1]), Gpu(overview[2], pci.normal(overview[3])))
        if len(uuids) > MOST_INSTANCES:
            raise source.error(f"more than {MOST_INSTANCES} GPUs and instances; no machine has as many", line=number)
    return found


def _add_gpu(source: Source, found: dict[int, Gpu], index: int, gpu: Gpu, line: int) -> Gpu:
    known = found.get(index)
    if known is not None and not known.bus:
        raise source.error(f"a second GPU {index}; a file describes one machine, which numbers each once", line=line)
    found[index] = replace(gpu, bus=known.bus if known else "")
    return found[index]


def _add_overview(found: dict[int, Gpu], index: int, gpu: Gpu) -> None:
    """The list has the whole name, the overview the PCI address; people paste either first, or the latter twice."""
    if index in found:
        found[index].bus = gpu.bus
    elif len(found) < MOST_INSTANCES:
        found[index] = gpu


def _once(source: Source, uuids: set[str], uuid: str, line: int) -> None:
    if uuid in uuids:
        raise source.error(f"{uuid} is listed twice; a UUID belongs to one device", line=line)
    uuids.add(uuid)

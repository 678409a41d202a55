"""What `nvidia-smi` prints: the matrix of `topo -m`, and the list of `-L` with MIG instances.

The matrix names the way between two devices, and no figures: NVLinks get some only where `-L`, or the usual overview,
is in the same text and says which GPUs they are. PIX to SYS are ways over PCI bridges of unknown speed. Nothing in it
says that GPUs can read each other's memory; `topo -p2p` says that, of which we note what does not work.
"""

from __future__ import annotations

import re

import msgspec

from fuel_parallel.topology.files.nvidia_smi_list import LISTED, OVERVIEW, Gpu, listed
from fuel_parallel.topology.files.nvidia_smi_table import (
    GPU_HEADER,
    GPU_ROW,
    Table,
    legend,
    plain_lines,
    tables,
)
from fuel_parallel.topology.files.pasted import beginning, check_size
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.model import DeviceInfo, DeviceKind, Interconnect, Link, Nic, NumaDomain
from fuel_parallel.topology.rates import TFLOPS, capability_of, nvlink
from fuel_parallel.topology.topology import DeviceTopology

MOST_TEXT = 1 << 20
"""Characters: a matrix of 256 devices is half of it."""

MOST_NVLINKS = 72
"""Between two GPUs; those of today have 18."""

HIDES_NVLINKS = re.compile(r"nvidia-smi\s{1,9}topo\s{1,9}-mp\b")
LEGEND = re.compile(r"^[ \t]*X[ \t]*= Self", re.MULTILINE)

FAILURES = {
    "ERROR: Option -m is missing its value": "the driver of that machine has no `topo -m`, as on Windows before "
    "driver 600; run it on Linux or with a newer driver",
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver": "the driver was not running on "
    "that machine; run it where `nvidia-smi` alone works",
    "No devices were found": "that machine shows no GPU",
}
"""What `nvidia-smi` says instead of a table, and what that means."""


def matches(source: Source) -> bool:
    """Whether there is a row or header of a matrix, a list, or an error of `nvidia-smi`."""
    text = beginning(source)
    signs = (GPU_ROW, GPU_HEADER, LISTED, OVERVIEW)
    return any(sign.search(text) for sign in signs) or any(failure in text for failure in FAILURES)


def read(source: Source) -> DeviceTopology:
    """Devices `cuda:0`, cards `nic:mlx5_0` and NUMA domains, and one direct link for each pair in the matrix.

    Raises `TopologyFileError` with line and column where rows are cut, or the two directions of a pair differ.
    """
    check_size(source, MOST_TEXT)
    gpus = listed(source)
    found = tables(source)
    links = [table for table in found if not table.is_of_access]
    if len(links) < len(found):
        # Under a matrix of access a lone GPU says nothing of the kind of its table; the titles do.
        links = [table for table in links if table.titles or table is found[0]]
    if len(links) > 1:
        raise source.error(
            f"a second matrix; the first is in line {links[0].line}. A file describes one machine: keep one of them",
            line=links[1].line,
        )
    if links:
        for table in (one for one in found if one is not links[0]):
            _note_access(source, table)
        return _from_matrix(source, links[0], gpus)
    if gpus:
        for table in found:
            _note_access(source, table)
        return _from_list(source, gpus)
    if found:
        raise source.error(
            "this is a matrix of `nvidia-smi topo -p2p`: it says which pairs may read each other's memory, and not how "
            "they are linked; paste the output of `nvidia-smi topo -m`",
            line=found[0].line,
        )
    raise _no_table(source)


def _note_access(source: Source, table: Table) -> None:
    """Two GPUs that are linked may still not read each other's memory; the model has no place for it."""
    refused = [
        f"{row.name} to {column} ({cell})"
        for row in table.rows.values()
        for column, cell in zip(table.columns, row.cells, strict=True)
        if cell not in ("OK", "X")
    ]
    if refused:
        some = ", ".join(refused[:4]) + ", ..." * (len(refused) > 4)
        source.note(f"peer-to-peer access does not work from {some}: copies go through the host", line=table.line)


def _no_table(source: Source) -> Exception:
    lines = plain_lines(source)
    for number, line in enumerate(lines, 1):
        for failure, meaning in FAILURES.items():
            if failure in line:
                return source.error(f"an error of nvidia-smi and no matrix: {meaning}", line=number)
    sign = next((n for n, line in enumerate(lines, 1) if GPU_ROW.match(line) or GPU_HEADER.match(line)), None)
    return source.error(
        "rows of `nvidia-smi topo -m` without its header, or a header without rows; paste the whole output", line=sign
    )


# The list.


def _from_list(source: Source, gpus: dict[int, Gpu]) -> DeviceTopology:
    topology = DeviceTopology()
    for index, gpu in gpus.items():
        if not gpu.instances:
            topology.add_device(_device(f"cuda:{index}", gpu))
        for number, profile in gpu.instances.items():
            # A rank is given an instance, and not the GPU that is split.
            topology.add_device(_device(f"cuda:{index}:mig:{number}", Gpu(f"{gpu.name} MIG {profile}", gpu.bus)))
    source.note("a list of GPUs only: how they are linked is unknown; `nvidia-smi topo -m` says it")
    return topology


def _device(part: str, gpu: Gpu | None) -> DeviceInfo:
    name = gpu.name if gpu else ""
    whole = " MIG " not in name
    rate = next((tflops for word, tflops in TFLOPS.items() if whole and word in name), None)
    return DeviceInfo(id=part, kind=DeviceKind.CUDA, name=name, bus=gpu.bus if gpu else "", tflops=rate)


# The matrix.


def _from_matrix(source: Source, table: Table, gpus: dict[int, Gpu]) -> DeviceTopology:
    topology = DeviceTopology()
    names = _names(source, table)
    _check_names(source, table)
    _add_domains(source, topology, table)
    for name, part in names.items():
        row = table.rows.get(name)
        if not name.startswith("GPU"):
            topology.add_nic(Nic(id=part, name=part.removeprefix("nic:"), numa=row.numa if row else None))
            continue
        gpu, row = gpus.get(int(name[3:])), table.rows[name]
        topology.add_device(msgspec.structs.replace(_device(part, gpu), cores=row.cores, numa=row.numa))
        if gpu and gpu.instances:
            source.note(
                f"{name} is split into {len(gpu.instances)} MIG instances, which the matrix does not show; "
                "`nvidia-smi -L` alone gives a topology of instances"
            )
    capability = {f"cuda:{index}": capability_of(gpu.name) for index, gpu in gpus.items()}
    if HIDES_NVLINKS.search(source.text) or (LEGEND.search(source.text) and "NV#" not in source.text):
        source.note("this looks like `topo -mp`, whose legend has no NV# and which hides NVLinks; `topo -m` shows them")
    pairs = _pairs(source, table)
    unknown = [(f"{a} to {b}", line) for (a, b), (cell, line) in pairs.items() if cell == "N/A"]
    if unknown:
        (first, line), more = unknown[0], len(unknown) - 1
        source.note(f"{first} is N/A{f', and {more} more' * (more > 0)}: left unknown", line=line)
    for (a, b), (cell, line) in pairs.items():
        link = _link(source, cell, line, [capability.get(names[end]) for end in (a, b)])
        if link is not None:
            topology.add_link(names[a], names[b], link)
    return topology


def _names(source: Source, table: Table) -> dict[str, str]:
    """The part of each row and column: `cuda:0` for GPU0, `nic:mlx5_0` for NIC0 if the legend says so."""
    cards: dict[str, str] = {}
    owner: dict[str, str] = {}
    for line, nic, name in legend(source):
        if cards.setdefault(nic, name) != name:
            raise source.error(f"{nic} is called {name} here and {cards[nic]} before; expected one name", line=line)
        if owner.setdefault(name, nic) != nic:
            raise source.error(f"{nic} and {owner[name]} are both called {name}; expected each once", line=line)
    devices = [*table.columns, *(row for row in table.rows if row not in table.columns)]
    nameless = [d for d in devices if d.startswith("NIC") and d not in cards]
    if nameless:
        source.note(f"no legend says which card {', '.join(nameless[:4])}{', ...' * (len(nameless) > 4)} is")
    twice = next((d for d in devices if d in owner), None)
    if twice is not None:
        raise source.error(f"the legend calls {owner[twice]} {twice}, which has a column of its own", line=table.line)
    return {d: f"cuda:{d[3:]}" if d.startswith("GPU") else f"nic:{cards.get(d, d)}" for d in devices}


def _check_names(source: Source, table: Table) -> None:
    """Every GPU must have a row and a column. Of cards people cut off either, and the other still says it."""
    rows, columns = table.rows.keys(), set(table.columns)
    gpus_without_row = [c for c in table.columns if c.startswith("GPU") and c not in rows]
    if gpus_without_row:
        last = max(row.line for row in table.rows.values())
        raise source.error(
            f"the rows of {', '.join(gpus_without_row[:8])} are missing after this line; paste the whole output",
            line=last,
        )
    stranger = next((r for r in table.rows.values() if r.name.startswith("GPU") and r.name not in columns), None)
    if stranger is not None:
        raise source.error(
            f"a row of {stranger.name}, for which the header (line {table.line}) has no column; expected the same "
            "names",
            line=stranger.line,
        )
    for what, missing in (
        ("column", [r for r in rows if r not in columns]),
        ("row", [c for c in table.columns if c not in rows]),
    ):
        if missing:
            source.note(
                f"there is no {what} of {', '.join(missing[:8])}{', ...' * (len(missing) > 8)}: "
                "what only it says is unknown",
                line=table.line,
            )


def _pairs(source: Source, table: Table) -> dict[tuple[str, str], tuple[str, int]]:
    """Each pair once, with its cell and that cell's line. Raises where the two directions differ."""
    found: dict[tuple[str, str], tuple[str, int]] = {}
    for row in table.rows.values():
        for column, cell in zip(table.columns, row.cells, strict=True):
            key = f"{row.name} to {column}"
            if (row.name == column) != (cell == "X"):
                expected = "X" if row.name == column else "a way to another device"
                raise source.error(f"found {cell}, expected {expected}", line=row.line, key=key)
            back, line = found.get((column, row.name), (cell, 0))
            if back != cell:
                raise source.error(
                    f"found {cell}, but line {line} says {back} of the way back, from {column} to {row.name}; "
                    "expected the same both ways",
                    line=row.line,
                    key=key,
                )
            if row.name != column and not line:
                found[row.name, column] = (cell, row.line)
    return found


def _link(source: Source, cell: str, line: int, capabilities: list[int | None]) -> Link | None:
    """None where the cell says that it is not known."""
    if cell == "N/A":
        return None
    if not cell.startswith("NV"):
        # "SOC" is what drivers of 2016 called SYS.
        return Link(interconnect=Interconnect.PCIE, path="SYS" if cell == "SOC" else cell)
    count = int(cell[2:]) if len(cell) < 6 else MOST_NVLINKS + 1
    if not 0 < count <= MOST_NVLINKS:
        raise source.error(f"found {cell[:20]}, expected NV1 to NV{MOST_NVLINKS}", line=line)
    # The slower end counts, and one that is not known makes the link unknown.
    return min((nvlink(c, count) for c in capabilities), key=lambda link: link.bandwidth_mb_s or 0.0)


def _add_domains(source: Source, topology: DeviceTopology, table: Table) -> None:
    """The NUMA domains that GPUs are next to. GPUs that disagree about a domain's cores leave them unknown."""
    cores: dict[int, set[str]] = {}
    for row in table.rows.values():
        if row.numa is not None:
            cores.setdefault(row.numa, set()).add(row.cores)
    for index, found in sorted(cores.items()):
        if len(found) > 1:
            source.note(f"GPUs next to NUMA domain {index} name different cores; which it has is unknown")
        only = next(iter(found)) if len(found) == 1 else ""
        topology.add_numa(NumaDomain(id=f"numa:{index}", index=index, cores=only))

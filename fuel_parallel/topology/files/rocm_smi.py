"""What `rocm-smi --showtopo` prints, as text or JSON, and `--showtoponuma` alone.

The tables give weights, hops and kinds of links, and no figures, so bandwidths are unknown.
"""

from __future__ import annotations

import re
from typing import Any

from fuel_parallel.topology.files import amd_json
from fuel_parallel.topology.files.amd_links import MOST_GPUS, Cell, Machine, Matrix, build, count_of
from fuel_parallel.topology.files.amd_tables import Section, sections, square
from fuel_parallel.topology.files.pasted import check_size
from fuel_parallel.topology.files.source import COLOURS, Source
from fuel_parallel.topology.probe import pci
from fuel_parallel.topology.topology import DeviceTopology

TITLE = re.compile(r"[=\s-]{0,200}(Weight|Hops|Link Type|Link accessibility) between two GPUs[=\s-]*", re.IGNORECASE)
RULE = re.compile(r"\s*={3,200}[^=]{0,80}={3,200}\s*")
SIGNS = (
    " between two GPUs",
    "(Topology) Numa ",
    "(Topology) Weight between DRM devices",
    "(Topology) Link type between",
)
BEGINNING, END = "ROCm System Management Interface", "End of ROCm SMI Log"
GPU = r"GPU(?:0|[1-9]\d{0,3})"

FACT = re.compile(
    r"\s*GPU\[(\d{1,4})\]\s*: *(\(Topology\) Numa Node|Card [Ss]eries|PCI Bus):\s*(\S.{0,100}?)\s*", re.ASCII
)
PAIR = re.compile(r"\(Topology\) (Weight|Hops|Link type) between DRM devices (\d{1,4}) and (\d{1,4})", re.ASCII)
CARD = re.compile(r"card(\d{1,4})", re.ASCII)


def matches(source: Source) -> bool:
    """Whether there is a title of a table, or a line or key of `(Topology)`."""
    return any(sign in source.text for sign in SIGNS)


def read(source: Source) -> DeviceTopology:
    """Devices `rocm:0`, their NUMA domains, and a direct link for each pair whose kind or weight is said.

    Raises `TopologyFileError` with the line where a table is cut, or is not what `rocm-smi` prints.
    """
    check_size(source)
    if re.search(r'"\(Topology\) ', source.text):
        return _from_json(source)
    found = sections(source, lambda line, number: _title(source, line, number))
    tables = {title: square(source, found[title], GPU) for title in ("weight", "hops", "link type") if title in found}
    machine = Machine()
    facts = _facts(source, machine)
    gpus = _gpus(source, found, {title: names for title, (names, _) in tables.items()}, facts)
    for title, matrix in (("weight", machine.weights), ("link type", machine.types)):
        if title in tables:
            matrix.update({(gpus[a], gpus[b]): cell for (a, b), cell in tables[title][1].items()})
        elif tables:
            source.note(f"there is no table of {title}s; they are unknown")
    if not machine.numa:
        source.note("no NUMA nodes are given; which domain each GPU is next to is unknown")
    if not tables:
        source.note("NUMA nodes only: how the GPUs are linked is unknown; `rocm-smi --showtopo` says it")
    if BEGINNING in source.text and END not in source.text:
        source.note("the end of the output is cut off; there may be more GPUs and NUMA nodes than it shows")
    return build(source, gpus, machine)


def _title(source: Source, line: str, number: int) -> str | None:
    """The title of a table, in lower case, "" for one of something else; None where there is none.

    Two in a line are no output of the tool, but somebody's summary.
    """
    if line.count("between two GPUs") > 1:
        raise source.error(
            "tables side by side, which `rocm-smi` does not print; paste the output of `rocm-smi --showtopo` as it is",
            line=number,
        )
    found = TITLE.fullmatch(line)
    if found is None and " between two GPUs" in line and not line.lstrip().startswith(("WARNING", "ERROR")):
        raise source.error(
            f"found {line.strip()[:60]!r}, expected a title such as 'Weight between two GPUs' on a line of its own",
            line=number,
        )
    if found:
        return found[1].lower()
    return "" if RULE.fullmatch(line) else None


def _gpus(
    source: Source, found: dict[str, Section], names: dict[str, tuple[str, ...]], facts: dict[int, int]
) -> list[int]:
    """The numbers of the GPUs, in the order of the tables; they must all be of the same ones."""
    if not names:
        if not facts:
            raise source.error("titles of `rocm-smi` but no tables and no NUMA nodes; paste its whole output")
        return list(facts)
    (first, order), *others = names.items()
    for title, other in others:
        if other != order:
            raise source.error(
                f"the table of {title} is of other GPUs than that of {first} (line {found[first].line})",
                line=found[title].line,
            )
    gpus = [int(name[3:]) for name in order]
    strangers = [gpu for gpu in facts if gpu not in set(gpus)]
    if strangers:
        raise source.error(
            f"GPU[{strangers[0]}] is in none of the tables; they were cut or are of another machine",
            line=facts[strangers[0]],
        )
    return gpus


def _facts(source: Source, machine: Machine) -> dict[int, int]:
    """Fills in what lines such as `GPU[0] : (Topology) Numa Node: 0` say; the GPUs that have any, and their lines."""
    lines: dict[int, int] = {}
    for line, text in enumerate(COLOURS.sub("", source.text).split("\n"), 1):
        found = FACT.fullmatch(text) if len(text) < 400 else None
        if found is None:
            continue
        gpu = int(found[1])
        lines.setdefault(gpu, line)
        if len(lines) > MOST_GPUS:
            raise source.error(f"more than {MOST_GPUS} GPUs; no machine has as many", line=line)
        _add_fact(source, machine, gpu, found[2].lower(), Cell(found[3], line, f"GPU[{gpu}]"))
    return lines


def _add_fact(source: Source, machine: Machine, gpu: int, what: str, cell: Cell) -> None:
    if what == "card series":
        machine.names[gpu] = "" if cell.text == "N/A" else cell.text
    elif what == "pci bus":
        machine.buses[gpu] = pci.normal(cell.text) if re.fullmatch(pci.ADDRESS, cell.text.lower()) else ""
    elif cell.text != "-1":  # a machine without NUMA
        domain = count_of(cell, source)
        if domain is not None and machine.numa.setdefault(gpu, domain) != domain:
            raise cell.error(source, f"NUMA node {domain}, but {machine.numa[gpu]} before; expected one")


def _from_json(source: Source) -> DeviceTopology:
    value = amd_json.decode(source)
    if not isinstance(value, dict):
        raise source.error("found a list, expected an object with 'system' and 'card0'")
    machine = Machine()
    gpus: dict[int, None] = {}
    for key, facts in value.items():
        card = CARD.fullmatch(key)
        if card and isinstance(facts, dict):
            gpus[int(card[1])] = None
            _add_card(source, machine, int(card[1]), facts)
    for key, word in _system(value).items():
        pair = PAIR.fullmatch(key)
        if pair is None:
            continue
        matrix: Matrix | None = {"Weight": machine.weights, "Link type": machine.types}.get(pair[1])
        a, b = int(pair[2]), int(pair[3])
        gpus.update({a: None, b: None})
        if matrix is not None:
            # Each pair is given once.
            matrix[a, b] = amd_json.cell(source, word, key)
            matrix.setdefault((b, a), matrix[a, b])
        if len(gpus) > MOST_GPUS:
            raise source.error(f"more than {MOST_GPUS} GPUs; no machine has as many", key=key)
    if not gpus:
        raise source.error("no GPU in this JSON; expected keys such as 'card0' with '(Topology) Numa Node'")
    return build(source, sorted(gpus), machine)


def _system(value: dict[str, Any]) -> dict[str, Any]:
    found = value.get("system", {})
    return found if isinstance(found, dict) else {}


def _add_card(source: Source, machine: Machine, gpu: int, facts: dict[str, Any]) -> None:
    for key, value in facts.items():
        what = key.lower()
        if what in ("(topology) numa node", "card series", "pci bus"):
            _add_fact(source, machine, gpu, what, amd_json.cell(source, value, f"card{gpu}, {key}"))

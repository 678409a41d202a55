"""The table of formats. To add one is to add an entry, and a module with the functions that it names."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuel_parallel.errors import ArgumentError
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.topology import DeviceTopology


@dataclass(frozen=True)
class Format:
    """A file format.

    Args:
        name: What `--to` takes.
        title: What a user calls it.
        module: Where its functions are, below `fuel_parallel.topology.files`: `matches(source) -> bool`, which says
            from the text alone whether it is of this format; `read(source) -> DeviceTopology`, and
            `write(topology) -> str`.
        reads: Whether it can be read.
        writes: Whether it can be written.
    """

    name: str
    title: str
    module: str
    reads: bool = True
    writes: bool = False

    def home(self) -> Any:
        """Its module."""
        return importlib.import_module(f"fuel_parallel.topology.files.{self.module}")


# In the order in which they are tried: those with a sure sign first, lists of hosts, which have none, last.
FORMATS: tuple[Format, ...] = (
    Format("slurm", "SLURM's topology.conf", "slurm"),
    Format("slurm-yaml", "SLURM's topology.yaml", "slurm_yaml"),
    Format("rankfile", "rankfile of Open MPI", "rankfile", writes=True),
    Format("graphviz", "Graphviz", "graphviz", reads=False, writes=True),
    Format("svg", "SVG picture", "svg", reads=False, writes=True),
    Format("nodelist", "list of nodes of SLURM", "nodelist"),
    Format("machinefile", "machine file of MPICH or Intel MPI", "machinefile", writes=True),
    Format("hostfile", "host file of Open MPI, DeepSpeed or MLX", "hostfile", writes=True),
)


@dataclass(frozen=True)
class Reading:
    """What was found in a file: the topology, the format, and what its reader wants to be known."""

    topology: DeviceTopology
    format: Format
    notes: tuple[str, ...] = ()


def read(path: str | Path) -> DeviceTopology:
    """The topology of a file, in whatever format.

    Raises `TopologyFileError` with file, line and reason when it is none that is known, or does not hold together.
    """
    return examine(path).topology


def examine(path: str | Path) -> Reading:
    """The topology of a file, its format, and notes about it. `-` is standard input. Raises like `read`."""
    return _examine(Source.open(Path(path)))


def examine_text(text: str, name: str = "the text") -> Reading:
    """Like `examine`, of text; errors call it by `name`."""
    return _examine(Source(name, text))


def detect(source: Source) -> Format:
    """The format of a text. Raises `TopologyFileError` when it is none that is known."""
    for one in FORMATS:
        if one.reads and one.home().matches(source):
            return one
    known = ", ".join(f.title for f in FORMATS if f.reads)
    first = next((line.strip() for line in source.lines if line.strip()), "")
    what = f"it begins with {first[:60]!r}" if first else "it is empty"
    raise source.error(f"no known format: {what}. Formats that can be read: {known}")


def write(topology: DeviceTopology, name: str) -> str:
    """The text of a file in a format by its name. Raises `ArgumentError` when there is none, or it is not written."""
    known = {f.name: f for f in FORMATS if f.writes}
    if name not in known:
        raise ArgumentError(f"cannot write a topology as {name!r}; the formats are {', '.join(known)}")
    return str(known[name].home().write(topology))


def _examine(source: Source) -> Reading:
    found = detect(source)
    return Reading(found.home().read(source), found, tuple(source.notes))

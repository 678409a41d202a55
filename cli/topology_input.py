"""The topology that a command is given: a file in any format, standard input, or an example that is shipped."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fuel_parallel.topology import DeviceTopology
    from fuel_parallel.topology.files import Reading


def examples() -> dict[str, Traversable]:
    """The examples, by name."""
    folder = files("fuelrun.launch").joinpath("topologies")
    found = folder.iterdir() if folder.is_dir() else iter(())
    return {one.name.removesuffix(".toml"): one for one in sorted(found, key=str) if one.name.endswith(".toml")}


def examine(name: str) -> Reading:
    """The topology, its format, and notes. A file is meant before an example; `-` is standard input."""
    from fuel_parallel.topology import files as formats

    if name == "-" or Path(name).exists():
        return formats.examine(name)
    known = examples()
    if name in known:
        return formats.examine_text(known[name].read_text(encoding="utf-8"), f"{name}.toml")
    raise click.UsageError(f"there is no file {name}, and no example of that name; there is {', '.join(known)}")


def read(name: str) -> DeviceTopology:
    """The topology; notes about the file go to standard error."""
    found = examine(name)
    for note in found.notes:
        click.echo(f"fuelrun: {name}: {note}", err=True)
    return found.topology

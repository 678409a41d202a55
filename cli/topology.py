"""`fuelrun topology`: what machines consist of: this one, those of a job, or those of a file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from fuel_parallel import environment
from fuelrun.bench import check_folder, on_ranks
from fuelrun.option_types import output_option, ranks_option
from fuelrun.pictures import check_pictures, draw, picture_options
from fuelrun.place import place
from fuelrun.topology_input import examine, read

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
PROBING = "fuel_parallel.comm.speed.probing"


@click.group(context_settings=SETTINGS)
def topology() -> None:
    """Find out, and show, which devices there are and how they are linked."""


@topology.command(context_settings=SETTINGS, short_help="Find out what this machine consists of.")
@ranks_option("Ranks to start for --measure.")
@click.option("--measure", is_flag=True, help="Measure memory and what lies between ranks, rather than assume it.")
@click.option("--validate", is_flag=True, help="Measure, and compare timings of collectives with predictions.")
@click.option("--per-rank", is_flag=True, help="Give each rank of a machine a CPU device of its own.")
@click.option("--json", "as_json", is_flag=True, help="Print the topology as JSON.")
@output_option("Write it as TOML, JSON (.json) or YAML (.yaml).")
def probe(ranks: int | None, measure: bool, validate: bool, per_rank: bool, as_json: bool, output: Path | None) -> int:
    """Find out what this machine consists of: cores, NUMA domains, caches, GPUs, network cards and links.

    Counts what this process may use: the cores of its cpuset, the GPUs that are visible. Nothing needs root. Inside
    mpirun or srun every machine of the job is probed, and what was found becomes one topology.

    \b
    Examples:
      fuelrun topology probe                            this machine
      fuelrun topology probe --measure -n 2             with the bandwidth and latency between two ranks
      fuelrun topology probe --validate -n 2            how near the predictions from these are to timings
      mpirun -n 64 fuelrun topology probe -o all.toml   the machines of a job

    With --measure a TOML file that is there already keeps all else, comments too, and gets the measured figures.
    """  # noqa: D301 (click wants the backspace itself)
    check_folder("--output", output)
    claim = environment.detect()
    inside = claim is not None and claim.parallel
    if not inside and not measure and not validate and (ranks or 1) == 1:
        from fuel_parallel.topology.probe import probe as probe_here
        from fuel_parallel.topology.text import emit

        emit(probe_here(ranks=1 if per_rank else None), as_json, output)
        _tell_quota()
        return 0
    words = [
        *(["--measure"] if measure else []),
        *(["--validate"] if validate else []),
        *(["--per-rank"] if per_rank else []),
    ]
    return on_ranks(PROBING, words, ranks, as_json, output=output)


def _tell_quota() -> None:
    """A container may run on all cores and yet get the time of two."""
    from fuel_parallel.topology.cgroup import quota
    from fuel_parallel.topology.sysfs import Sysfs

    granted, allowed = quota(Sysfs()), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if granted is not None and granted < allowed:
        click.echo(
            f"fuelrun: this process gets the time of {granted:g} of its {allowed} cores (cgroup quota)", err=True
        )


@topology.command(context_settings=SETTINGS, short_help="Show and draw a topology, or an example.")
@click.argument("file", metavar="FILE|-|EXAMPLE")
@picture_options(heat_map=True)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def show(file: str, svg: Path | None, png: Path | None, heat_map: Path | None, as_json: bool) -> None:
    """Show the devices and links of a FILE in any format, of standard input (-), or of an example that is shipped.

    \b
    Examples:
      fuelrun topology show cluster.toml
      nvidia-smi topo -m | fuelrun topology show -
      fuelrun topology show fat-tree
    """  # noqa: D301
    from fuel_parallel.topology.text import emit

    check_pictures(svg, png, heat_map)
    t = read(file)
    if draw(t, svg, png, heat_map) and not as_json:
        return
    if sys.stdout.isatty() and not as_json:
        from fuelrun.topology_tree import show as show_tree

        show_tree(t)
    else:
        emit(t, as_json, None)


@topology.command(context_settings=SETTINGS, short_help="Write a topology in another format.")
@click.argument("file", metavar="FILE|-|EXAMPLE")
@click.option(
    "--machine",
    metavar="FILE",
    help="Put this machine into each node of FILE: a network of SLURM, say, and what nvidia-smi says of one node.",
)
@click.option("--node", metavar="NAME", help="Only this machine of FILE.")
@click.option("--to", "name", default="native", metavar="FORMAT", help="The format [default: native].")
@output_option("Write it to a file.", metavar="OUT")
def convert(file: str, machine: str | None, node: str | None, name: str, output: Path | None) -> None:
    """Write the topology of a FILE in another format.

    \b
    Examples:
      fuelrun topology convert topology.conf --machine nvidia-smi.txt -o cluster.toml
      fuelrun topology convert cluster.toml --node n1 --to nccl -o nccl.xml

    The native format is TOML; toml, yaml and json, or the suffix of OUT, say in which language it is written.
    """  # noqa: D301
    from fuel_parallel.errors import ArgumentError
    from fuel_parallel.topology import files
    from fuel_parallel.topology.combine import machine_in, machine_of
    from fuel_parallel.topology.files import native

    check_folder("--output", output)
    t = read(file) if machine is None else machine_in(read(file), read(machine))
    t = t if node is None else machine_of(t, node)
    if name == "native" and output is not None:
        name = native.form_of(output.name)
    try:
        text = native.write(t, name) if name in native.FORMS else files.write(t, name)
    except ArgumentError as reason:
        raise click.UsageError(f"--to {name}: {reason}; and {', '.join(native.FORMS)} for the native one") from None
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as reason:
        raise click.UsageError(f"--output {output}: {reason.strerror}") from None
    click.echo(f"{t!r} written to {output}")


@topology.command(context_settings=SETTINGS, short_help="Say what is in files, and what looks wrong.")
@click.argument("names", nargs=-1, required=True, metavar="FILE...")
@click.option("--strict", is_flag=True, help="Exit with 1 when there are problems, too.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def check(names: tuple[str, ...], strict: bool, as_json: bool) -> int:
    """Say of each FILE which format it has, what is in it, and what looks wrong. Exits with 1 when one is refused."""
    found = [_checked(name) for name in names]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for one in found:
            click.echo("\n".join(_lines(one)))
    return int(any(one["error"] or (strict and one["problems"]) for one in found))


def _checked(name: str) -> dict[str, Any]:
    from fuel_parallel.errors import TopologyError
    from fuel_parallel.topology.problems import problems

    found: dict[str, Any] = {"file": name, "error": None, "format": None, "notes": [], "problems": []}
    try:
        reading = examine(name)
    except (TopologyError, click.UsageError) as reason:
        return found | {"error": str(reason)}
    t = reading.topology
    counts = {
        "machines": len(t.nodes) or 1,
        "devices": len(t),
        "numa": len(t.numa_domains),
        "nics": len(t.nics),
        "switches": len(t.switches),
        "links": sum(1 for _ in t.connections()),
    }
    about = {"format": reading.format.name, "counts": counts, "notes": list(reading.notes), "problems": problems(t)}
    return found | about


def _lines(one: dict[str, Any]) -> Iterator[str]:
    if one["error"]:
        place = f"{one['file']}: " if not one["error"].startswith(one["file"]) else ""
        yield f"refused: {place}{one['error']}"
        return
    counts = ", ".join(f"{number} {_WORDS[what][number != 1]}" for what, number in one["counts"].items() if number)
    yield f"{one['file']}: {one['format']}: {counts}"
    yield from (f"  note: {text}" for text in one["notes"])
    yield from (f"  problem: {text}" for text in one["problems"])


_WORDS = {
    "machines": ("machine", "machines"),
    "devices": ("device", "devices"),
    "numa": ("NUMA domain", "NUMA domains"),
    "nics": ("network card", "network cards"),
    "switches": ("switch", "switches"),
    "links": ("link", "links"),
}

topology.add_command(place)

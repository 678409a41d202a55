"""`fuelrun topology place`: which device each rank of a mesh gets. The group `topology` attaches this command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fuel_parallel.errors import FuelError
from fuelrun.pictures import check_pictures, draw, picture_options
from fuelrun.topology_input import read

if TYPE_CHECKING:
    from fuel_parallel.topology.mesh_axes import MeshAxis
    from fuel_parallel.topology.placement import Placement

HELP = """\b
Examples:
  fuelrun topology place cluster.toml --axis dp=2 --axis tp=4
  fuelrun topology place cluster.toml --axis dp=8:100MiB --axis pp=4:p2p:8MiB --axis tp=8:16MiB --within-node tp
  fuelrun topology place cluster.toml --axis dp=2 --axis tp=4 --rankfile > ranks

An axis is NAME=SIZE, and after colons what its ranks do (all_reduce, reduce_scatter, all_gather, broadcast, all_to_all,
p2p) and with how many bytes [all_reduce, 1MiB]. The last axis has its ranks next to each other.
"""


class Axis(click.ParamType[Any]):
    """NAME=SIZE[:COLLECTIVE][:BYTES]."""

    name = "axis"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> MeshAxis:
        """Say what was expected, and what came instead."""
        from fuel_parallel.topology.mesh_axes import MeshAxis, parse_axis

        if isinstance(value, MeshAxis):
            return value
        try:
            axis = parse_axis(value)
        except FuelError as reason:
            raise click.UsageError(str(reason)) from None
        if axis.size < 1:
            raise click.UsageError(f"--axis {value}: a placement needs the size of every axis")
        return axis


@click.command(
    epilog=HELP,
    short_help="Assign devices to the ranks of a mesh.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.argument("topology_file", metavar="FILE|-|EXAMPLE")
@click.option(
    "--axis", "axes", type=Axis(), multiple=True, required=True, metavar="AXIS", help="One axis, outermost first."
)
@click.option("--within-node", multiple=True, metavar="NAME", help="Keep the groups of this axis inside of machines.")
@click.option("--memory", "memory_gib", type=float, metavar="GIB", help="What each rank needs; others are left out.")
@click.option("--seed", type=int, default=0, metavar="N", help="Of the search [default: 0].")
@click.option("--rankfile", is_flag=True, help="Print a rankfile for Open MPI instead.")
@picture_options(heat_map=False)
@click.option("--json", "as_json", is_flag=True, help="Print the placement as JSON.")
def place(
    topology_file: str,
    axes: tuple[MeshAxis, ...],
    within_node: tuple[str, ...],
    memory_gib: float | None,
    seed: int,
    rankfile: bool,
    svg: Path | None,
    png: Path | None,
    as_json: bool,
) -> None:
    """Assign devices to the ranks of a mesh so that communication takes least time."""
    import msgspec

    from fuel_parallel.topology import placement

    names = [axis.name for axis in axes]
    strange = next((name for name in within_node if name not in names), None)
    if strange is not None:
        raise click.UsageError(f"--within-node {strange}: there is no such axis; the axes are {', '.join(names)}")
    kept = [msgspec.structs.replace(axis, within_node=axis.name in within_node) for axis in axes]
    memory = None if memory_gib is None else int(memory_gib * 2**30)
    check_pictures(svg, png)
    topology = read(topology_file)
    placed = placement.place(topology, kept, memory_bytes=memory, likely=True, seed=seed)
    draw(topology, svg, png, placement=placed)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(placed), indent=2).decode())
    elif rankfile:
        click.echo(placed.rankfile(), nl=False)
    else:
        _print(placed)


def _print(placed: Placement) -> None:
    click.echo(placed.why)
    for before, after in zip(placed.before, placed.after, strict=True):
        times = [f"{one.us:.1f} us" if one.us is not None else "unknown" for one in (before, after)]
        click.echo(f"{after.axis}: {times[0]} in the topology's order, {times[1]} placed ({after.algorithm})")
    width = max(map(len, placed.devices))
    for rank, device in enumerate(placed.devices):
        place_of = ", ".join(f"{name}={at}" for name, at in placed.coordinates(rank).items())
        click.echo(f"rank {rank:>5}  {device.ljust(width)}  {place_of}")

"""`fuelrun plan`: how to split a model over a machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fuelrun.option_types import output_option
from fuelrun.topology_input import read

if TYPE_CHECKING:
    from fuel_parallel.topology.planner import Plan

HELP = """\b
Examples:
  fuelrun plan --topology cluster.toml --model model.toml
  fuelrun plan --topology cluster.toml --model model.toml -o mesh.toml
  fuelrun plan --topology cluster.toml --model model.toml --tflops 312 --memory 80 --json

A model.toml has layers, hidden, heads, sequence, global_batch and vocabulary, and where they differ from a GPT's
kv_heads, ffn, gated, tied, dtype, optimizer, flash_attention and dropout.
"""

COLUMNS = ("dp", "pp", "tp", "micro", "chunks", "recompute", "sequence", "sharded", "s/step", "MFU", "GiB", "why")


@click.command(epilog=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--topology",
    "topology_file",
    required=True,
    metavar="FILE",
    help="The machines and their links: a file in any format, - or the name of an example.",
)
@click.option(
    "--model",
    "model_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    required=True,
    metavar="FILE",
    help="The model's shape and how it is trained, as TOML.",
)
@click.option(
    "--tflops", type=float, metavar="T", help="A device's peak in the model's dtype [default: as the topology says]."
)
@click.option(
    "--memory", "memory_gib", type=float, metavar="GIB", help="A device's memory in GiB [default: the topology's]."
)
@click.option("--best", type=click.IntRange(1, 1000), default=10, metavar="N", help="How many to show [default: 10].")
@output_option("Write the best mesh and strategy there, as TOML.")
@click.option("--json", "as_json", is_flag=True, help="Print the plans as JSON.")
def plan(
    topology_file: str,
    model_file: Path,
    tflops: float | None,
    memory_gib: float | None,
    best: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show the quickest ways to split a model over a machine.

    Every dp x pp x tp, micro-batch, interleaving and recomputation that fits into memory is timed by a model of the
    machine's links; nothing runs. Times are predictions, as good as the topology's figures.
    """
    import msgspec

    from fuel_parallel.topology import planner
    from fuel_parallel.topology.transformer import read_model

    memory = None if memory_gib is None else int(memory_gib * 2**30)
    topology, model = read(topology_file), read_model(model_file)
    plans = planner.plan(topology, model, best=best, tflops=tflops, memory_bytes=memory)
    if output is not None:
        try:
            output.write_text(plans[0].toml())
        except OSError as error:
            raise click.UsageError(f"-o {output}: {error.strerror}") from None
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(plans), indent=2).decode())
    else:
        _print(plans)


def _row(one: Plan) -> tuple[str, ...]:
    s = one.strategy
    flags = ("yes" if s.sequence_parallel else "no", "yes" if s.sharded_optimizer else "no")
    numbers = (str(s.dp), str(s.pp), str(s.tp), str(s.micro_batch), str(s.chunks))
    figures = (f"{one.step_us / 1e6:.3g}", f"{one.utilization:.0%}", f"{one.memory.total() / 2**30:.1f}")
    return (*numbers, s.recompute.value, *flags, *figures, one.why)


def _print(plans: list[Plan]) -> None:
    rows = [_row(one) for one in plans]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        grid = Table(*COLUMNS)
        for row in rows:
            grid.add_row(*row)
        Console().print(grid)
        return
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    for row in (COLUMNS, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

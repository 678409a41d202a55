"""`fuelrun schedule`: pipeline schedules, drawn, proven and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fuelrun.option_types import Count
from fuelrun.pictures import PICTURE, check_pictures
from fuelrun.schedule_costs import CostOptions, Source
from fuelrun.time_lines import as_data, console, print_rows, write_pictures

if TYPE_CHECKING:
    from fuel_parallel.pipeline_parallel import Schedule, Timeline

HELP = """\b
Examples:
  fuelrun schedule --kind zb-h1 --stages 4 --microbatches 8
  fuelrun schedule --kind interleaved-1f1b --stages 4 --microbatches 8 --virtual 2 --svg picture.svg
  fuelrun schedule --compare gpipe,1f1b,zb-h1 --stages 4 --microbatches 8 --message 0.1
  fuelrun schedule --kind 1f1b --stages 2 --microbatches 4 --lower --csv > mine.csv
  fuelrun schedule --check mine.csv
  fuelrun schedule --kind zb-h1 --stages 2 --microbatches 8 --costs out.json
  fuelrun schedule --kind 1f1b --stages 8 --microbatches 32 --topology nvswitch --flops 4e15 --activation-bytes 8e8

Kinds: gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipe-v, breadth-first, inference. Times are in units of
one forward of a stage, or of all stages of a rank with --compare; a backward takes two of them. With --costs and
--topology they are in ms.
"""


@click.command(epilog=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--kind", metavar="KIND", help="Which schedule [default: 1f1b].")
@click.option("--stages", type=Count("the depth of the pipeline"), metavar="N", help="Ranks of the pipeline.")
@click.option("--microbatches", type=Count("the micro-batches of a step"), metavar="N", help="Micro-batches of a step.")
@click.option("--virtual", type=Count("the stages of a rank"), metavar="N", help="Stages that each rank holds.")
@click.option("--message", type=float, metavar="T", help="What a message takes, in forwards [default: 0].")
@click.option(
    "--costs",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="TRACE",
    help="Costs of actions as a trace of a pipeline has them, for as many stages and micro-batches as large.",
)
@click.option(
    "--topology", metavar="FILE", help="Costs on these machines: a file in any format, or the name of an example."
)
@click.option("--flops", type=float, metavar="N", help="With --topology: of a forward of the batch by the whole model.")
@click.option(
    "--activation-bytes", type=float, metavar="N", help="With --topology: what passes between stages for the batch."
)
@click.option(
    "--tflops", type=float, metavar="T", help="With --topology: a device's peak [default: as the topology says]."
)
@click.option(
    "--lower", "lowered", is_flag=True, help="With sends, receives and reductions; messages block both ranks."
)
@click.option(
    "--check",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Prove a schedule of your own, a CSV with a row for each rank, and show it.",
)
@click.option("--compare", metavar="KINDS", help="Compare kinds, with commas between them, as a table.")
@click.option("--svg", type=PICTURE, metavar="FILE", help="Draw the time line as SVG.")
@click.option("--png", type=PICTURE, metavar="FILE", help="Draw the time line as PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print actions and times as JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the schedule as CSV, as --check reads it.")
def schedule(
    kind: str | None,
    stages: int | None,
    microbatches: int | None,
    virtual: int | None,
    message: float | None,
    costs: Path | None,
    topology: str | None,
    flops: float | None,
    activation_bytes: float | None,
    tflops: float | None,
    lowered: bool,
    file: Path | None,
    compare: str | None,
    svg: Path | None,
    png: Path | None,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Show when each rank of a pipeline does what; prove a schedule of your own; compare several."""
    from fuel_parallel.pipeline_parallel import build, check, lower, read_csv

    check_pictures(svg, png)
    source = CostOptions(message, costs, topology, flops, activation_bytes, tflops).source
    chosen = [name for name, given in (("--kind", kind), ("--check", file), ("--compare", compare)) if given]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} exclude each other; give one of them")
    if file is None and (stages is None or microbatches is None):
        raise click.UsageError("--stages and --microbatches are needed, as in --kind 1f1b --stages 4 --microbatches 8")
    if file is not None and (stages, microbatches, virtual) != (None, None, None):
        raise click.UsageError(
            "--check: stages and micro-batches are those of the file; leave out the options for them"
        )
    if compare is not None:
        if svg or png or as_csv:
            raise click.UsageError("--compare makes a table or JSON; draw and write one kind at a time")
        _compare(compare.split(","), stages or 1, microbatches or 1, virtual, source(), lowered, as_json)
        return
    if file is not None:
        shown = read_csv(file)
        check(shown)
    else:
        shown = build(kind or "1f1b", stages or 1, microbatches or 1, virtual)
    chosen_source = source()
    timeline = chosen_source.timeline(shown, lowered)
    shown = lower(shown) if lowered else shown
    write_pictures(shown, {"": timeline}, svg, png, chosen_source.unit)
    if as_json:
        click.echo(_json(shown, timeline, chosen_source.unit))
    elif as_csv:
        from fuel_parallel.pipeline_parallel import to_csv

        click.echo(to_csv(shown), nl=False)
    else:
        _print(shown, timeline, chosen_source.unit, checked=file is not None)


def _json(shown: Schedule, timeline: Timeline, unit: str) -> str:
    import msgspec

    found = {
        "name": shown.name,
        "microbatches": shown.num_microbatches,
        "placement": shown.placement,
        "unit": unit or "forward",
        "activations_held": shown.held(),
        **as_data(timeline),
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def _print(shown: Schedule, timeline: Timeline, unit: str, checked: bool) -> None:
    """The time line, in pieces as wide as the terminal, and what it comes to."""
    to = console()
    print_rows(to, shown, timeline)
    behind = f" {unit}" if unit else ""
    proven = "can run; " if checked else ""
    to.print(
        f"{shown.name}: {proven}time {timeline.total:g}{behind}, bubble {timeline.bubble_ratio():.1%} "
        f"({timeline.bubble_ratio_of_span():.1%} from first to last action of a rank), "
        f"activations held {', '.join(map(str, shown.held()))}"
    )


def _compare(
    kinds: list[str], stages: int, count: int, virtual: int | None, source: Source, lowered: bool, as_json: bool
) -> None:
    from fuel_parallel.pipeline_parallel import build
    from fuel_parallel.pipeline_parallel.builders import kind_of, virtual_stages_of

    found = []
    for kind in kinds:
        free = virtual_stages_of(kind_of(kind.strip()))[1]
        built = build(kind.strip(), stages, count, virtual if free else None)
        timeline = source.timeline_to_compare(built, lowered)
        ratios = timeline.bubble_ratio(), timeline.bubble_ratio_of_span()
        found.append((built.name, built.num_stages // stages, timeline.total, *ratios, max(timeline.peak_memory)))
    time = f"time, {source.unit}" if source.unit else "time"
    columns = ("kind", "stages a rank", time, "bubble", "within a rank", "activations")
    if as_json:
        import msgspec

        keys = ("kind", "stages_a_rank", "total", "bubble_ratio", "bubble_ratio_of_span", "peak_activations")
        rows = [dict(zip(keys, row, strict=True)) for row in found]
        click.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column == "kind" else "right", no_wrap=True)
    for name, per_rank, total, bubble, within, peak in found:
        table.add_row(name, str(per_rank), f"{total:g}", f"{bubble:.1%}", f"{within:.1%}", f"{peak:g}")
    console().print(table)

"""`fuelrun trace`: what a trace says, in a few tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fuelrun.pictures import PICTURE, check_pictures
from fuelrun.pipeline_trace import show_pipeline

if TYPE_CHECKING:
    from rich.table import Table

    from fuelrun.launch.traces import Summary


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--svg", type=click.Path(path_type=Path), help="Draw the last step into this file, too.")
@click.option("--top", type=click.IntRange(min=1), default=15, help="Kernels to show [default: 15].")
@click.option(
    "--pipeline", is_flag=True, help="Show the time line of a pipeline's step instead, and how it was predicted."
)
@click.option("--png", type=PICTURE, metavar="FILE", help="With --pipeline: draw both time lines as PNG; --svg as SVG.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="With --pipeline: this step, not medians of all.")
@click.option(
    "--replica", type=click.IntRange(min=0), metavar="N", help="With --pipeline: which one, if several [default: 0]."
)
@click.option(
    "--costs", type=PICTURE, metavar="TRACE", help="With --pipeline: predict with costs of this other trace [FILE's]."
)
@click.argument("file", type=click.Path(path_type=Path))
def trace(
    as_json: bool,
    svg: Path | None,
    top: int,
    pipeline: bool,
    png: Path | None,
    step: int | None,
    replica: int | None,
    costs: Path | None,
    file: Path,
) -> int:
    """Sum up FILE, a trace that `fuelrun --trace FILE` wrote.

    Perfetto (ui.perfetto.dev) and chrome://tracing show the trace itself. Where mpirun or srun started the ranks, each
    has left FILE.rank-R.json: this command puts them together.

    With --pipeline, two time lines of a step are drawn: as the schedule's simulation predicts it with the median costs
    of its actions, and as it ran; below, where they differ.
    """
    from fuelrun.launch.traces import gather, read, summarize

    if not file.exists() and gather(file):
        click.echo(f"fuelrun: put the files of the ranks together in {file}", err=True)
    if pipeline:
        check_pictures(svg, png)
        show_pipeline(file, as_json, svg, png, step, replica, costs)
        return 0
    given = {"--png": png, "--step": step, "--replica": replica, "--costs": costs}
    wrong = next((name for name, value in given.items() if value is not None), None)
    if wrong:
        raise click.UsageError(f"{wrong} goes with --pipeline")
    found = read(file)
    summary = summarize(found)
    if svg:
        from fuelrun.launch.trace_picture import draw

        try:
            svg.write_text(draw(found))
        except OSError as reason:
            raise click.UsageError(f"--svg {svg}: {reason.strerror}") from None
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(summary), indent=2))
        return 0

    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 110
    for table in (_ranks(summary), _ops(summary, top), _collectives(summary)):
        if table.row_count:
            console.print(table)
            console.print()
    for line in _remarks(summary):
        console.print(line)
    return 0


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), min_width=40)
    for column in columns:
        table.add_column(column, justify="left" if column in ("op", "collective", "on") else "right", no_wrap=True)
    return table


def _ranks(summary: Summary) -> Table:
    columns = ("total", "GEMM", "share", "GFLOP/s", "other kernels", "exposed", "hidden", "waits", "runtime", "script")
    table = _table("Where the time went, in ms; communication exposed and hidden", "rank", *columns)
    for r in summary.ranks:
        rate = f"{r.gflop_s:.1f}" if r.gflop_s else ""
        times = (r.kernel_ms - r.gemm_ms, r.exposed_ms, r.hidden_ms, r.wait_ms, r.runtime_ms, r.script_ms)
        table.add_row(
            str(r.rank),
            f"{r.total_ms:.1f}",
            f"{r.gemm_ms:.1f}",
            f"{r.gemm_share:.0%}",
            rate,
            *(f"{ms:.1f}" for ms in times),
        )
    return table


def _ops(summary: Summary, top: int) -> Table:
    table = _table("Kernels, all ranks", "ms", "share", "runs", "GFLOP/s", "op")
    for op in summary.ops[:top]:
        rate = f"{op.gflop_s:.1f}" if op.gflop_s else ""
        table.add_row(f"{op.ms:.2f}", f"{op.share:.1%}", str(op.runs), rate, op.name)
    rest = summary.ops[top:]
    if rest:
        share = f"{sum(op.share for op in rest):.1%}"
        runs = str(sum(op.runs for op in rest))
        table.add_row(f"{sum(op.ms for op in rest):.2f}", share, runs, "", f"{len(rest)} more")
    return table


def _collectives(summary: Summary) -> Table:
    table = _table("Collectives, all ranks", "ms", "of it waiting", "runs", "MiB", "collective", "on")
    for c in summary.collectives:
        table.add_row(f"{c.ms:.2f}", f"{c.wait_ms:.2f}", str(c.runs), f"{c.mib:.2f}", c.name, c.comm)
    return table


def _remarks(summary: Summary) -> list[str]:
    results = max((r.peak_live_mib for r in summary.ranks), default=0.0)
    resident = max((r.resident_mib for r in summary.ranks), default=0.0)
    lines = [f"Memory of the rank that took most: results {results:.1f} MiB, the process {resident:.1f} MiB."]
    if summary.slowest_rank is not None:
        caused = next((r.caused_wait_ms for r in summary.ranks if r.rank == summary.slowest_rank), 0.0)
        lines.append(f"Slowest rank: {summary.slowest_rank}; the others waited {caused:.1f} ms for it.")
    if summary.clock_accuracy_us:
        lines.append(f"Clocks of different hosts agree to {summary.clock_accuracy_us:.0f} us.")
    if summary.missing:
        lines.append(
            f"No trace of rank {', '.join(map(str, summary.missing))}: it was killed, or never realized anything."
        )
    for r in summary.ranks:
        if r.dropped:
            lines.append(f"Rank {r.rank} noted no more after its limit; {r.dropped} steps are missing at its end.")
    return lines

"""`fuelrun status [JOBID]…`: jobs of SLURM."""

from __future__ import annotations

import sys

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print as JSON, a list of jobs.")
@click.argument("ids", nargs=-1, metavar="[JOBID]...")
def status(as_json: bool, ids: tuple[str, ...]) -> int:
    """Show jobs of SLURM: yours that wait or run, or those named, also when they have ended.

    A table on a terminal; elsewhere a line for each job with its id, state, exit status, elapsed time, limit, nodes,
    restarts and name, parted by tabs.
    """
    from fuelrun.launch import jobs

    found = jobs.named(ids) if ids else jobs.of_user()
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
        return 0
    rows = [
        (
            job.id,
            job.state,
            "" if job.exit_code is None else str(job.exit_code),
            job.elapsed,
            job.limit,
            job.node_list or (f"{job.nodes} ({job.reason})" if job.reason else job.nodes),
            str(job.restarts or ""),
            job.name,
        )
        for job in found
    ]
    if not sys.stdout.isatty():
        for row in rows:
            click.echo("\t".join(row))
        return 0
    if not rows:
        click.echo("You have no jobs that wait or run.")
        return 0

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("job", "state", "exit", "elapsed", "limit", "nodes", "restarts", "name"):
        table.add_column(title)
    for row in rows:
        state = {"RUNNING": "green", "FAILED": "red", "TIMEOUT": "red", "NODE_FAIL": "red"}.get(row[1], "")
        table.add_row(row[0], Text(row[1], style=state), *(Text(text) for text in row[2:]))
    Console(highlight=False).print(table)
    return 0

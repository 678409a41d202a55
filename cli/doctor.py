"""`fuelrun doctor`: is everything as it should be, and if not, how to mend it."""

from __future__ import annotations

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--no-launch", is_flag=True, help="Do not start two ranks for a try.")
def doctor(as_json: bool, no_launch: bool) -> int:
    """Check Python, MPI, launcher and devices, and say how to mend what is wrong.

    The exit status is 0 when ranks can be started, 1 when something is wrong.
    """
    from fuelrun.launch.checkup import examine

    findings = list(examine(launch=not no_launch))
    healthy = all(finding.ok for finding in findings)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode({"ok": healthy, "findings": findings}), indent=2))
        return 0 if healthy else 1

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = "" if finding.ok else "WRONG: "
        table.add_row(finding.name, Text(f"{mark}{finding.value}", style="" if finding.ok else "red"))
        if finding.remedy:
            table.add_row("", Text(f"-> {finding.remedy}", style="yellow"))
    console = Console(highlight=False)
    console.print(table)
    console.print("All is well." if healthy else "Something is wrong: see WRONG above.")
    return 0 if healthy else 1

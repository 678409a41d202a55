"""`fuelrun doctor`: is everything as it should be, and if not, how to mend it."""

from __future__ import annotations

import click

from fuelrun import machine_options


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--no-launch", is_flag=True, help="Do not start two ranks for a try.")
@machine_options.machine_options
def doctor(
    as_json: bool,
    no_launch: bool,
    host: str | None,
    hostfile: str | None,
    interface: str | None,
    launch_agent: str | None,
) -> int:
    """Check Python, MPI, launcher and devices, and say how to mend what is wrong.

    With -H or --hostfile, the way to other machines is shown, and whether each has what a rank needs. The exit status
    is 0 when ranks can be started, 1 when something is wrong.
    """
    from fuelrun.launch.checkup import examine
    from fuelrun.launch.machines_checkup import examine_interfaces, examine_machines

    wish = machine_options.wish(None, None, None, host, hostfile)
    findings = [*examine(launch=not no_launch), examine_interfaces()]
    if wish is not None:
        findings += examine_machines(wish.hosts, interface or "", launch_agent)
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

"""The `fuelrun` command: a group of commands of which `run` needs no name.

    fuelrun -n 2 train.py        # run
    fuelrun doctor               # a command
    fuelrun ./doctor             # a script again

To add a command is to write it in a file of its own and to name it in `COMMANDS`; it is imported when it is used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from fuel_parallel.errors import FuelError
from fuel_parallel.version import __version__

COMMANDS = {
    "run": "Run a script on N ranks (the default: the word `run` can be left out).",
    "sbatch": "Write a batch script for SLURM, or submit it.",
    "status": "Show jobs of SLURM: yours, or those named.",
    "logs": "Show the output of a job of SLURM, and follow it.",
    "trace": "Sum up a trace that `fuelrun --trace FILE` wrote.",
    "plan": "Show the quickest ways to split a model over a machine.",
    "schedule": "Show, check and compare pipeline schedules.",
    "bench": "Measure collectives on this machine; --tune keeps what is faster.",
    "topology": "Find out and show which devices there are, and how they are linked.",
    "doctor": "Check Python, MPI, launcher and devices, and say how to mend what is wrong.",
}

COMPLETE = "_FUELRUN_COMPLETE"
"""Set by the shell's completion; `docs/launching.md` says how to switch it on."""

_EXAMPLES = """\
Examples:
  fuelrun train.py                   one rank, in this process; no MPI needed
  fuelrun -n 4 train.py --lr 0.1     four ranks; what follows the script is the script's
  fuelrun -n 4 -m package.train      a module instead of a script
  fuelrun -H a:4,b:4 train.py        four on each of two machines; in a SLURM job none need be named
  mpirun -n 64 fuelrun train.py      already inside MPI (or srun): becomes the rank
  fuelrun -n 4 --dry-run train.py    only show the command line
  fuelrun doctor                     is everything as it should be?
"""


class FuelGroup(click.Group):
    """A group whose command `run` is meant when no command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module and return it."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"fuelrun.{cmd_name}"), cmd_name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """What is neither a command nor an option of the group belongs to `run`."""
        if args and args[0] not in {*COMMANDS, "--help", "-h", "--version"}:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands, and what `run` completes: its options, or the script."""
        found = super().shell_complete(ctx, incomplete)
        run = self.get_command(ctx, "run")
        if run is not None and incomplete.startswith("-"):
            found += run.shell_complete(click.Context(run, parent=ctx), incomplete)
        elif run is not None:
            found.append(CompletionItem(incomplete, type="file"))
        return found

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Both forms."""
        formatter.write_usage("fuelrun", "[OPTIONS] SCRIPT [ARGS]...")
        formatter.write_usage("fuelrun", "COMMAND [ARGS]...", prefix="       ")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples first, then the options of `run`, then the commands."""
        formatter.write_paragraph()
        formatter.write(_EXAMPLES)
        run = self.get_command(ctx, "run")
        options = [option for option in run.get_params(ctx) if isinstance(option, click.Option)] if run else []
        rows = [row for option in options if (row := option.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl([*rows[:-1], ("--version", "Show the version and exit."), *rows[-1:]])
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=FuelGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    no_args_is_help=False,
)
@click.version_option(__version__, prog_name="fuelrun", message="%(prog)s %(version)s")
def fuelrun() -> None:
    """Run a Python script on N ranks, from a laptop to a cluster."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry of the console script. A user's mistake is one line on standard error and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if not arguments and COMPLETE not in os.environ:
            raise click.UsageError("no script given: fuelrun -n 2 train.py (`fuelrun --help` shows more)")
        result = fuelrun.main(args=arguments, prog_name="fuelrun", standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message())
    except FuelError as error:
        _fail(str(error))
    except click.Abort:
        sys.exit(130)
    sys.exit(result if isinstance(result, int) else 0)


def _fail(message: str) -> NoReturn:
    click.echo(f"fuelrun: {' '.join(message.split())}", err=True)
    sys.exit(2)

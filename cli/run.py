"""`fuelrun [-n N] SCRIPT ARGS…`: start N ranks, or become one."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import click

from fuel_parallel import environment
from fuel_parallel.environment import LauncherClaim
from fuel_parallel.errors import ArgumentError, FuelError, LaunchError
from fuelrun.launch.rank import LOG_DIR, TIMEOUT, TRACE
from fuelrun.launch.script import Script


class Count(click.ParamType[int]):
    """A whole number of at least one."""

    name = "count"

    def __init__(self, what: str) -> None:
        self.what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Say what was expected, and what came instead."""
        if str(value).isascii() and str(value).isdigit() and int(value) > 0:
            return int(value)
        option = param.opts[0] if param else ""
        raise click.UsageError(f"{option} takes {self.what}, a whole number of at least 1; got '{value}'")


class Threads(click.ParamType[str]):
    """A whole number of at least one, or auto."""

    name = "threads"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Say what was expected, and what came instead."""
        return "auto" if value == "auto" else str(Count("auto, or the threads of a rank").convert(value, param, ctx))


class Seconds(click.ParamType[float]):
    """A time of zero or more."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Say what was expected, and what came instead."""
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < float("inf"):
            raise click.UsageError(f"{param.opts[0] if param else ''} takes seconds, 0 or more; got '{value}'")
        return seconds


class RunCommand(click.Command):
    """`run`, whose own options end at the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Turn the argument that click misses into a sentence that helps."""
        kind, example = ("module", "-m package.train") if "-m" in args else ("script", "train.py")
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter:
            raise click.UsageError(f"no {kind} given: fuelrun -n 2 {example} (`fuelrun --help` shows more)") from None


@click.command(
    cls=RunCommand,
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
    options_metavar="[OPTIONS]",
)
@click.option("-n", "--ranks", type=Count("the number of ranks"), metavar="N", help="Number of ranks to start.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`.")
@click.option(
    "--threads", type=Threads(), metavar="K|auto", help="Threads of a rank; auto: its share of the cores [default: 1]."
)
@click.option(
    "--bind",
    metavar="auto|none|CORES",
    help="Cores of a rank: a share of the machine's, any, or lists by local rank such as 0-3:4-7 [default: auto].",
)
@click.option(
    "--mesh", metavar="AXES", help="Axes for fp.Mesh.from_environment(), outermost first: dp=2,tp=4; -1: what is left."
)
@click.option(
    "--topology",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Give each rank the device, cores and network card that fit the mesh best; see `fuelrun topology`.",
)
@click.option("--tag-output", is_flag=True, help="Put [rank/N] before every line of output.")
@click.option("--trace", metavar="FILE", help="Write what every rank did when, for `fuelrun trace` and Perfetto.")
@click.option("--dry-run", is_flag=True, help="Show the command line and start nothing.")
@click.option(
    "--grace", type=Seconds(), default=5.0, metavar="S", help="Seconds for the script after Ctrl-C [default: 5]."
)
@click.option(
    "--timeout", type=Seconds(), metavar="S", help="Seconds that a collective may wait; 0: for ever [default: 300]."
)
@click.option("--log-dir", metavar="DIR", help="Where the stacks of a job that is stuck go [default: fuelrun-logs].")
@click.option("--mpirun", metavar="PATH", help="The mpirun to use [default: the one of the MPI that mpi4py loads].")
@click.option("--mpi-args", multiple=True, metavar="ARGS", help="Options for mpirun itself, quoted; may be repeated.")
@click.option("-q", "--quiet", is_flag=True, help="No notes, only errors.")
@click.option("-v", "--verbose", is_flag=True, help="Tell what is done, and show mpirun's own messages.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int | None,
    module: bool,
    threads: str | None,
    bind: str | None,
    mesh: str | None,
    topology: str | None,
    tag_output: bool,
    trace: str | None,
    dry_run: bool,
    grace: float,
    timeout: float | None,
    log_dir: str | None,
    mpirun: str | None,
    mpi_args: tuple[str, ...],
    quiet: bool,
    verbose: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT on N ranks. What follows SCRIPT belongs to the script.

    Without -n, one rank runs in this process; inside mpirun or srun, this process becomes its rank.
    """
    target = Script(script, arguments, module)
    claim = environment.detect()
    inside = claim is not None and claim.parallel
    if claim is not None and inside:
        _refuse_to_nest(claim, ranks)
    _check(target)
    trace_to = _prepare_trace(trace) if trace else None
    settings = (
        _settings(timeout, log_dir, trace_to) | _binding(bind) | _mesh(mesh, topology, None if inside else ranks or 1)
    )
    if inside or (ranks or 1) == 1:
        from fuelrun.launch.rank import become_rank, rank_command

        if dry_run:
            click.echo(shlex.join(rank_command(target, threads=threads, tag_output=tag_output, settings=settings)))
            return 0
        os.environ.update(settings)
        become_rank(target, threads=threads, tag_output=tag_output)

    from fuelrun.launch.find import find_engine
    from fuelrun.launch.plan import Options, make_plan
    from fuelrun.launch.supervise import supervise

    options = Options(
        threads=threads,
        tag_output=tag_output,
        settings=settings,
        mpi_arguments=tuple(word for words in mpi_args for word in shlex.split(words)),
        grace=grace,
        verbose=verbose,
        # Both: a rank that draws on the terminal prints there as well, and what is printed may belong into a file.
        terminal=shutil.get_terminal_size().columns if os.isatty(1) and os.isatty(2) else None,
    )
    plan = make_plan(find_engine(mpirun), target, ranks or 1, options)
    if dry_run:
        click.echo(plan.shell_line())
        return 0
    for note in (*(plan.notes if not quiet else ()), *(plan.details if verbose else ())):
        click.echo(f"fuelrun: {note}", err=True)
    if verbose:
        click.echo(f"fuelrun: {plan.shell_line()}", err=True)
    if trace_to:
        _remove_traces(trace_to)
    verdict = supervise(plan)
    for text in verdict.unexplained if not verbose else ():
        click.echo(text, err=True, nl=False)
    if verdict.message:
        click.echo(f"fuelrun: {verdict.message}", err=True)
    if trace_to:
        outcome = _gather_traces(trace_to, ranks or 1)
        if not quiet:
            click.echo(f"fuelrun: {outcome}", err=True)
    return verdict.code


def _binding(bind: str | None) -> dict[str, str]:
    if bind is None:
        return {}
    from fuelrun.launch.binding import BIND, cores_by_local_rank

    if bind not in ("auto", "none"):
        try:
            cores_by_local_rank(bind)
        except FuelError as reason:
            raise click.UsageError(str(reason).replace(f"{BIND}=", "--bind ", 1)) from None
    return {BIND: bind}


def _mesh(mesh: str | None, topology: str | None, ranks: int | None) -> dict[str, str]:
    """The settings of a mesh and a placement; where fuelrun starts the ranks, it finds out first whether they fit."""
    from fuel_parallel.topology.mesh_axes import MESH, filled, parse_axes
    from fuelrun.launch import placing

    settings = {}
    if mesh is not None:
        try:
            sizes = {axis.name: axis.size for axis in parse_axes(mesh)}
            if ranks is not None and math.prod(filled(sizes, ranks).values()) != ranks:
                raise ArgumentError(f"--mesh {mesh} has not as many ranks as -n {ranks}")
        except FuelError as reason:
            raise click.UsageError(str(reason)) from None
        settings[MESH] = mesh
    if topology is not None:
        settings[placing.TOPOLOGY] = os.path.abspath(topology)
        if ranks is not None:
            placing.check(settings[placing.TOPOLOGY], mesh, ranks)
    return settings


def _settings(timeout: float | None, log_dir: str | None, trace_to: Path | None) -> dict[str, str]:
    """What the library in each rank reads from its environment."""
    settings = {}
    if timeout is not None:
        settings[TIMEOUT] = f"{timeout:g}"
    if log_dir is not None:
        settings[LOG_DIR] = os.path.abspath(log_dir)
    if trace_to is not None:
        settings[TRACE] = str(trace_to)
    return settings


def _prepare_trace(name: str) -> Path:
    """Where the trace goes; a folder that is not there is found out before the job, not after it."""
    path = Path(name).absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise click.UsageError(f"--trace takes a file that can be written; {name} cannot")
    return path


def _remove_traces(path: Path) -> None:
    """What an earlier job left would be taken for this one's."""
    from fuelrun.launch.traces import rank_files

    for file in (path, *rank_files(path)):
        file.unlink(missing_ok=True)


def _gather_traces(path: Path, ranks: int) -> str:
    """One file of all ranks' files; returns what the user should know about it."""
    from fuelrun.launch.traces import gather

    found = gather(path)
    if not found:
        return f"no trace: no rank realized anything, or could write to {path.parent}"
    name = os.path.relpath(path)
    of = f"{ranks} ranks" if len(found) == ranks else f"{len(found)} of {ranks} ranks"
    return f"trace of {of} in {name}: `fuelrun trace {shlex.quote(name)}` sums it up, ui.perfetto.dev shows it"


def _refuse_to_nest(claim: LauncherClaim, ranks: int | None) -> None:
    """Ranks that each start N ranks are never what was meant."""
    if ranks is None or ranks == claim.world_size:
        return
    size = "" if claim.world_size is None else f" of {claim.world_size}"
    raise LaunchError(
        f"this is already rank {claim.rank}{size}, started by {claim.launcher}; -n {ranks} cannot start more ranks "
        "from inside one. Leave -n out to become this rank"
    )


def _check(target: Script) -> None:
    """Find mistakes before any rank is started."""
    try:
        target.check()
    except SyntaxError as error:
        click.echo("".join(traceback.format_exception_only(error)), err=True, nl=False)
        sys.exit(1)
    except LaunchError as error:
        if target.name == "doctor" and not target.module:
            raise LaunchError(f"{error}; the command is `fuelrun doctor`, without options before it") from None
        raise

"""`fuelrun [-n N] SCRIPT ARGS…`: start N ranks, or become one."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fuel_parallel import environment
from fuel_parallel.environment import LauncherClaim
from fuel_parallel.errors import LaunchError
from fuelrun import defaults, machine_options, settings
from fuelrun.launch.script import Script
from fuelrun.option_types import Count, Seconds, Threads, Words, ranks_option

if TYPE_CHECKING:
    from fuelrun.launch.plan import Plan


class RunCommand(click.Command):
    """`run`, whose own options end at the script, and may have defaults in files and variables."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Give the defaults to click."""
        return super().make_context(info_name, args, parent, default_map=defaults.from_files(self), **extra)

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
        "auto_envvar_prefix": defaults.PREFIX,
    },
    options_metavar="[OPTIONS]",
)
@ranks_option("Number of ranks to start.")
@machine_options.nodes_option
@machine_options.per_node_option
@machine_options.machine_options
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
    "--mesh",
    metavar="AXES",
    help="Axes for fp.Mesh.from_environment(): dp=-1,tp=4 (-1: what is left), or the FILE of `plan -o`.",
)
@click.option(
    "--topology",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Give each rank the device, cores and network card that fit the mesh best; see `fuelrun topology`.",
)
@click.option(
    "--env",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable for every rank, or pass on the one that is set here; may be repeated.",
)
@click.option("--tag-output", is_flag=True, help="Put [rank/N] before every line of output.")
@click.option("--trace", metavar="FILE", help="Write what every rank did when, for `fuelrun trace` and Perfetto.")
@click.option("--dry-run", is_flag=True, help="Show the command line and start nothing.")
@click.option(
    "--grace", type=Seconds(), default=5.0, metavar="S", help="Seconds for the script after Ctrl-C [default: 5]."
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="K",
    help="Start the job again, up to K times, when it died after its first step [default: 0].",
)
@click.option(
    "--min-np",
    type=Count("the least number of ranks"),
    metavar="M",
    help="Start again with fewer ranks, at least M, when a machine is gone.",
)
@click.option(
    "--timeout", type=Seconds(), metavar="S", help="Seconds that a collective may wait; 0: for ever [default: 300]."
)
@click.option(
    "--log-dir", metavar="DIR", help="Keep what each rank prints in DIR/rank-R.log, and all of it in DIR/merged.log."
)
@machine_options.engine_option
@click.option("--mpirun", metavar="PATH", help="The mpirun to use [default: the one of the MPI that mpi4py loads].")
@click.option(
    "--mpi-args",
    multiple=True,
    type=Words(),
    metavar="ARGS",
    help="Options for mpirun itself, quoted; may be repeated.",
)
@click.option("-q", "--quiet", is_flag=True, help="No notes, only errors.")
@click.option("-v", "--verbose", is_flag=True, help="Tell what is done, and show mpirun's own messages.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int | None,
    nnodes: int | None,
    ppn: int | None,
    host: str | None,
    hostfile: str | None,
    interface: str | None,
    launch_agent: str | None,
    module: bool,
    threads: str | None,
    bind: str | None,
    mesh: str | None,
    topology: str | None,
    variables: tuple[str, ...],
    tag_output: bool,
    trace: str | None,
    dry_run: bool,
    grace: float,
    max_restarts: int,
    min_np: int | None,
    timeout: float | None,
    log_dir: str | None,
    engine: str,
    mpirun: str | None,
    mpi_args: tuple[tuple[str, ...], ...],
    quiet: bool,
    verbose: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT on N ranks. What follows SCRIPT belongs to the script.

    Without -n, one rank runs in this process; inside mpirun or srun, this process becomes its rank. With -H or
    --hostfile, ranks run on other machines as well; in a SLURM job, on its nodes, as many as it has tasks.
    """
    target = Script(script, arguments, module)
    claim = environment.detect()
    inside = claim is not None and claim.parallel
    context = click.get_current_context()
    if claim is not None and inside:
        said = context.get_parameter_source("ranks") is ParameterSource.COMMANDLINE
        _refuse_to_nest(claim, ranks if said else None)
    for name in defaults.strange_variables(context.command) if not quiet else ():
        click.echo(f"fuelrun: {name} is set, but there is no such option; see fuelrun --help", err=True)
    _check(target)
    job = None
    if not inside and "SLURM_JOB_ID" in os.environ and host is None and hostfile is None:
        from fuelrun import slurm_job

        job = slurm_job.around_us(quiet)
    if engine == "srun" and job is None and not inside:
        raise LaunchError(
            "--engine srun starts ranks in a SLURM job, and this is none: `salloc --nodes 2` makes one, and "
            "`fuelrun sbatch` a batch job"
        )
    wish = machines = None
    if job is not None:
        job, ranks = slurm_job.with_numbers(job, ranks, nnodes, ppn, context)
    elif not inside:
        wish = machine_options.wish(ranks, nnodes, ppn, host, hostfile)
    if wish is not None:
        ranks, machines = machine_options.prepare(wish, target, interface=interface, launch_agent=launch_agent)
    trace_to = _prepare_trace(trace) if trace else None
    of_ranks = {
        **settings.of_variables(variables),
        **settings.of_watching(timeout, log_dir, trace_to),
        **settings.of_binding(bind),
        **settings.of_mesh(mesh, topology, None if inside else ranks or 1),
    }
    elsewhere = machines is not None or (job is not None and not job.holds_this_machine(os.environ))
    if inside or ((ranks or 1) == 1 and not elsewhere and not max_restarts):
        from fuelrun.launch.rank import become_rank, rank_command

        if dry_run:
            click.echo(shlex.join(rank_command(target, threads=threads, tag_output=tag_output, settings=of_ranks)))
            return 0
        os.environ.update(of_ranks)
        become_rank(target, threads=threads, tag_output=tag_output)

    from fuelrun.launch.find import find_engine
    from fuelrun.launch.plan import Options, make_plan
    from fuelrun.launch.restart import run_with_restarts

    options = Options(
        threads=threads,
        tag_output=tag_output,
        settings=of_ranks,
        mpi_arguments=tuple(word for words in mpi_args for word in words),
        grace=grace,
        verbose=verbose,
        # Both: a rank that draws on the terminal prints there as well, and what is printed may belong into a file.
        terminal=shutil.get_terminal_size().columns if os.isatty(1) and os.isatty(2) else None,
    )
    if job is None:
        found, reason = find_engine(mpirun, engine), ""
    else:
        job = slurm_job.reachable(job, interface)
        found, reason = slurm_job.engine(job, mpirun, engine)
    plan = make_plan(found, target, ranks or 1, options, machines, job)
    if dry_run:
        click.echo(plan.shell_line())
        return 0
    details = (*plan.details, reason) if reason else plan.details
    for note in (*(plan.notes if not quiet else ()), *(details if verbose else ())):
        click.echo(f"fuelrun: {note}", err=True)
    if verbose:
        click.echo(f"fuelrun: {plan.shell_line()}", err=True)
    if trace_to:
        _remove_traces(trace_to)

    def planner(before: Plan, lost: Collection[int]) -> Plan:
        """Without the machines of the ranks that are lost, if fewer ranks will do."""
        nonlocal wish, machines
        if not lost or wish is None or machines is None or min_np is None:
            return before
        wish = wish.without({machines.host_of(rank).name for rank in lost}, min_np)
        fewer, machines = machine_options.prepare(wish, target, interface=interface, launch_agent=launch_agent)
        return make_plan(found, target, fewer, options, machines)

    verdict = run_with_restarts(planner, plan, max_restarts, lambda line: click.echo(f"fuelrun: {line}", err=True))
    for text in verdict.unexplained if not verbose else ():
        click.echo(text, err=True, nl=False)
    if verdict.message:
        click.echo(f"fuelrun: {verdict.message}", err=True)
    if trace_to:
        outcome = _gather_traces(trace_to, ranks or 1)
        if not quiet:
            click.echo(f"fuelrun: {outcome}", err=True)
    if job is not None and verdict.code:
        slurm_job.requeue(job, verdict.code)
    return verdict.code


def _prepare_trace(name: str) -> Path:
    """Where the trace goes; a folder that is not there is found out before the job, not after it."""
    from fuelrun.launch.traces import is_replaceable

    path = Path(name).absolute()
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise click.UsageError(f"--trace takes a file that can be written; {name} cannot")
    if not is_replaceable(path):
        raise click.UsageError(
            f"--trace takes a file for the trace; {name} is there and holds no trace, so it is left alone: "
            "choose another name, or remove it"
        )
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
        import difflib  # not at every start

        from fuelrun.main import COMMANDS

        command = next(iter(difflib.get_close_matches(target.name, COMMANDS, n=1, cutoff=0.7)), "")
        if command and not target.module and not Path(target.name).exists():
            raise LaunchError(f"{error}; the command is `fuelrun {command}`, without options before it") from None
        raise

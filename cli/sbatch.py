"""`fuelrun sbatch SCRIPT ARGS…`: write a batch script for SLURM, or submit it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from fuel_parallel.errors import LaunchError
from fuelrun import settings
from fuelrun.launch.batch_script import BatchScript, job_name, log_file
from fuelrun.launch.script import Script
from fuelrun.option_types import Count, Words

_PLAIN = ("partition", "account", "qos", "constraint")


@click.command(
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
    options_metavar="[OPTIONS]",
)
@click.option("-N", "--nodes", type=Count("the number of nodes"), default="1", metavar="N", help="Nodes [default: 1].")
@click.option(
    "--ntasks-per-node",
    "--ppn",
    "per_node",
    type=Count("the ranks of a node"),
    metavar="N",
    help="Ranks on each node [default: one a GPU, else 1].",
)
@click.option("--gpus-per-node", metavar="[TYPE:]N", help="GPUs of each node; every rank of the node sees all.")
@click.option("-c", "--cpus-per-task", type=Count("the cores of a rank"), metavar="N", help="Cores of a rank.")
@click.option("-t", "--time", "time_limit", metavar="TIME", help="Time limit: minutes, 2:00:00, 1-12:00.")
@click.option("-p", "--partition", metavar="NAME", help="Partition (queue).")
@click.option("-A", "--account", metavar="NAME", help="Account to charge.")
@click.option("-q", "--qos", metavar="NAME", help="Quality of service.")
@click.option("-C", "--constraint", metavar="EXPR", help="Features that the nodes must have.")
@click.option("-a", "--array", metavar="LIST", help="A job for each of 0-9, say; the script reads SLURM_ARRAY_TASK_ID.")
@click.option("-J", "--job-name", "name", metavar="NAME", help="Name of the job [default: the script's].")
@click.option("--log-dir", metavar="DIR", help="Where NAME-JOBID.log goes [default: the working folder].")
@click.option(
    "--signal-before",
    type=Count("seconds"),
    metavar="S",
    help="Send SIGUSR1 to every rank so many seconds before the time limit (without a handler it ends them).",
)
@click.option("--requeue", is_flag=True, help="Start the job again when it was preempted or its node failed.")
@click.option("--activate", metavar="ENV", help="Virtual or conda environment [default: the Python of this fuelrun].")
@click.option("--module", "modules", multiple=True, metavar="NAME", help="Load an environment module; may be repeated.")
@click.option("--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="Set a variable; may be repeated.")
@click.option(
    "--run-args",
    type=Words(),
    default="",
    metavar="ARGS",
    help="Options of `fuelrun run`, quoted: '--mesh dp=2,tp=4'.",
)
@click.option("--sbatch-args", type=Words(), default="", metavar="ARGS", help="Other options of sbatch, quoted.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as in `python -m`.")
@click.option("--submit/--print", default=False, help="Submit, and print the job's id; or only print [default].")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def sbatch(
    nodes: int,
    per_node: int | None,
    gpus_per_node: str | None,
    cpus_per_task: int | None,
    time_limit: str | None,
    array: str | None,
    name: str | None,
    log_dir: str | None,
    signal_before: int | None,
    requeue: bool,
    activate: str | None,
    modules: tuple[str, ...],
    variables: tuple[str, ...],
    run_args: tuple[str, ...],
    sbatch_args: tuple[str, ...],
    module: bool,
    submit: bool,
    script: str,
    arguments: tuple[str, ...],
    **plain: str | None,
) -> int:
    """Write a batch script that runs SCRIPT on the ranks of a SLURM job. What follows SCRIPT belongs to the script.

    The text goes to standard output, to be kept, changed and given to sbatch; with --submit, it is submitted.
    """
    target = Script(script, arguments, module)
    _check(target)
    name = name if name is not None else job_name(script.rpartition(".")[2] if module else script)
    directives = {
        "job-name": name,
        **{option: value for option in _PLAIN if (value := plain[option])},
        "nodes": str(nodes),
        "ntasks-per-node": str(per_node or _ranks_of(gpus_per_node)),
        "cpus-per-task": str(cpus_per_task or ""),
        "gpus-per-node": gpus_per_node or "",
        "time": time_limit or "",
        "array": array or "",
        "output": log_file(log_dir or "", name, array=bool(array)),
        "open-mode": "append",  # a job that starts again goes on in its file
        "signal": f"B:USR1@{signal_before}" if signal_before else "",
    }
    options = [(option, value) for option, value in directives.items() if value]
    text = BatchScript(
        command=(
            "python" if activate else sys.executable,
            "-m",
            "fuelrun",
            *run_args,
            *target.command(),
        ),
        directives=(*options, *((("requeue", ""),) if requeue else ())),
        folder=os.getcwd(),
        environment=activate or "",
        conda=_is_conda(activate),
        modules=modules,
        variables=settings.of_variables(variables),
        more=_options(sbatch_args),
    ).text()
    if not submit:
        sys.stdout.flush()
        sys.stdout.buffer.write(os.fsencode(text))
        _warn_of_folder(log_dir)
        return 0
    if log_dir:
        _make(Path(log_dir))
    click.echo(_submitted(text))
    return 0


def _check(target: Script) -> None:
    """A mistake in the script is better found now than after hours in a queue."""
    try:
        target.check()
    except SyntaxError as error:
        raise LaunchError(f"{error.filename}, line {error.lineno}: {error.msg}; the job would end with that") from None


def _ranks_of(gpus_per_node: str | None) -> int:
    """One a GPU."""
    count = (gpus_per_node or "").rpartition(":")[2]
    return max(1, int(count)) if count.isdecimal() else 1


def _options(words: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Each option with its value, for a line of its own."""
    lines: list[tuple[str, ...]] = []
    for word in words:
        if word.startswith("-"):
            lines.append((word,))
        elif lines and len(lines[-1]) == 1:
            lines[-1] = (*lines[-1], word)
        else:
            raise click.UsageError(f"--sbatch-args: '{word}' belongs to no option; expected options such as '--mem=4G'")
    return tuple(lines)


def _is_conda(environment: str | None) -> bool:
    """Whether it is one of conda; a name without a folder can be no other. An error when it is none at all."""
    if not environment:
        return False
    path = Path(environment)
    if (path / "bin" / "activate").is_file():
        return False
    if (path / "conda-meta").is_dir() or "/" not in environment.rstrip("/"):
        return True
    raise click.UsageError(
        f"--activate {environment}: there is neither bin/activate (a virtual environment) nor conda-meta (one of conda)"
    )


def _warn_of_folder(log_dir: str | None) -> None:
    if log_dir and not Path(log_dir).is_dir():
        click.echo(f"fuelrun: make {log_dir} before you submit: SLURM makes no folders for logs", err=True)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"--log-dir {folder}: {error.strerror}") from None


def _submitted(text: str) -> str:
    """The id of the job that SLURM makes of a script."""
    try:
        child = subprocess.run(["sbatch", "--parsable"], input=os.fsencode(text), capture_output=True, check=False)
    except OSError as error:
        raise LaunchError(
            f"cannot start sbatch: {error.strerror}; submit from a machine with SLURM, or leave --submit out"
        ) from None
    if child.returncode != 0:
        said = child.stderr.decode(errors="replace").replace("sbatch: error: ", "").strip()
        raise LaunchError(f"SLURM refuses the job: {said}")
    return child.stdout.decode(errors="replace").strip().partition(";")[0]

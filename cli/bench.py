"""`fuelrun bench`: how fast collectives are on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from fuel_parallel import environment
from fuelrun.run import Count, Seconds

TUNING = "fuel_parallel.comm.tuning"


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--tune", is_flag=True, help="Find from which size on shared memory is faster than MPI, and keep it.")
@click.option(
    "-n",
    "--ranks",
    type=Count("the number of ranks"),
    metavar="N",
    help="Ranks to start [default: one a core, at least 2].",
)
@click.option("--seconds", type=Seconds(), default=0.2, metavar="S", help="Time for each size [default: 0.2].")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where the table goes [default: ~/.cache/fuel-parallel/collectives.json].",
)
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def bench(tune: bool, ranks: int | None, seconds: float, output: Path | None, as_json: bool) -> int:
    """Measure collectives on this machine.

    Inside a node, arrays can go through MPI or through memory that the ranks share; which is faster depends on size,
    number of ranks, MPI and machine. `--tune` times both, some 20 s for each number of ranks (2, 4, ... and N), and
    writes a table that every later run of yours on this machine reads. Nothing else should run meanwhile.

    \b
    Examples:
      fuelrun bench --tune                  for as many ranks as there are cores
      fuelrun bench --tune -n 4             for 2 and for 4 ranks
      srun -N 1 -n 16 fuelrun bench --tune  on a node of a cluster
    """  # noqa: D301 (click wants the backspace itself)
    if not tune:
        raise click.UsageError("say what to measure: fuelrun bench --tune (`fuelrun bench --help` shows more)")
    if output is not None and not output.absolute().parent.is_dir():
        raise click.UsageError(f"--output {output}: there is no folder {output.absolute().parent}; make it first")
    from fuelrun.launch.script import Script

    words = [f"--seconds={seconds}", *(["--json"] if as_json else [])]
    if output is not None:
        words.append(f"--output={output.absolute()}")
    target = Script(TUNING, tuple(words), module=True)
    claim = environment.detect()
    if claim is not None and claim.parallel:
        from fuelrun.launch.rank import become_rank

        become_rank(target)
    from fuelrun.launch.find import find_engine
    from fuelrun.launch.plan import Options, make_plan
    from fuelrun.launch.processes import cores
    from fuelrun.launch.supervise import supervise

    verdict = supervise(make_plan(find_engine(None), target, ranks or max(2, cores()), Options()))
    if verdict.message:
        click.echo(f"fuelrun: {verdict.message}", err=True)
    return verdict.code

"""`fuelrun bench`: how fast collectives are on this machine."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from typing import Any

import click

from fuel_parallel import environment
from fuel_parallel.sizes import bytes_of
from fuelrun.option_types import Seconds, output_option, ranks_option

TUNING = "fuel_parallel.comm.speed.tuning"
TIMING = "fuel_parallel.comm.speed.bench"
COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "all_to_all",
    "shift",
    "send",
    "barrier",
)
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
DEVICES = ("cpu", "cuda", "rocm")
PICTURES = (".png", ".svg", ".pdf")

HELP = """\b
Examples:
  fuelrun bench                             every collective, on as many ranks as there are cores
  fuelrun bench all_reduce -n 4             one of them, on 4 ranks
  fuelrun bench all_reduce all_gather --sizes 4KiB:64MiB --dtype bfloat16
  fuelrun bench all_reduce --plot all_reduce.png
  fuelrun bench all_reduce --device cuda
  mpirun -n 64 fuelrun bench all_reduce --json > all_reduce.json
  fuelrun bench --tune                      for as many ranks as there are cores
  srun -N 1 -n 16 fuelrun bench --tune      on a node of a cluster
"""


class Sizes(click.ParamType[list[int]]):
    """Sizes in bytes, as 4KiB,1MiB or as the range 4KiB:64MiB, each four times the one before."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Say what was expected, and what came instead."""
        if isinstance(value, list):
            return value
        first, colon, last = value.partition(":")
        if not colon:
            return [self._size(word, value) for word in value.split(",")]
        start, end = self._size(first, value), self._size(last, value)
        if not 0 < start <= end:
            raise click.UsageError(f"--sizes {value}: a range goes from a smaller size of 1 or more to a larger one")
        return [size for size in (start << 2 * n for n in range(32)) if size <= end]

    def _size(self, word: str, value: str) -> int:
        size = bytes_of(word)
        if size is None:
            raise click.UsageError(f"--sizes takes sizes such as 64,4KiB,1MiB or a range 4KiB:64MiB; got '{value}'")
        return size


@click.command(epilog=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.argument("collectives", nargs=-1, metavar="[COLLECTIVE]...")
@click.option("--tune", is_flag=True, help="Find from which size on shared memory is faster than MPI, and keep it.")
@ranks_option("Ranks to start [default: one a core, at least 2].")
@click.option(
    "--sizes",
    type=Sizes(),
    metavar="SIZES",
    help="As in 64,4KiB,1MiB, or a range, each size four times the one before [default: 64:64MiB].",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the arrays [default: float32].")
@click.option("--device", type=click.Choice(DEVICES), help="Where the arrays are [default: cpu].")
@click.option("--seconds", type=Seconds(), default=0.2, metavar="S", help="Time for each size and way [default: 0.2].")
@output_option("Where the table of --tune goes [default: ~/.cache/fuel-parallel/collectives.json].")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=f"Draw latency and bandwidth over size ({', '.join(PICTURES)}).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def bench(
    collectives: tuple[str, ...],
    tune: bool,
    ranks: int | None,
    sizes: list[int] | None,
    dtype: str | None,
    device: str | None,
    seconds: float,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Measure collectives on this machine or this job.

    Prints for each collective and size the latency (median, least and greatest of several series, on the slowest
    rank), the bandwidth, and the bandwidth on the bus: what a wire must carry for a perfect algorithm. Ways are timed
    in turns: `auto` is what scripts get, `mpi` is MPI alone, `shared` the memory that the ranks of a node share; with
    --device `nccl`, `mpi` on device memory and `staged` through the host. Every result is checked first. COLLECTIVE is
    one or more of all_reduce, reduce_scatter, all_gather, broadcast, reduce, all_to_all, shift, send and barrier
    [default: all].

    Inside a node, arrays can go through MPI or through memory that the ranks share; which is faster depends on size,
    number of ranks, MPI and machine. `--tune` times both, some 20 s for each number of ranks (2, 4, ... and N), and
    writes a table that every later run of yours on this machine reads. Nothing else should run meanwhile.
    """
    if tune:
        given = {"COLLECTIVE": collectives, "--sizes": sizes, "--dtype": dtype, "--device": device, "--plot": plot}
        wrong = next((name for name, value in given.items() if value), None)
        if wrong:
            raise click.UsageError(f"{wrong} and --tune do not go together: --tune measures what its table needs")
        check_folder("--output", output)
        return on_ranks(TUNING, [f"--seconds={seconds}"], ranks, as_json, output=output)
    if output is not None:
        raise click.UsageError("--output is where --tune writes its table; for a file use --json > FILE")
    unknown = next((name for name in collectives if name not in COLLECTIVES), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, COLLECTIVES, 1)
        hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(COLLECTIVES)}"
        raise click.UsageError(f"there is no collective '{unknown}' to measure; {hint}")
    if plot is not None:
        check_folder("--plot", plot)
        if plot.suffix not in PICTURES:
            raise click.UsageError(f"--plot {plot}: the name must end in one of {', '.join(PICTURES)}")
        if importlib.util.find_spec("matplotlib") is None:
            raise click.UsageError("--plot needs matplotlib: pip install 'fuel-parallel[plot]'")
    sizes = Sizes().convert("64:64MiB", None, None) if sizes is None else sizes
    words = [*collectives, f"--sizes={','.join(map(str, sizes))}", f"--dtype={dtype or 'float32'}"]
    words += [f"--seconds={seconds}", *([f"--device={device}"] if device else [])]
    return on_ranks(TIMING, words, ranks, as_json, plot=plot)


def check_folder(option: str, path: Path | None) -> None:
    """Refuses a file in a folder that is not there, before anything is measured."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.UsageError(f"{option} {path}: there is no folder {path.absolute().parent}; make it first")


def on_ranks(module: str, words: list[str], ranks: int | None, as_json: bool, **files: Path | None) -> int:
    """Runs a module on the ranks of this job, or of one that is started for it, with words and options for files."""
    from fuelrun.launch.script import Script

    options = [f"--{name}={path.absolute()}" for name, path in files.items() if path is not None]
    target = Script(module, (*words, *options, *(["--json"] if as_json else [])), module=True)
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

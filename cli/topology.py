"""`fuelrun topology`: what this machine, or the machines of a job, consist of."""

from __future__ import annotations

from pathlib import Path

import click

from fuel_parallel import environment
from fuelrun.bench import check_folder, on_ranks
from fuelrun.option_types import Count
from fuelrun.place import place

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
PROBING = "fuel_parallel.comm.speed.probing"


@click.group(context_settings=SETTINGS)
def topology() -> None:
    """Find out, and show, which devices there are and how they are linked."""


@topology.command(context_settings=SETTINGS)
@click.option("-n", "--ranks", type=Count("the number of ranks"), metavar="N", help="Ranks to start for --measure.")
@click.option("--measure", is_flag=True, help="Measure memory and what lies between ranks, rather than assume it.")
@click.option("--validate", is_flag=True, help="Measure, and compare timings of collectives with predictions.")
@click.option("--per-rank", is_flag=True, help="Give each rank of a machine a CPU device of its own.")
@click.option("--json", "as_json", is_flag=True, help="Print the topology as JSON.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write it as JSON."
)
def probe(ranks: int | None, measure: bool, validate: bool, per_rank: bool, as_json: bool, output: Path | None) -> int:
    """Find out what this machine consists of: cores, NUMA domains, caches, GPUs, network cards and links.

    Counts what this process may use: the cores of its cpuset, the GPUs that are visible. Nothing needs root. Inside
    mpirun or srun every machine of the job is probed, and what was found becomes one topology.

    \b
    Examples:
      fuelrun topology probe                            this machine
      fuelrun topology probe --measure -n 2             with the bandwidth and latency between two ranks
      fuelrun topology probe --validate -n 2            how near the predictions from these are to timings
      mpirun -n 64 fuelrun topology probe -o all.json   the machines of a job
    """  # noqa: D301 (click wants the backspace itself)
    check_folder("--output", output)
    claim = environment.detect()
    inside = claim is not None and claim.parallel
    if not inside and not measure and not validate and (ranks or 1) == 1:
        from fuel_parallel.topology.probe import probe as probe_here
        from fuel_parallel.topology.text import emit

        emit(probe_here(ranks=1 if per_rank else None), as_json, output)
        return 0
    words = [
        *(["--measure"] if measure else []),
        *(["--validate"] if validate else []),
        *(["--per-rank"] if per_rank else []),
    ]
    words += [*(["--json"] if as_json else []), *([f"--output={output.absolute()}"] if output is not None else [])]
    return on_ranks(PROBING, words, ranks)


@topology.command(context_settings=SETTINGS)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def show(file: Path, as_json: bool) -> int:
    """Show the devices and links of a FILE that `fuelrun topology probe -o FILE` wrote."""
    from fuel_parallel.topology.text import LARGEST, emit, from_json

    if file.stat().st_size > LARGEST:
        raise click.UsageError(f"{file} has {file.stat().st_size} bytes; a topology has at most {LARGEST}")
    emit(from_json(file.read_bytes(), str(file)), as_json, None)
    return 0


topology.add_command(place)

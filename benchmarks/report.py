"""Runs all benchmarks and writes docs/benchmarks.md; `make bench`.

    python benchmarks/report.py --peer-python .venv-bench/bin/python

A peer that cannot run here is in the report, with the reason. Each part is a command of its own, shown above its table.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import race

import fuel_parallel

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
PEERS = ("torch", "torch-compile", "jax", "mlx")
ON_TWO_RANKS = ("all_reduce.py", "pipeline.py")
FEWER_STEPS = {"mlx": 5}  # it is far slower than the others on x86
ALONE = {"mlx": "its backends for several processes are not measured"}

HEAD = """\
# Benchmarks

`make bench` measures all of this and writes this page. It installs the peers in an environment of their own
(`.venv-bench`). One thread a rank everywhere.

What is compared runs in one session and takes turns, step by step, ours first in one round and last in the next. A
ratio is the median of the ratios of neighbours, so that a disturbance of the machine, which meets both, hardly counts;
it is therefore not the ratio of the two medians beside it. Below 1, ours is faster. *CPU time* is the ratio of the time
that the two computed, or waited actively, on a core.
"""

GPT = """\
## GPT training step

Forward, backward and AdamW of a GPT with 4 layers, 4 heads, width 256, vocabulary 4096, on 8 x 128 random tokens a
rank, float32: pre-norm layer norm, learned positions, biases, tanh-GELU, a head of its own. All start from the same
weights, and the run fails unless the losses of five steps agree to 1e-3. PyTorch uses `scaled_dot_product_attention`
and fused AdamW, and on two ranks DistributedDataParallel over gloo; JAX one jitted function with donated state; MLX
`mx.compile`, its fast layer norm and attention.

MLX, far slower on this machine than the others, runs 5 steps. *GEMM floor* is the time of the step's matrix products
alone, by numpy, into memory that is there already. *Peak* is what the process grew by since before the model was built,
at most.
"""


@dataclass(frozen=True)
class Outcome:
    """What a command printed, or why it could not."""

    command: tuple[str, ...]
    found: dict[str, Any]
    skipped: str = ""


def run(*words: str, shown: Sequence[str] = ()) -> Outcome:
    """Runs `python benchmarks/WORDS --json`. A failure is an outcome, too."""
    click.echo(f"  {shlex.join(words)}", err=True)
    script, *rest = words
    launcher = ["-m", "fuelrun", "--quiet", "-n", "2"] if script in ON_TWO_RANKS else []
    command = [sys.executable, *launcher, str(ROOT / "benchmarks" / script), "--json", *rest]
    start = "fuelrun -n 2" if launcher else "python"
    said = (*shlex.split(start), f"benchmarks/{script}", *(shown or rest))
    done = subprocess.run(command, capture_output=True, text=True, env=race.environment(), check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return Outcome(said, {}, reason_in(lines))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return Outcome(said, found)


def reason_in(lines: list[str]) -> str:
    """The line that says why: the last error before our own closing line."""
    errors = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith("Error: ")]
    return (errors or lines or ["it printed nothing"])[-1]


def table(*columns: str, rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table; all columns but the first are numbers."""
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join(['---', *['---:'] * (len(columns) - 1)])}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def shown(outcome: Outcome) -> Iterator[str]:
    """The command, as code."""
    yield "    " + shlex.join(outcome.command)
    yield ""


def measured(
    title: str, script: str, *words: str, peer: Sequence[str] = (), python: str = ""
) -> Generator[str, None, tuple[dict[str, Any], str]]:
    """A title, the command and, if it failed, why; returns what was found, nothing then.

    `peer` are options that end in the Python of a peer. Without it where that fails; why is returned, too.
    """
    yield f"## {title}"
    yield ""
    without = ""
    outcome = run(script, *words, *peer, python, shown=[*words, *peer, "PYTHON"]) if peer else run(script, *words)
    if peer and outcome.skipped:
        without = outcome.skipped
        outcome = run(script, *words)
    yield from shown(outcome)
    if outcome.skipped:
        yield f"Skipped: {outcome.skipped}"
        yield ""
    return outcome.found, without


def left_out(peer: str, why: str) -> Iterator[str]:
    """A line about a peer, if it was left out."""
    if why:
        yield f"- {peer}: skipped, {why}"
        yield ""


def machine() -> Iterator[str]:
    """Where and when."""
    here = race.Machine.this()
    yield f"Measured on {datetime.date.today().isoformat()} with fuel-parallel {fuel_parallel.__version__}:"
    yield ""
    yield f"- {here.cpu}, {here.cores} cores, {here.memory_gib} GiB of memory; {here.system}"
    yield f"- Python {here.python}, numpy {here.numpy}, {here.mpi}"
    load = os.getloadavg()[0]
    yield f"- load average when it began: {load:.1f}"
    yield ""
    if load > here.cores / 2:
        yield "**The machine did other work meanwhile**: times are longer than on a quiet one, and ratios less certain."
        yield ""


def gpt(peer_python: str, ranks: int, steps: int) -> Iterator[str]:
    """One table of all peers, and the distance from the floor."""
    yield f"### {'One rank' if ranks == 1 else f'{ranks} data-parallel ranks'}"
    yield ""
    rows, last = [], None
    skipped = []
    for peer in PEERS:
        if ranks > 1 and peer in ALONE:
            skipped.append(f"- {peer}: skipped, {ALONE[peer]}")
            continue
        words = ["--peer", peer, "--ranks", str(ranks), "--steps", str(FEWER_STEPS.get(peer, steps))]
        show = ["--peer", "PEER", "--ranks", str(ranks), "--steps", str(steps), "--peer-python", "PYTHON"]
        one = run("gpt_step.py", *words, "--peer-python", peer_python, shown=show)
        if one.skipped:
            skipped.append(f"- {peer}: skipped, {one.skipped}")
            continue
        last = one
        f = one.found
        rows.append(
            (
                f["versions"]["peer"].partition(",")[0] + (" compiled" if peer == "torch-compile" else ""),
                span(f, "peer"),
                span(f, "ours"),
                f"**{f['ours_over_peer']:.3f}**",
                f"{f['ours_over_peer_cpu']:.3f}",
                span(f, "gemm_floor"),
                f"{f['floor_over_ours']:.3f}",
                f"{f['peer_peak_bytes'] / 2**20:.0f}",
                f"{f['ours_peak_bytes'] / 2**20:.0f}",
            )
        )
    if last:
        yield from shown(last)
        yield from table(
            "peer",
            "its ms (min to max)",
            "our ms (min to max)",
            "ours / peer",
            "CPU time",
            "GEMM floor ms",
            "floor / ours",
            "its peak MiB",
            "our peak MiB",
            rows=rows,
        )
    yield from skipped
    if skipped:
        yield ""


def span(found: dict[str, Any], name: str) -> str:
    """Median, with the range."""
    return f"{found[f'{name}_ms']:.1f} ({found[f'{name}_min_ms']:.1f} to {found[f'{name}_max_ms']:.1f})"


def limits() -> Iterator[str]:
    """The machine's own speed."""
    f, _ = yield from measured("Limits of the machine", "limits.py")
    if not f:
        return
    yield f"The {f['gflop']:.1f} GFLOP of a step's matrix products take {span(f, 'gemm_floor')} ms:"
    yield f"{f['gflop_s']:.1f} GFLOP/s."
    yield ""
    rows = [(r["shape"], r["transposed"], str(r["times"]), f"{r['ms']:.2f}", f"{r['gflop_s']:.1f}") for r in f["gemms"]]
    yield from table("product", "transposed operand", "a step", "ms each", "GFLOP/s", rows=rows)
    rates = [(f"{r['pass']}, in {r['where']}", f"{r['gb_s']:.1f}") for r in f["bandwidth"]]
    yield from table("pass over float32 arrays", "GB/s read and written", rows=rates)


def all_reduce(peer_python: str) -> Iterator[str]:
    """Inside one node."""
    peer = ("--peer", "gloo", "--peer-python")
    title = "All-reduce, two ranks of one node"
    f, without = yield from measured(title, "all_reduce.py", peer=peer, python=peer_python)
    if not f:
        return
    yield "float32, sum. *in place*: of an array that was allocated in node-local memory; *copied*: of any other array."
    yield "The last two columns are how many times faster the first is."
    yield ""
    ways = ["ours", "copied", "mpi", *(["gloo"] if f["speedup_over_peer"] else [])]
    rows = []
    for size, times in f["seconds"].items():
        cells = [
            f"{times[way]['median_s'] * 1e6:.1f} ({times[way]['min_s'] * 1e6:.1f} to {times[way]['max_s'] * 1e6:.1f})"
            for way in ways
        ]
        gloo = f["speedup_over_peer"].get(size)
        rows.append((binary(int(size)), *cells, f"{f['speedup_over_mpi'][size]:.2f}", f"{gloo:.1f}" if gloo else "-"))
    titles = {
        "ours": "in place, us",
        "copied": "copied, us",
        "mpi": f"{f['mpi']} in place, us",
        "gloo": "gloo in place, us",
    }
    yield from table("bytes", *(titles[way] for way in ways), "over MPI", "over gloo", rows=rows)
    yield from left_out("gloo", without)


def binary(size: int) -> str:
    """4194304 is 4 MiB."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0:
            return f"{size // factor} {unit}"
    return str(size)


def start_up(peer_python: str) -> Iterator[str]:
    """The launchers."""
    peer = ("--torch-python",)
    f, without = yield from measured("Start-up of two ranks", "start_up.py", peer=peer, python=peer_python)
    if not f:
        return
    yield "From the command to its end, in ms. *ready*: a script that makes the communicator of all ranks and ends:"
    yield "`fp.init()`, mpi4py's `COMM_WORLD`, a gloo process group."
    yield ""
    rows = []
    for name in ("fuelrun", "mpirun", "torchrun"):
        if f"{name}_ms" not in f:
            continue
        cells = []
        for kind in ("", "_with_init"):
            cells.append(span(f, name + kind))
            cells.append(f"{f[f'fuelrun_over_{name}{kind}']:.3f}" if name != "fuelrun" else "")
        rows.append((name, *cells))
    yield from table("launcher", "empty script", "fuelrun / it", "ready", "fuelrun / it", rows=rows)
    yield f"fuelrun takes {span(f, 'overhead_empty')} ms more than mpirun of the same empty script, and"
    yield f"{span(f, 'overhead_mpi4py')} ms more for a script that meets by mpi4py's `COMM_WORLD` (median of 20 pairs)."
    yield ""
    yield from left_out("torchrun", without)


def pipelines() -> Iterator[str]:
    """Schedules, predicted and measured."""
    f, _ = yield from measured("Pipelines", "pipeline.py", "--batch", "16")
    if not f:
        return
    sizes = ", ".join(map(str, f["layers_per_stage"]))
    yield f"The GPT in {f['ranks']} stages of {sizes} layers (the embedding, blocks and the head), a batch of 16 in"
    yield f"{f['microbatches']} micro-batches. *Predicted*: simulated from the times of the stages alone, on all"
    yield "ranks at once, and of messages. Ratios are medians over rounds, each of which measures costs and steps."
    yield ""
    rows = []
    for one in f["schedules"]:
        ratio, least, most = (one[name] for name in ("measured_over_predicted", "least_ratio", "greatest_ratio"))
        times = f"{one['predicted_ms']:.1f}", f"{one['measured_ms']:.1f}"
        cells = f"**{ratio:.3f}** ({least:.3f} to {most:.3f})", f"{one['predicted_bubble_ratio']:.1%}"
        rows.append((one["kind"], *times, *cells))
    yield from table("schedule", "predicted ms", "measured ms", "measured / predicted", "bubble", rows=rows)
    yield f"With stages that multiply one number, a step takes {f['action_us']:.0f} us for each action of a rank."
    yield f"Without messages, on one rank, an action takes {f['cpu_us']:.0f} us of the processor, of which the runner"
    yield f"takes {f['runner_us']:.0f} us."
    yield ""


def tracing(steps: int) -> Iterator[str]:
    """What `fuelrun --trace` costs."""
    f, _ = yield from measured("Cost of tracing", "gpt_step.py", "--peer", "traced", "--steps", str(steps))
    if not f:
        return
    yield f"The GPT step takes {span(f, 'peer')} ms under `fuelrun --trace` and {span(f, 'ours')} ms without:"
    more, more_cpu = 1 / f["ours_over_peer"] - 1, 1 / f["ours_over_peer_cpu"] - 1
    yield f"{more:+.1%}, {more_cpu:+.1%} of CPU time (medians of pairs)."
    yield ""


@click.command(context_settings={"show_default": True})
@click.option(
    "--peer-python", default=str(ROOT / ".venv-bench" / "bin" / "python"), help="The Python that has the peers."
)
@click.option("--steps", type=click.IntRange(min=1), default=30, help="GPT steps of each race.")
@click.option("--output", type=click.Path(path_type=Path), default=PAGE)
def main(peer_python: str, steps: int, output: Path) -> None:
    """Run all benchmarks and write the page."""
    peer_python = os.path.abspath(peer_python)  # not resolved: it may be a link, by which Python knows its environment
    parts = [HEAD.splitlines(), [""], machine(), GPT.splitlines(), [""]]
    parts += [gpt(peer_python, 1, steps), gpt(peer_python, 2, steps), all_reduce(peer_python)]
    parts += [limits(), start_up(peer_python), pipelines(), tracing(steps)]
    text = "\n".join(line for part in parts for line in part).rstrip() + "\n"
    output.write_text(text)
    click.echo(output, err=True)


if __name__ == "__main__":
    main()

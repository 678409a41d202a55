"""The time of one training step of a GPT, ours against a peer's, step by step in turns.

    python benchmarks/gpt_step.py
    python benchmarks/gpt_step.py --json --peer torch --peer-python PATH_OF_ITS_PYTHON
    python benchmarks/gpt_step.py --ranks 2 --peer torch --peer-python ...
    python benchmarks/gpt_step.py --device cuda:0 --dim 1024 --context 1024 --peer torch --peer-python ...

All start from the same weights, and the losses of the first steps must agree: nobody computes something else.
`gemm_floor_ms` is the time of the step's matrix products alone, taken in the same turns. On a machine that does other
work at the same time, CPU time tells two programs apart with less noise.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import race
from gpt import Config, gemms
from limits import sizes
from race import Workers

from fuel_parallel.backends import check_device
from fuel_parallel.errors import DeviceError

AGREEMENT = 1e-3
CHECKED_STEPS = 5

PEERS: dict[str, tuple[str, dict[str, str]]] = {
    "torch": ("peers/torch_gpt.py", {}),
    "torch-compile": ("peers/torch_gpt.py", {"GPT_COMPILE": "1"}),
    "jax": ("peers/jax_gpt.py", {}),
    "mlx": ("peers/mlx_gpt.py", {}),
    "traced": ("gpt_model.py", {}),  # ourselves under `fuelrun --trace`: what tracing costs
}


ON_DEVICES = ("torch", "torch-compile", "traced")
"""The peers that know `--device`."""


@contextmanager
def all_workers(config: Config, ranks: int, peer: str | None, python: str, device: str) -> Iterator[dict[str, Workers]]:
    """Ours, the matrix products alone, and the peer, ready to step."""
    with tempfile.TemporaryDirectory(prefix="gpt-step-") as name, ExitStack() as stack:
        folder = Path(name)
        config.save(folder)
        on = {"BENCHMARK_DEVICE": device}
        workers = {
            "ours": race.under_fuelrun("fuel-parallel", "gpt_model.py", folder, ranks, **on),
            "gemm_floor": race.by_hand("the GEMM floor", sys.executable, "limits.py", folder, ranks, **on),
        }
        if peer == "traced":
            workers["peer"] = race.under_fuelrun(
                "traced", PEERS[peer][0], folder, ranks, "--trace", str(folder / "trace.json"), **on
            )
        elif peer:
            script, more = PEERS[peer]
            workers["peer"] = race.by_hand(peer, python, script, folder, ranks, **more, **on)
        yield {name: stack.enter_context(each) for name, each in workers.items()}


def losses(workers: dict[str, Workers]) -> dict[str, list[float]]:
    """Of the first steps. Raises when they do not agree."""
    found: dict[str, list[float]] = {}
    for name, each in workers.items():
        found[name] = [each.step(number)[1] for number in range(CHECKED_STEPS)]
    del found["gemm_floor"]
    for number, together in enumerate(zip(*found.values(), strict=True)):
        if max(together) - min(together) > AGREEMENT:
            raise click.ClickException(
                f"the losses differ at step {number}: {dict(zip(found, together, strict=True))}; "
                f"expected them to agree to {AGREEMENT}"
            )
    return found


def measure(config: Config, ranks: int, steps: int, peer: str | None, python: str, device: str) -> dict[str, Any]:
    """The report."""
    with all_workers(config, ranks, peer, python, device) as workers:
        report: dict[str, Any] = {"config": asdict(config), "ranks": ranks, "steps": steps, "peer": peer}
        report |= {"device": device, "gflop": sum(gemm.flops for gemm in gemms(config)) / 1e9}
        report["losses"] = losses(workers)
        for each in workers.values():
            each.cpu_ms.clear()
        racers = [lambda number, each=each: each.step(number)[0] for each in workers.values()]
        times = dict(zip(workers, race.take_turns(racers, steps, CHECKED_STEPS), strict=True))
        for name, taken in times.items():
            report |= race.summary(name, taken)
            report[f"{name}_cpu_ms"] = statistics.median(workers[name].cpu_ms)
        report["floor_over_ours"] = race.ratio(times["gemm_floor"], times["ours"])
        if device == "cpu":  # the workers know the memory of the host
            report["ours_peak_bytes"] = workers["ours"].peak_bytes()
        report["versions"] = {name: each.version for name, each in workers.items()}
        if peer:
            report["ours_over_peer"] = report[f"ours_over_{peer.replace('-', '_')}"] = race.ratio(
                times["ours"], times["peer"]
            )
            report["ours_over_peer_cpu"] = race.ratio(workers["ours"].cpu_ms, workers["peer"].cpu_ms)
            if device == "cpu":
                report["peer_peak_bytes"] = workers["peer"].peak_bytes()
        report["machine"] = asdict(race.Machine.this())
    return report


def describe(report: dict[str, Any]) -> Iterator[str]:
    """The report in words."""
    for name in ("ours", "peer", "gemm_floor"):
        if f"{name}_ms" in report:
            least, middle, most = (report[f"{name}{kind}_ms"] for kind in ("_min", "", "_max"))
            peak = f", peak {report[f'{name}_peak_bytes'] / 2**20:.0f} MiB" if f"{name}_peak_bytes" in report else ""
            title = (report["peer"] if name == "peer" else name).ljust(13)
            yield f"{title} {middle:8.1f} ms  ({least:.1f} to {most:.1f}){peak}   {report['versions'][name]}"
    if report["peer"]:
        ratios = f"{report['ours_over_peer']:.3f}, of CPU time {report['ours_over_peer_cpu']:.3f}"
        yield f"ours / {report['peer']}: {ratios} (medians of pairs)"
    rate = report["gflop"] / report["gemm_floor_ms"]
    yield f"GEMM floor / ours: {report['floor_over_ours']:.3f}; the floor is {rate:.3g} TFLOP/s on {report['device']}"


@click.command(help="Time a GPT training step, ours against a peer's.", context_settings={"show_default": True})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--peer", type=click.Choice(list(PEERS)), help="Whom to race; nobody if left out.")
@click.option("--peer-python", default=sys.executable, help="The Python that has the peer.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, help="Data-parallel ranks, one thread each.")
@click.option("--steps", type=click.IntRange(min=1), default=30, help="Steps that count.")
@click.option("--device", default="cpu", help="Where all compute: cpu, cuda:0 ...")
@sizes
def main(
    as_json: bool, peer: str | None, peer_python: str, ranks: int, steps: int, device: str, **dimensions: int
) -> None:
    """Prints the report."""
    config = Config(**dimensions)
    if device != "cpu" and peer is not None and peer not in ON_DEVICES:
        raise click.UsageError(
            f"--peer {peer} runs on the CPU only; with --device it is one of {', '.join(ON_DEVICES)}"
        )
    try:
        device = check_device(device)
    except DeviceError as reason:
        raise click.UsageError(f"--device: {reason}") from None
    if config.dim % config.heads:
        raise click.UsageError(f"--dim {config.dim} cannot be shared equally by --heads {config.heads}")
    try:
        report = measure(config, ranks, steps, peer, peer_python, device)
    except (race.WorkerFailed, OSError) as reason:
        raise click.ClickException(str(reason)) from None
    print(json.dumps(report) if as_json else "\n".join(describe(report)))


if __name__ == "__main__":
    main()

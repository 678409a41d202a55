"""What the machine allows: the time of the GPT step's matrix products alone, and the speed of memory.

    python benchmarks/limits.py            # or --json

The matrix products are numpy's, into memory that is there already, one after the other, with nothing in between; for
gpt_step.py on a GPU they are cuBLAS's, in the precision that the step has, and waited for once at the end.
Memory is read and written in arrays of 64 MiB, and in blocks of 64 KiB, which stay in the cache.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import race
import worker
from gpt import Array, Config, Gemm, gemms

from fuel_parallel.backends import backend_of


def prepared(gemm: Gemm, draw: np.random.Generator, device: str = "cpu") -> Callable[[], Any]:
    """The product, ready to run; on a GPU it only queues."""
    backend = backend_of(device)
    xp = backend.array_module

    def operand(rows: int, columns: int, transposed: bool) -> Any:
        lead = () if gemm.count == 1 else (gemm.count,)
        if transposed:
            return backend.from_host(draw.random((*lead, columns, rows), dtype=np.float32)).swapaxes(-1, -2)
        return backend.from_host(draw.random((*lead, rows, columns), dtype=np.float32))

    left = operand(gemm.rows, gemm.inner, gemm.transposed == "left")
    right = operand(gemm.inner, gemm.columns, gemm.transposed == "right")
    out = xp.empty((*left.shape[:-1], gemm.columns), np.float32)
    return lambda: xp.matmul(left, right, out=out)


def build(config: Config, weights: dict[str, Array], rank: int, size: int) -> worker.Step:
    """As a worker of gpt_step.py: a step is all matrix products of a step."""
    weights.clear()
    draw = np.random.default_rng(0)
    backend = backend_of(worker.device())
    # Equal products share their operands: the least memory traffic, as a limit should have.
    ready = {gemm: prepared(gemm, draw, worker.device()) for gemm in set(gemms(config))}
    products = [ready[gemm] for gemm in gemms(config)]

    def step(tokens: Array, targets: Array) -> float:
        with backend.running():
            for product in products:
                product()
            backend.wait()
        return 0.0

    return step


def milliseconds(run: Callable[[], Any], rounds: int) -> list[float]:
    """The time of each of `rounds` runs, after one that does not count."""
    run()
    times = []
    for _ in range(rounds):
        began = time.perf_counter_ns()
        run()
        times.append((time.perf_counter_ns() - began) / 1e6)
    return times


def gemm_rates(config: Config, rounds: int) -> list[dict[str, Any]]:
    """For each kind of product in the step how often it comes, and its rate."""
    draw = np.random.default_rng(0)
    every = gemms(config)
    rows = []
    for gemm in dict.fromkeys(every):
        took = statistics.median(milliseconds(prepared(gemm, draw), rounds))
        rows.append(
            {
                "shape": f"{gemm.count} x [{gemm.rows}, {gemm.inner}] @ [{gemm.inner}, {gemm.columns}]",
                "transposed": gemm.transposed or "none",
                "times": every.count(gemm),
                "ms": took,
                "gflop_s": gemm.flops / took / 1e6,
            }
        )
    return rows


def bandwidths(rounds: int) -> list[dict[str, Any]]:
    """GB/s of simple passes, counting what is read and what is written, not what the cache fetches to write."""
    rows = []
    for where, nbytes in (("memory", 64 << 20), ("cache", 64 << 10)):
        a, b, out = (np.ones(nbytes // 4, np.float32) for _ in range(3))
        repeat = max(1, (16 << 20) // nbytes)

        def many(run: Callable[[], Any], repeat: int = repeat) -> Callable[[], None]:
            def loop() -> None:
                for _ in range(repeat):
                    run()

            return loop

        passes: dict[str, tuple[int, Callable[[], Any]]] = {
            "copy": (2, lambda a=a, out=out: np.copyto(out, a)),
            "add": (3, lambda a=a, b=b, out=out: np.add(a, b, out=out)),
        }
        for name, (arrays, run) in passes.items():
            took = statistics.median(milliseconds(many(run), rounds))
            rows.append({"pass": name, "where": where, "gb_s": arrays * nbytes * repeat / took / 1e6})
    return rows


def measure(config: Config, rounds: int) -> dict[str, Any]:
    """All of it."""
    nothing = np.empty(0)
    step = build(config, {}, 0, 1)
    floor = milliseconds(lambda: step(nothing, nothing), rounds)
    flops = sum(gemm.flops for gemm in gemms(config))
    return {
        **race.summary("gemm_floor", floor),
        "gflop": flops / 1e9,
        "gflop_s": flops / statistics.median(floor) / 1e6,
        "gemms": gemm_rates(config, rounds),
        "bandwidth": bandwidths(rounds),
    }


def sizes(command: Any) -> Any:
    """The options that say how large the model is."""
    for name, usual in reversed([(f, getattr(Config, f)) for f in Config.__dataclass_fields__]):
        command = click.option(f"--{name}", type=click.IntRange(min=1), default=usual)(command)
    return command


@click.command(help="Measure what the machine allows.", context_settings={"show_default": True})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--rounds", type=click.IntRange(min=1), default=20)
@sizes
def main(as_json: bool, rounds: int, **dimensions: int) -> None:
    """Prints the limits."""
    found = measure(Config(**dimensions), rounds)
    if as_json:
        print(json.dumps(found))
        return
    print(f"all matrix products of a step: {found['gemm_floor_ms']:.1f} ms, {found['gflop_s']:.1f} GFLOP/s")
    for row in found["gemms"]:
        print(f"  {row['times']:3} times {row['shape']}, transposed {row['transposed']}: {row['gflop_s']:6.1f} GFLOP/s")
    for row in found["bandwidth"]:
        print(f"{row['pass']} in {row['where']}: {row['gb_s']:.1f} GB/s")


if __name__ == "__main__":
    if "BENCHMARK_DRIVER" in race.os.environ:
        worker.serve(build, f"numpy {np.__version__}")
    else:
        main()

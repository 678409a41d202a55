"""Memory of one rank under plain data parallelism and ZeRO-1, 2 and 3, measured against the paper's formulas.

    mpiexec -n 4 python benchmarks/zero_memory.py
    mpiexec -n 2 python benchmarks/zero_memory.py --dtype bfloat16 --layers 32

For a model of Psi parameters in b bytes, with optimizer state of K bytes a parameter, over N ranks
(arXiv:1910.02054, section 3):

    plain     (b + b + K) Psi                   K = 8 for AdamW in float32
    ZeRO-1    (b + b + K/N) Psi                 K = 12 for AdamW with float32 masters of parameters in bfloat16
    ZeRO-2    (b + (b + K)/N) Psi
    ZeRO-3    ((b + b + K)/N) Psi

"state" is what is held between steps with the gradients still there: parameters, gradients, optimizer state, as
`fp.memory_stats().live` counts it. "peak" is what is held when the backward pass begins, what the plan of both passes
takes (`fp.memory_stats().peak`: activations, whole gradients and gathered weights, buckets), and gradients that a
reduce-scatter gives.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.data_parallel import ShardedOptimizer, average_gradients, shard_parameters

BUCKET = 1 << 20
STAGES = ("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3")


class Mlp(fp.Module):
    """Square layers: all of them the same, as the layers of a transformer are."""

    def __init__(self, layers: int, dim: int, dtype: str) -> None:
        generator = ft.random.Generator(0)
        self.layers = [fp.Linear(dim, dim, generator, bias=False, dtype=dtype) for _ in range(layers)]

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        """[batch, dim] to the same."""
        for layer in self.layers:
            x = ft.tanh(layer(x))
        return x


@dataclass(frozen=True)
class Row:
    """What one rank was measured to hold, and what the paper says of it; bytes."""

    name: str
    state: int
    formula: float
    peak: int
    milliseconds: float


def formula(stage: int, size: int, width: int, state: int, ranks: int) -> float:
    """Bytes of parameters, gradients and optimizer state on one rank."""
    parts = [width, width, state]  # parameters, gradients, state; the stage says how many of the last are cut
    return size * sum(part / (ranks if 3 - index <= stage else 1) for index, part in enumerate(parts))


def adamw(parameters: list[fp.Parameter]) -> fp.optim.AdamW:
    """The optimizer of all four."""
    return fp.optim.AdamW(parameters, lr=1e-3)


def made(stage: int, model: Mlp, comm: fp.Communicator, masters: bool) -> tuple[Any, Callable[[Any], Any]]:
    """The optimizer, and what makes of a rank's gradients those that are held until the update."""
    if stage == 3:
        shard_parameters(model, comm, whole_elements=0)
        return adamw(model.parameters()), lambda gradients: gradients
    if stage == 0:
        return adamw(model.parameters()), lambda gradients: average_gradients(gradients, comm, bucket_bytes=BUCKET)
    make = (lambda rows: fp.optim.MixedPrecision(rows, adamw, comm=comm)) if masters else adamw
    optimizer = ShardedOptimizer(make, model.parameters(), comm, stage=stage, bucket_bytes=BUCKET)
    return optimizer, optimizer.reduce_gradients if stage == 2 else lambda gradients: gradients


def measure(stage: int, layers: int, dim: int, batch: int, dtype: str, comm: fp.Communicator, steps: int) -> Row:
    """Some steps, gradients realized apart from the update so that they can be counted."""
    model = Mlp(layers, dim, dtype)
    size = layers * dim * dim
    optimizer, reduced = made(stage, model, comm, masters=dtype == "bfloat16")
    fp.realize(model, optimizer)
    x = ft.asarray(ft.random.Generator(1).normal((batch, dim), dtype=dtype).numpy())
    peak = state = 0
    begin = time.perf_counter()
    for _ in range(steps):
        loss = ft.mean(ft.square(model(x)))
        gradients = reduced(ft.grad(loss, model.parameters()))
        fp.realize(loss, gradients)
        gc.collect()
        stats = fp.memory_stats()
        state = stats.live - x.nbytes
        held_before = state - sum(g.nbytes for g in gradients)
        scattered = sum(g.nbytes for g in gradients) if stage >= 2 and comm.world_size > 1 else 0
        peak = max(peak, held_before + stats.peak + scattered)
        if stage == 2:
            optimizer.update(gradients, reduced=True)
        else:
            optimizer.update(gradients)
        del gradients
        fp.realize(loss, model, optimizer)
    elapsed = (time.perf_counter() - begin) / steps * 1e3
    width = model.parameters()[0].dtype.itemsize
    per_parameter = 12 if dtype == "bfloat16" else 2 * width
    return Row(STAGES[stage], state, formula(stage, size, width, per_parameter, comm.world_size), peak, elapsed)


@click.command(help="Measure what a rank holds under each stage of ZeRO.", context_settings={"show_default": True})
@click.option("--layers", default=16)
@click.option("--dim", default=512)
@click.option("--batch", default=16, help="Rows of a rank.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--steps", default=3)
def main(layers: int, dim: int, batch: int, dtype: str, steps: int) -> None:
    """Prints a row of a table for each stage."""
    world = fp.init()
    stages = range(4) if dtype == "float32" else (1, 2)  # the others keep no masters
    for stage in stages:
        row = measure(stage, layers, dim, batch, dtype, world, steps)
        if world.is_root:
            mib = [f"{n / 2**20:.2f}" for n in (row.formula, row.state, row.peak)]
            print(f"| {world.world_size} | {row.name} | {' | '.join(mib)} | {row.milliseconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()

"""How well a pipeline's step time is predicted, and what the runner costs: `fuelrun -n 2 benchmarks/pipeline.py`.

The stages of a GPT run alone: each rank times the forward and the backward of a micro-batch through its own stage, all
ranks at the same time, since they share a machine; and messages of that size go to and fro. From these costs, schedules
are simulated. Then `PipelineRunner` runs them. In each round the costs are measured, then a step of each schedule;
ratios are medians over the rounds, so that a disturbance of the machine, which meets both, hardly counts.

The runner's overhead is measured with stages that multiply one number, as time on the processor: what a step of a
pipeline of one rank takes beyond what its actions take without a runner, for each of them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import numpy as np
from gpt import Array, Config
from gpt_model import EPS, Block
from limits import sizes

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.comm.posted import PostedReceive, post_send
from fuel_parallel.pipeline_parallel import Costs, PipelineModel, PipelineRunner, Schedule, StageAssignment, simulate
from fuel_parallel.pipeline_parallel import build as built
from fuel_parallel.pipeline_parallel.run.stage import Loss, StageRun

KINDS = ("gpipe", "1f1b", "zb-h1")
WARM_UP = 3
TINY_MICROBATCHES = 64


class Embed(fp.Module):
    """Tokens to the first block's input."""

    def __init__(self, config: Config, generator: ft.random.Generator) -> None:
        self.token = fp.Embedding(config.vocabulary, config.dim, generator)
        self.position = fp.Embedding(config.context, config.dim, generator)

    def __call__(self, tokens: ft.Tensor) -> ft.Tensor:
        """[batch, length] to [batch, length, dim]."""
        return self.token(tokens) + self.position.weight


class Head(fp.Module):
    """The last block's output to logits."""

    def __init__(self, config: Config, generator: ft.random.Generator) -> None:
        self.norm = fp.LayerNorm(config.dim, eps=EPS)
        self.out = fp.Linear(config.dim, config.vocabulary, generator, bias=False)

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        """[batch, length, dim] to [batch, length, vocabulary]."""
        return self.out(self.norm(x))


class Scale(fp.Module):
    """Next to nothing."""

    def __init__(self) -> None:
        self.weight = fp.Parameter(np.ones((), np.float32))

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        """Any shape to the same."""
        return x * self.weight


def layers(config: Config) -> tuple[list[fp.Module], list[float]]:
    """The model in a row, and what each layer takes, by the sizes of its matrices."""
    generator = ft.random.Generator(0)
    blocks: list[fp.Module] = [Block(config, generator) for _ in range(config.layers)]
    block = 12.0 * config.dim**2 + 2 * config.context * config.dim
    row = [Embed(config, generator), *blocks, Head(config, generator)]
    return row, [0.0, *[block] * config.layers, float(config.dim * config.vocabulary)]


def cross_entropy(logits: ft.Tensor, targets: ft.Tensor) -> ft.Tensor:
    """The mean over all tokens."""
    return ft.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def mean_square(output: ft.Tensor, targets: ft.Tensor) -> ft.Tensor:
    """The loss of stages that do next to nothing."""
    return ft.mean(ft.square(output - targets))


class Alone:
    """A stage that is handed one micro-batch again and again, without a pipeline.

    Args:
        module: The stage of this rank.
        given: What comes in: part of the batch, or activations.
        targets: Of the micro-batch.
        loss: As `PipelineRunner` takes it; used on the last rank.
        world: A stage on each.
    """

    def __init__(self, module: fp.Module, given: Array, targets: Array, loss: Loss, world: fp.Communicator) -> None:
        self.world = world
        self.is_last = world.rank == world.world_size - 1
        self.run = StageRun(module, loss=loss if self.is_last else None, is_first=world.rank == 0, recompute=False)
        self.given, self.targets = [given], ft.asarray(targets) if self.is_last else None
        self.cotangents: list[Array] = []
        if not self.is_last:
            output = module(ft.asarray(given)).realize()
            self.cotangents = [np.full(output.shape, 1e-3, np.float32)]

    def seconds(self, rounds: int) -> dict[str, float]:
        """Medians of the actions of a stage, by the names that `Costs` has for them."""
        run, weight = self.run, 1.0
        actions: list[tuple[str, Callable[[], Any]]] = [
            ("forward", lambda: run.forward(0, self.given, self.targets)),
            ("backward", lambda: run.backward(0, self.cotangents, weight)),
            ("forward", lambda: run.forward(0, self.given, self.targets)),
            ("backward_input", lambda: run.backward_input(0, self.cotangents, weight)),
            ("backward_weight", lambda: run.backward_weight(0)),
        ]
        times: dict[str, list[float]] = {name: [] for name, _ in actions}
        for _ in range(rounds):
            for name, act in actions:
                began = time.perf_counter()
                act()
                times[name].append(time.perf_counter() - began)
        began = time.perf_counter()
        fp.realize(run.accumulator.sum())
        times["reduce"] = [time.perf_counter() - began]
        return {name: statistics.median(some) for name, some in times.items()}


def message_seconds(comm: fp.Communicator, shape: Sequence[int], rounds: int) -> float:
    """One way, half of the time there and back between ranks 0 and 1; the same number on all ranks."""
    array, times = np.zeros(shape, np.float32), []
    for _ in range(rounds) if comm.rank < 2 else ():
        began = time.perf_counter()
        if comm.rank == 0:
            post_send(comm, array, 1, 0)
        back = PostedReceive(comm, tuple(shape), ft.float32, 1 - comm.rank, 0).wait()
        if comm.rank == 1:
            post_send(comm, back, 0, 0)
        times.append((time.perf_counter() - began) / 2)
    found: float = comm.broadcast_object(statistics.median(times) if times else 0.0, 0, type=float)
    return found


def costs_of(alone: Alone, messages: fp.Communicator, shape: Sequence[int], rounds: int) -> Costs:
    """The costs of all stages, on every rank; the ranks measure theirs at the same time."""
    alone.world.barrier()
    mine = alone.seconds(rounds)
    rows: list[dict[str, float]] = alone.world.all_gather_object(mine, type=dict[str, float])
    message = message_seconds(messages, shape, 2 * rounds)
    return Costs(message=message, **{name: [row[name] for row in rows] for name in mine})  # type: ignore[arg-type]


def step_seconds(runner: PipelineRunner, inputs: Any, targets: Any, world: fp.Communicator) -> float:
    """From the moment when all begin until the last has its gradients and the loss."""
    world.barrier()
    began = time.perf_counter()
    result = runner.step(inputs, targets)
    fp.realize(result.gradients)
    result.loss.item()
    took: float = max(world.all_gather_object(time.perf_counter() - began, type=float))
    return took


def rounds_of(
    world: fp.Communicator,
    schedules: Sequence[Schedule],
    stages: dict[int, fp.Module],
    batch: tuple[Array, Array],
    activation: Array,
    loss: Loss,
    rounds: int,
) -> tuple[list[Costs], dict[str, list[float]]]:
    """In each round the costs, and the seconds of a step of each schedule."""
    messages = world.group(range(world.world_size), "messages")
    inputs, targets = batch
    runners = {one.name: PipelineRunner(stages, one, world, loss=loss) for one in schedules}
    rows = len(inputs) // schedules[0].num_microbatches
    given = inputs[:rows] if world.rank == 0 else activation
    alone = Alone(stages[world.rank], given, targets[:rows], loss, world)
    found: list[Costs] = []
    steps: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(WARM_UP + rounds):
        costs = costs_of(alone, messages, activation.shape, 5)
        taken = {name: step_seconds(runner, inputs, targets, world) for name, runner in runners.items()}
        if number >= WARM_UP:
            found.append(costs)
            for name, took in taken.items():
                steps[name].append(took)
    return found, steps


def compared(schedule: Schedule, costs: Sequence[Costs], taken: Sequence[float]) -> dict[str, Any]:
    """Prediction and measurement of a schedule, in ms."""
    predicted = [simulate(schedule, one) for one in costs]
    ratios = [took / one.total for took, one in zip(taken, predicted, strict=True)]
    return {
        "kind": schedule.name,
        "predicted_ms": statistics.median(one.total for one in predicted) * 1e3,
        "measured_ms": statistics.median(taken) * 1e3,
        "measured_over_predicted": statistics.median(ratios),
        "least_ratio": min(ratios),
        "greatest_ratio": max(ratios),
        "predicted_bubble_ratio": statistics.median(one.bubble_ratio() for one in predicted),
    }


def overhead(world: fp.Communicator, rounds: int) -> dict[str, float]:
    """Microseconds of an action, of stages that do next to nothing.

    `action_us` is the time of a step on all ranks by the actions of one; `cpu_us` that of a pipeline of one rank, which
    neither sends nor waits, on the processor, and `runner_us` what of it the same actions do not take without a runner.
    """
    count = TINY_MICROBATCHES
    schedule = built("1f1b", world.world_size, count)
    ones = np.ones((count, 1), np.float32)
    pipeline = PipelineRunner({world.rank: Scale()}, schedule, world, loss=mean_square)
    single = PipelineRunner({0: Scale()}, built("1f1b", 1, count), fp.IdentityComm(), loss=mean_square)
    run = StageRun(Scale(), loss=mean_square, is_first=True, recompute=False)
    row = ft.asarray(ones[:1]).realize()

    def alone() -> None:
        for _ in range(count):
            run.forward(0, [ones[:1]], row)
            run.backward(0, [], 1 / count)
        fp.realize(run.accumulator.sum())

    together: list[float] = []
    with_runner: list[float] = []
    without: list[float] = []
    for number in range(WARM_UP + rounds):
        took = step_seconds(pipeline, ones, ones, world)
        busy = processor_seconds(lambda: fp.realize(single.step(ones, ones).gradients))
        bare = processor_seconds(alone)
        if number >= WARM_UP:
            together.append(took)
            with_runner.append(busy)
            without.append(bare)
    actions = 2 * count
    added = statistics.median(a - b for a, b in zip(with_runner, without, strict=True))
    return {
        "action_us": statistics.median(together) / actions * 1e6,
        "cpu_us": statistics.median(with_runner) / actions * 1e6,
        "runner_us": added / actions * 1e6,
    }


def processor_seconds(run: Callable[[], Any]) -> float:
    """What this process took of a core, however busy the machine is."""
    began = time.process_time()
    run()
    return time.process_time() - began


def measure(config: Config, microbatches: int, rounds: int) -> dict[str, Any]:
    """All of it, on every rank."""
    world = fp.init()
    if world.world_size < 2 or config.batch % microbatches:
        raise click.UsageError(
            f"a pipeline is of two ranks or more, fuelrun -n 2, and its --microbatches divide --batch; got "
            f"{world.world_size} ranks, {microbatches} micro-batches and a batch of {config.batch}"
        )
    row, times = layers(config)
    schedules = [built(kind, world.world_size, microbatches) for kind in KINDS]
    assignment = StageAssignment.by_times(times, world.world_size)
    model = PipelineModel(row, assignment, schedules[0], world.rank)
    fp.realize(model)
    draw = np.random.default_rng(0)
    tokens, targets = (draw.integers(0, config.vocabulary, (config.batch, config.context)) for _ in range(2))
    shape = (config.batch // microbatches, config.context, config.dim)
    activation = draw.standard_normal(shape, dtype=np.float32)
    stages: dict[int, fp.Module] = dict(model.stages)
    costs, steps = rounds_of(world, schedules, stages, (tokens, targets), activation, cross_entropy, rounds)
    middle = {
        name: np.median([getattr(one, name) for one in costs], axis=0).tolist()
        for name in ("forward", "backward", "backward_input", "backward_weight", "message", "reduce")
    }
    return {
        "ranks": world.world_size,
        "microbatches": microbatches,
        "rounds": rounds,
        "layers_per_stage": assignment.layers_per_stage(),
        "costs_ms": {name: (np.array(value) * 1e3).tolist() for name, value in middle.items()},
        "schedules": [compared(one, costs, steps[one.name]) for one in schedules],
        **overhead(world, rounds),
    }


@click.command(help="Predict a pipeline's step, and measure it.", context_settings={"show_default": True})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--microbatches", type=click.IntRange(min=1), default=8)
@click.option("--rounds", type=click.IntRange(min=1), default=10)
@sizes
def main(as_json: bool, microbatches: int, rounds: int, **dimensions: int) -> None:
    """Prints the table on rank 0."""
    found = measure(Config(**dimensions), microbatches, rounds)
    if not fp.init().is_root:
        return
    if as_json:
        print(json.dumps(found))
        return
    for name, each in found["costs_ms"].items():
        print(f"{name.ljust(15)} {', '.join(f'{ms:.3f}' for ms in np.atleast_1d(each))} ms")
    print("schedule  predicted ms  measured ms  ratio (least to greatest)  bubble")
    for one in found["schedules"]:
        span = f"{one['measured_over_predicted']:.3f} ({one['least_ratio']:.3f} to {one['greatest_ratio']:.3f})"
        times = f"{one['predicted_ms']:12.1f}  {one['measured_ms']:11.1f}"
        print(f"{one['kind'].ljust(8)}  {times}  {span.ljust(25)}  {one['predicted_bubble_ratio']:.1%}")
    print(f"an action of next to nothing: {found['action_us']:.0f} us with its messages, on all ranks")
    print(f"  on the processor {found['cpu_us']:.0f} us without messages, of it the runner {found['runner_us']:.0f} us")


if __name__ == "__main__":
    main()

"""Pipelines at work: every schedule gives the losses and gradients of the model on one rank.

`FUEL_STRESS=1` runs a thousand random schedules.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from random_schedules import random_schedule

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint, tensor_parallel
from fuel_parallel.errors import ArgumentError, ScheduleError
from fuel_parallel.pipeline_parallel import (
    PipelineModel,
    PipelineRunner,
    Schedule,
    ScheduleKind,
    StageAssignment,
    build,
)

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi
RANDOM_SCHEDULES = 1000 if os.environ.get("FUEL_STRESS") else 4

KINDS = [kind for kind in ScheduleKind if kind is not ScheduleKind.INFERENCE]
DIM, CLASSES = 6, 11
rng = np.random.default_rng(0)
TOKENS, TARGETS = rng.integers(0, CLASSES, (2, 13, 5))


class Block(fp.Module):
    """A feed-forward layer over tensor-parallel ranks."""

    def __init__(self, g: ft.random.Generator, tp: fp.Communicator) -> None:
        self.norm = fp.LayerNorm(DIM, dtype="float64")
        self.up = tensor_parallel.ColumnParallel(DIM, 4 * DIM, g, tp, dtype="float64")
        self.down = tensor_parallel.RowParallel(4 * DIM, DIM, g, tp, dtype="float64")

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        return x + self.down(ft.gelu(self.up(self.norm(x))))


def layers_of(count: int, tp: fp.Communicator | None = None) -> list[fp.Module]:
    g = ft.random.Generator(3)
    blocks = [Block(g, tp or fp.IdentityComm()) for _ in range(count - 2)]
    return [fp.Embedding(CLASSES, DIM, g, dtype="float64"), *blocks, fp.Linear(DIM, CLASSES, g, dtype="float64")]


def through(layers: Sequence[fp.Module], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def loss_of(logits: ft.Tensor, targets: ft.Tensor) -> ft.Tensor:
    return ft.cross_entropy(logits, targets)


def assert_like_one_rank(schedule: Schedule, comm: fp.Communicator = world, *, steps: int = 1, **options: Any) -> None:
    layers = layers_of(schedule.num_stages + 2)
    model = PipelineModel(layers, StageAssignment.uniform(len(layers), schedule.num_stages), schedule, comm.rank)
    runner = PipelineRunner(model.stages, schedule, comm, loss=loss_of, **options)
    loss = loss_of(through(layers, ft.asarray(TOKENS)), ft.asarray(TARGETS))
    expected = ft.grad(loss, runner.parameters())
    fp.realize(loss, expected)
    for _ in range(steps):
        result = runner.step(TOKENS, TARGETS)
        fp.realize(result.gradients)
        assert abs(result.loss.item() - loss.item()) < 1e-12
        for mine, dense in zip(result.gradients, expected, strict=True):
            np.testing.assert_allclose(mine.numpy(), dense.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_gives_the_gradients_of_one_rank(kind: ScheduleKind) -> None:
    """Micro-batches of unequal sizes, twice: the first step tells shapes, the second knows them."""
    assert_like_one_rank(build(kind, N, 5), steps=2)


@pytest.mark.parametrize("kind", ["1f1b", "zb-v"])
def test_forwards_can_be_computed_again(kind: str) -> None:
    assert_like_one_rank(build(kind, N, 3), recompute=True)


@pytest.mark.timeout(60 + RANDOM_SCHEDULES)
def test_random_schedules_run() -> None:
    for seed in range(RANDOM_SCHEDULES):
        draw = random.Random(seed)
        assert_like_one_rank(random_schedule(N, draw.randint(1, 3), draw.randint(1, 5), draw), recompute=seed % 2 == 1)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-v"])
def test_with_data_parallel_ranks(kind: str) -> None:
    """pp x dp, or one of them alone; each replica has its own rows of the batch."""
    pp = 2 if N % 2 == 0 else 1
    mesh = fp.Mesh(world, pp=pp, dp=-1)
    schedule = build(kind, pp, 3)
    layers = layers_of(schedule.num_stages + 2)
    model = PipelineModel(layers, StageAssignment.uniform(len(layers), schedule.num_stages), schedule, mesh["pp"].rank)
    runner = PipelineRunner(model.stages, schedule, mesh["pp"], loss=loss_of, dp=mesh["dp"])
    tokens, targets = rng_batch(12)
    rows = fp.data_parallel.shard_rows(12, mesh["dp"])
    mine = slice(rows.start, rows.stop)
    result = runner.step(tokens[mine], targets[mine])
    loss = loss_of(through(layers, ft.asarray(tokens)), ft.asarray(targets))
    expected = ft.grad(loss, runner.parameters())
    fp.realize(loss, expected, result.gradients)
    assert abs(result.loss.item() - loss.item()) < 1e-12
    for ours, dense in zip(result.gradients, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), dense.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_with_tensor_parallel_ranks(kind: str) -> None:
    """pp x tp: collectives inside of stages keep their order while micro-batches overtake each other."""
    pp = 2 if N % 2 == 0 else 1
    mesh = fp.Mesh(world, pp=pp, tp=-1)
    schedule = build(kind, pp, 4)
    count = schedule.num_stages + 2
    layers, dense = layers_of(count, mesh["tp"]), layers_of(count)
    assignment = StageAssignment.uniform(count, schedule.num_stages)
    model = PipelineModel(layers, assignment, schedule, mesh["pp"].rank)
    twin = PipelineModel(dense, assignment, schedule, mesh["pp"].rank)
    runner = PipelineRunner(model.stages, schedule, mesh["pp"], loss=loss_of)
    loss = loss_of(through(dense, ft.asarray(TOKENS)), ft.asarray(TARGETS))
    gradients = dict(zip(twin.named_variables(), ft.grad(loss, twin.parameters()), strict=True))
    result = runner.step(TOKENS, TARGETS)
    fp.realize(loss, gradients, result.gradients)
    assert abs(result.loss.item() - loss.item()) < 1e-12
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, mine in zip(runner.parameters(), result.gradients, strict=True):
        whole = gradients[names[id(parameter)]].numpy()
        shard = parameter.shard
        part = whole if shard is None else whole[box(shard.start, parameter.shape)]
        np.testing.assert_allclose(mine.numpy(), part, rtol=1e-12, atol=1e-14)


def box(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + extent) for first, extent in zip(start, shape, strict=True))


def rng_batch(rows: int) -> Any:
    return np.random.default_rng(1).integers(0, CLASSES, (2, rows, 5))


class First(fp.Module):
    """Passes on activations, and the tokens themselves, which have no gradient."""

    def __init__(self, embedding: fp.Embedding) -> None:
        self.embedding = embedding

    def __call__(self, tokens: ft.Tensor) -> tuple[ft.Tensor, ft.Tensor]:
        return self.embedding(tokens), tokens


class Middle(fp.Module):
    def __call__(self, x: ft.Tensor, tokens: ft.Tensor) -> tuple[ft.Tensor, ft.Tensor]:
        return ft.tanh(x) * ft.astype(tokens + 1, x.dtype)[..., None], tokens


class Last(fp.Module):
    """Has a copy of the embedding as its head."""

    def __init__(self, embedding: fp.Embedding) -> None:
        self.embedding = embedding

    def __call__(self, x: ft.Tensor, tokens: ft.Tensor) -> ft.Tensor:
        return self.embedding.logits(x)


def embedding(seed: int) -> fp.Embedding:
    return fp.Embedding(CLASSES, DIM, ft.random.Generator(seed), dtype="float64")


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-v"])
def test_tied_weights_and_several_tensors_between_stages(kind: str, tmp_path_factory: Any) -> None:
    schedule = build(kind, N, 4)
    own = embedding(0)  # one and the same where both ends lie on one rank
    last = own if schedule.placement[0] == schedule.placement[-1] else embedding(1)  # else made equal
    stages = [First(own), *[Middle() for _ in range(schedule.num_stages - 2)], Last(last)]
    if schedule.num_stages == 1:
        stages = [Both(own)]
    mine = {number: stages[number] for number in schedule.stages_of(RANK)}
    ends = [stage.embedding.weight for stage in mine.values() if not isinstance(stage, Middle)]
    runner = PipelineRunner(mine, schedule, world, loss=loss_of, tied={"token": ends[0]} if ends else None)
    dense = embedding(0)
    x: Any = First(dense)(ft.asarray(TOKENS))
    for _ in range(schedule.num_stages - 2):
        x = Middle()(*x)
    loss = loss_of(Last(dense)(*x), ft.asarray(TARGETS))
    expected = ft.grad(loss, dense.weight)
    result = runner.step(TOKENS, TARGETS)
    squares = float(ft.sum(expected * expected))
    _, norm = fp.optim.clip_by_global_norm(result.gradients, 0.1, parameters=runner.parameters(), pp=world)
    assert abs(norm.item() - squares**0.5) < 1e-12
    assert abs(result.loss.item() - loss.item()) < 1e-12
    for gradient in result.gradients:
        np.testing.assert_allclose(gradient.numpy(), expected.numpy(), rtol=1e-12, atol=1e-14)


class Both(fp.Module):
    def __init__(self, embedding: fp.Embedding) -> None:
        self.embedding = embedding

    def __call__(self, tokens: ft.Tensor) -> ft.Tensor:
        return self.embedding.logits(self.embedding(tokens))


@pytest.mark.parametrize("kind", ["1f1b", "zb-v", "inference"])
def test_evaluation_and_prediction(kind: str) -> None:
    schedule = build(kind, N, 4)
    layers = layers_of(schedule.num_stages + 2)
    model = PipelineModel(layers, StageAssignment.uniform(len(layers), schedule.num_stages), schedule, RANK)
    runner = PipelineRunner(model.stages, schedule, world, loss=loss_of)
    for rows in (13, 2, 13):  # fewer rows than micro-batches, too
        logits = through(layers, ft.asarray(TOKENS[:rows]))
        loss = loss_of(logits, ft.asarray(TARGETS[:rows]))
        assert abs(runner.evaluate(TOKENS[:rows], TARGETS[:rows]).item() - loss.item()) < 1e-12
        outputs = runner.predict(TOKENS[:rows])
        assert (outputs is not None) == (schedule.placement[-1] == RANK)
        if outputs is not None:
            np.testing.assert_allclose(outputs.numpy(), logits.numpy(), rtol=1e-12)


def test_a_checkpoint_does_not_know_how_many_stages_there_were(tmp_path_factory: Any) -> None:
    folder = world.broadcast_object(str(tmp_path_factory.mktemp("run")) if RANK == 0 else None)
    one, other = build("1f1b", N, N), build("zb-v", N, N)
    layers = layers_of(2 * N + 2)
    saved = PipelineModel(layers, StageAssignment.uniform(len(layers), N), one, RANK)
    optimizer = fp.optim.AdamW(saved.parameters(), lr=1e-2)
    runner = PipelineRunner(saved.stages, one, world, loss=loss_of)
    optimizer.update(runner.step(TOKENS, TARGETS).gradients)
    fp.realize(saved, optimizer)
    loss = runner.evaluate(TOKENS, TARGETS).item()
    checkpoint.save(folder, {"model": saved, "optimizer": optimizer}, step=1, comm=world)
    loaded = PipelineModel(layers_of(2 * N + 2), StageAssignment.uniform(len(layers), 2 * N), other, RANK)
    again = fp.optim.AdamW(loaded.parameters(), lr=1e-2)
    checkpoint.load(folder, {"model": loaded, "optimizer": again}, comm=world)
    runner = PipelineRunner(loaded.stages, other, world, loss=loss_of)
    assert abs(runner.evaluate(TOKENS, TARGETS).item() - loss) < 1e-12


def test_mistakes_are_named() -> None:
    schedule = build("1f1b", N, 4)
    layers = layers_of(N + 2)
    stages = PipelineModel(layers, StageAssignment.uniform(N + 2, N), schedule, RANK).stages
    with pytest.raises(ScheduleError, match=rf"1f1b is for {N + 1} ranks, but communicator 'world' has {N}"):
        PipelineRunner(stages, build("1f1b", N + 1, 4), world, loss=loss_of)
    with pytest.raises(ArgumentError, match=rf"gives rank {RANK} the stages \[{RANK}\], but stages= has \[\]"):
        PipelineRunner({}, schedule, world, loss=loss_of)
    if N == 1:
        runner = PipelineRunner(stages, schedule, world, loss=loss_of)
        for inputs, targets, message in (
            (None, TARGETS, "inputs are missing"),
            (TOKENS, None, "targets are missing"),
            (TOKENS[:3], TARGETS[:3], "inputs have 3 rows, fewer than the 4 micro-batches"),
            (TOKENS, TARGETS[:8], "targets have 8 rows on rank 0, but inputs have 13 on rank 0"),
            (np.float64(1.0), TARGETS, "cut into micro-batches along dimension 0"),
        ):
            with pytest.raises(ArgumentError, match=message):
                runner.step(inputs, targets)
        with pytest.raises(ArgumentError, match="give loss="):
            PipelineRunner(stages, schedule, world)
        with pytest.raises(ArgumentError, match=r"loss: expected a floating scalar.* got float64\[4, 5, 11\]"):
            PipelineRunner(stages, schedule, world, loss=lambda y, t: y).step(TOKENS, TARGETS)
        with pytest.raises(ScheduleError, match="no backward; call evaluate or predict"):
            PipelineRunner(stages, build("inference", 1, 4), world, loss=loss_of).step(TOKENS, TARGETS)

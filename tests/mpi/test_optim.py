"""Optimizers of models that are cut over ranks: steps and norms are the dense twin's; decisions are all ranks'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.lazy.node import topological
from fuel_parallel.optim import SGD, AdamW, MixedPrecision, Muon, clip_by_global_norm
from fuel_parallel.partitioning import partition

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi

Array = np.ndarray[Any, Any]
SIZE = st.integers(1, 9)
CUTS = st.sampled_from(["whole", "rows", "columns", "copies", "first rank"])


def shard_of(shape: tuple[int, ...], cut: str) -> tuple[tuple[slice, ...], fp.Shard | None]:
    """Which box of a tensor this rank holds, and the shard that says so."""
    everything = tuple(slice(0, extent) for extent in shape)
    if cut == "whole":
        return everything, None
    mine = partition(shape[0], N)[RANK]
    if cut == "copies":  # all ranks hold all, and each counts some rows
        return everything, fp.Shard(shape, (0,) * len(shape), (slice(mine.start, mine.stop), *everything[1:]))
    if cut == "first rank":
        rows = slice(0, shape[0] if RANK == 0 else 0)
        return (rows, *everything[1:]), fp.Shard(shape, (0,) * len(shape))
    dim = 0 if cut == "rows" else len(shape) - 1
    mine = partition(shape[dim], N)[RANK]
    box = tuple(slice(mine.start, mine.stop) if d == dim else one for d, one in enumerate(everything))
    return box, fp.Shard(shape, tuple(one.start for one in box))


def drawn(shape: tuple[int, ...], *seed: int) -> Array:
    return np.asarray(np.random.default_rng(seed).normal(size=shape))


def same(found: ft.Tensor, wanted: Array) -> None:
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-12)


@settings(max_examples=12)
@given(
    shapes=st.lists(st.tuples(SIZE, SIZE, CUTS), min_size=1, max_size=3), scaling=st.sampled_from(["rms", "spectral"])
)
def test_muon_steps_by_the_whole_matrix(shapes: list[tuple[int, int, str]], scaling: str) -> None:
    wholes = [drawn(shape[:2], i) for i, shape in enumerate(shapes)] + [drawn((5,), 9)]
    cuts = [shard_of(shape[:2], shape[2]) for shape in shapes] + [shard_of((5,), "rows")]
    dense = [fp.Parameter(ft.asarray(value)) for value in wholes]
    parts = [fp.Parameter(ft.asarray(v[box]), shard=shard) for v, (box, shard) in zip(wholes, cuts, strict=True)]
    one, other = Muon(dense, lr=0.1, scaling=scaling), Muon(parts, lr=0.1, scaling=scaling, comm=world)
    for step in range(3):
        gradients = [drawn(value.shape, step, i) for i, value in enumerate(wholes)]
        one.update([ft.asarray(g) for g in gradients])
        other.update([ft.asarray(g[box]) for g, (box, _) in zip(gradients, cuts, strict=True)])
        fp.realize(one, other)
    for whole, part, (box, _) in zip(dense, parts, cuts, strict=True):
        same(part, whole.numpy()[box])


@settings(max_examples=12)
@given(
    shapes=st.lists(st.tuples(SIZE, SIZE, CUTS), min_size=1, max_size=5),
    max_norm=st.sampled_from([0.1, 3.0, 1e3]),
)
def test_the_norm_of_parts_is_that_of_the_dense_gradients(shapes: list[tuple[int, int, str]], max_norm: float) -> None:
    wholes = [drawn(shape[:2], i) for i, shape in enumerate(shapes)]
    cuts = [shard_of(shape[:2], shape[2]) for shape in shapes]
    parts = [fp.Parameter(ft.asarray(v[box]), shard=shard) for v, (box, shard) in zip(wholes, cuts, strict=True)]
    gradients = [ft.asarray(v[box]) for v, (box, _) in zip(wholes, cuts, strict=True)]
    clipped, norm = clip_by_global_norm(gradients, max_norm, parameters=parts, tp=world)
    fp.realize(clipped, norm)
    expected = np.sqrt(sum(np.sum(v**2) for v in wholes))
    same(norm, expected)
    for found, whole, (box, _) in zip(clipped, wholes, cuts, strict=True):
        same(found, whole[box] * min(1.0, max_norm / expected))
    assert len(set(world.all_gather_object(norm.numpy().tobytes().hex()))) == 1


def test_stages_of_a_pipeline_have_one_norm_and_one_collective_along_each_axis() -> None:
    mesh = fp.Mesh(world, pp=-1, tp=2 if N % 2 == 0 else 1)
    pp, tp = mesh["pp"], mesh["tp"]
    alike = drawn((3,), 7, pp.rank)  # on all ranks of a stage
    rows = partition(5, tp.world_size)[tp.rank]
    cut = drawn((5, 2), 8, pp.rank)[rows.start : rows.stop]
    shard = fp.Shard((5, 2), (rows.start, 0))
    parameters = [fp.Parameter(ft.zeros(3)), fp.Parameter(ft.zeros((len(rows), 2)), shard=shard)]
    _, norm = clip_by_global_norm([ft.asarray(alike), ft.asarray(cut)], 1.0, parameters=parameters, tp=tp, pp=pp)
    crossing = [node for node in topological([norm.node]) if node.op.crosses_ranks]
    assert len(crossing) == (tp.world_size > 1) + (pp.world_size > 1)
    assert all(node.spec.nbytes <= 8 * N for node in crossing)
    stages = range(pp.world_size)
    same(norm, np.sqrt(sum(np.sum(drawn((3,), 7, s) ** 2) + np.sum(drawn((5, 2), 8, s) ** 2) for s in stages)))
    assert len(set(world.all_gather_object(norm.numpy().tobytes().hex()))) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bad_rank", range(N))
def test_an_overflow_on_one_rank_skips_the_step_on_all(dtype: str, bad_rank: int) -> None:
    rows = partition(2 * N + 1, N)[RANK]
    shard = fp.Shard((2 * N + 1, 3), (rows.start, 0))
    weight = fp.Parameter(ft.ones((len(rows), 3), dtype=dtype), shard=shard)
    optimizer = MixedPrecision([weight], lambda m: AdamW(m, lr=0.1), comm=world, loss_scale=1024.0, growth_interval=2)
    for step in range(4):
        gradient = np.ones((len(rows), 3), np.float32)
        if step == 1 and bad_rank == RANK:
            gradient[-1, 1] = np.inf
        before = [np.array(t.numpy()) for t in (weight, *optimizer.masters, *optimizer.optimizer.squares)]
        optimizer.update([ft.astype(ft.asarray(gradient), dtype)])
        fp.realize(optimizer)
        after = [t.numpy() for t in (weight, *optimizer.masters, *optimizer.optimizer.squares)]
        assert [bool((a == b).all()) for a, b in zip(after, before, strict=True)] == [step == 1] * 3
    assert optimizer.skipped_steps.item() == 1
    assert optimizer.loss_scale.item() == 1024.0  # halved, and doubled after two good steps
    assert optimizer.optimizer.step.item() == 3


def test_a_tensor_parallel_step_with_clipping_and_masters_is_the_dense_one() -> None:
    """All of it together, in one plan, against one rank with the whole model."""

    def step(first: Any, second: Any, tp: fp.Communicator | None, x: Array) -> list[fp.Parameter]:
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = MixedPrecision(parameters, lambda m: SGD(m, lr=0.1, momentum=0.9), comm=tp, loss_scale=64.0)
        for _ in range(3):
            loss = ft.mean(ft.square(second(ft.tanh(first(ft.asarray(x))))))
            gradients = ft.grad(optimizer.scaled(loss), parameters)
            gradients, norm = clip_by_global_norm(
                gradients, 0.05, parameters=parameters, tp=tp, loss_scale=optimizer.loss_scale
            )
            optimizer.update(gradients)
            fp.realize(loss, norm, optimizer)
            assert norm.item() > 0.05
        return parameters

    g, h = ft.random.Generator(0), ft.random.Generator(0)
    x = drawn((4, 6), 3)
    columns = fp.tensor_parallel.ColumnParallel(6, 7, g, world, dtype="float64")
    rows = fp.tensor_parallel.RowParallel(7, 5, g, world, dtype="float64")
    found = step(columns, rows, world, x)
    wanted = step(fp.Linear(6, 7, h, dtype="float64"), fp.Linear(7, 5, h, dtype="float64"), None, x)
    for mine, whole in zip(found, wanted, strict=True):
        start = mine.shard.start if mine.shard is not None else (0,) * mine.ndim
        same(mine, whole.numpy()[tuple(slice(s, s + n) for s, n in zip(start, mine.shape, strict=True))])

"""Data parallelism: accumulated and averaged gradients are those of one large batch; replicas that drift are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.checkpoint.state import named
from fuel_parallel.data_parallel import GradientAccumulator, average_gradients, check_replicas, shard_rows
from fuel_parallel.errors import ArgumentError, ReplicaError, ShapeError
from fuel_parallel.lazy.node import topological
from fuel_parallel.runtime.plan import plans

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi

Array = np.ndarray[Any, Any]


def network(dtype: str = "float64") -> list[fp.Linear]:
    g = ft.random.Generator(5)
    return [fp.Linear(4, 6, g, dtype=dtype), fp.Linear(6, 2, g, dtype=dtype)]


def parameters_of(layers: list[fp.Linear]) -> list[fp.Parameter]:
    return [p for layer in layers for p in layer.parameters()]


def gradients_of(layers: list[fp.Linear], x: Array) -> list[ft.Tensor]:
    found = layers[1](ft.tanh(layers[0](ft.astype(ft.asarray(x), layers[0].weight.dtype))))
    return list(ft.grad(ft.mean(ft.square(ft.astype(found, "float64"))), parameters_of(layers)))


@settings(max_examples=10)
@given(rows=st.integers(1, 5), micro_batches=st.integers(1, 4), at_once=st.booleans())
def test_micro_batches_on_all_ranks_are_one_large_batch(rows: int, micro_batches: int, at_once: bool) -> None:
    layers = network()
    x = np.random.default_rng(rows).normal(size=(rows * micro_batches * N, 4))
    mine = shard_rows(len(x), world)
    accumulator = GradientAccumulator(parameters_of(layers))
    for first in range(mine.start, mine.stop, rows):
        accumulator.add(gradients_of(layers, x[first : first + rows]))
        if not at_once:
            fp.realize(accumulator)
    averaged = average_gradients(accumulator.mean(), world)
    wanted = gradients_of(layers, x)
    fp.realize(averaged, wanted)
    for found, whole in zip(averaged, wanted, strict=True):
        np.testing.assert_allclose(found.numpy(), whole.numpy(), rtol=1e-12, atol=1e-12)


def test_accumulation_sends_nothing_holds_one_sum_and_makes_no_new_plans() -> None:
    layers = network("bfloat16")
    accumulator = GradientAccumulator(parameters_of(layers))
    made, held = [], []
    for count in (2, 3, 5):
        for micro_batch in range(count):
            accumulator.add(gradients_of(layers, np.random.default_rng(micro_batch).normal(size=(2, 4))))
            assert not any(node.op.crosses_ranks for node in topological([t.node for t in accumulator.__tensors__()]))
            fp.realize(accumulator)
            held.append(fp.memory_stats().held_bytes if hasattr(fp.memory_stats(), "held_bytes") else 0)
        averaged = average_gradients(accumulator.mean(), world)
        fp.realize(averaged, accumulator)
        made.append(plans.made)
    assert made[1] == made[2]
    assert {g.dtype.name for g in averaged} == {"float32"}


def test_misuse_of_the_accumulator_is_named() -> None:
    accumulator = GradientAccumulator([fp.Parameter(ft.zeros(3))])
    with pytest.raises(ArgumentError, match="mean: no gradients were added since the last one"):
        accumulator.mean()
    with pytest.raises(ArgumentError, match="add: 1 parameters, but 2 gradients"):
        accumulator.add([ft.zeros(3), ft.zeros(3)])
    with pytest.raises(ShapeError, match=r"add: parameter 0 has shape \(3,\), its gradient \(2,\)"):
        accumulator.add([ft.zeros(2)])


# Replicas.


def drifted(change: Callable[[dict[str, Array]], Any], rank: int = N - 1) -> str:
    """The message of all ranks, which is one, after `change` was made on one rank."""
    state = {
        "big": np.arange(100_000, dtype=np.float32).reshape(100, 10, 100),
        "nan": np.array([np.nan, 0.0, -0.0]),
        "half": ft.ones((3, 3), dtype=ft.bfloat16).numpy().copy(),
        "empty": np.zeros((0, 4)),
        "scalar": np.array(3),
    }
    value: dict[str, Any] = {"arrays": state, "lr": 0.5}
    if rank == RANK and (more := change(state)):
        value |= more
    with pytest.raises(ReplicaError) as caught:
        check_replicas(value, world)
    messages = world.all_gather_object(str(caught.value))
    assert len(set(messages)) == 1
    return messages[0]


def put(name: str, at: Any, value: Any) -> Callable[[dict[str, Array]], Any]:
    return lambda state: state[name].__setitem__(at, value)


def test_replicas_that_are_alike_pass_nans_too() -> None:
    layers = network()
    optimizer = fp.optim.AdamW(parameters_of(layers))
    optimizer.update(average_gradients(gradients_of(layers, np.full((2, 4), RANK / 2)), world))
    layers[0].bias.assign(layers[0].bias * np.nan)
    check_replicas([layers, optimizer], world)
    check_replicas({"model": layers, "optimizer": optimizer}, world)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("at", [(0, 0, 0), (57, 3, 99), (99, 9, 99)])
def test_the_first_element_that_differs_is_named_with_its_values(at: tuple[int, int, int]) -> None:
    before = float(np.ravel_multi_index(at, (100, 10, 100)))

    def change(state: dict[str, Array]) -> None:
        state["big"][at] = -7.5
        state["big"].reshape(-1)[-1] = -7.5

    message = drifted(change)
    others = ", ".join(map(str, range(N - 1)))
    plural = "s" if N > 2 else ""
    odd, most = (f"rank {N - 1}", f"rank{plural} {others}")
    assert message.startswith(f"check_replicas: arrays.big, float32[100, 10, 100] differs: {odd} from {most}, ")
    assert f"at first in element {list(at)}, which is {before!r} (0x" in message
    assert f") on {most}, -7.5 (0xc0f00000) on {odd}; 1 of 6 differ." in message


@pytest.mark.mpi(min_size=2)
def test_signs_of_zeros_payloads_of_nans_and_small_dtypes_count() -> None:
    assert "element [2], which is -0.0 (0x8000000000000000)" in drifted(put("nan", 2, 0.0))
    other = np.array([0x7FF8000000000001], np.uint64).view(np.float64)[0]
    assert "element [0], which is nan (0x7ff8000000000000)" in drifted(put("nan", 0, other))
    assert "arrays.half, bfloat16[3, 3] differs" in drifted(put("half", (1, 1), 1.0078125))
    assert "element [1, 1], which is 1.0 (0x3f80)" in drifted(put("half", (1, 1), 1.0078125))
    assert "arrays.scalar, int64[] differs" in drifted(put("scalar", (), 4))


@pytest.mark.mpi(min_size=2)
def test_other_things_than_tensors_are_compared_too() -> None:
    ranks = f"rank{'s' if N > 2 else ''} {', '.join(map(str, range(N - 1)))}"
    assert f"lr = 0.5 on {ranks}, but lr = 0.25 on rank {N - 1}" in drifted(lambda _: {"lr": 0.25})
    assert "but more = 3 on rank" in drifted(lambda _: {"more": 3})
    assert "big, float32[100, 10, 100] on" in drifted(lambda state: {"arrays": {**state, "big": np.zeros(3)}})


@pytest.mark.mpi(min_size=3)
def test_the_odd_one_out_may_be_any_rank_and_all_may_differ() -> None:
    assert f"differs: rank 1 from ranks {', '.join(str(r) for r in range(N) if r != 1)}" in drifted(
        put("big", 5, 0.0), rank=1
    )
    values = {"x": np.array([1.0, RANK, 2.0])}
    with pytest.raises(ReplicaError, match=r"element \[1\], which is 0\.0 .* on rank 0, 1\.0 .* on rank 1, 2\.0"):
        check_replicas(values, world)


@pytest.mark.mpi(min_size=4)
def test_parts_are_compared_with_the_same_parts() -> None:
    mesh = fp.Mesh(world, dp=-1, tp=2)
    layer = fp.tensor_parallel.ColumnParallel(4, 6, ft.random.Generator(1), mesh["tp"])
    check_replicas(layer, mesh["dp"])
    check_replicas(layer, world)
    if RANK == 3:
        layer.weight[2, 1] = 7.5
    with pytest.raises(ReplicaError, match=r"weight, float32\[4, 6\] differs: rank 3 from rank 1, .* \[2, 4\], .*7\.5"):
        check_replicas(layer, world)


def test_rows_of_an_optimizer_are_no_replicas_of_each_other() -> None:
    layers = network()
    optimizer = fp.data_parallel.ShardedOptimizer(fp.optim.AdamW, parameters_of(layers), world)
    optimizer.update(gradients_of(layers, np.full((2, 4), RANK / 2)))
    check_replicas([layers, optimizer], world)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_sharded_state_are_clipped_by_the_norm_of_all_rows(stage: int) -> None:
    """The rows of one parameter are parts of it, over data-parallel ranks here; a scalar is whole on all."""

    class Scaled(fp.Module):
        def __init__(self) -> None:
            self.layers = network()
            self.scale = fp.Parameter(ft.asarray(1.5, dtype="float64"))

        def __call__(self, x: ft.Tensor) -> ft.Tensor:
            return ft.mean(ft.square(self.layers[1](ft.tanh(self.layers[0](x))) * self.scale))

    x = np.random.default_rng(3).normal(size=(2 * N, 4)) * 10
    rows = shard_rows(len(x), world)
    dense, model = Scaled(), Scaled()
    plain = fp.optim.SGD(dense.parameters(), lr=0.1)
    gradients, wanted = fp.optim.clip_by_global_norm(
        ft.grad(dense(ft.asarray(x)), dense.parameters()), 0.01, parameters=dense.parameters()
    )
    plain.update(gradients)
    mine = ft.asarray(x[rows.start : rows.stop])
    if stage == 3:
        fp.data_parallel.shard_parameters(model, world, whole_elements=1)
        optimizer = fp.optim.SGD(model.parameters(), lr=0.1)
        gradients, norm = fp.optim.clip_by_global_norm(
            ft.grad(model(mine), model.parameters()), 0.01, parameters=model.parameters(), dp=world
        )
        optimizer.update(gradients)
    else:
        sharded = fp.data_parallel.ShardedOptimizer(
            lambda p: fp.optim.SGD(p, lr=0.1), model.parameters(), world, stage=stage
        )
        reduced = sharded.reduce_gradients(ft.grad(model(mine), model.parameters()))
        gradients, norm = fp.optim.clip_by_global_norm(reduced, 0.01, parameters=sharded.shards, dp=world)
        sharded.update(gradients, reduced=True)
    fp.realize(norm, wanted, model, dense)
    np.testing.assert_allclose(norm.numpy(), wanted.numpy(), rtol=1e-12)
    for found, whole in zip(model.parameters(), dense.parameters(), strict=True):
        start = (0,) * found.ndim if found.shard is None else found.shard.start
        part = whole.numpy()[tuple(slice(s, s + n) for s, n in zip(start, found.shape, strict=True))]
        np.testing.assert_allclose(found.numpy(), part, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_norm_under_zero_and_tensor_parallelism_is_that_of_the_dense_model(stage: int) -> None:
    """Parts over tp, what tp ranks hold alike, key heads that several hold, rows over dp of all of these."""
    mesh = fp.Mesh(world, dp=-1, tp=2) if N % 2 == 0 else fp.Mesh(world, dp=1, tp=-1)
    tp, dp = mesh["tp"], mesh["dp"]

    class Block(fp.Module):
        def __init__(self, attention: fp.Module) -> None:
            self.norm, self.attention = fp.LayerNorm(6, dtype="float64"), attention

        def __call__(self, x: ft.Tensor) -> ft.Tensor:
            return ft.sum(ft.square(self.attention(self.norm(x)))) * 3.0

    options: dict[str, Any] = {"kv_heads": 1, "head_size": 2, "dtype": "float64"}
    dense = Block(fp.Attention(6, 4, ft.random.Generator(5), **options))
    model = Block(fp.tensor_parallel.ParallelAttention(6, 4, ft.random.Generator(5), tp, **options))
    x = ft.asarray(np.random.default_rng(3).normal(size=(1, 3, 6)))
    whole = ft.grad(dense(x), dense.parameters())
    _, wanted = fp.optim.clip_by_global_norm(whole, 1.0, parameters=dense.parameters())
    if stage == 3:
        fp.data_parallel.shard_parameters(model, dp, whole_elements=8)
        parameters, gradients = model.parameters(), ft.grad(model(x), model.parameters())
    else:
        sharded = fp.data_parallel.ShardedOptimizer(fp.optim.SGD, model.parameters(), dp)
        parameters = sharded.shards
        gradients = sharded.reduce_gradients(ft.grad(model(x), model.parameters()))
    _, norm = fp.optim.clip_by_global_norm(gradients, 1.0, parameters=parameters, tp=tp, dp=dp)
    np.testing.assert_allclose(norm.numpy(), wanted.numpy(), rtol=1e-12)


@pytest.mark.parametrize("bad_rank", [0, N - 1])
def test_masters_and_a_loss_scale_may_be_cut_over_the_ranks(bad_rank: int) -> None:
    def train(make: Callable[[list[fp.Parameter]], Any]) -> tuple[list[fp.Parameter], Any]:
        parameters = parameters_of(network("float16"))
        optimizer = make(parameters)
        for step in range(3):
            draw = np.random.default_rng([step, RANK])
            gradients = [ft.astype(ft.asarray(draw.integers(-8, 9, p.shape) / 8), ft.float16) for p in parameters]
            if step == 1 and bad_rank == RANK:
                gradients[0] = gradients[0] * np.inf
            if isinstance(optimizer, fp.optim.MixedPrecision):
                gradients = average_gradients(gradients, world)
            optimizer.update(gradients)
            fp.realize(optimizer)
        return parameters, optimizer

    def mixed(p: list[fp.Parameter]) -> fp.optim.MixedPrecision:
        return fp.optim.MixedPrecision(p, lambda m: fp.optim.AdamW(m, lr=0.1), comm=world, loss_scale=4.0)

    wanted, plain = train(mixed)
    found, sharded = train(lambda p: fp.data_parallel.ShardedOptimizer(mixed, p, world))
    assert sharded.inner.skipped_steps.item() == plain.skipped_steps.item() == 1
    assert sharded.inner.loss_scale.item() == plain.loss_scale.item() == 2.0
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-3)
    names = named({"p": found, "optimizer": sharded}).tensors
    assert {n: held.global_shape for n, held in names.items()} == {
        n: held.global_shape for n, held in named({"p": wanted, "optimizer": plain}).tensors.items()
    }

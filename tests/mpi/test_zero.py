"""ZeRO-1, 2 and 3: the steps of plain data parallelism bit for bit, and states that any other number of ranks loads."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint
from fuel_parallel.comm.mpi import MpiComm
from fuel_parallel.comm.node_local import NodeLocalTransport
from fuel_parallel.comm.thresholds import KINDS, NEVER
from fuel_parallel.data_parallel import ShardedOptimizer, ShardedParameter, shard_parameters
from fuel_parallel.errors import ArgumentError, CommunicatorError, ShapeError

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi

OPTIMIZERS: dict[str, Callable[[list[fp.Parameter]], Any]] = {
    "AdamW": lambda ps: fp.optim.AdamW(ps, lr=1e-2, weight_decay=0.1),
    "SGD": lambda ps: fp.optim.SGD(ps, lr=1e-1, momentum=0.9),
}


@pytest.fixture(scope="module")
def comm() -> Any:
    """A communicator that adds in the order of ranks whatever the size: in shared memory."""
    made = MpiComm()
    if N > 1:
        transport = made.transport
        assert isinstance(transport, NodeLocalTransport)
        assert transport.shares_one_node
        transport.use_thresholds({**dict.fromkeys(KINDS, 1), "all_reduce_handed_in": NEVER})
    return made


class Net(fp.Module):
    """Sizes that no number of ranks divides, a scalar, a parameter used in another module than its own."""

    def __init__(self, dtype: str = "float64") -> None:
        g = ft.random.Generator(5)
        self.table = fp.Embedding(11, 13, g, std=0.5, dtype=dtype)
        self.layers = [fp.Linear(13, 17, g, dtype=dtype), fp.Linear(17, 13, g, dtype=dtype)]
        self.norm = fp.RMSNorm(13, dtype=dtype)
        self.scale = fp.Parameter(ft.asarray(0.5, dtype=dtype))
        self.shifts = [fp.Parameter(ft.zeros(13, dtype=dtype)), fp.Parameter(ft.zeros((1, 13), dtype=dtype))]

    def __call__(self, tokens: ft.Tensor) -> ft.Tensor:
        x = self.table(tokens) + self.shifts[0] + self.table.weight[: tokens.shape[0]]
        x = x + self.layers[1](ft.tanh(self.layers[0](self.norm(x)))) * self.scale
        return (x + self.shifts[1]) @ self.layers[0].weight

    def loss(self, tokens: ft.Tensor) -> ft.Tensor:
        return ft.mean(ft.square(ft.sin(self(tokens))))


def batch(step: int, rank: int = RANK) -> ft.Tensor:
    return ft.asarray(np.random.default_rng([step, rank]).integers(0, 11, size=5))


def plain(comm: fp.Communicator, make: Any, steps: int, dtype: str = "float64") -> tuple[list[float], Net, Any]:
    model = Net(dtype)
    optimizer = make(model.parameters())
    losses = []
    for step in range(steps):
        loss = model.loss(batch(step))
        optimizer.update(fp.data_parallel.average_gradients(ft.grad(loss, model.parameters()), comm))
        fp.realize(loss, model, optimizer)
        losses.append(loss.item())
    return losses, model, optimizer


def sharded(
    comm: fp.Communicator, make: Any, steps: int, stage: int, dtype: str = "float64", **options: Any
) -> tuple[list[Any], Net, Any]:
    model = Net(dtype)
    if stage == 3:
        shard_parameters(model, comm, whole_elements=options.get("whole_elements", 0))
        optimizer = make(model.parameters())
    else:
        optimizer = ShardedOptimizer(make, model.parameters(), comm, stage=stage, **options)
    losses = []
    for step in range(steps):
        loss = model.loss(batch(step))
        optimizer.update(ft.grad(loss, model.parameters()))
        fp.realize(loss, model, optimizer)
        losses.append(loss.item())
    return losses, model, optimizer


def whole(parameter: fp.Parameter) -> Any:
    """All of a parameter, on every rank."""
    return (parameter.whole() if isinstance(parameter, ShardedParameter) else parameter).numpy()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_losses_and_parameters_are_those_of_plain_data_parallelism_bit_for_bit(
    comm: Any, name: str, stage: int, dtype: str
) -> None:
    wanted, plain_model, _ = plain(comm, OPTIMIZERS[name], 5, dtype)
    found, model, _ = sharded(comm, OPTIMIZERS[name], 5, stage, dtype)
    assert found == wanted
    for mine, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        np.testing.assert_array_equal(whole(mine), theirs.numpy())


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_of_any_size_and_steps_that_change_their_rate(comm: Any, stage: int) -> None:
    wanted, _, _ = plain(comm, OPTIMIZERS["AdamW"], 2)
    for bucket_bytes in (1, 1000):
        found, _, optimizer = sharded(comm, OPTIMIZERS["AdamW"], 2, stage, bucket_bytes=bucket_bytes)
        assert found == wanted
    assert optimizer.lr == 1e-2
    optimizer.lr = 0.5
    assert optimizer.inner.lr == 0.5


def shapes() -> Any:
    return st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=5)


@settings(max_examples=10)
@given(shapes=shapes(), stage=st.sampled_from([1, 2]), bucket_bytes=st.sampled_from([1, 100, 10_000]))
def test_parameters_of_any_shape_are_updated_as_those_of_one_rank(
    shapes: list[tuple[int, ...]], stage: int, bucket_bytes: int
) -> None:
    draw = np.random.default_rng(0)
    values = [draw.normal(size=shape) for shape in shapes]
    by_rank = [[draw.normal(size=shape) for shape in shapes] for _ in range(N)]
    parameters = [fp.Parameter(ft.asarray(value)) for value in values]
    alone = [fp.Parameter(ft.asarray(value)) for value in values]
    optimizer = ShardedOptimizer(OPTIMIZERS["AdamW"], parameters, world, stage=stage, bucket_bytes=bucket_bytes)
    twin = OPTIMIZERS["AdamW"](alone)
    for _ in range(2):
        optimizer.update([ft.asarray(g) for g in by_rank[RANK]])
        twin.update([ft.asarray(np.mean(of_ranks, axis=0)) for of_ranks in zip(*by_rank, strict=True)])
        fp.realize(optimizer, twin)
    for mine, theirs in zip(parameters, alone, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_several_batches_add_up(comm: Any, stage: int) -> None:
    def summed(model: Net, reduced: Callable[[Any], Any]) -> Any:
        total = None
        for step in range(3):
            one = reduced(ft.grad(model.loss(batch(step)), model.parameters()))
            total = one if total is None else [a + b for a, b in zip(total, one, strict=True)]
            fp.realize(total)  # a batch at a time: that is what it is for
        return total

    model, other = Net(), Net()
    twin = OPTIMIZERS["AdamW"](other.parameters())
    twin.update(summed(other, lambda gradients: fp.data_parallel.average_gradients(gradients, comm)))
    if stage == 3:
        shard_parameters(model, comm)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        optimizer.update(summed(model, lambda gradients: gradients))
    else:
        optimizer = ShardedOptimizer(OPTIMIZERS["AdamW"], model.parameters(), comm)
        total = summed(model, optimizer.reduce_gradients)
        assert [g.shape for g in total] == [s.shape for s in optimizer.shards]
        optimizer.update(total, reduced=True)
    fp.realize(model, optimizer, other, twin)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(whole(mine), theirs.numpy())


def sum_of_squares(gradients: list[ft.Tensor], parameters: list[fp.Parameter]) -> float:
    """Over all ranks: what is cut by rows is summed over them, what is whole counts once."""
    zero = ft.zeros((), dtype="float64")
    cut = sum((ft.sum(ft.square(g)) for g, p in zip(gradients, parameters, strict=True) if p.shard), zero)
    rest = sum((ft.sum(ft.square(g)) for g, p in zip(gradients, parameters, strict=True) if not p.shard), zero)
    return float((world.all_reduce(cut) + rest).item())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_norm_of_cut_gradients_is_that_of_the_whole_ones(comm: Any, stage: int) -> None:
    model, other = Net(), Net()
    averaged = fp.data_parallel.average_gradients(ft.grad(other.loss(batch(0)), other.parameters()), comm)
    wanted = sum(float(np.sum(np.square(g.numpy()))) for g in averaged)
    if stage == 3:
        shard_parameters(model, comm, whole_elements=100)
        rows = ft.grad(model.loss(batch(0)), model.parameters())
        parameters: list[fp.Parameter] = model.parameters()
    else:
        optimizer = ShardedOptimizer(OPTIMIZERS["SGD"], model.parameters(), comm)
        rows = optimizer.reduce_gradients(ft.grad(model.loss(batch(0)), model.parameters()))
        parameters = optimizer.shards
    np.testing.assert_allclose(sum_of_squares(rows, parameters), wanted, rtol=1e-12)


def test_masters_in_float32_of_parameters_in_bfloat16() -> None:
    """Steps too small for bfloat16 add up in the masters; the parameters are these, rounded."""
    parameter = fp.Parameter(ft.ones(8, dtype="bfloat16"))
    optimizer = ShardedOptimizer(
        lambda rows: fp.optim.MixedPrecision(rows, lambda masters: fp.optim.SGD(masters, lr=1e-3), comm=world),
        [parameter],
        world,
    )
    for _ in range(100):
        optimizer.update([ft.ones(8, dtype="bfloat16")])
        fp.realize(optimizer)
    assert isinstance(optimizer.inner, fp.optim.MixedPrecision)
    (mine,) = optimizer.inner.masters
    assert mine.shape == (len(fp.partition(8, N)[RANK]),)
    np.testing.assert_allclose(mine.numpy(), 0.9, rtol=1e-5)
    assert parameter.dtype.name == "bfloat16"
    np.testing.assert_array_equal(parameter.numpy().astype(np.float32), np.float32(0.8984375))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Rank 0's folder, for all."""
    yield Path(world.broadcast_object(str(tmp_path)))
    world.barrier()


@pytest.mark.parametrize("saved", [0, 1, 2, 3])
def test_a_state_saved_under_one_stage_goes_on_under_any_other_and_on_other_ranks(
    comm: Any, folder: Path, saved: int
) -> None:
    make = OPTIMIZERS["AdamW"]
    wanted, _, _ = plain(comm, make, 3)
    _, model, optimizer = plain(comm, make, 2) if saved == 0 else sharded(comm, make, 2, saved)
    checkpoint.save(folder, {"model": model, "optimizer": optimizer}, step=2)
    halves = world.split(RANK % 2, RANK)
    assert halves is not None
    for group in (comm, halves):
        for stage in range(4):
            model, optimizer = plain(group, make, 0)[1:] if stage == 0 else sharded(group, make, 0, stage)[1:]
            checkpoint.load(folder, {"model": model, "optimizer": optimizer})
            loss = model.loss(batch(2))
            gradients = ft.grad(loss, model.parameters())
            optimizer.update(fp.data_parallel.average_gradients(gradients, group) if stage == 0 else gradients)
            fp.realize(loss, model, optimizer)
            assert loss.item() == wanted[2]


class Cut(fp.Module):
    """Two layers of which tensor parallelism holds parts."""

    def __init__(self, tp: fp.Communicator) -> None:
        g = ft.random.Generator(2)
        self.up = fp.tensor_parallel.ColumnParallel(6, 10, g, tp, dtype="float64")
        self.down = fp.tensor_parallel.RowParallel(10, 6, g, tp, dtype="float64")

    def loss(self, x: ft.Tensor) -> ft.Tensor:
        return ft.mean(ft.square(self.down(ft.tanh(self.up(x)))))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tensor_parallel_parameters_are_cut_within_their_parts(folder: Path, stage: int) -> None:
    if N % 2:
        pytest.skip("a mesh of pairs")
    mesh = fp.Mesh(world, dp=-1, tp=2)
    dp = mesh["dp"]

    def data(step: int) -> ft.Tensor:
        return ft.asarray(np.random.default_rng([step, dp.rank]).normal(size=(4, 6)))

    model, other = Cut(mesh["tp"]), Cut(mesh["tp"])
    twin = OPTIMIZERS["AdamW"](other.parameters())
    if stage == 3:
        shard_parameters(model, dp, whole_elements=0)
        optimizer: Any = OPTIMIZERS["AdamW"](model.parameters())
    else:
        optimizer = ShardedOptimizer(OPTIMIZERS["AdamW"], model.parameters(), dp, stage=stage)
    for step in range(3):
        loss, loss_of_twin = model.loss(data(step)), other.loss(data(step))
        optimizer.update(ft.grad(loss, model.parameters()))
        gradients = ft.grad(loss_of_twin, other.parameters())
        twin.update(fp.data_parallel.average_gradients(gradients, dp))
        fp.realize(loss, loss_of_twin, model, optimizer, other, twin)
        np.testing.assert_allclose(loss.item(), loss_of_twin.item(), rtol=1e-12)
    checkpoint.save(folder, {"model": model, "optimizer": optimizer}, step=1)
    alone = Cut(fp.IdentityComm())
    checkpoint.load(folder, {"model": alone, "optimizer": OPTIMIZERS["AdamW"](alone.parameters())})
    for mine, theirs in zip(alone.parameters(), other.parameters(), strict=True):
        if theirs.shard is None:
            np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-12)
        else:
            at = tuple(slice(s, s + n) for s, n in zip(theirs.shard.start, theirs.shape, strict=True))
            np.testing.assert_allclose(mine.numpy()[at], theirs.numpy(), rtol=1e-12)


def test_a_rank_holds_what_the_formula_of_the_paper_says() -> None:
    """In float32: 4 + 4 + 8 bytes a parameter, of which each stage cuts one more part."""
    size, layers = 24 * N, 4
    for stage, expected in ((1, 8 + 8 / N), (2, 4 + 12 / N), (3, 16 / N)):
        gc.collect()
        assert abs(held_in_a_step(stage, size, layers) - expected * layers * size * size) < 1000


def mean_output(model: list[fp.Linear], size: int) -> ft.Tensor:
    x = ft.ones((4, size))
    for layer in model:
        x = ft.tanh(layer(x))
    return ft.mean(x)


def held_in_a_step(stage: int, size: int, layers: int) -> int:
    """Bytes of parameters, gradients and optimizer state."""
    before = fp.memory_stats().live
    model = [fp.Linear(size, size, ft.random.Generator(i), bias=False) for i in range(layers)]
    if stage == 3:
        for layer in model:
            shard_parameters(layer, world)
    parameters = [layer.parameters()[0] for layer in model]
    make = OPTIMIZERS["AdamW"]
    optimizer: Any = make(parameters) if stage == 3 else ShardedOptimizer(make, parameters, world, stage=stage)
    fp.realize(model, optimizer)
    held = 0
    for _ in range(2):
        gradients = ft.grad(mean_output(model, size), parameters)
        if stage == 2:
            gradients = optimizer.reduce_gradients(gradients)
        fp.realize(gradients)
        held = fp.memory_stats().live - before
        optimizer.update(gradients, **({"reduced": True} if stage == 2 else {}))
        del gradients
        fp.realize(model, optimizer)
    return held


@pytest.mark.mpi(min_size=2)
def test_a_gathered_weight_lives_no_longer_than_its_layer_and_gathers_start_one_ahead() -> None:
    size, layers = 180, 12
    model = [fp.Linear(size, size, ft.random.Generator(i), bias=False) for i in range(layers)]
    for layer in model:
        shard_parameters(layer, world)
    parameters = [layer.parameters()[0] for layer in model]
    fp.realize(model)
    fp.realize(ft.grad(mean_output(model, size), parameters))
    # Two gathered weights, and two whole gradients: one that is made while the one before is on its way.
    assert fp.memory_stats().peak < 4.5 * size * size * 4


def test_a_symbolic_rank_builds_the_graph_of_every_stage() -> None:
    for stage in (1, 2, 3):
        model = Net()
        symbolic = fp.SymbolicComm(1, 3)
        if stage == 3:
            shard_parameters(model, symbolic, whole_elements=0)
            optimizer: Any = OPTIMIZERS["AdamW"](model.parameters())
        else:
            optimizer = ShardedOptimizer(OPTIMIZERS["AdamW"], model.parameters(), symbolic, stage=stage)
        optimizer.update(ft.grad(model.loss(batch(0)), model.parameters()))
        assert optimizer.parameters[0].shape == ((4, 13) if stage == 3 else (11, 13))


class Whole(fp.optim.Optimizer):
    """One that needs whole matrices."""

    elementwise = False


def test_mistakes_are_named() -> None:
    model, make = Net(), OPTIMIZERS["SGD"]
    with pytest.raises(ArgumentError, match=r"stage is 1 or 2, not 3; for stage 3 call fp\.data_parallel\.shard_param"):
        ShardedOptimizer(make, model.parameters(), world, stage=3)
    with pytest.raises(ArgumentError, match="make is called with a list of parameters, and returns the optimizer"):
        ShardedOptimizer(lambda _: make(model.parameters()), model.parameters(), world)
    optimizer = ShardedOptimizer(make, model.parameters(), world)
    with pytest.raises(ArgumentError, match="update: 9 parameters, but 1 gradients"):
        optimizer.update([ft.ones(3)])
    with pytest.raises(ShapeError, match=r"parameter 0 has shape \(11, 13\), its gradient \(3,\).*say reduced=True"):
        optimizer.update([ft.ones(3)] * 9)
    with pytest.raises(ShapeError, match="all_gather: sizes"):
        fp.SymbolicComm(0, 2).all_gather(ft.ones(3), sizes=[2, 3])
    with pytest.raises(ShapeError, match=r"reduce_scatter: sizes=\[1, 1\] cover 2, but dimension 0 .* extent of 3"):
        fp.SymbolicComm(0, 2).reduce_scatter(ft.ones(3), sizes=[1, 1])
    with pytest.raises(ArgumentError, match=r"sizes has an extent, 0 or more, for each of 2 ranks; got \[3\]"):
        fp.SymbolicComm(0, 2).reduce_scatter(ft.ones(3), sizes=[3])
    with pytest.raises(ArgumentError, match=r"all_gather: sizes has an extent, .* got \[1\.5, 2\]"):
        fp.SymbolicComm(0, 2).all_gather(ft.ones(3), sizes=[1.5, 2])  # type: ignore[list-item]


@pytest.mark.mpi(min_size=2)
def test_mistakes_of_several_ranks_are_named() -> None:
    model = Net()
    with pytest.raises(ArgumentError, match="Whole needs whole matrices, but each rank would have some rows"):
        ShardedOptimizer(lambda ps: Whole(ps, 0.1), model.parameters(), world)
    with pytest.raises(CommunicatorError, match=r"parameter 0 is float32\[1\] on rank 0, float32\[2\] on rank 1"):
        ShardedOptimizer(OPTIMIZERS["SGD"], [fp.Parameter(ft.ones(RANK + 1))], world)
    with pytest.raises(CommunicatorError, match="differ: 1 on rank 0, 2 on rank 1"):
        ShardedOptimizer(OPTIMIZERS["SGD"], [fp.Parameter(ft.ones(1)) for _ in range(min(RANK, 1) + 1)], world)
    cut = fp.tensor_parallel.ColumnParallel(3, N, ft.random.Generator(0), world)
    with pytest.raises(CommunicatorError, match=r"at \[0, 0\] of \[3, \d\] on rank 0"):
        ShardedOptimizer(OPTIMIZERS["SGD"], cut.parameters(), world)
    with pytest.raises(CommunicatorError, match=r"shard_parameters: .* at \[0, 0\] of \[3, \d\] on rank 0"):
        shard_parameters(cut, world)
    shard_parameters(model, world)
    with pytest.raises(ArgumentError, match=r"table\.weight has been cut by it before"):
        shard_parameters(model, world)
    with pytest.raises(ArgumentError, match="parameter 0 has been cut by shard_parameters"):
        ShardedOptimizer(OPTIMIZERS["SGD"], model.parameters(), world)

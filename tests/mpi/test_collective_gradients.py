"""The vjp of every collective equals the gradient of the same loss, computed densely on one rank.

All ranks know all ranks' data, so each builds the dense twin: the collective written with plain operations on the list
of all shards. In float64 both agree to 1e-12.
"""

from __future__ import annotations

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import ReduceOp

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = world.world_size, world.rank
ROWS = 2 * N + 1


def values(shape, rank, seed=1):
    return np.random.default_rng([seed, rank]).uniform(0.5, 1.5, size=shape)


def loss_of(y, rank):
    """A different, curved loss on every rank."""
    return (ft.sin(y) * ft.asarray(values(y.shape, rank, seed=2))).sum()


def part(x, rank, dim=0):
    r = fp.partition(x.shape[dim], N)[rank]
    return x[(slice(None),) * dim + (slice(r.start, r.stop),)]


def total(xs, op):
    if op is ReduceOp.PRODUCT:
        return ft.prod(ft.stack(xs), axis=0)
    if op is ReduceOp.MAX:
        return ft.max(ft.stack(xs), axis=0)
    if op is ReduceOp.MIN:
        return ft.min(ft.stack(xs), axis=0)
    return sum(xs[1:], xs[0]) * (1 / N if op is ReduceOp.AVG else 1)


def shifted(xs, rank, offset, wrap):
    source = rank - offset
    return xs[source % N] if wrap or 0 <= source < N else ft.zeros_like(xs[0])


# Free parts: rank s keeps all but one row for each of the others, and gives none to the rank after it.
SIZES = [[0 if r == (s + 1) % N and N > 1 else 1 for r in range(N)] for s in range(N)]
for s in range(N):
    SIZES[s][s] += ROWS - sum(SIZES[s])


def start(source, dest):
    return sum(SIZES[source][:dest])


CASES = {
    **{
        f"all_reduce {op.name}": (lambda x, op=op: world.all_reduce(x, op), lambda xs, r, op=op: total(xs, op))
        for op in ReduceOp
    },
    **{
        f"reduce {op.name}": (
            lambda x, op=op: world.reduce(x, op, N - 1),
            lambda xs, r, op=op: total(xs, op) if r == N - 1 else ft.zeros_like(xs[0]),
        )
        for op in (ReduceOp.SUM, ReduceOp.AVG)
    },
    **{
        f"reduce_scatter {op.name} {dim}": (
            lambda x, op=op, dim=dim: world.reduce_scatter(x, op, dim),
            lambda xs, r, op=op, dim=dim: part(total(xs, op), r, dim),
        )
        for op in (ReduceOp.SUM, ReduceOp.AVG)
        for dim in (0, 1)
    },
    "broadcast": (lambda x: world.broadcast(x, N - 1), lambda xs, r: xs[N - 1]),
    "all_gather 0": (lambda x: world.all_gather(x, 0), lambda xs, r: ft.concat(xs, axis=0)),
    "all_gather 1": (lambda x: world.all_gather(x, 1), lambda xs, r: ft.concat(xs, axis=1)),
    "all_to_all": (
        lambda x: world.all_to_all(x, 0, 1),
        lambda xs, r: ft.concat([part(x, r) for x in xs], axis=1),
    ),
    "all_to_all sizes": (
        lambda x: world.all_to_all(x, 0, 0, sizes=SIZES),
        lambda xs, r: ft.concat([x[start(s, r) : start(s, r + 1)] for s, x in enumerate(xs)], axis=0),
    ),
    "shift": (lambda x: world.shift(x, 1), lambda xs, r: shifted(xs, r, 1, True)),
    "shift open": (lambda x: world.shift(x, -1, wrap=False), lambda xs, r: shifted(xs, r, -1, False)),
}


def dense_gradient(dense, losses=None):
    """d(sum of all ranks' losses) / d(my shard)."""
    xs = [ft.asarray(values((ROWS, 3), rank)) for rank in range(N)]
    ranks = range(N) if losses is None else losses
    parts = [loss_of(dense(xs, rank), rank) for rank in ranks]
    return ft.grad(sum(parts[1:], parts[0]), xs[RANK]).numpy()


@pytest.mark.parametrize("name", CASES)
def test_gradient_equals_the_dense_one(name):
    parallel, dense = CASES[name]
    x = ft.asarray(values((ROWS, 3), RANK))
    gradient = ft.grad(loss_of(parallel(x), RANK), x).numpy()
    np.testing.assert_allclose(gradient, dense_gradient(dense), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_second_gradient_equals_the_dense_one(name):
    parallel, dense = CASES[name]
    x = ft.asarray(values((ROWS, 3), RANK))
    first = ft.grad(loss_of(parallel(x), RANK), x)
    second = ft.grad((first * first).sum(), x).numpy()
    xs = [ft.asarray(values((ROWS, 3), rank)) for rank in range(N)]
    parts = [loss_of(dense(xs, rank), rank) for rank in range(N)]
    firsts = ft.grad(sum(parts[1:], parts[0]), xs)
    squares = [(g * g).sum() for g in firsts]
    expected = ft.grad(sum(squares[1:], squares[0]), xs[RANK]).numpy()
    np.testing.assert_allclose(second, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["all_reduce SUM", "broadcast", "all_gather 0", "shift"])
def test_ranks_whose_input_is_a_constant_still_take_part(name):
    """Only rank 0 differentiates by its shard; the others must run the backward collective all the same."""
    parallel, dense = CASES[name]
    x = ft.asarray(values((ROWS, 3), RANK))
    other = ft.asarray(1.0, dtype=ft.float64)
    gradient = ft.grad(loss_of(parallel(x), RANK) + other, x if RANK == 0 else other)
    if RANK == 0:
        np.testing.assert_allclose(gradient.numpy(), dense_gradient(dense), rtol=1e-12)
    else:
        assert gradient.item() == 1.0
        fp.realize()


@pytest.mark.mpi(min_size=2)
def test_gradients_flow_back_through_messages():
    """Rank 0 sends x, each rank scales and passes on; only the last has a loss."""
    x = ft.asarray(values((3,), 0))
    scales = [ft.asarray(values((3,), rank, seed=3)) for rank in range(N)]
    arriving = x if RANK == 0 else world.recv((3,), ft.float64, RANK - 1, differentiable=True)
    y = arriving * scales[RANK]
    last = RANK == N - 1
    if not last:
        world.send(y, RANK + 1, differentiable=True)
    loss = ft.sin(y).sum() if last else 0 * x.sum()
    gradient = ft.grad(loss, [x, scales[RANK]])
    fp.realize(gradient)
    product = x
    for scale in scales:
        product = product * scale
    expected = ft.grad(ft.sin(product).sum(), [x, scales[RANK]])
    np.testing.assert_allclose(gradient[1].numpy(), expected[1].numpy(), rtol=1e-12)
    if RANK == 0:
        np.testing.assert_allclose(gradient[0].numpy(), expected[0].numpy(), rtol=1e-12)


# One loss on all ranks: the Megatron pairs, against the dense layer.


def test_column_then_row_parallel_layers_equal_the_dense_ones():
    """f = replicate before the columns, g = all_reduce(replicated) after the rows (arXiv:1909.08053, section 3)."""
    inputs, hidden = 4, 3 * N
    x0, a0, b0 = values((5, inputs), 0), values((inputs, hidden), 0, 4), values((hidden, inputs), 0, 5)
    x, a, b = (ft.asarray(v) for v in (x0, a0, b0))
    dense_loss = ft.sin(ft.tanh(x @ a) @ b).sum()
    dx, da, db = ft.grad(dense_loss, [x, a, b])

    x = ft.asarray(x0)
    columns, rows = ft.asarray(part(ft.asarray(a0), RANK, 1).numpy()), ft.asarray(part(ft.asarray(b0), RANK).numpy())
    y = world.all_reduce(ft.tanh(world.replicate(x) @ columns) @ rows, replicated=True)
    loss = ft.sin(y).sum()
    gx, ga, gb = ft.grad(loss, [x, columns, rows])
    fp.realize(loss, gx, ga, gb)
    np.testing.assert_allclose(loss.item(), dense_loss.item(), rtol=1e-12)
    np.testing.assert_allclose(gx.numpy(), dx.numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(ga.numpy(), part(da, RANK, 1).numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(gb.numpy(), part(db, RANK).numpy(), rtol=1e-12, atol=1e-13)


def test_sequence_parallel_layer_equals_the_dense_one():
    """all_gather the sequence before the columns, reduce_scatter after the rows: one loss, cut over ranks."""
    inputs, hidden = 4, 2 * N
    x0, a0, b0 = values((ROWS, inputs), 0), values((inputs, hidden), 0, 4), values((hidden, inputs), 0, 5)
    x, a, b = (ft.asarray(v) for v in (x0, a0, b0))
    dx, da, db = ft.grad(ft.sin(ft.tanh(x @ a) @ b).sum(), [x, a, b])

    mine, columns, rows = (
        ft.asarray(t.numpy())
        for t in (part(ft.asarray(x0), RANK), part(ft.asarray(a0), RANK, 1), part(ft.asarray(b0), RANK))
    )
    sequence = world.all_gather(mine, 0, size=ROWS)
    y = world.reduce_scatter(ft.tanh(sequence @ columns) @ rows, ReduceOp.SUM, 0)
    gx, ga, gb = ft.grad(ft.sin(y).sum(), [mine, columns, rows])
    fp.realize(gx, ga, gb)
    np.testing.assert_allclose(gx.numpy(), part(dx, RANK).numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(ga.numpy(), part(da, RANK, 1).numpy(), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(gb.numpy(), part(db, RANK).numpy(), rtol=1e-12, atol=1e-13)


def test_gather_and_shard_of_a_replicated_tensor_are_each_others_vjp():
    whole = values((ROWS, 2), 0)
    x = ft.asarray(whole)
    joined = world.all_gather(world.shard(x, 0) * 2, 0, size=ROWS, replicated=True)
    gradient = ft.grad(ft.sin(joined).sum(), x).numpy()
    np.testing.assert_allclose(gradient, 2 * np.cos(2 * whole), rtol=1e-12)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_buckets_of_any_size_average_each_gradient(bucket_bytes):
    shapes = [(3,), (2, 4), (), (5, 1), (0,), (7,)]
    kinds = [ft.float64, ft.float64, ft.float32, ft.float32, ft.float64, ft.float64]

    def gradients(rank):
        return [ft.asarray(values(s, rank, i)).astype(d) for i, (s, d) in enumerate(zip(shapes, kinds, strict=True))]

    averaged = fp.data_parallel.average_gradients(gradients(RANK), world, bucket_bytes=bucket_bytes)
    for i, found in enumerate(averaged):
        wanted = np.mean([gradients(rank)[i].numpy() for rank in range(N)], axis=0)
        assert (found.shape, found.dtype) == (shapes[i], kinds[i])
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)


def test_average_gradients_equals_the_whole_batch():
    weight0, batch = values((3, 2), 0), values((4 * N, 3), 0, 6)
    weight = ft.asarray(weight0)
    expected = ft.grad(ft.mean(ft.sin(ft.asarray(batch) @ weight)), weight).numpy()
    rows = fp.data_parallel.shard_rows(4 * N, world)
    weight = ft.asarray(weight0)
    loss = ft.mean(ft.sin(ft.asarray(batch[rows.start : rows.stop]) @ weight))
    averaged = fp.data_parallel.average_gradients({"w": ft.grad(loss, weight)}, world)["w"]
    np.testing.assert_allclose(averaged.numpy(), expected, rtol=1e-12)

"""scan and exscan equal numpy's running reductions over ranks, and their vjps the dense gradients."""

from __future__ import annotations

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import ReduceOp
from fuel_parallel.errors import ArgumentError, DTypeError
from fuel_parallel.lazy import dtypes

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = world.world_size, world.rank
OPS = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}
SHAPES = [(), (0,), (3,), (2, 0), (2 * N + 1, 3)]


def data(shape, dtype, rank):
    x = np.random.default_rng([8, rank]).integers(0, 4, size=shape)
    return np.asarray(x * (1 + 1j) if dtype.kind == "c" else x).astype(dtype)


def nothing(op, dtype):
    """What an exscan gives where there is no rank before."""
    if op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        return int(op is ReduceOp.PRODUCT)
    if dtype.kind == "b":
        return op is ReduceOp.MIN
    if dtypes.kind(dtype) == "integral":
        return np.iinfo(dtype).max if op is ReduceOp.MIN else np.iinfo(dtype).min
    return np.inf if op is ReduceOp.MIN else -np.inf


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda d: d.name)
@pytest.mark.parametrize("reverse", [False, True])
def test_scans_equal_numpy_for_every_dtype_and_shape(dtype, reverse):
    for op, ufunc in OPS.items():
        if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
            continue
        for shape in SHAPES:
            xs = [data(shape, dtype, rank) for rank in range(N)]
            x = ft.asarray(xs[RANK])
            before = xs[RANK + 1 :] if reverse else xs[:RANK]
            for found, terms in (
                (world.scan(x, op, reverse=reverse), [*before, xs[RANK]]),
                (world.exscan(x, op, reverse=reverse), before),
            ):
                total = np.full(shape, nothing(op, dtype)).astype(dtype)
                for term in terms:
                    total = np.asarray(ufunc(total, term)).astype(dtype)
                assert (found.shape, found.dtype) == (shape, dtype)
                np.testing.assert_array_equal(found.numpy(), total)


def test_halves_are_rounded_once():
    xs = [np.full(5, 1 + rank * 2**-7, np.float32).astype(dtypes.bfloat16) for rank in range(N)]
    expected = np.sum([x.astype(np.float32) for x in xs[: RANK + 1]], axis=0).astype(dtypes.bfloat16)
    np.testing.assert_array_equal(world.scan(ft.asarray(xs[RANK])).numpy(), expected)


def terms_of(rank, exclusive, reverse):
    if reverse:
        return range(rank + exclusive, N)
    return range(rank + 1 - exclusive)


def loss_of(y, rank):
    return (ft.sin(y) * ft.asarray(np.random.default_rng([2, rank]).uniform(0.5, 1.5, size=y.shape))).sum()


def reduction_of(op, terms, like):
    """The reduction of the terms by plain operations."""
    if op is ReduceOp.SUM:
        return sum(terms, like * 0)
    if not terms:
        return ft.full_like(like, {ReduceOp.PRODUCT: 1.0, ReduceOp.MIN: np.inf, ReduceOp.MAX: -np.inf}[op])
    reduce = {ReduceOp.PRODUCT: ft.prod, ReduceOp.MIN: ft.min, ReduceOp.MAX: ft.max}[op]
    return reduce(ft.stack(terms), axis=0)


def finite(y):
    """An exscan by MIN or MAX begins with an infinity, which has no sine."""
    return ft.where(ft.isfinite(y), y, ft.zeros_like(y))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
def test_first_and_second_gradients_equal_the_dense_ones(op, exclusive, reverse):
    values = [np.random.default_rng([1, rank]).uniform(0.5, 1.5, size=(5, 3)) for rank in range(N)]
    x = ft.asarray(values[RANK])
    y = (world.exscan if exclusive else world.scan)(x, op, reverse=reverse)
    first = ft.grad(loss_of(finite(y), RANK), x)
    second = ft.grad((first * first).sum(), x)
    fp.realize(first, second)

    xs = [ft.asarray(value) for value in values]
    losses = []
    for k in range(N):
        terms = [xs[r] for r in terms_of(k, exclusive, reverse)]
        losses.append(loss_of(finite(reduction_of(op, terms, xs[k])), k))
    firsts = ft.grad(sum(losses[1:], losses[0]), xs)
    squares = [(g * g).sum() for g in firsts]
    expected = ft.grad(sum(squares[1:], squares[0]), xs[RANK])
    np.testing.assert_allclose(first.numpy(), firsts[RANK].numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(second.numpy(), expected.numpy(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_gradients_equal_finite_differences(op):
    values = [np.random.default_rng([5, rank]).uniform(0.5, 1.5, size=4) for rank in range(N)]
    x = ft.asarray(values[RANK])
    found = ft.grad(ft.sin(world.scan(x, op)).sum(), x).numpy()

    def loss(mine):
        xs = [mine if rank == RANK else value for rank, value in enumerate(values)]
        return sum(np.sin(total).sum() for total in OPS[op].accumulate(xs))

    step = 1e-6 * np.eye(4)
    expected = [(loss(values[RANK] + e) - loss(values[RANK] - e)) / 2e-6 for e in step]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match="scan: AVG is no scan"):
        world.scan(ft.ones(3), ReduceOp.AVG)
    with pytest.raises(DTypeError, match="exscan: complex numbers have no order"):
        world.exscan(ft.ones(3, dtype=ft.complex64), ReduceOp.MIN)

"""Layers that are cut over ranks: values and all gradients are the dense twin's, for sizes that do not divide too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import tensor_parallel as tp
from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError
from fuel_parallel.lazy.node import topological
from fuel_parallel.partitioning import partition

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi

SIZE = st.integers(1, 9)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def drawn(shape: tuple[int, ...], seed: int) -> ft.Tensor:
    return ft.asarray(np.random.default_rng(seed).normal(size=shape))


def part(x: Any, dim: int) -> Any:
    mine = partition(x.shape[dim], N)[RANK]
    return np.take(np.asarray(x), range(mine.start, mine.stop), dim)


def same(found: ft.Tensor, wanted: Any) -> None:
    np.testing.assert_allclose(found.numpy(), np.asarray(wanted), **CLOSE)


@settings(max_examples=15)
@given(rows=SIZE, inputs=SIZE, hidden=SIZE, outputs=SIZE, bias=st.booleans(), whole=st.booleans())
def test_columns_then_rows_are_the_dense_layers(
    rows: int, inputs: int, hidden: int, outputs: int, bias: bool, whole: bool
) -> None:
    def dense() -> tuple[fp.Linear, fp.Linear]:
        g = ft.random.Generator(3)
        return (
            fp.Linear(inputs, hidden, g, bias=bias, dtype="float64"),
            fp.Linear(hidden, outputs, g, bias=bias, dtype="float64"),
        )

    g = ft.random.Generator(3)
    first = tp.ColumnParallel(inputs, hidden, g, world, bias=bias, gather_output=whole, dtype="float64")
    second = tp.RowParallel(hidden, outputs, g, world, bias=bias, scatter_input=whole, dtype="float64")
    dense_first, dense_second = dense()
    x = drawn((rows, inputs), 0)
    wanted = dense_second(ft.tanh(dense_first(x)))
    found = second(ft.tanh(first(x)))
    dense_parameters = [*dense_first.parameters(), *dense_second.parameters()]
    parameters = [*first.parameters(), *second.parameters()]
    wanted_gradients = ft.grad(ft.sin(wanted).sum(), [x, *dense_parameters])
    gradients = ft.grad(ft.sin(found).sum(), [x, *parameters])
    fp.realize(found, wanted, gradients, wanted_gradients)
    same(found, wanted.numpy())
    same(gradients[0], wanted_gradients[0].numpy())
    for parameter, gradient, dense_gradient in zip(parameters, gradients[1:], wanted_gradients[1:], strict=True):
        if parameter.shard is None:
            same(gradient, dense_gradient.numpy())
        else:
            at = tuple(slice(s, s + n) for s, n in zip(parameter.shard.start, parameter.shape, strict=True))
            same(gradient, dense_gradient.numpy()[at])


@settings(max_examples=15)
@given(vocabulary=SIZE, dim=SIZE, tokens=st.lists(st.integers(0, 99), min_size=1, max_size=12))
def test_an_embedding_cut_by_rows_is_the_dense_one(vocabulary: int, dim: int, tokens: list[int]) -> None:
    indices = ft.asarray(np.array(tokens) % vocabulary)
    dense = fp.Embedding(vocabulary, dim, ft.random.Generator(1), dtype="float64")
    mine = tp.VocabParallelEmbedding(vocabulary, dim, ft.random.Generator(1), world, dtype="float64")
    found, wanted = mine(indices), dense(indices)
    (gradient,) = ft.grad(ft.sin(found).sum(), [mine.weight])
    (wanted_gradient,) = ft.grad(ft.sin(wanted).sum(), [dense.weight])
    same(found, wanted.numpy())
    same(gradient, part(wanted_gradient.numpy(), 0))


@settings(max_examples=20)
@given(
    classes=SIZE,
    tokens=st.integers(1, 7),
    ignored=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)
def test_cross_entropy_of_cut_logits_is_the_dense_one(
    classes: int, tokens: int, ignored: bool, smoothing: float, reduction: str
) -> None:
    logits = drawn((tokens, classes), 2) * 30.0  # far enough to need the greatest one
    targets = np.arange(tokens) * 7 % classes
    if ignored:
        targets[::2] = -1
    kept = targets != -1
    whole = ft.log_softmax(logits, axis=-1)
    nll = -ft.take_along_axis(whole, ft.asarray(np.where(kept, targets, 0)).reshape(-1, 1), axis=-1).reshape(-1)
    losses = ft.where(ft.asarray(kept), nll * (1 - smoothing) - ft.mean(whole, axis=-1) * smoothing, 0.0)
    wanted = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / max(kept.sum(), 1)}[reduction]

    mine = ft.asarray(part(logits.numpy(), 1))
    found = tp.vocab_parallel_cross_entropy(
        mine,
        ft.asarray(targets),
        world,
        classes=classes,
        ignore_index=-1 if ignored else None,
        label_smoothing=smoothing,
        reduction=reduction,
    )
    (gradient,) = ft.grad(ft.sin(found).sum(), [mine])
    (wanted_gradient,) = ft.grad(ft.sin(wanted).sum(), [logits])
    same(found, wanted.numpy())
    np.testing.assert_allclose(gradient.numpy(), part(wanted_gradient.numpy(), 1), rtol=1e-11, atol=1e-12)


def test_the_full_logits_are_never_there() -> None:
    """No node is larger than this rank's part."""
    classes = 64 * N * 100
    mine = ft.zeros((8, classes // N))
    loss = tp.vocab_parallel_cross_entropy(mine, ft.asarray([1] * 8), world)
    assert max(math.prod(node.spec.shape) for node in topological([loss.node])) == mine.size
    np.testing.assert_allclose(loss.item(), np.log(classes), rtol=1e-5)


def test_scatter_and_gather_are_the_mappings_of_the_paper() -> None:
    x = drawn((3, 7), 4)
    again = tp.gather_from_ranks(tp.scatter_to_ranks(x, world) * 2.0, world, size=7)
    (gradient,) = ft.grad(ft.sin(again).sum(), [x])
    same(again, 2 * x.numpy())
    same(gradient, 2 * np.cos(2 * x.numpy()))
    summed = tp.reduce_from_ranks(tp.copy_to_ranks(x, world) * (RANK + 1.0), world)
    (gradient,) = ft.grad(ft.sin(summed).sum(), [x])
    same(summed, x.numpy() * N * (N + 1) / 2)
    same(gradient, np.cos(summed.numpy()) * N * (N + 1) / 2)


def test_mistakes_are_named() -> None:
    layer = tp.ColumnParallel(3, 4, ft.random.Generator(0), world)
    with pytest.raises(
        ShapeError, match=r"ColumnParallel: the last dimension of x must be 3 on this rank, but .*\(2, 5\)"
    ):
        layer(ft.zeros((2, 5)))
    logits, targets = ft.zeros((2, 4)), ft.asarray([0, 1])
    with pytest.raises(ShapeError, match="targets must have the shape of logits without the last dimension"):
        tp.vocab_parallel_cross_entropy(logits, ft.asarray([0]), world)
    with pytest.raises(DTypeError, match="targets must be integers"):
        tp.vocab_parallel_cross_entropy(logits, ft.zeros(2), world)
    with pytest.raises(ArgumentError, match=r"label_smoothing lies in \[0, 1\), but is 2"):
        tp.vocab_parallel_cross_entropy(logits, targets, world, label_smoothing=2)
    with pytest.raises(ShapeError, match=r"this rank holds \d+ of the classes"):
        tp.vocab_parallel_cross_entropy(logits, targets, world, classes=100)

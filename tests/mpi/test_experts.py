"""Experts on different ranks: values and gradients are those of the dense layer on the tokens of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import expert_parallel
from fuel_parallel.errors import ArgumentError
from fuel_parallel.runtime.plan import plans

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def tokens_of(rank: int, rows: int) -> ft.Tensor:
    return ft.asarray(np.random.default_rng([7, rank]).normal(size=(rows, 3)))


def loss_of(mixed: Any) -> ft.Tensor:
    return ft.sin(mixed.value).mean() + mixed.balance_loss * 0.1 + mixed.z_loss * 0.01


def dense_losses(dense: fp.MixtureOfExperts, xs: list[ft.Tensor]) -> tuple[list[ft.Tensor], ft.Tensor]:
    """The value for each rank's tokens, and the mean of the ranks' losses; the balance is that of all tokens."""
    mixed = [dense(x) for x in xs]
    balance = dense(ft.concat(xs)).balance_loss
    parts = [loss_of(m._replace(balance_loss=balance)) for m in mixed]
    return [m.value for m in mixed], sum(parts[1:], parts[0]) * (1 / N)


@settings(max_examples=7)
@given(
    rows=st.integers(1, 7),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 3),
    renormalise=st.booleans(),
    capacity_factor=st.sampled_from([None, 0.4, 1.5]),
    activation=st.sampled_from(["swiglu", "gelu"]),
    lonely=st.booleans(),
)
def test_experts_on_ranks_are_the_dense_ones(
    rows: int,
    experts: int,
    top_k: int,
    renormalise: bool,
    capacity_factor: float | None,
    activation: str,
    lonely: bool,
) -> None:
    """With fewer experts than ranks some hold none; `lonely` experts get no tokens at all."""
    options = {"renormalise": renormalise, "capacity_factor": capacity_factor, "activation": activation}
    options |= {"top_k": min(top_k, experts), "dtype": "float64"}
    dense = fp.MixtureOfExperts(3, 5, experts, ft.random.Generator(2), **options)
    layer = expert_parallel.ExpertParallel(3, 5, experts, ft.random.Generator(2), world, **options)
    if lonely:
        steep = ft.asarray(np.arange(experts)[None] * np.ones((3, 1)) * 20.0)
        for router in (dense.router, layer.router):
            router.assign(steep)
    xs = [ft.abs(tokens_of(rank, rows)) if lonely else tokens_of(rank, rows) for rank in range(N)]
    values, mean_loss = dense_losses(dense, xs)
    wanted_gradients = ft.grad(mean_loss, [xs[RANK], *dense.parameters()])

    found = layer(xs[RANK])
    gradients = ft.grad(loss_of(found), [xs[RANK], *layer.parameters()])
    averaged = expert_parallel.average_gradients(gradients[1:], layer.parameters(), world)
    fp.realize(found.value, gradients[0], averaged, values, wanted_gradients)
    np.testing.assert_allclose(found.value.numpy(), values[RANK].numpy(), **CLOSE)
    np.testing.assert_allclose(gradients[0].numpy() / N, wanted_gradients[0].numpy(), **CLOSE)
    for parameter, gradient, whole in zip(layer.parameters(), averaged, wanted_gradients[1:], strict=True):
        mine = slice(None)
        if parameter.shard is not None:
            mine = slice(parameter.shard.start[0], parameter.shard.start[0] + parameter.shape[0])
        np.testing.assert_allclose(gradient.numpy(), whole.numpy()[mine], **CLOSE)


def test_ranks_may_have_different_numbers_of_tokens_where_none_are_dropped() -> None:
    dense = fp.MixtureOfExperts(3, 5, 5, ft.random.Generator(2), dtype="float64")
    layer = expert_parallel.ExpertParallel.from_dense(dense, world)
    x = tokens_of(RANK, RANK)  # none on rank 0
    wanted, found = dense(x).value, layer(x).value
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), **CLOSE)
    mine = fp.partition(5, N)[RANK]
    np.testing.assert_array_equal(layer.experts.down.numpy(), dense.experts.down.numpy()[mine.start : mine.stop])


def test_replicas_of_experts_are_averaged() -> None:
    """Two pairs of ranks, each with all experts: the mean over all four ranks' losses."""
    if N % 2:
        pytest.skip("needs an even number of ranks")
    mesh = fp.Mesh(world, dp=-1, ep=2)
    dense = fp.MixtureOfExperts(3, 5, 3, ft.random.Generator(2), dtype="float64", capacity_factor=1.0)
    layer = expert_parallel.ExpertParallel.from_dense(dense, mesh["ep"])
    xs = [tokens_of(rank, 6) for rank in range(N)]
    losses = [ft.sin(dense(x).value).mean() for x in xs]
    wanted = ft.grad(sum(losses[1:], losses[0]) * (1 / N), dense.parameters())
    gradients = ft.grad(ft.sin(layer(xs[RANK]).value).mean(), layer.parameters())
    averaged = expert_parallel.average_gradients(gradients, layer.parameters(), world, replicas=mesh["dp"])
    for parameter, gradient, whole in zip(layer.parameters(), averaged, wanted, strict=True):
        mine = slice(None)
        if parameter.shard is not None:
            mine = slice(parameter.shard.start[0], parameter.shard.start[0] + parameter.shape[0])
        np.testing.assert_allclose(gradient.numpy(), whole.numpy()[mine], **CLOSE)


def test_with_a_capacity_one_plan_serves_all_steps() -> None:
    layer = expert_parallel.ExpertParallel(3, 5, 4, ft.random.Generator(2), world, capacity_factor=1.0)
    made = []
    for step in range(4):
        layer(tokens_of(step, 6)).value.numpy()
        made.append(len(plans))
    assert made[1:] == [made[1]] * 3


def test_mistakes_are_named() -> None:
    layer = expert_parallel.ExpertParallel(3, 5, 4, ft.random.Generator(2), world)
    with pytest.raises(ArgumentError, match="average_gradients: 4 parameters, but 1 gradients"):
        expert_parallel.average_gradients([ft.zeros(1)], layer.parameters(), world)

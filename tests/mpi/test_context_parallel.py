"""Attention over sequences that are cut over ranks: values and gradients are those of the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import SymbolicComm, context_parallel
from fuel_parallel.errors import ArgumentError, GradientError, ShapeError
from fuel_parallel.lazy.node import topological

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi

LAYOUT = st.sampled_from(["contiguous", "zigzag"])
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def drawn(*shape: int, seed: int, dtype: str = "float64") -> ft.Tensor:
    return ft.asarray(np.random.default_rng(seed).normal(size=shape), dtype=dtype)


def places(length: int, layout: str, rank: int = RANK) -> list[int]:
    return [p for part in context_parallel.sequence_chunks(length, N, layout)[rank] for p in part]


def weighed(x: ft.Tensor, at: list[int]) -> ft.Tensor:
    """A loss that is different at each position."""
    return (ft.sin(x) * ft.asarray([1.0 + p for p in at], dtype=x.dtype).reshape(-1, 1)).sum()


def compared(attend: Any, length: int, layout: str, inputs: list[ft.Tensor], causal: bool, scale: float | None) -> None:
    """The parallel function against the dense one: my part of the result and of all gradients."""
    wanted = ft.scaled_dot_product_attention(*inputs, causal=causal, scale=scale)
    wanted_gradients = ft.grad(weighed(wanted, list(range(length))), inputs)
    mine = places(length, layout)
    parts = [context_parallel.sequence_part(x, world, -2, layout) for x in inputs]
    found = attend(*parts, world, causal=causal, scale=scale, length=length)
    gradients = ft.grad(weighed(found, mine), parts)
    fp.realize(found, gradients, wanted, wanted_gradients)
    np.testing.assert_allclose(found.numpy(), wanted.numpy()[..., mine, :], **CLOSE)
    for gradient, whole in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(gradient.numpy(), whole.numpy()[..., mine, :], **CLOSE)


@settings(max_examples=25)
@given(
    length=st.integers(1, 23),
    batch=st.sampled_from([(), (2,), (1, 2)]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dim=st.integers(1, 5),
    value_dim=st.integers(1, 5),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    layout=LAYOUT,
)
def test_a_ring_gives_what_the_whole_sequence_gives(
    length: int,
    batch: tuple[int, ...],
    kv_heads: int,
    group: int,
    dim: int,
    value_dim: int,
    causal: bool,
    scale: float | None,
    layout: str,
) -> None:
    query = drawn(*batch, kv_heads * group, length, dim, seed=0)
    key = drawn(*batch, kv_heads, length, dim, seed=1)
    value = drawn(*batch, kv_heads, length, value_dim, seed=2)

    def ring(*args: Any, **options: Any) -> ft.Tensor:
        return context_parallel.ring_attention(*args, layout=layout, **options)

    compared(ring, length, layout, [query, key, value], causal, scale)


@pytest.mark.parametrize("layout", context_parallel.layout.LAYOUTS)
def test_a_ring_of_long_parts_works_block_by_block(layout: str) -> None:
    """Longer than a block of queries and of keys, so that no weights are kept."""
    length = 600 * N + 1
    inputs = [drawn(heads, length, 8, seed=seed) for seed, heads in enumerate((2, 1, 1))]

    def ring(*args: Any, **options: Any) -> ft.Tensor:
        return context_parallel.ring_attention(*args, layout=layout, **options)

    compared(ring, length, layout, inputs, True, None)


@settings(max_examples=12)
@given(
    length=st.integers(1, 17),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 3),
    causal=st.booleans(),
)
def test_exchanged_heads_give_what_the_whole_sequence_gives(
    length: int, kv_heads: int, group: int, causal: bool
) -> None:
    heads = kv_heads * group
    query = drawn(2, heads, length, 3, seed=0)
    key, value = drawn(2, kv_heads, length, 3, seed=1), drawn(2, kv_heads, length, 2, seed=2)
    if heads < N:
        with pytest.raises(ArgumentError, match=rf"{N} ranks share {heads} heads.*use ring_attention"):
            context_parallel.ulysses_attention(
                *(context_parallel.sequence_part(x, world, -2) for x in (query, key, value)), world, length=length
            )
        return
    compared(context_parallel.ulysses_attention, length, "contiguous", [query, key, value], causal, None)


@settings(max_examples=15)
@given(length=st.integers(0, 20), layout=LAYOUT)
def test_parts_of_a_sequence_are_joined_in_its_order(length: int, layout: str) -> None:
    x = drawn(2, length, 3, seed=5)
    part = context_parallel.sequence_part(x, world, 1, layout)
    joined = context_parallel.join_sequence(part, world, 1, layout, length=length)
    assert context_parallel.sequence_positions(length, world, layout).tolist() == places(length, layout)
    assert sorted(p for rank in range(N) for p in places(length, layout, rank)) == list(range(length))
    assert [len(places(length, layout, rank)) for rank in range(N)] == [len(p) for p in fp.partition(length, N)]
    np.testing.assert_array_equal(joined.numpy(), x.numpy())


def test_a_zigzag_shares_the_work_of_causal_attention() -> None:
    """The scores that each rank computes, in a sequence of 16 positions a rank."""
    length = 16 * N

    def scores(layout: str) -> list[int]:
        return [sum(p + 1 for p in places(length, layout, rank)) for rank in range(N)]

    assert len(set(scores("zigzag"))) == 1
    assert N == 1 or scores("contiguous")[-1] > 2 * scores("contiguous")[0]


@pytest.mark.parametrize("layout", context_parallel.layout.LAYOUTS)
def test_a_layer_is_the_dense_one_with_rotary_positions_and_shared_key_heads(layout: str) -> None:
    length = 3 * N + 1
    rotary = fp.Rotary(4)
    dense = fp.Attention(6, 4, ft.random.Generator(0), kv_heads=2, head_size=4, causal=True, rotary=rotary)
    for parameter in dense.parameters():
        parameter.node = ft.astype(parameter, "float64").node
    x, mine = drawn(2, length, 6, seed=9), places(length, layout)
    wanted = dense(x)
    parameters = [x, *dense.parameters()]
    wanted_gradients = ft.grad(weighed(wanted, list(range(length))), parameters)
    part = context_parallel.sequence_part(x, world, 1, layout)
    found = context_parallel.RingAttention(dense, world, layout=layout)(part, length=length)
    gradients = ft.grad(weighed(found, mine), [part, *dense.parameters()])
    summed = [world.all_reduce(g) for g in gradients[1:]]
    fp.realize(found, gradients, summed, wanted, wanted_gradients)
    np.testing.assert_allclose(found.numpy(), wanted.numpy()[:, mine], **CLOSE)
    np.testing.assert_allclose(gradients[0].numpy(), wanted_gradients[0].numpy()[:, mine], rtol=1e-11, atol=1e-12)
    for gradient, whole in zip(summed, wanted_gradients[1:], strict=True):
        np.testing.assert_allclose(gradient.numpy(), whole.numpy(), rtol=1e-11, atol=1e-11)


def test_half_precision_is_as_good_as_its_digits() -> None:
    length = 5 * N
    inputs = [drawn(2, length, 4, seed=s) for s in range(3)]
    wanted = ft.scaled_dot_product_attention(*inputs, causal=True)
    wanted_gradients = ft.grad(weighed(wanted, [0] * length), inputs)
    parts = [ft.astype(context_parallel.sequence_part(x, world, -2), "float16") for x in inputs]
    found = context_parallel.ring_attention(*parts, world, causal=True)
    gradients = ft.grad(weighed(found, [0] * (length // N)), parts)
    assert {t.dtype.name for t in (found, *gradients)} == {"float16"}
    mine = places(length, "contiguous")
    for half, whole in zip([found, *gradients], [wanted, *wanted_gradients], strict=True):
        np.testing.assert_allclose(half.numpy().astype(float), whole.numpy()[..., mine, :], atol=0.02)


def test_the_graph_holds_nothing_of_other_ranks() -> None:
    """No node of forward and backward together is larger than what this rank has."""
    comm = SymbolicComm(1, 64)
    parts = [ft.zeros((1, 2, 32, 8)) for _ in range(3)]
    loss = context_parallel.ring_attention(*parts, comm, causal=True, layout="zigzag").sum()
    nodes = topological([g.node for g in ft.grad(loss, parts)])
    assert max(node.spec.size for node in nodes) == sum(x.size for x in parts)


def test_ranks_that_differentiate_something_else_still_take_part() -> None:
    x, other = drawn(1, 4, 2, seed=1), ft.asarray(1.0, dtype="float64")
    loss = context_parallel.ring_attention(x, x, x, world).sum() + other
    (gradient,) = ft.grad(loss, [x if RANK == 0 else other])
    fp.realize(gradient)
    assert RANK == 0 or gradient.item() == 1.0


def test_mistakes_are_named() -> None:
    comm = SymbolicComm(1, 3)
    x = ft.zeros((2, 4, 8))
    with pytest.raises(ShapeError, match=r"of a sequence of length 10, rank 1 of 3 holds 3 positions, but .* has 4"):
        context_parallel.ring_attention(x, x, x, comm, length=10)
    with pytest.raises(ShapeError, match="ring_attention: queries and keys are of one sequence"):
        context_parallel.ring_attention(x, x[:, :3], x[:, :3], comm)
    with pytest.raises(ShapeError, match="ring_attention: query heads must be a multiple of key heads"):
        context_parallel.ring_attention(x, ft.zeros((3, 4, 8)), ft.zeros((3, 4, 8)), comm)
    with pytest.raises(ArgumentError, match="layout is one of 'contiguous', 'zigzag', not 'striped'"):
        context_parallel.ring_attention(x, x, x, comm, layout="striped")
    (first,) = ft.grad(context_parallel.ring_attention(x, x, x, comm).sum(), [x])
    with pytest.raises(GradientError, match=r"ring_attention_backward .* has no gradient"):
        ft.grad(first.sum(), x)

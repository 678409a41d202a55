"""A mixture of experts gives what a plain sum over all experts gives, token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError

ACTIVATIONS = {"gelu": ft.gelu, "relu": ft.relu, "silu": ft.silu}
MIXTURE = {
    "tokens": st.integers(0, 9),
    "experts": st.integers(1, 6),
    "top_k": st.integers(1, 3),
    "renormalise": st.booleans(),
    "capacity_factor": st.sampled_from([None, 0.3, 1.0, 100.0]),
    "activation": st.sampled_from(["swiglu", "gelu", "relu"]),
}


def plain(layer: fp.MixtureOfExperts, x: ft.Tensor) -> tuple[ft.Tensor, ft.Tensor]:
    """The value and the balance loss; every expert sees every token, and what was not chosen counts nothing."""
    probabilities = ft.softmax(x @ layer.router)
    values = (probabilities * 1.0).numpy()  # of the probabilities themselves a gradient is asked for
    chosen = np.argsort(-values, axis=-1, kind="stable")[:, : layer.top_k]
    taken = np.zeros(layer.count, int)
    kept = np.zeros(values.shape)
    picked = np.zeros(values.shape)
    limit = math.inf
    if layer.capacity_factor is not None:
        limit = math.ceil(layer.capacity_factor * layer.top_k * len(values) / layer.count)
    for choice in range(layer.top_k):
        for token, expert in enumerate(chosen[:, choice]):
            picked[token, expert] = 1
            kept[token, expert] = taken[expert] < limit
            taken[expert] += 1
    gates = probabilities * ft.asarray(picked)
    if layer.renormalise:
        gates = gates / ft.sum(gates, axis=-1, keepdims=True)
    gates = gates * ft.asarray(kept)
    value = ft.zeros_like(x)
    for e in range(layer.count):
        inner = x @ layer.experts.up[e]
        if layer.experts.gate is None:
            inner = ACTIVATIONS[layer.experts.activation](inner)
        else:
            inner = ft.silu(x @ layer.experts.gate[e]) * inner
        value = value + gates[:, e : e + 1] * (inner @ layer.experts.down[e])
    share = ft.asarray(picked.sum(0) / max(picked.sum(), 1))
    balance = (share * probabilities.sum(axis=0)).sum() * (layer.count / max(len(values), 1))
    return value, balance


@settings(max_examples=20, deadline=None)
@given(**MIXTURE)
def test_value_and_gradients_are_those_of_the_plain_sum(
    tokens: int, experts: int, top_k: int, renormalise: bool, capacity_factor: float | None, activation: str
) -> None:
    layer = fp.MixtureOfExperts(
        3,
        5,
        experts,
        ft.random.Generator(1),
        top_k=min(top_k, experts),
        renormalise=renormalise,
        capacity_factor=capacity_factor,
        activation=activation,
        dtype="float64",
    )
    x = ft.asarray(np.random.default_rng(tokens).normal(size=(tokens, 3)))
    found = layer(x)
    wanted, wanted_balance = plain(layer, x)
    leaves = [x, *layer.parameters()]
    gradients = ft.grad(ft.sin(found.value).sum() + found.balance_loss * 0.1, leaves)
    wanted_gradients = ft.grad(ft.sin(wanted).sum() + wanted_balance * 0.1, leaves)
    close = {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(found.value.numpy(), wanted.numpy(), **close)
    np.testing.assert_allclose(found.balance_loss.item(), wanted_balance.item(), **close)
    assert found.counts.numpy().sum() == tokens * layer.top_k
    for gradient, other in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(gradient.numpy(), other.numpy(), **close)


def test_losses_of_the_router_are_those_of_the_papers() -> None:
    layer = fp.MixtureOfExperts(4, 8, 8, ft.random.Generator(0), top_k=1, dtype="float64")
    x = ft.asarray(np.random.default_rng(0).normal(size=(50, 4)))
    logits = x.numpy() @ layer.router.numpy()
    np.testing.assert_allclose(layer(x).z_loss.item(), (np.log(np.exp(logits).sum(-1)) ** 2).mean(), rtol=1e-12)
    layer.router.assign(ft.zeros_like(layer.router))
    uniform = layer(x)
    assert uniform.balance_loss.item() == pytest.approx(1.0)
    assert uniform.counts.tolist() == [50, 0, 0, 0, 0, 0, 0, 0]  # ties go to the first
    layer.router.assign(ft.zeros_like(layer.router) + ft.asarray([50.0] + [0.0] * 7))
    assert layer(ft.abs(x)).balance_loss.item() == pytest.approx(8.0)


def test_a_capacity_keeps_shapes_whatever_the_router_says() -> None:
    """Experts work on as many rows as there are slots; without a capacity, on as many as there are choices."""
    layer = fp.MixtureOfExperts(4, 16, 8, ft.random.Generator(0), top_k=2, capacity_factor=1.25)
    assert layer.capacity(64) == math.ceil(1.25 * 2 * 64 / 8)
    slots = 8 * layer.capacity(64)
    from fuel_parallel.lazy.node import topological

    found = layer(ft.zeros((64, 4))).value
    rows = {node.spec.shape for node in topological([found.node]) if node.op.name == "grouped_matmul"}
    assert rows == {(slots, 16), (slots, 4)}
    unlimited = fp.MixtureOfExperts(4, 16, 8, ft.random.Generator(0), top_k=2)(ft.zeros((64, 4))).value
    rows = {node.spec.shape for node in topological([unlimited.node]) if node.op.name == "grouped_matmul"}
    assert rows == {(128, 16), (128, 4)}


def test_half_precision_routes_in_float32() -> None:
    layer = fp.MixtureOfExperts(8, 16, 4, ft.random.Generator(0), dtype="bfloat16")
    x = ft.astype(ft.asarray(np.random.default_rng(0).normal(size=(6, 8))), "bfloat16")
    found = layer(x)
    assert (found.value.dtype.name, found.balance_loss.dtype.name) == ("bfloat16", "float32")
    wide = fp.MixtureOfExperts(8, 16, 4, ft.random.Generator(0))
    wide.load({name: value.numpy().astype("float32") for name, value in layer.named_variables().items()})
    wanted = wide(ft.astype(x, "float32")).value.numpy()
    np.testing.assert_allclose(found.value.numpy().astype("float32"), wanted, atol=0.02)


def test_mistakes_are_named() -> None:
    generator = ft.random.Generator(0)
    with pytest.raises(ArgumentError, match="top_k lies between 1 and 4 experts, but is 5"):
        fp.MixtureOfExperts(2, 3, 4, generator, top_k=5)
    with pytest.raises(ArgumentError, match="capacity_factor is a positive number or None, not 0"):
        fp.MixtureOfExperts(2, 3, 4, generator, capacity_factor=0)
    with pytest.raises(ArgumentError, match="activation is one of 'swiglu', 'gelu', 'relu', 'silu', not 'tanh'"):
        fp.MixtureOfExperts(2, 3, 4, generator, activation="tanh")
    with pytest.raises(ShapeError, match=r"the last dimension of x must be 2, but x has shape \(5, 3\)"):
        fp.MixtureOfExperts(2, 3, 4, generator)(ft.zeros((5, 3)))
    with pytest.raises(ShapeError, match=r"grouped_matmul: expected x .*\(5, 3\), \(2, 4, 1\) and \(2,\)"):
        ft.grouped_matmul(ft.zeros((5, 3)), ft.zeros((2, 4, 1)), ft.asarray([1, 2]))
    with pytest.raises(DTypeError, match="ends is a vector of integers"):
        ft.grouped_matmul(ft.zeros((5, 3)), ft.zeros((2, 3, 1)), ft.asarray([1.0, 2.0]))

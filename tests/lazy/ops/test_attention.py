"""Attention by blocks equals attention by the matrix of all scores, and its memory does not grow with the square."""

from __future__ import annotations

import tracemalloc
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.lazy.ops import attention, attention_blocks


@given(st.data())
@settings(max_examples=60)
def test_blocks_of_any_size_give_the_dense_result_and_gradients(data):
    draw = data.draw
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    q, k, dim, width = (draw(st.integers(1, 9)) for _ in range(4))
    batch = draw(st.sampled_from([(), (2,), (2, 1)]))
    causal = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    def tensor(*shape):
        return ft.asarray(rng.normal(size=(*batch, *shape)))

    query, key, value = tensor(kv_heads * groups, q, dim), tensor(kv_heads, k, dim), tensor(kv_heads, k, width)
    mask = ft.asarray(rng.random((q, k)) < 0.7) if draw(st.booleans()) else None
    sizes = attention_blocks.QUERY_BLOCK, attention_blocks.KEY_BLOCK, attention_blocks.SCORES
    attention_blocks.QUERY_BLOCK, attention_blocks.KEY_BLOCK, attention_blocks.SCORES = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        8,
    )
    try:
        found = ft.scaled_dot_product_attention(query, key, value, mask=mask, causal=causal)
        gradients = ft.grad(ft.sum(ft.sin(found)), [query, key, value])
        fp.realize(found, gradients)
    finally:
        attention_blocks.QUERY_BLOCK, attention_blocks.KEY_BLOCK, attention_blocks.SCORES = sizes
    dense = attention.dense_attention(query, key, value, mask, causal, dim**-0.5)
    wanted = ft.grad(ft.sum(ft.sin(dense)), [query, key, value])
    for ours, theirs in zip([found, *gradients], [dense, *wanted], strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [2048, 4096])
def test_memory_grows_with_the_length_alone(length):
    x = ft.asarray(np.random.default_rng(0).normal(size=(1, length, 8)).astype(np.float32)).realize()
    loss = ft.sum(ft.scaled_dot_product_attention(x, x, x, causal=True))
    gradient = ft.grad(loss, x)
    tracemalloc.start()
    gradient.realize()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    all_scores = 4 * length * length
    assert peak < all_scores / 4
    assert peak < 3_500_000 + 400 * length


@pytest.mark.parametrize("causal", [False, True])
def test_without_any_key_the_result_is_zero(causal: bool) -> None:
    query, key = ft.asarray(np.ones((1, 2, 3, 4))), ft.asarray(np.ones((1, 2, 0, 4)))
    found = ft.scaled_dot_product_attention(query, key, key, causal=causal)
    gradient, _ = ft.grad(ft.sum(found), [query, key])
    assert found.tolist() == gradient.tolist() == np.zeros((1, 2, 3, 4)).tolist()


@pytest.mark.parametrize("strange", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dim", [8, 1], ids=["weights are kept", "weights are not kept"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_key_that_is_not_seen_has_no_influence(strange: float, dim: int, masked: bool) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 6, dim)) for _ in range(3))
    mask = ft.asarray(np.arange(6) < 4) if masked else None

    def seen(of: np.ndarray) -> np.ndarray:
        return ft.scaled_dot_product_attention(
            ft.asarray(query), ft.asarray(of), ft.asarray(value), mask=mask, causal=True
        ).numpy()[:, :4]

    wanted = seen(key)
    key[:, 4:] = strange  # which the first four queries do not see
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(seen(key), wanted, rtol=1e-12)


def test_what_hides_keys_is_kept_for_the_host_alone() -> None:
    device = types.SimpleNamespace(ones=np.ones, tril=np.tril, where=np.where)
    kept = dict(attention_blocks._tiles)
    made = [attention_blocks._causal_tile(device, slice(0, 3), slice(0, 3), 0, np.dtype(float)) for _ in range(2)]
    assert made[0] is not made[1]  # a tile of a capture that failed has memory that is given back
    assert attention_blocks._tiles.keys() == kept.keys()

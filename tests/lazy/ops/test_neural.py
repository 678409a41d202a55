"""The functions of neural networks, against a few lines of numpy in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DTypeError, FuelError, IndexingError, ShapeError
from fuel_parallel.lazy import dtypes

Array = np.ndarray[Any, Any]
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)


def normal(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> Array:
    return np.random.default_rng(seed).normal(0, scale, shape)


def close(found: ft.Tensor, wanted: Array, tolerance: float = 1e-12) -> None:
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found.numpy().astype(np.float64), wanted, rtol=tolerance, atol=tolerance)


@given(SHAPES, st.data(), st.sampled_from([1.0, 1e3]))
def test_softmax_does_not_overflow(shape: Any, data: st.DataObject, scale: float) -> None:
    x = normal(shape, scale=scale)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    close(ft.softmax(ft.asarray(x), axis=axis), special.softmax(x, axis))
    close(ft.log_softmax(ft.asarray(x), axis=axis), special.log_softmax(x, axis))


@pytest.mark.parametrize("function", [ft.softmax, ft.log_softmax])
def test_softmax_of_nothing_is_nothing(function: Any) -> None:
    assert function(ft.zeros((2, 0))).tolist() == [[], []]


@pytest.mark.parametrize("dtype", [ft.float16, ft.bfloat16], ids=lambda d: d.name)
def test_halves_are_normalized_in_single_precision(dtype: Any) -> None:
    x = normal((2, 3000), scale=100).astype(dtype)
    wide = x.astype(np.float64)
    for found, wanted in (
        (ft.softmax(ft.asarray(x)), special.softmax(wide, -1)),
        (ft.layer_norm(ft.asarray(x)), (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)),
    ):
        assert found.dtype == dtype
        close(found, wanted.astype(dtype).astype(np.float64), 2 * ft.finfo(dtype).eps)


@given(SHAPES)
def test_norms(shape: Any) -> None:
    x, weight, bias = normal(shape), normal(shape[-1:], 1), normal(shape[-1:], 2)
    tensor, w, b = map(ft.asarray, (x, weight, bias))
    centered = x - x.mean(-1, keepdims=True)
    wanted = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    close(ft.layer_norm(tensor), wanted)
    close(ft.layer_norm(tensor, w), wanted * weight)
    close(ft.layer_norm(tensor, w, b), wanted * weight + bias)
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1)
    close(ft.rms_norm(tensor, w, eps=0.1), wanted * weight)


def test_a_large_mean_does_not_spoil_the_variance() -> None:
    x = ft.asarray(normal((4, 64)) + 1e4, dtype=ft.float32)
    assert abs(float(ft.var(ft.layer_norm(x))) - 1) < 1e-3


def test_embedding_takes_rows_and_gives_them_their_gradient() -> None:
    table = ft.asarray(normal((5, 2)))
    tokens = ft.asarray([[1, 4, 1], [0, 0, 0]])
    close(ft.embedding(tokens, table), table.numpy()[tokens.numpy()])
    assert ft.grad(ft.sum(ft.embedding(tokens, table)), table).tolist() == [
        [3.0, 3.0],
        [2.0, 2.0],
        [0.0, 0.0],
        [0.0, 0.0],
        [1.0, 1.0],
    ]


@given(st.integers(1, 4), st.integers(2, 5), st.sampled_from(["mean", "sum", "none"]), st.booleans(), st.data())
def test_cross_entropy(rows: int, classes: int, reduction: str, ignoring: bool, data: st.DataObject) -> None:
    lowest = -1 if ignoring else 0
    targets = np.array(data.draw(st.lists(st.integers(lowest, classes - 1), min_size=rows, max_size=rows)))
    logits = normal((rows, classes), scale=20)
    losses = -special.log_softmax(logits, -1)[np.arange(rows), targets] * (targets >= 0)
    wanted = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / max((targets >= 0).sum(), 1)}[reduction]
    found = ft.cross_entropy(
        ft.asarray(logits), ft.asarray(targets), reduction=reduction, ignore_index=-1 if ignoring else None
    )
    close(found, np.asarray(wanted))


@pytest.mark.parametrize("ignore_index", [-100, 255, 0])
def test_ignored_targets_have_no_gradient(ignore_index: int) -> None:
    logits = ft.asarray(normal((3, 4)))
    targets = ft.asarray([1, ignore_index, 2])
    gradient = ft.grad(ft.cross_entropy(logits, targets, ignore_index=ignore_index), logits).numpy()
    assert not gradient[1].any()
    assert gradient[0].any()
    nothing = ft.cross_entropy(logits, ft.full(3, ignore_index), ignore_index=ignore_index)
    assert nothing.item() == 0.0


def test_cross_entropy_of_no_targets_is_zero() -> None:
    assert ft.cross_entropy(ft.zeros((0, 3)), ft.zeros(0, dtype=ft.int64)).item() == 0.0


# Attention.


def attention(q: Array, k: Array, v: Array, seen: Array, bias: Array | float, scale: float) -> Array:
    repeats = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, repeats, -3), np.repeat(v, repeats, -3)
    scores = np.where(seen, np.einsum("...qd,...kd->...qk", q, k) * scale + bias, -np.inf)
    with np.errstate(all="ignore"):
        weights = np.nan_to_num(special.softmax(scores, -1))
    return np.asarray(np.einsum("...qk,...kd->...qd", weights, v))


@settings(max_examples=60)
@given(
    batch=st.sampled_from([(), (2,), (2, 1)]),
    groups=st.integers(1, 3),
    heads=st.integers(1, 2),
    q=st.integers(1, 4),
    k=st.integers(1, 4),
    causal=st.booleans(),
    mask=st.sampled_from(["none", "bool", "bool per head", "float"]),
    dtype=st.sampled_from([ft.float64, ft.float32, ft.bfloat16]),
)
def test_attention(batch: Any, groups: int, heads: int, q: int, k: int, causal: bool, mask: str, dtype: Any) -> None:
    query, key = normal((*batch, groups * heads, q, 3)), normal((*batch, heads, k, 3), 1)
    value = normal((*batch, heads, k, 2), 2)
    seen = np.tril(np.ones((q, k), bool), k - q) if causal else np.ones((q, k), bool)
    bias: Array | float = 0.0
    given_mask: Array | None = None
    if mask == "float":
        given_mask = bias = normal((q, k), 3)
    elif mask != "none":
        given_mask = np.random.default_rng(4).random((groups * heads, q, k) if "head" in mask else (q, k)) < 0.6
        seen = seen & given_mask
    tensors = [ft.asarray(x).astype(dtype) for x in (query, key, value)]
    found = ft.scaled_dot_product_attention(
        *tensors, causal=causal, mask=None if given_mask is None else ft.asarray(given_mask)
    )
    assert found.dtype == dtype
    query, key, value = (t.numpy().astype(np.float64) for t in tensors)
    tolerance = {ft.float64: 1e-12, ft.float32: 1e-5, ft.bfloat16: 0.1}[dtype]
    close(found, attention(query, key, value, seen, bias, 3**-0.5), tolerance)


def test_attention_takes_a_scale() -> None:
    q = normal((1, 2, 3))
    found = ft.scaled_dot_product_attention(ft.asarray(q), ft.asarray(q), ft.asarray(q), scale=0.5)
    close(found, attention(q, q, q, np.ones((2, 2), bool), 0.0, 0.5))


def test_a_query_that_sees_nothing_gives_zeros_and_no_nan_in_gradients() -> None:
    x = ft.asarray(normal((1, 3, 2)))
    hidden = np.array([[1, 0, 0], [0, 0, 0], [1, 1, 1]], dtype=bool)
    found = ft.scaled_dot_product_attention(x, x, x, mask=ft.asarray(hidden))
    gradient = ft.grad(ft.sum(found * found), x)
    assert found[0, 1].tolist() == [0.0, 0.0]
    assert np.isfinite(gradient.numpy()).all()


@pytest.mark.parametrize(("q", "k"), [(1, 4), (3, 4), (4, 3)])
def test_the_last_query_of_causal_attention_sees_all_keys(q: int, k: int) -> None:
    x, y = normal((2, q, 3)), normal((2, k, 3), 1)
    found = ft.scaled_dot_product_attention(ft.asarray(x), ft.asarray(y), ft.asarray(y), causal=True)
    whole = ft.scaled_dot_product_attention(ft.asarray(x), ft.asarray(y), ft.asarray(y))
    close(found[:, -1], whole[:, -1].numpy())
    assert np.isfinite(found.numpy()).all()


X, HEADS = ft.zeros((2, 3)), ft.zeros((4, 5, 8))
ATTEND = ft.scaled_dot_product_attention
MISTAKES: list[tuple[Any, type[FuelError], str]] = [
    (lambda: ft.softmax(ft.arange(3)), DTypeError, "softmax: expected one of float16, bfloat16, float32, float64, but"),
    (lambda: ft.softmax(X, axis=2), ShapeError, "softmax: axis 2 is out of bounds for a tensor of 2 dimensions"),
    (lambda: ft.layer_norm(X, X), ShapeError, r"weight must have shape \(3,\) like x's last dimension, not \(2, 3\)"),
    (lambda: ft.layer_norm(X, None, X[0, :2]), ShapeError, r"layer_norm: bias must have shape \(3,\) .* not \(2,\)"),
    (lambda: ft.rms_norm(ft.zeros(())), ShapeError, r"expected a last dimension with elements, but x has shape \(\)"),
    (lambda: ft.embedding(ft.arange(2), X[0]), ShapeError, r"must have shape \[vocabulary, dim\], not \(3,\)"),
    (lambda: ft.embedding(X, X), IndexingError, "must have an integer dtype, not float32"),
    (lambda: ft.cross_entropy(X, ft.arange(3)), ShapeError, r"logits has shape \(2, 3\) and targets \(3,\)"),
    (lambda: ft.cross_entropy(X, X[:, 0]), DTypeError, r"targets must be integers \(class numbers\), not float32"),
    (lambda: ft.cross_entropy(X, ft.arange(2), reduction="max"), ArgumentError, "'mean', 'sum' or 'none', not 'max'"),
    (lambda: ATTEND(X, X, X), ShapeError, r"expected \[..., heads, length, dim\], got query \(2, 3\), key \(2, 3\)"),
    (
        lambda: ATTEND(HEADS, HEADS[:3], HEADS[:3]),
        ShapeError,
        r"query heads must be a multiple of key heads; got query",
    ),
    (lambda: ATTEND(HEADS, HEADS[..., :4], HEADS), ShapeError, "query and key must have the same last extent"),
    (lambda: ATTEND(HEADS, HEADS, HEADS[:, :4]), ShapeError, "key and value the same heads and length"),
    (lambda: ATTEND(HEADS, HEADS, HEADS, mask=ft.zeros((7, 5))), ShapeError, r"\(7, 5\)"),
]


@pytest.mark.parametrize(("make", "error", "text"), MISTAKES)
def test_mistakes_are_named(make: Any, error: type[FuelError], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_dtypes_of_norms_follow_the_weights() -> None:
    assert ft.layer_norm(X.astype(ft.float16), ft.ones(3)).dtype == dtypes.promote(ft.float16, ft.float32)

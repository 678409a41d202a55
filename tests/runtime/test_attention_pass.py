"""Attention that is written out runs as the op, with the same values, NaN included; and nothing else does."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuel_parallel.lazy as ft
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.execute import execute
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan

module = importlib.import_module("fuel_parallel.runtime.passes.attention")  # the package's `attention` is the function

ALL = tuple(passes.PASSES)
PAYS = module.pays
WITHOUT = tuple(name for name in ALL if name != "attention")


@pytest.fixture(autouse=True)
def any_size_pays(monkeypatch):
    """Small matrices show as much as large ones."""
    monkeypatch.setattr(module, "pays", lambda scores, operands: True)


@pytest.fixture
def only_what_pays(monkeypatch, any_size_pays):
    monkeypatch.setattr(module, "pays", PAYS)


def planned(tensors, names=ALL):
    graph, leaves, nodes = trace([t.node for t in tensors])
    return make_plan(graph, names), graph, leaves, nodes


def computed(tensors, names):
    plan, graph, leaves, nodes = planned(tensors, names)
    values = dict(zip(graph.outputs, execute(plan, [n.value for n in leaves], nodes), strict=True))
    number = {node: i for i, node in enumerate([*leaves, *nodes])}
    return [np.asarray(values[number[t.node]]) for t in tensors]


def ops_of(tensors, names=ALL):
    return [step.op.name for step in planned(tensors, names)[0].steps]


def is_recognized(*tensors):
    """Whether the op does it all: no softmax is left."""
    return {"softmax", "exp"}.isdisjoint(ops_of(tensors, ("attention",)))


def agree(tensors):
    for plain, passed in zip(computed(tensors, WITHOUT), computed(tensors, ALL), strict=True):
        assert plain.shape == passed.shape
        assert plain.dtype == passed.dtype
        np.testing.assert_allclose(passed, plain, rtol=1e-11, atol=1e-11)


def by_hand(x):
    e = ft.exp(x - ft.max(x, axis=-1, keepdims=True))
    return e / ft.sum(e, axis=-1, keepdims=True)


def by_hand_with_constant_shift(x):
    e = ft.exp(x - ft.stop_gradient(ft.max(x, axis=-1, keepdims=True)))
    return e / ft.sum(e, axis=-1, keepdims=True)


SOFTMAXES = [ft.softmax, by_hand, by_hand_with_constant_shift]


def tensor(*shape, seed=0):
    return ft.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def causal(q, k):
    return ft.tril(ft.ones((q, k), dtype=ft.bool), k=k - q)


@st.composite
def masks(draw, shape):
    """None, or a mask that broadcasts to the shape of the scores."""
    q, k = shape[-2:]
    kind = draw(st.sampled_from(["none", "causal", "positions", "window", "triu", "data"]))
    rows, columns = ft.arange(q)[:, None], ft.arange(k)[None, :]
    if kind == "data":
        own = [draw(st.sampled_from([1, extent])) for extent in shape][draw(st.integers(0, len(shape))) :]
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        return ft.asarray(rng.random(own) < draw(st.sampled_from([0.5, 0.9])))
    return {
        "none": None,
        "causal": causal(q, k),
        "positions": rows + (k - q) >= columns,
        "window": ft.abs(rows - columns) < draw(st.integers(1, 3)),
        "triu": ft.logical_not(ft.triu(ft.ones((1, q, k), dtype=ft.bool), k=1)) if len(shape) > 2 else causal(q, k),
    }[kind]


@st.composite
def programs(draw):
    """Attention in one of the ways in which it is written, maybe with gradients of some of what it reads.

    With one key there is nothing to sum, and `grad` writes the sums of a softmax by hand otherwise.
    """
    batch = draw(st.sampled_from([(), (3,), (2, 3), (2, 1, 3)]))
    q, k, dim, width = (draw(st.integers(least, 7)) for least in (1, 2, 1, 1))
    shared = draw(st.sampled_from(["none", "none", "query and key", "key and value", "all"]))
    if shared != "none":
        q, width = (k if shared != "key and value" else q), dim
    query, key, value = tensor(*batch, q, dim), tensor(*batch, k, dim, seed=1), tensor(*batch, k, width, seed=2)
    if batch and shared == "none" and draw(st.booleans()):
        # One head of keys for all queries.
        key, value = tensor(1, k, dim, seed=1), tensor(1, k, width, seed=2)
    leaves = [query, key, value]
    if shared != "none":
        # Projections that are made once and read in several places.
        query, key, value = (t * 1.5 for t in leaves)
        key = query if shared in ("query and key", "all") else key
        value = key if shared in ("key and value", "all") else value
    transposed = draw(st.booleans()) and shared == "none"
    if transposed:
        leaves[1] = tensor(*key.shape[:-2], dim, k, seed=1)
    keys = leaves[1] if transposed else key.mT
    place, factor = draw(st.sampled_from(["query", "keys", "scores", "after", "none"])), draw(st.sampled_from([0.5, 2]))
    scale = draw(st.sampled_from([lambda x: x * factor, lambda x: factor * x, lambda x: x / math.sqrt(factor)]))
    scores = (scale(query) if place == "query" else query) @ (scale(keys) if place == "keys" else keys)
    scores = scale(scores) if place == "scores" else scores
    mask = draw(masks(scores.shape))
    if mask is not None and draw(st.booleans()):
        scores = ft.where(mask, scores, -math.inf)
    elif mask is not None:
        scores = ft.where(~mask, -math.inf, scores)
    scores = scale(scores) if place == "after" else scores
    result = draw(st.sampled_from(SOFTMAXES))(scores) @ value
    if not draw(st.booleans()):
        return [result]
    cotangent = draw(st.sampled_from([tensor(*result.shape, seed=3), None]))
    wanted = [leaves[i] for i in draw(st.lists(st.integers(0, 2), min_size=1, unique=True))]
    loss = result if cotangent is not None else ft.sum(ft.sin(ft.where(ft.isnan(result), 0.0, result)))
    gradients = ft.grad(loss, wanted, cotangent=cotangent)
    # The gradient of the values alone needs no values: without the result it is no attention.
    behind_scores = {"none": leaves[:2], "query and key": leaves[:1]}.get(shared, leaves)
    alone = not any(t is s for t in wanted for s in behind_scores)
    return [result, *gradients] if alone or draw(st.booleans()) else gradients


@given(programs())
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_all_ways_to_write_it_are_recognized_and_give_what_they_gave(tensors):
    assert is_recognized(*tensors)
    agree(tensors)


def attend(query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return ft.softmax(scores if mask is None else ft.where(mask, scores, -math.inf)) @ value


def arguments(shape=(2, 6, 4)):
    return [tensor(*shape, seed=seed) for seed in range(3)]


@pytest.mark.parametrize("cotangent", [ft.ones_like, ft.cos], ids=["finite", "NaN, too"])
def test_a_query_that_sees_nothing_stays_nan_and_spoils_no_more_than_it_did(cotangent):
    query, key, value = arguments((2, 3, 4))
    mask = np.ones((2, 3, 3), dtype=bool)
    mask[0, 1] = False
    result = attend(query, key, value, ft.asarray(mask))
    gradients = ft.grad(result, [query, key, value], cotangent=cotangent(result))
    assert is_recognized(result, *gradients)
    out, of_query, of_key, of_value = computed([result, *gradients], ALL)
    np.testing.assert_array_equal(np.isnan(out).all(axis=-1), [[False, True, False], [False] * 3])
    np.testing.assert_array_equal(of_query[0, 1], 0)
    assert np.isfinite(of_query).all()
    assert np.isfinite(of_key).all()
    assert np.isnan(of_value[0]).all()
    assert np.isfinite(of_value[1]).all()
    agree([result, *gradients])


@pytest.mark.parametrize(
    ("mask", "inputs"),
    [
        (lambda: causal(6, 6), 3),
        (lambda: ft.arange(6)[:, None] >= ft.arange(6)[None, :], 3),
        (lambda: ~ft.triu(ft.ones((1, 1, 6, 6), dtype=ft.bool), k=1), 3),
        (lambda: ft.tril(ft.ones((6, 6), dtype=ft.bool), k=1), 4),
        (lambda: ft.asarray(np.tri(6, dtype=bool)), 4),
    ],
    ids=["tril", "positions", "triu", "another diagonal", "data"],
)
def test_a_constant_causal_mask_is_no_mask(mask, inputs):
    plan = planned([attend(*arguments((2, 1, 6, 4)), mask())], ("attention",))[0]
    (step,) = [s for s in plan.steps if s.op.name == "attention"]
    assert len(step.inputs) == inputs
    assert step.attrs[0] == (inputs == 3)


def test_only_a_mask_that_may_hide_all_keys_is_watched_for_it():
    x = arguments()
    window = ft.abs(ft.arange(6)[:, None] - ft.arange(6)[None, :]) < 2
    assert "any" not in ops_of([attend(*x, window)], ("attention",))
    assert "any" in ops_of([attend(*x, window & (ft.arange(6) > 2))], ("attention",))
    assert "any" in ops_of([attend(*x, ft.asarray(np.ones(6, dtype=bool)))], ("attention",))


def test_einsum_and_two_separate_gradients():
    query, key, value = arguments((2, 5, 3, 4))
    weights = ft.softmax(ft.einsum("bqhd,bkhd->bhqk", query, key) * 0.3)
    result = ft.einsum("bhqk,bkhd->bqhd", weights, value)
    loss = ft.sum(ft.sin(result))
    gradients = [ft.grad(loss, query), ft.grad(loss, key), *ft.grad(loss, [key, value])]
    assert is_recognized(result, *gradients)
    assert ops_of([result, *gradients]).count("attention_backward") == 1
    agree([result, *gradients])


def test_two_losses_share_the_forward_pass():
    query, key, value = arguments()
    result = attend(query, key, value, causal(6, 6))
    tensors = [*ft.grad(ft.sum(ft.sin(result)), [query, value]), *ft.grad(ft.sum(ft.cos(result)), [query, key])]
    names = ops_of(tensors)
    assert (names.count("attention"), names.count("attention_backward")) == (1, 2)
    agree(tensors)


def declined():
    """What must stay as it is: a name, and tensors."""
    query, key, value = arguments()
    scores = query @ key.mT
    weights = ft.softmax(scores)
    result = weights @ value
    yield "weights are wanted, too", [result, weights]
    yield "weights are read twice", [result, ft.sum(weights * weights)]
    yield "scores are wanted, too", [result, scores]
    yield "gradient of the weights", [*ft.grad(ft.sum(result) + ft.sum(weights * 2), [query, value])]
    yield "added mask", [ft.softmax(scores + tensor(6, 6)) @ value]
    yield "finite mask", [ft.softmax(ft.where(causal(6, 6), scores, -1e9)) @ value]
    yield "factor that is data", [ft.softmax(scores * tensor()) @ value]
    yield "softmax over queries", [ft.softmax(scores, axis=-2) @ value]
    yield "softmax without a product", [ft.softmax(scores)]
    yield "softmax of no product", [ft.softmax(tensor(2, 6, 6)) @ value]
    yield "weights on the right", [value.mT @ weights]
    yield "negative factor after the mask", [ft.softmax(ft.where(causal(6, 6), scores, -math.inf) * -1.0) @ value]
    yield "dropout", [(weights * ft.asarray(np.ones((2, 6, 6)))) @ value]
    yield "values of a larger batch", [weights @ tensor(5, 2, 6, 4)]
    of_weights = tensor(2, 6, 4, seed=3) @ tensor(5, 2, 6, 4).mT
    of_scores = weights * (of_weights - ft.sum(of_weights * weights, axis=-1, keepdims=True))
    yield "a cotangent of a larger batch", [of_scores @ key.mT.mT]
    before = weights.mT @ tensor(2, 6, 4, seed=3)
    yield "values made of the weights", [weights @ (before + 1), before]
    halves = [t.astype(ft.float16) for t in (query, key, value)]
    yield "16 bits", [ft.softmax(halves[0] @ halves[1].mT) @ halves[2]]


@pytest.mark.parametrize("name", [name for name, _ in declined()])
def test_what_is_something_else_is_left_alone(name):
    tensors = dict(declined())[name]
    assert ops_of(tensors, ("attention",)) == ops_of(tensors, ())


def scores_in_memory(tensors, length, names=ALL):
    """The results that are a matrix of all scores, and the arena in bytes."""
    plan = planned(tensors, names)[0]
    shapes = [place.spec.shape for step in plan.steps for place in step.places]
    return [shape for shape in shapes if shape[-2:] == (length, length)], plan.memory.arena_bytes


@pytest.mark.usefixtures("only_what_pays")
def test_memory_grows_with_the_length_alone():
    heads, length = 4, 2048
    x = [tensor(1, heads, length, 16, seed=seed) for seed in range(3)]
    result = attend(*x, causal(length, length))
    tensors = [ft.sum(result), *ft.grad(ft.sum(ft.sin(result)), x)]
    all_scores = 8 * heads * length * length
    matrices, arena = scores_in_memory(tensors, length, WITHOUT)
    assert (1, heads, length, length) in matrices
    assert arena > all_scores
    matrices, arena = scores_in_memory(tensors, length)
    assert matrices == []
    assert arena < all_scores / 10


@pytest.mark.usefixtures("only_what_pays")
@pytest.mark.parametrize(
    ("length", "dim", "pays"), [(512, 64, True), (256, 64, False), (512, 256, False), (64, 4, False)]
)
def test_few_scores_are_left_in_a_matrix(length, dim, pays):
    """Where there are not twice as many as inputs, or no more than the op computes at one time."""
    assert is_recognized(attend(*arguments((8, length, dim) if length > 64 else (2, length, dim)))) == pays

"""Random numbers depend on seed, stream and position, on nothing else; and they are random."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DTypeError, FuelError, ShapeError
from fuel_parallel.lazy.random import Generator, philox_words

MASK = (1 << 64) - 1
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)

# From kat_vectors of Random123 1.14: philox4x64, 10 rounds. Counter, key, result.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (MASK, MASK, MASK, MASK),
        (MASK, MASK),
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox 4x64-10, written from the paper."""
    x, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(x[0] * MULTIPLIERS[0], 1 << 64)
        high1, low1 = divmod(x[2] * MULTIPLIERS[1], 1 << 64)
        x = [high1 ^ x[1] ^ k[0], low1, high0 ^ x[3] ^ k[1], low0]
        k = [(k[0] + WEYL[0]) & MASK, (k[1] + WEYL[1]) & MASK]
    return tuple(x)


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN_ANSWERS)
def test_known_answers(counter: Any, key: Any, wanted: Any) -> None:
    assert philox(counter, key) == wanted
    block = sum(word << (64 * i) for i, word in enumerate(counter))
    found = philox_words(np.array(key, dtype=np.uint64), 4 * block, 4)
    assert tuple(int(word) for word in found) == wanted


@given(st.integers(0, MASK), st.integers(0, 3), st.integers(0, 2**70), st.integers(1, 9))
def test_word_p_of_a_stream_is_lane_p_of_its_blocks(seed: int, stream: int, position: int, count: int) -> None:
    found = philox_words(np.array([seed, stream], dtype=np.uint64), position, count)
    for offset, word in enumerate(found):
        block, lane = divmod(position + offset, 4)
        counter = tuple((block >> (64 * i)) & MASK for i in range(4))
        assert int(word) == philox(counter, (seed, stream))[lane]


@st.composite
def windows(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    whole = draw(st.lists(st.integers(0, 5), max_size=4))
    start = [draw(st.integers(0, extent)) for extent in whole]
    shape = [draw(st.integers(0, extent - first)) for extent, first in zip(whole, start, strict=True)]
    return tuple(whole), tuple(start), tuple(shape)


@given(windows(), st.sampled_from(["bits", "uniform", "normal", "integers", "bernoulli"]))
def test_a_window_is_that_slice_of_the_whole(window: Any, kind: str) -> None:
    whole, start, shape = window
    more: tuple[Any, ...] = {"integers": (0, 9), "bernoulli": (0.3,)}.get(kind, ())
    one = getattr(Generator(11), kind)(whole, *more)
    part = getattr(Generator(11), kind)(shape, *more, global_shape=whole, start=start)
    cut = tuple(slice(first, first + extent) for first, extent in zip(start, shape, strict=True))
    np.testing.assert_array_equal(part.numpy(), one.numpy()[cut])


def test_each_call_takes_the_next_stream() -> None:
    generator = Generator(5)
    first, second = generator.uniform(8).tolist(), generator.uniform(8).tolist()
    again = Generator(5)
    assert [again.uniform(8).tolist(), again.uniform(8).tolist()] == [first, second]
    assert first != second
    assert Generator(6).uniform(8).tolist() != first
    assert repr(generator) == "Generator(seed=5, stream=2)"


def test_normals_take_two_streams() -> None:
    generator = Generator(5)
    generator.normal(3)
    assert generator.stream == 2


@pytest.mark.parametrize("dtype", [ft.float16, ft.bfloat16, ft.float32, ft.float64], ids=lambda d: d.name)
def test_uniform_numbers_lie_below_one(dtype: Any) -> None:
    x = Generator(1).uniform(20_000, dtype=dtype)
    values = x.numpy().astype(np.float64)
    assert x.dtype == dtype
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02


@pytest.mark.parametrize("dtype", [ft.float32, ft.float64], ids=lambda d: d.name)
def test_distributions(dtype: Any) -> None:
    n = 40_000
    generator = Generator(2024)
    uniform = generator.uniform(n, -1.0, 3.0, dtype=dtype).numpy()
    normal = generator.normal(n, 2.0, 0.5, dtype=dtype).numpy()
    assert stats.kstest(uniform, stats.uniform(-1, 4).cdf).pvalue > 1e-3
    assert stats.kstest(normal, stats.norm(2, 0.5).cdf).pvalue > 1e-3
    assert abs(normal.mean() - 2) < 5 * 0.5 / math.sqrt(n)
    assert abs(normal.var() - 0.25) < 5 * 0.25 * math.sqrt(2 / n)
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 5 / math.sqrt(n)


def test_integers_are_uniform() -> None:
    drawn = Generator(3).integers(30_000, -2, 4)
    values, counts = np.unique(drawn.numpy(), return_counts=True)
    assert values.tolist() == [-2, -1, 0, 1, 2, 3]
    assert stats.chisquare(counts).pvalue > 1e-3
    assert drawn.dtype == ft.int64
    assert Generator(3).integers(4, 0, 2, dtype=ft.uint8).dtype == ft.uint8


def test_bernoulli_and_permutation() -> None:
    generator = Generator(4)
    hits = generator.bernoulli(20_000, 0.2).numpy()
    assert hits.dtype == bool
    assert abs(hits.mean() - 0.2) < 5 * math.sqrt(0.16 / 20_000)
    order = generator.permutation(50).tolist()
    assert sorted(order) == list(range(50))
    assert order != list(range(50))


def test_dropout_keeps_the_mean_and_drops_the_gradient_of_what_it_dropped() -> None:
    x = ft.ones(20_000)
    y = Generator(9).dropout(x, 0.25)
    gradient = ft.grad(ft.sum(y), x)
    values = y.numpy()
    assert set(np.unique(values).tolist()) == {0.0, float(np.float32(1 / 0.75))}
    assert abs(values.mean() - 1) < 0.03
    np.testing.assert_array_equal(gradient.numpy(), values)
    assert y.dtype == ft.float32


def test_dropout_of_shards_is_the_dropout_of_the_whole() -> None:
    x = ft.ones((6, 4))
    whole = Generator(1).dropout(x, 0.5).numpy()
    parts = [Generator(1).dropout(x[i : i + 2], 0.5, global_shape=(6, 4), start=(i, 0)).numpy() for i in (0, 2, 4)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_no_dropout_is_the_tensor_itself() -> None:
    x = ft.ones(3)
    assert Generator(1).dropout(x, 0.0) is x


MISTAKES: list[tuple[Any, type[FuelError], str]] = [
    (lambda: Generator(-1), ArgumentError, r"seed is an int from 0 to 2\*\*64 - 1, not -1"),
    (lambda: Generator("a"), ArgumentError, "not 'a'"),  # type: ignore[arg-type]
    (
        lambda: Generator(1).bits(3, global_shape=4, start=2),
        ShapeError,
        r"window of shape \(3,\) at \(2,\) .* shape \(4,\)",
    ),
    (lambda: Generator(1).bits((3, 1), global_shape=4), ShapeError, "does not lie in global shape"),
    (lambda: Generator(1).uniform(3, dtype=ft.int32), DTypeError, "uniform: expected a floating dtype, not int32"),
    (lambda: Generator(1).integers(3, 2, 2), ArgumentError, "low must be below high, but they are 2 and 2"),
    (lambda: Generator(1).dropout(ft.ones(3), 1.0), ArgumentError, r"rate must lie in \[0, 1\), but is 1.0"),
]


@pytest.mark.parametrize(("make", "error", "text"), MISTAKES)
def test_mistakes_are_named(make: Any, error: type[FuelError], text: str) -> None:
    with pytest.raises(error, match=text):
        make()

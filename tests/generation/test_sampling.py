"""What can be drawn is what the parameters say, is drawn as often as it is likely, and depends on its place alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fuel_parallel import IdentityComm
from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.generation import (
    Draw,
    GenerationRequest,
    SamplingParameters,
    choose,
    distribution,
    likeliest,
    sample,
)

# Few values, so that many are equal.
logits = st.lists(
    st.sampled_from([-np.inf, -2.0, -0.5, 0.0, 0.25, 1.0, 3.0]) | st.floats(-9, 9), min_size=1, max_size=40
)
logits = logits.map(np.array).filter(lambda values: np.isfinite(values).any())
temperatures = st.floats(0.05, 5)


def in_order(values: np.ndarray) -> list[int]:
    """The likeliest first, of equal ones the lower number."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@given(logits, st.integers(1, 50))
def test_top_k_keeps_the_k_likeliest(values: np.ndarray, k: int) -> None:
    numbers, probabilities = distribution(values, SamplingParameters(1.0, top_k=k))
    assert numbers.tolist() == sorted(in_order(values)[:k]) == likeliest(values, k).tolist()
    assert len(numbers) == min(k, len(values))
    assert probabilities.sum() == pytest.approx(1)


@given(logits, st.floats(0.01, 0.99), temperatures, st.integers(0, 50))
def test_top_p_is_the_smallest_set_with_its_probability(
    values: np.ndarray, p: float, temperature: float, k: int
) -> None:
    before, weights = distribution(values, SamplingParameters(temperature, top_k=k))
    numbers, probabilities = distribution(values, SamplingParameters(temperature, top_k=k, top_p=p))
    by_number = dict(zip(before.tolist(), weights.tolist(), strict=True))
    order = sorted(by_number, key=lambda number: (-by_number[number], number))
    sums = np.cumsum([by_number[number] for number in order])
    assume(np.abs(sums - p).min() > 1e-12)
    count = len(numbers)
    assert numbers.tolist() == sorted(order[:count])
    assert sums[count - 1] >= p
    assert count == 1 or sums[count - 2] < p
    np.testing.assert_allclose(probabilities, [by_number[n] / sums[count - 1] for n in numbers.tolist()], rtol=1e-12)


@given(logits, temperatures, st.integers(0, 2**64 - 1), st.integers(0, 3), st.integers(0, 10**6))
def test_limits_that_exclude_nothing_change_nothing(
    values: np.ndarray, temperature: float, seed: int, index: int, position: int
) -> None:
    free = SamplingParameters(temperature, seed=seed)
    bounded = SamplingParameters(temperature, top_k=len(values), seed=seed)
    assert choose(values, Draw(free, index, position)) == choose(values, Draw(bounded, index, position))
    one = SamplingParameters(temperature, top_k=1, seed=seed)
    greedy = choose(values, Draw(SamplingParameters(), index, position))
    assert choose(values, Draw(one, index, position)) == greedy == in_order(values)[0]


@given(logits, temperatures, st.integers(0, 99))
def test_what_is_impossible_is_not_drawn(values: np.ndarray, temperature: float, position: int) -> None:
    number = choose(values, Draw(SamplingParameters(temperature), 0, position))
    assert np.isfinite(values[number])


@settings(max_examples=10)
@given(st.integers(0, 2**64 - 1), st.integers(0, 5), st.integers(0, 2**40))
def test_numbers_are_those_of_their_place(seed: int, index: int, position: int) -> None:
    """Words of a Philox stream, which `numpy` gives as well when it is asked for all words from the beginning."""
    draw = Draw(SamplingParameters(1.0, seed=seed), index, position)
    assert 0 <= draw.uniform() < 1
    near = Draw(SamplingParameters(1.0, seed=seed), index, position % 64)
    counter = np.array([2**64 - 1] * 4, np.uint64)  # numpy counts up before it makes the first block
    words = np.random.Philox(key=np.array([seed, index], np.uint64), counter=counter).random_raw(64)
    assert near.uniform() == int(words[position % 64] >> np.uint64(11)) / 2**53


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParameters(1.0, seed=3),
        SamplingParameters(0.7, top_k=4, seed=4),
        SamplingParameters(1.6, top_p=0.8, seed=5),
        SamplingParameters(1.3, top_k=5, top_p=0.9, seed=6),
    ],
)
def test_tokens_come_as_often_as_they_are_likely(sampling: SamplingParameters) -> None:
    values = np.array([0.1, 2.0, -1.0, 1.2, 0.4, -0.3, 1.9, 0.0])
    numbers, probabilities = distribution(values, sampling)
    count = 4000
    found = [choose(values, Draw(sampling, index % 2, index)) for index in range(count)]
    seen = np.array([found.count(number) for number in numbers])
    assert seen.sum() == count
    chi_square = ((seen - count * probabilities) ** 2 / (count * probabilities)).sum()
    # The mean is the number of degrees of freedom, the variance twice that; the seeds are fixed.
    degrees = len(numbers) - 1
    assert chi_square < degrees + 3 * np.sqrt(2 * degrees)


def test_rows_that_cannot_be_are_errors() -> None:
    draw = Draw(SamplingParameters(1.0), 0, 0)
    with pytest.raises(ShapeError, match=r"logits of 2 rows, as there are draws, and 3 of 3 columns .* shape \(1, 3\)"):
        sample(np.zeros((1, 3)), [[draw], [draw]], 3, IdentityComm())
    for wrong in ([np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]):
        with pytest.raises(ArgumentError, match="row 1 of the logits has values that are not numbers or infinite"):
            sample(np.array([[0.0, 1.0], wrong]), [[draw], [draw]], 2, IdentityComm())
    assert sample(np.zeros((2, 3)), [[], [draw, draw]], 3, IdentityComm())[0] == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature is 0 or a positive number, not -1.0"),
        ({"temperature": float("nan")}, "temperature is 0 or a positive number, not nan"),
        ({"top_k": -1}, "top_k is 0 for all tokens, or how many; not -1"),
        ({"top_p": 0.0}, "top_p lies above 0 and is 1 at most, not 0.0"),
        ({"seed": -1}, "seed is a number from 0 to .* not -1"),
    ],
)
def test_parameters_that_cannot_be_are_errors(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SamplingParameters(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": ()}, "the prompt has no tokens"),
        ({"max_tokens": 0}, "max_tokens and samples are 1 or more, not 0 and 1"),
        ({"samples": 0}, "max_tokens and samples are 1 or more, not 3 and 0"),
        ({"stop_strings": ("a", "")}, "a stop string is empty; leave it out"),
    ],
)
def test_requests_that_cannot_be_are_errors(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        GenerationRequest(**{"prompt": (1,), "max_tokens": 3, **wrong})  # type: ignore[arg-type]

"""Tokens that ranks with parts of the vocabulary choose are those of one rank that has all of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
from fuel_parallel.errors import ArgumentError
from fuel_parallel.generation import Draw, SamplingParameters, sample

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi

parameters = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    seed=st.integers(0, 9),
)
draws = st.builds(Draw, parameters, st.integers(0, 2), st.integers(0, 99))


@settings(max_examples=40)
@given(st.integers(1, 11), st.lists(st.lists(draws, max_size=3), max_size=5), st.data())
def test_choices_from_parts_are_those_from_the_whole(
    vocabulary: int, rows: list[list[Draw]], data: st.DataObject
) -> None:
    values = st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0])
    row = st.lists(values, min_size=vocabulary, max_size=vocabulary).filter(lambda row: max(row) > -np.inf)
    logits = np.array([data.draw(row) for _ in rows]).reshape(len(rows), vocabulary)
    mine = fp.partition(vocabulary, N)[RANK]
    found = sample(logits[:, mine.start : mine.stop], rows, vocabulary, world)
    assert found == sample(logits, rows, vocabulary, fp.IdentityComm())


def test_a_rank_whose_logits_are_no_numbers_is_an_error_on_all() -> None:
    mine = fp.partition(8, N)[RANK]
    logits = np.zeros((2, len(mine)))
    if RANK == N - 1:
        logits[1, 0] = np.nan
    greedy = [Draw(SamplingParameters(), 0, 0)]
    with pytest.raises(ArgumentError, match="row 1 of the logits"):
        sample(logits, [greedy, greedy], 8, world)

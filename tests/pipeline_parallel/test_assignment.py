"""Layers are assigned to stages as well as can be: no other way has a quicker slowest stage."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import ArgumentError
from fuel_parallel.pipeline_parallel import StageAssignment

TIMES = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def every_way(layers: int, stages: int):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield (0, *cuts, layers)


def loads(bounds, values, first, last):
    sums = [sum(values[low:high]) for low, high in itertools.pairwise(bounds)]
    sums[0] += first
    sums[-1] += last
    return sums


@settings(max_examples=100)
@given(TIMES, st.data())
def test_no_way_that_fits_is_quicker(times: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(times)))
    memory = data.draw(st.lists(st.integers(0, 9), min_size=len(times), max_size=len(times)))
    first, last, first_memory, last_memory = (data.draw(st.integers(0, 9)) for _ in range(4))
    limits = data.draw(st.lists(st.integers(0, 40), min_size=stages, max_size=stages))
    fitting = [
        max(loads(bounds, times, first, last))
        for bounds in every_way(len(times), stages)
        if all(
            need <= most for need, most in zip(loads(bounds, memory, first_memory, last_memory), limits, strict=True)
        )
    ]
    options = {"first_memory": first_memory, "last_memory": last_memory, "memory": memory, "most_memory": limits}
    if not fitting:
        with pytest.raises(ArgumentError, match="fits into memory"):
            StageAssignment.by_times(times, stages, first=first, last=last, **options)
        return
    found = StageAssignment.by_times(times, stages, first=first, last=last, **options)
    assert max(loads(found.bounds, times, first, last)) == min(fitting)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 1000), min_size=12, max_size=12))
@example([1] * 12)
def test_twelve_layers_in_four_stages(times: list[int]) -> None:
    found = StageAssignment.by_times(times, 4)
    assert max(loads(found.bounds, times, 0, 0)) == min(max(loads(way, times, 0, 0)) for way in every_way(12, 4))


@given(st.integers(1, 40), st.data())
def test_each_layer_is_in_the_stage_that_it_says(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    assignment = StageAssignment.uniform(layers, stages)
    assert [layer for stage in range(stages) for layer in assignment.layers_in_stage(stage)] == list(range(layers))
    assert all(layer in assignment.layers_in_stage(assignment.stage_of(layer)) for layer in range(layers))
    assert max(assignment.layers_per_stage()) - min(assignment.layers_per_stage()) <= 1


def test_tied_embeddings_weigh_on_both_ends_and_once_on_one_stage() -> None:
    assert StageAssignment.by_parameters([10] * 8, 4, tied=20).layers_per_stage() == [1, 3, 3, 1]
    assert StageAssignment.by_parameters([10] * 8, 1, tied=20).layers_per_stage() == [8]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: StageAssignment.uniform(3, 4), "one layer or more; got 3 layers for 4 stages"),
        (lambda: StageAssignment.uniform(3, 0), "got 3 layers for 0 stages"),
        (lambda: StageAssignment.by_times([1, -1], 2), "times are numbers of 0 or more"),
        (lambda: StageAssignment.by_times([1, 1], 2, memory=[1]), "a number for each of 2 layers"),
        (lambda: StageAssignment((0, 0, 3)), "each stage has one layer or more"),
        (lambda: StageAssignment.uniform(3, 2).stage_of(3), "the layers 0 to 2"),
        (lambda: StageAssignment.uniform(3, 2).layers_in_stage(-1), "the stages 0 to 1"),
    ],
)
def test_other_numbers_are_refused(call, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()

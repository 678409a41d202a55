"""The arithmetic of boxes, against masks of numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.checkpoint.boxes import Box, gap_or_clash, overlap, split_rows, whole


@st.composite
def boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    found = []
    for _ in range(count):
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        found.append(Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    return shape, found


def mask(shape: tuple[int, ...], box: Box) -> np.ndarray:
    array = np.zeros(shape, int)
    array[box.within(whole(shape))] = 1
    return array


@given(boxes(2))
def test_the_overlap_is_what_both_hold(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = drawn
    both = mask(shape, a) * mask(shape, b)
    shared = overlap(a, b)
    assert (mask(shape, shared) if shared else np.zeros(shape)).tolist() == both.tolist()


@given(boxes(3))
def test_a_partition_holds_each_element_once(drawn: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, found = drawn
    counts = sum(mask(shape, box) for box in found)
    assert (gap_or_clash(found, shape) == "") == bool(np.all(counts == 1))


def test_what_is_wrong_is_said() -> None:
    assert gap_or_clash([Box((0,), (3,))], (5,)) == "no rank holds 2 of its 5 elements"
    assert gap_or_clash([Box((0,), (3,)), Box((2,), (3,))], (5,)) == "two parts overlap: [0:3] and [2:5]"
    assert gap_or_clash([Box((), ()), Box((), ())], ()) == "two parts overlap: [] and []"


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rows_are_a_partition(rows: int) -> None:
    box = Box((3, 1), (7, 2))
    parts = list(split_rows(box, rows))
    assert gap_or_clash([Box((p.start[0] - 3, p.start[1] - 1), p.shape) for p in parts], box.shape) == ""
    assert max(part.shape[0] for part in parts) == rows

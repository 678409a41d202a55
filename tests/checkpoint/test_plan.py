"""Who writes what: each box once, by one that holds it, evenly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.checkpoint import plan
from fuel_parallel.checkpoint.state import named
from fuel_parallel.errors import CheckpointError


def view_of(*states: Any) -> plan.View:
    return plan.merge((plan.listing_of(named(state)), [rank]) for rank, state in enumerate(states))


def cut(shape: tuple[int, ...], dim: int, part: int, parts: int) -> fp.Parameter:
    shard = fp.Shard.along(shape, dim, part, parts)
    extents = list(shape)
    extents[dim] = len(fp.partition(shape[dim], parts)[part])
    return fp.Parameter(ft.zeros(extents), shard=shard)


def load_of(pieces: list[plan.Piece], ranks: int) -> list[int]:
    return [sum(piece.box.size for piece in pieces if piece.writer == rank) for rank in range(ranks)]


def test_replicas_share_the_work() -> None:
    state = {f"w{i}": np.zeros(100 + i, np.float32) for i in range(30)}
    pieces = plan.pieces_of(view_of(*[state] * 4), 4)
    assert sorted(piece.name for piece in pieces) == sorted(state)
    load = load_of(pieces, 4)
    assert max(load) - min(load) <= 129


def test_a_tensor_that_dominates_is_cut() -> None:
    view = view_of(*[{"large": np.zeros((1000, 10), np.float32), "small": np.zeros(3)}] * 4)
    for piece_bytes in (400, 10_000, 1 << 18):  # of a tensor of 40 kB
        assert load_of(plan.pieces_of(view, 4, piece_bytes), 4) == pytest.approx([2500] * 4, abs=100)
    crumbs = plan.pieces_of(view, 4, piece_bytes=64 * 40_001)
    assert [piece.box.shape for piece in crumbs if piece.name == "large"] == [(1000, 10)]
    alone = plan.pieces_of(view_of({"large": np.zeros((1000, 10), np.float32)}), 1, piece_bytes=400)
    assert [piece.box.shape for piece in alone] == [(1000, 10)]


def test_a_part_is_written_by_one_that_holds_it() -> None:
    # Four ranks as dp=2, tp=2.
    view = view_of(*[{"w": cut((8, 6), 1, rank % 2, 2), "b": np.zeros(6)} for rank in range(4)])
    pieces = plan.pieces_of(view, 4)
    assert {piece.box.start for piece in pieces if piece.name == "w"} == {(0, 0), (0, 3)}
    for piece in pieces:
        assert piece.name == "b" or piece.writer % 2 == piece.box.start[1] // 3


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([{"a": 1}, {"a": 2}], r"ranks differ about 'a': rank 0 has 1, rank 1 2; give what is each rank's own"),
        ([{"a": 1}, {"a": np.zeros(1)}], r"'a' is a tensor on one rank and a plain value on another"),
        ([{"a": np.zeros(1)}, {"a": np.zeros(2)}], r"rank 0 has float64\[1\], rank 1 float64\[2\]; a part of a larger"),
        ([{"w": cut((4, 4), 0, 0, 2)}, {"w": cut((4, 4), 0, 0, 2)}], "'w', .* no rank holds 8 of its 16 elements"),
        ([{"w": cut((4, 4), 0, 0, 2)}, {"w": cut((4, 4), 1, 0, 2)}], r"overlap: \[0:2, 0:4\] and \[0:4, 0:2\]"),
    ],
)
def test_ranks_that_contradict_each_other_are_told(states: list[Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        plan.pieces_of(view_of(*states), len(states))

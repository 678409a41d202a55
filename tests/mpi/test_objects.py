"""Control data travels as MessagePack, in the order of the script, and a rank that cannot send leaves none waiting."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DataError

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = world.world_size, world.rank


@dataclass
class Settings:
    seed: int
    names: tuple[str, ...]


class Step(msgspec.Struct):
    number: int


@pytest.mark.parametrize(
    "value", [None, True, -(2**63), 2**64 - 1, 0.1, "schön", b"\0\xff", [], {}, [1, [2.5, None]], {"a": {"b": [1]}}]
)
def test_objects_arrive_as_they_are(value):
    assert world.broadcast_object(value if RANK == N - 1 else "not this", N - 1) == value
    assert world.all_gather_object([value, RANK]) == [[value, rank] for rank in range(N)]


def test_objects_of_different_sizes_on_different_ranks():
    assert world.all_gather_object("x" * 3**RANK * 1000) == ["x" * 3**rank * 1000 for rank in range(N)]
    assert world.all_gather_object(dict.fromkeys(range(RANK))) == [dict.fromkeys(range(r)) for r in range(N)]


def test_a_type_makes_of_it_what_it_was():
    settings = Settings(3, ("a", "b"))
    assert world.broadcast_object(settings) == {"seed": 3, "names": ["a", "b"]}
    assert world.broadcast_object(settings, type=Settings) == settings
    assert world.all_gather_object(Step(RANK), type=Step) == [Step(rank) for rank in range(N)]
    with pytest.raises(DataError, match=r"what rank 0 gave is no Step: .*give one, or leave out type"):
        world.broadcast_object("seven", type=Step)


def test_what_cannot_be_encoded_is_an_error_on_every_rank():
    message = f"rank {N - 1} gave a complex, which MessagePack cannot hold: .*tensors go by broadcast and all_gather"
    with pytest.raises(ArgumentError, match=message):
        world.broadcast_object(1j if RANK == N - 1 else None, N - 1)
    with pytest.raises(ArgumentError, match=message):
        world.all_gather_object(1j if RANK == N - 1 else 0)
    with pytest.raises(ArgumentError, match="rank 0 gave a ndarray"):
        world.broadcast_object(np.ones(3))
    with pytest.raises(ArgumentError, match=f"root must be a rank from 0 to {N - 1}, not {N}"):
        world.broadcast_object(1, N)
    assert world.broadcast_object(5) == 5


def test_objects_keep_their_place_among_the_collectives_of_the_script():
    """Rank 0 has run the older collective already; the others run it now."""
    older = world.all_reduce(ft.ones(3))
    if RANK == 0:
        older.realize()
    assert world.broadcast_object(7) == 7
    assert older.tolist() == [N] * 3


def test_parts_of_the_world_have_objects_of_their_own():
    part = world.split(RANK % 2)
    assert part.all_gather_object(RANK) == [rank for rank in range(N) if rank % 2 == RANK % 2]
    assert world.split(RANK).broadcast_object((RANK,)) == [RANK]


@pytest.mark.mpi(min_size=2)
def test_a_send_is_not_taken_for_a_part_of_a_collective():
    """The message is under way, with tag 0, while a shift goes the same way."""
    world.send(ft.asarray([100 + RANK]), (RANK + 1) % N)
    fp.realize()
    assert world.shift(ft.asarray([RANK])).item() == (RANK - 1) % N
    assert world.recv((1,), ft.int64, (RANK - 1) % N).item() == 100 + (RANK - 1) % N

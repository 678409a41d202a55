"""Meshes over real ranks: collectives along each axis reach the ranks of that axis, in its order, and no others."""

from __future__ import annotations

import math
import os

import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import Mesh
from fuel_parallel.errors import CommunicatorError

pytestmark = pytest.mark.mpi

SHAPES = {1: {"dp": 1, "tp": 1}, 2: {"dp": 1, "tp": 2}, 3: {"dp": 3, "tp": 1}, 4: {"dp": 2, "tp": 2}}


def test_collectives_along_each_axis() -> None:
    world = fp.init()
    backwards = list(range(world.world_size))[::-1]
    for order in (None, backwards):
        mesh = Mesh(world, order=order, **SHAPES.get(world.world_size, {"dp": world.world_size, "tp": 1}))
        for names in (("tp",), ("dp",), ("dp", "tp"), ("tp", "dp")):
            part = mesh[names]
            gathered = part.all_gather(ft.asarray([world.rank])).tolist()
            assert gathered == mesh.ranks_along(*names)
            assert part.world_size == math.prod(mesh.axes[name] for name in names)
        assert mesh["tp"] is mesh["tp"]


def test_a_placement_orders_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fp.init()
    positions = [
        (rank * 2 + 1) % world.world_size if world.world_size % 2 else rank ^ 1 for rank in range(world.world_size)
    ]
    monkeypatch.setitem(os.environ, "FUEL_MESH", "tp=-1")
    monkeypatch.setitem(os.environ, "FUEL_POSITION", str(positions[world.rank]) if world.world_size > 1 else "0")
    mesh = Mesh.from_environment(world)
    if world.world_size > 1:
        assert mesh.coordinates == {"tp": positions[world.rank]}
        assert mesh["tp"].rank == positions[world.rank]


@pytest.mark.mpi(min_size=2)
def test_a_group_that_its_ranks_do_not_agree_on_is_an_error() -> None:
    world = fp.init()
    ranks = [0, 1] if world.rank == 0 else [1] if world.rank == 1 else [world.rank]
    if world.rank < 2:
        with (
            pytest.raises(CommunicatorError, match="all ranks of a group give the same list")
            if world.rank == 0
            else _fine()
        ):
            world.group(ranks)
    else:
        world.group(ranks)


def _fine() -> pytest.MonkeyPatch:
    from contextlib import nullcontext

    return nullcontext()  # type: ignore[return-value]

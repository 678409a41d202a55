"""A mesh as numbers: every rank is somewhere, groups along an axis partition the ranks, and all ranks agree on them."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel import IdentityComm, Mesh, SymbolicComm
from fuel_parallel.errors import ArgumentError


@st.composite
def meshes(draw: st.DrawFn) -> tuple[dict[str, int], list[int]]:
    names = draw(st.lists(st.sampled_from(["dp", "pp", "cp", "tp"]), min_size=1, max_size=3, unique=True))
    axes = {name: draw(st.integers(1, 3)) for name in names}
    return axes, draw(st.permutations(range(math.prod(axes.values()))))


def of_rank(rank: int, axes: dict[str, int], order: list[int] | None = None) -> Mesh:
    return Mesh(SymbolicComm(rank, math.prod(axes.values())), order=order, **axes)


@given(meshes())
def test_all_ranks_agree_on_the_groups_of_each_choice_of_axes(drawn: tuple[dict[str, int], list[int]]) -> None:
    axes, order = drawn
    ranks = range(math.prod(axes.values()))
    all_of_them = [of_rank(rank, axes, order) for rank in ranks]
    for count in range(1, len(axes) + 1):
        for names in itertools.permutations(axes, count):
            for rank, mesh in zip(ranks, all_of_them, strict=True):
                group = mesh.ranks_along(*names)
                assert len(set(group)) == len(group) == math.prod(axes[name] for name in names)
                assert all(all_of_them[other].ranks_along(*names) == group for other in group)
                part = mesh[names]
                assert (part.rank, part.world_size) == (group.index(rank), len(group))


@given(meshes())
def test_a_rank_is_where_its_coordinates_say(drawn: tuple[dict[str, int], list[int]]) -> None:
    axes, order = drawn
    for rank in range(len(order)):
        mesh = of_rank(rank, axes, order)
        assert list(mesh.coordinates) == list(axes)
        assert mesh.rank_at(**mesh.coordinates) == rank
        assert [mesh.coordinates_of(r) for r in mesh.ranks_along(*axes)] == [
            dict(zip(axes, at, strict=True)) for at in itertools.product(*map(range, axes.values()))
        ]


def test_the_last_axis_has_neighbours_and_minus_one_is_what_is_left() -> None:
    mesh = Mesh(SymbolicComm(5, 12), dp=-1, pp=2, tp=3)
    assert (mesh.axes, mesh.size) == ({"dp": 2, "pp": 2, "tp": 3}, 12)
    assert mesh.ranks_along("tp") == [3, 4, 5]
    assert mesh.ranks_along("dp") == [5, 11]
    assert mesh.ranks_along("dp", "tp") == [3, 4, 5, 9, 10, 11]
    assert repr(mesh) == "Mesh(dp=2, pp=2, tp=3), of which rank 5 is dp=0, pp=1, tp=2"
    assert "tp" in mesh
    assert "ep" not in mesh


def test_communicators_are_kept_and_those_of_one_rank_do_nothing() -> None:
    mesh = Mesh(SymbolicComm(1, 4), dp=4, pp=1)
    assert mesh["dp"] is mesh["dp"] is mesh.comm
    assert isinstance(mesh["pp"], IdentityComm)
    assert mesh["pp", "dp"] is mesh.comm


def test_a_placement_moves_ranks_and_not_their_numbers() -> None:
    mesh = Mesh(SymbolicComm(1, 4), order=[0, 2, 1, 3], dp=2, tp=2)
    assert mesh.coordinates == {"dp": 1, "tp": 0}
    assert mesh.ranks_along("tp") == [1, 3]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"dp": 3, "tp": 2}, "dp=3 x tp=2 do not make 8 ranks"),
        ({"dp": -1, "tp": 3}, "8 ranks cannot be divided by tp=3: dp=-1 has no size"),
        ({"dp": -1, "tp": -1}, "one axis at most can have the size -1, but dp and tp do"),
        ({"dp": 0}, "dp=0: expected a whole number of at least 1, or -1 for the rest"),
        ({"dp": 2.0}, "dp=2.0: expected a whole number"),
        ({"dp": True}, "dp=True: expected a whole number"),
        ({}, "it needs one axis or more, such as Mesh"),
        ({"order": [0, 0, 1, 2, 3, 4, 5, 6], "dp": 8}, "order lists each of the 8 ranks once"),
    ],
)
def test_sizes_that_do_not_fit(axes: dict[str, int], said: str) -> None:
    with pytest.raises(ArgumentError, match=said.replace("(", r"\(")):
        Mesh(SymbolicComm(0, 8), **axes)


def test_names_and_places_that_are_not_there() -> None:
    mesh = Mesh(SymbolicComm(0, 4), dp=2, tp=2)
    with pytest.raises(ArgumentError, match="no axis 'pp'; the axes are dp, tp"):
        mesh["pp"]
    with pytest.raises(ArgumentError, match="an axis twice: tp, tp"):
        mesh["tp", "tp"]
    with pytest.raises(ArgumentError, match="tp=2 lies outside of the axis, which has 2 ranks"):
        mesh.rank_at(tp=2)
    with pytest.raises(ArgumentError, match="there is no rank 4"):
        mesh.coordinates_of(4)
    with pytest.raises(TypeError, match="not iterable"):
        list(mesh)  # type: ignore[call-overload]


def test_the_mesh_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUEL_MESH", "dp=-1,tp=2")
    assert Mesh.from_environment(SymbolicComm(3, 4)).coordinates == {"dp": 1, "tp": 1}
    monkeypatch.setenv("FUEL_MESH", "dp=-1,tp=two")
    with pytest.raises(ArgumentError, match="FUEL_MESH tp=two: expected NAME=SIZE"):
        Mesh.from_environment(SymbolicComm(3, 4))

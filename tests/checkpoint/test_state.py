"""What a state may hold, how its parts are named, and what comes back."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint
from fuel_parallel.checkpoint.state import named
from fuel_parallel.errors import ArgumentError, CheckpointError, ShapeError


class Block(fp.Module):
    def __init__(self, seed: int = 0) -> None:
        self.layers = [fp.Linear(2, 2, ft.random.Generator(seed), bias=False) for _ in range(2)]
        self.norm = fp.RMSNorm(2)


class Pair(NamedTuple):
    first: Any
    second: Any


def there_and_back(state: Any, fresh: Any, folder: Path) -> Any:
    checkpoint.save(folder, state, step=1)
    return checkpoint.load(folder, fresh).state


def test_names_are_the_way_to_a_leaf() -> None:
    model = Block()
    found = named({"model": model, "data": {"position": 3}, "pair": [ft.ones(2), "text"]})
    assert list(found.tensors) == ["model.layers.0.weight", "model.layers.1.weight", "model.norm.weight", "pair.0"]
    assert found.values == {"data.position": 3, "pair.1": "text"}


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_an_optimizer_names_its_state_after_the_parameters(first: str) -> None:
    model = Block()
    # In another order than the model's: the names do not depend on it.
    optimizer = fp.optim.AdamW(model.parameters()[::-1], lr=0.5)
    state = {"optimizer": optimizer, "model": model}
    found = named({first: state.pop(first), **state})
    assert found.tensors["optimizer.means.model.layers.1.weight"].leaf is optimizer.means[1]
    assert found.tensors["optimizer.squares.model.norm.weight"].leaf is optimizer.squares[0]
    assert found.tensors["optimizer.step"].leaf is optimizer.step
    assert found.values == {"optimizer.lr": 0.5}


def test_an_optimizer_without_its_model_numbers_them() -> None:
    optimizer = fp.optim.SGD(Block().parameters(), momentum=0.9)
    assert list(named([optimizer]).tensors) == ["0.velocities.0", "0.velocities.1", "0.velocities.2"]


def test_the_state_of_a_cut_parameter_is_cut_like_it() -> None:
    shard = fp.Shard.along((5, 4), 0, 1, 2)
    weight = fp.Parameter(ft.zeros((2, 4)), shard=shard)
    optimizer = fp.optim.AdamW([weight])
    found = named({"weights": [weight], "optimizer": optimizer})
    for name in ("weights.0", "optimizer.means.weights.0", "optimizer.squares.weights.0"):
        assert (found.tensors[name].global_shape, found.tensors[name].box.start) == ((5, 4), (3, 0))
    assert found.tensors["optimizer.step"].global_shape == ()


def test_a_shard_lies_in_the_whole() -> None:
    with pytest.raises(ShapeError, match=r"a shard of shape \(3, 4\) at \(3, 0\) does not lie in a tensor"):
        fp.Parameter(ft.zeros((3, 4)), shard=fp.Shard((5, 4), (3, 0)))


VALUES = {
    "none": None,
    "flag": True,
    "small": -3,
    "large": 2**100,
    "float": 0.1,
    "one": 1.0,
    "infinite": -math.inf,
    "text": "größer \0",
    "list": [1, [2.5, None, math.inf], {"a": [True]}],
    "empty": [],
    "tuple": (1, 2),
    "nest": {"deep": {"er": 1}},
    "pair": Pair(1, "b"),
}


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    fresh = {**VALUES, "small": 0, "list": [], "empty": [7], "nest": {"deep": {"er": 0}}, "pair": Pair(0, "")}
    back = there_and_back(VALUES, fresh, tmp_path)
    assert back == VALUES
    assert [type(value) for value in back.values()] == [type(value) for value in VALUES.values()]
    assert math.isnan(there_and_back({"x": math.nan}, {"x": 0.0}, tmp_path)["x"])


def test_tensors_and_arrays_come_back_as_what_they_are(tmp_path: Path) -> None:
    state = {
        "lazy": ft.ones((2, 3)) * 2,
        "half": ft.asarray([1.5, -2.0]).astype("bfloat16"),
        "array": np.arange(6, dtype=">i4").reshape(2, 3).T,
        "scalar": np.float32(3.5),
        "empty": np.zeros((0, 4)),
        "complex": np.array([1 + 2j]),
        "variable": fp.Variable(ft.asarray([1, 2])),
    }
    variable = fp.Variable(ft.asarray([0, 0]))
    fresh = {name: (ft if isinstance(one, ft.Tensor) else np).zeros_like(one) for name, one in state.items()}
    back = there_and_back(state, {**fresh, "variable": variable}, tmp_path)
    assert back["variable"] is variable
    assert variable.tolist() == [1, 2]
    for name, one in state.items():
        assert np.array_equal(np.asarray(back[name]), np.asarray(one)), name
        assert np.asarray(back[name]).dtype == np.asarray(one).dtype.newbyteorder("="), name
    assert isinstance(back["lazy"], ft.Tensor)
    assert isinstance(back["array"], np.ndarray)


def test_generators_go_on(tmp_path: Path) -> None:
    generator = ft.random.Generator(5)
    generator.uniform(3)
    other = ft.random.Generator(0)
    back = there_and_back({"g": generator}, {"g": other}, tmp_path)
    assert back["g"] is other
    assert other.uniform(4).tolist() == generator.uniform(4).tolist()


@pytest.mark.parametrize("kind", ["PCG64", "MT19937", "Philox", "SFC64", "PCG64DXSM"])
def test_generators_of_numpy_go_on(kind: str, tmp_path: Path) -> None:
    make = getattr(np.random, kind)
    generator, other = np.random.Generator(make(5)), np.random.Generator(make(0))
    generator.integers(0, 9, 3, dtype=np.int32)
    generator.random(5)
    there_and_back({"g": generator}, {"g": other}, tmp_path)
    assert other.integers(0, 2**30, 9).tolist() == generator.integers(0, 2**30, 9).tolist()
    odd = np.random.Generator(np.random.Philox(0) if kind == "PCG64" else np.random.PCG64(0))
    with pytest.raises(ArgumentError, match=r"g holds the state of another kind of numpy generator"):
        checkpoint.load(tmp_path, {"g": odd})


class Reader:
    """A reader of data, as a user writes one."""

    def __init__(self) -> None:
        self.position, self.mean = 0, fp.Variable(ft.zeros(2))

    def __state__(self) -> dict[str, Any]:
        return {"position": self.position, "mean": self.mean}

    def __restore__(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        assert state["mean"] is self.mean


def test_objects_of_ones_own_take_part(tmp_path: Path) -> None:
    reader, fresh = Reader(), Reader()
    reader.position = 640
    reader.mean.assign(ft.asarray([1.0, 2.0]))
    there_and_back({"data": reader}, {"data": fresh}, tmp_path)
    assert (fresh.position, fresh.mean.tolist()) == (640, [1.0, 2.0])


def test_the_learning_rate_comes_back(tmp_path: Path) -> None:
    model, other = Block(), Block(1)
    optimizer = fp.optim.AdamW(model.parameters(), lr=0.25)
    fresh = fp.optim.AdamW(other.parameters(), lr=1.0)
    there_and_back({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": fresh}, tmp_path)
    assert fresh.lr == 0.25
    assert fresh._lr.item() == 0.25


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": 1}, "a.b": 2}, "two parts of the state are named 'a.b'"),
        (3, "a state is a dict, a list, a module or the like, not 3"),
        (ft.ones(2), "a state is a dict"),
        ({"rng": random.Random(0)}, "rng is a Random, which cannot be kept; expected tensors"),
        ({"f": [1, {2}]}, "f.1 is a set, which cannot be kept"),
        ({"z": 1j}, "z is a complex, which cannot be kept"),
    ],
)
def test_what_cannot_be_kept_is_said(state: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        checkpoint.save(tmp_path, state, step=1)
    assert checkpoint.steps(tmp_path) == []


def test_another_state_is_told_apart(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"m": Block(), "step": 1, "a": np.zeros(3)}, step=4)
    wrong = fp.RMSNorm(2)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(tmp_path, {"m": {"norm": wrong, "x": 1, "y": 2, "z": 3, "zz": 4}, "a": np.zeros(3, np.float32)})
    assert (
        "step-00000004: the checkpoint is of another state: 4 missing: m.x, m.y, m.z, …; "
        "2 unexpected: m.layers.0.weight, m.layers.1.weight; 1 mismatched: a (saved float64[3], here float32[3])"
    ) in str(error.value)
    with pytest.raises(CheckpointError, match=r"1 mismatched: step \(saved a plain value, here int64\[\]\)"):
        checkpoint.load(tmp_path, {"step": np.int64(3)})


def test_top_level_keys_may_be_left_out(tmp_path: Path) -> None:
    model, other = Block(), Block(3)
    checkpoint.save(tmp_path, {"m": model, "optimizer": fp.optim.AdamW(model.parameters())}, step=4)
    checkpoint.load(tmp_path, {"m": other})
    assert other.layers[0].weight.tolist() == model.layers[0].weight.tolist()

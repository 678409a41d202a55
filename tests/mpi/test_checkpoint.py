"""Checkpoints over real ranks: replicas share the work, all succeed or all fail, any mesh loads what another saved."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint
from fuel_parallel.checkpoint import tensor_file
from fuel_parallel.errors import CheckpointError

pytestmark = pytest.mark.mpi
world = fp.init()
N, RANK = world.world_size, world.rank


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Rank 0's folder, for all."""
    yield Path(world.broadcast_object(str(tmp_path)))
    world.barrier()


def sizes(folder: Path, step: int) -> list[int]:
    return sorted(path.stat().st_size for path in (folder / f"step-{step:08d}").glob("*.safetensors"))


@pytest.mark.parametrize("background", [False, True])
def test_replicas_share_the_work(folder: Path, background: bool) -> None:
    state = {f"w{i}": ft.asarray(np.full((64, 64), float(i))) for i in range(12)}
    checkpoint.save(folder, state, step=1, background=background).wait()
    world.barrier()
    assert len(sizes(folder, 1)) == N
    assert sum(sizes(folder, 1)) < 12 * 64 * 64 * 8 + N * 2000
    assert sizes(folder, 1)[-1] - sizes(folder, 1)[0] < 64 * 64 * 8 + 2000
    loaded = checkpoint.load(folder, {name: ft.zeros_like(one) for name, one in state.items()})
    assert all(np.array_equal(loaded.state[name].numpy(), one.numpy()) for name, one in state.items())


def test_lazy_state_of_all_ranks_is_computed(folder: Path) -> None:
    total = world.all_reduce(ft.asarray([float(RANK)]))
    checkpoint.save(folder, {"total": total * 2}, step=1)
    assert checkpoint.load(folder, {"total": ft.zeros(1)}).state["total"].item() == N * (N - 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_fails_fails_for_all(
    folder: Path, rank: int, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{i}": np.zeros(100) for i in range(2 * N)}
    checkpoint.save(folder, state, step=1)

    def full(path: Path, *_: Any) -> list[int]:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if rank == RANK:
            patch.setattr(tensor_file, "write", full)
        text = rf"step 2 is not saved: rank {rank} on .*rank-0000{rank}\.safetensors cannot be written: No space left"
        with pytest.raises(CheckpointError, match=text):
            checkpoint.save(folder, state, step=2, background=background).wait()
    world.barrier()
    assert os.listdir(folder) == ["step-00000001"]
    checkpoint.save(folder, state, step=2, background=background)
    assert checkpoint.latest(folder) == 2
    assert checkpoint.verify(folder) == {}


@pytest.mark.mpi(min_size=2)
def test_in_the_background_ranks_compute_and_talk(folder: Path) -> None:
    weight = fp.Parameter(ft.ones(1000))
    optimizer = fp.optim.AdamW([weight], lr=0.1)
    for step in range(1, 6):
        loss = world.all_reduce(ft.square(weight).sum(), fp.ReduceOp.AVG)
        optimizer.update([world.all_reduce(2 * weight, fp.ReduceOp.AVG)])
        fp.realize(loss, optimizer)
        before = weight.numpy().copy()
        checkpoint.save(folder, {"w": [weight], "optimizer": optimizer}, step=step, keep=2, background=True)
    assert checkpoint.latest(folder) == 5
    fresh = fp.Parameter(ft.zeros(1000))
    checkpoint.load(folder, {"w": [fresh]})
    assert np.array_equal(fresh.numpy(), before)
    assert checkpoint.steps(folder) == [4, 5]


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ_are_told(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="ranks differ about 'seed': rank 0 has 0, rank 1 1"):
        checkpoint.save(folder, {"seed": RANK}, step=1)
    world.barrier()
    assert checkpoint.steps(folder) == []


def test_all_go_back_to_the_same_one(folder: Path) -> None:
    state = {f"w{i}": np.full(1000, i) for i in range(N)}
    for step in (1, 2):
        checkpoint.save(folder, state, step=step)
    if world.is_root:
        last = sorted((folder / "step-00000002").glob("*.safetensors"))[-1]
        last.write_bytes(last.read_bytes()[:-1])
    world.barrier()
    fresh = {name: np.zeros_like(one) for name, one in state.items()}
    if world.is_root:
        with pytest.warns(RuntimeWarning, match="going back to the checkpoint of step 1"):
            loaded = checkpoint.load(folder, fresh)
    else:
        loaded = checkpoint.load(folder, fresh)
    assert (loaded.step, list(loaded.skipped)) == (1, [2])
    assert all(np.array_equal(loaded.state[name], one) for name, one in state.items())


class Attention(fp.Module):
    """Heads shared by the ranks of `tp`: projections cut by columns, the way out by rows."""

    def __init__(self, dim: int, heads: int, tp: fp.Communicator, dense: dict[str, np.ndarray[Any, Any]]) -> None:
        self.tp, self.size = tp, dim // heads
        self.query, self.key, self.value = (cut(dense[name], 1, tp) for name in ("query", "key", "value"))
        self.out = cut(dense["out"], 0, tp)

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        batch, length, _ = x.shape
        x = self.tp.replicate(x)

        def heads(weight: fp.Parameter) -> ft.Tensor:
            return ft.permute_dims((x @ weight).reshape(batch, length, -1, self.size), (0, 2, 1, 3))

        seen = ft.scaled_dot_product_attention(heads(self.query), heads(self.key), heads(self.value), causal=True)
        joined = ft.permute_dims(seen, (0, 2, 1, 3)).reshape(batch, length, -1)
        return self.tp.all_reduce(joined @ self.out, replicated=True)


class Perceptron(fp.Module):
    def __init__(self, tp: fp.Communicator, dense: dict[str, np.ndarray[Any, Any]]) -> None:
        self.tp = tp
        self.up, self.down = cut(dense["up"], 1, tp), cut(dense["down"], 0, tp)
        self.bias = fp.Parameter(dense["bias"])

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        hidden = ft.gelu(self.tp.replicate(x) @ self.up)
        return self.tp.all_reduce(hidden @ self.down, replicated=True) + self.bias


class Model(fp.Module):
    def __init__(self, tp: fp.Communicator, seed: int) -> None:
        draw = np.random.default_rng(seed).normal
        shapes = dict.fromkeys(("query", "key", "value", "out"), (8, 8))
        shapes |= {"up": (8, 20), "down": (20, 8), "bias": (8,)}
        dense = {name: draw(size=shape) for name, shape in shapes.items()}
        self.attention = Attention(8, 4, tp, dense)
        self.perceptron = Perceptron(tp, dense)

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        x = x + self.attention(x)
        return x + self.perceptron(x)


def cut(dense: np.ndarray[Any, Any], dim: int, tp: fp.Communicator) -> fp.Parameter:
    rows = fp.partition(dense.shape[dim], tp.world_size)[tp.rank]
    part = np.take(dense, rows, axis=dim)
    return fp.Parameter(part, shard=fp.Shard.along(dense.shape, dim, tp.rank, tp.world_size))


@pytest.mark.mpi(min_size=4)
def test_any_mesh_loads_what_another_saved(folder: Path) -> None:
    if N != 4:
        pytest.skip("meshes of four ranks")
    x = ft.asarray(np.random.default_rng(7).normal(size=(2, 5, 8)))
    mesh = fp.Mesh(world, dp=2, tp=2)
    model = Model(mesh["tp"], seed=0)
    optimizer = fp.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: Model, optimizer: fp.optim.AdamW, dp: fp.Communicator) -> None:
        loss = ft.square(model(x)).mean()
        gradients = fp.data_parallel.average_gradients(ft.grad(loss, model.parameters()), dp)
        optimizer.update(gradients)
        fp.realize(loss, model, optimizer)

    train(model, optimizer, mesh["dp"])
    checkpoint.save(folder, {"model": model, "optimizer": optimizer}, step=3, comm=mesh)
    logits = model(x).numpy()
    train(model, optimizer, mesh["dp"])
    later = model(x).numpy()
    for axes in ({"dp": 1, "tp": 4}, {"dp": 4, "tp": 1}, {"dp": 2, "tp": 2}):
        other = fp.Mesh(world, **axes)
        fresh = Model(other["tp"], seed=1)
        optimizer = fp.optim.AdamW(fresh.parameters(), lr=1.0)
        assert not np.allclose(fresh(x).numpy(), logits)
        checkpoint.load(folder, {"model": fresh, "optimizer": optimizer}, comm=other)
        np.testing.assert_allclose(fresh(x).numpy(), logits, rtol=0, atol=1e-12)
        # And it goes on from there as the first one did: the optimizer's state was cut anew as well.
        train(fresh, optimizer, other["dp"])
        np.testing.assert_allclose(fresh(x).numpy(), later, rtol=0, atol=1e-12)
    alone = Model(fp.IdentityComm(), seed=1)
    checkpoint.load(folder, {"model": alone}, comm=fp.IdentityComm())
    np.testing.assert_allclose(alone(x).numpy(), logits, rtol=0, atol=1e-12)


@pytest.mark.mpi(min_size=2)
def test_stages_of_a_pipeline_load_onto_fewer_ranks(folder: Path) -> None:
    class Stage(fp.Module):
        def __init__(self, layers: range, fill: float) -> None:
            self.blocks = {layer: fp.Parameter(ft.full(3, fill + layer)) for layer in layers}

    stage = Stage(fp.partition(6, N)[RANK], 10.0)
    optimizer = fp.optim.SGD(stage.parameters(), momentum=0.9)
    checkpoint.save(folder, {"model": stage, "optimizer": optimizer}, step=1)
    whole = Stage(range(6), 0.0)
    optimizer = fp.optim.SGD(whole.parameters(), momentum=0.9)
    checkpoint.load(folder, {"model": whole, "optimizer": optimizer}, comm=fp.IdentityComm())
    assert [block.tolist() for block in whole.blocks.values()] == [[10.0 + layer] * 3 for layer in range(6)]
    world.barrier()
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.blocks\.5"):
        checkpoint.load(folder, {"model": Stage(fp.partition(5, N)[RANK], 0.0)})

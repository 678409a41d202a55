"""ZeRO-1, 2 and 3: the steps of plain data parallelism bit for bit, and states that any other number of ranks loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.comm.mpi import MpiComm
from fuel_parallel.comm.node_local import NodeLocalTransport
from fuel_parallel.comm.thresholds import KINDS, NEVER
from fuel_parallel.data_parallel import ShardedOptimizer, ShardedParameter, shard_parameters

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi

OPTIMIZERS: dict[str, Callable[[list[fp.Parameter]], Any]] = {
    "AdamW": lambda ps: fp.optim.AdamW(ps, lr=1e-2, weight_decay=0.1),
    "SGD": lambda ps: fp.optim.SGD(ps, lr=1e-1, momentum=0.9),
}


@pytest.fixture(scope="module")
def comm() -> Any:
    """A communicator that adds in the order of ranks whatever the size: in shared memory."""
    made = MpiComm()
    if N > 1:
        transport = made.transport
        assert isinstance(transport, NodeLocalTransport)
        assert transport.shares_one_node
        transport.use_thresholds({**dict.fromkeys(KINDS, 1), "all_reduce_handed_in": NEVER})
    return made


class Net(fp.Module):
    """Sizes that no number of ranks divides, a scalar, a parameter used in another module than its own."""

    def __init__(self, dtype: str = "float64") -> None:
        g = ft.random.Generator(5)
        self.table = fp.Embedding(11, 13, g, std=0.5, dtype=dtype)
        self.layers = [fp.Linear(13, 17, g, dtype=dtype), fp.Linear(17, 13, g, dtype=dtype)]
        self.norm = fp.RMSNorm(13, dtype=dtype)
        self.scale = fp.Parameter(ft.asarray(0.5, dtype=dtype))
        self.shifts = [fp.Parameter(ft.zeros(13, dtype=dtype)), fp.Parameter(ft.zeros((1, 13), dtype=dtype))]

    def __call__(self, tokens: ft.Tensor) -> ft.Tensor:
        x = self.table(tokens) + self.shifts[0] + self.table.weight[: tokens.shape[0]]
        x = x + self.layers[1](ft.tanh(self.layers[0](self.norm(x)))) * self.scale
        return (x + self.shifts[1]) @ self.layers[0].weight

    def loss(self, tokens: ft.Tensor) -> ft.Tensor:
        return ft.mean(ft.square(ft.sin(self(tokens))))


def batch(step: int, rank: int = RANK) -> ft.Tensor:
    return ft.asarray(np.random.default_rng([step, rank]).integers(0, 11, size=5))


def plain(comm: fp.Communicator, make: Any, steps: int, dtype: str = "float64") -> tuple[list[float], Net, Any]:
    model = Net(dtype)
    optimizer = make(model.parameters())
    losses = []
    for step in range(steps):
        loss = model.loss(batch(step))
        optimizer.update(fp.data_parallel.average_gradients(ft.grad(loss, model.parameters()), comm))
        fp.realize(loss, model, optimizer)
        losses.append(loss.item())
    return losses, model, optimizer


def sharded(
    comm: fp.Communicator, make: Any, steps: int, stage: int, dtype: str = "float64", **options: Any
) -> tuple[list[Any], Net, Any]:
    model = Net(dtype)
    if stage == 3:
        shard_parameters(model, comm, whole_elements=options.get("whole_elements", 0))
        optimizer = make(model.parameters())
    else:
        optimizer = ShardedOptimizer(make, model.parameters(), comm, stage=stage, **options)
    losses = []
    for step in range(steps):
        loss = model.loss(batch(step))
        optimizer.update(ft.grad(loss, model.parameters()))
        fp.realize(loss, model, optimizer)
        losses.append(loss.item())
    return losses, model, optimizer


def whole(parameter: fp.Parameter) -> Any:
    """All of a parameter, on every rank."""
    return (parameter.whole() if isinstance(parameter, ShardedParameter) else parameter).numpy()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_losses_and_parameters_are_those_of_plain_data_parallelism_bit_for_bit(
    comm: Any, name: str, stage: int, dtype: str
) -> None:
    wanted, plain_model, _ = plain(comm, OPTIMIZERS[name], 5, dtype)
    found, model, _ = sharded(comm, OPTIMIZERS[name], 5, stage, dtype)
    assert found == wanted
    for mine, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        np.testing.assert_array_equal(whole(mine), theirs.numpy())

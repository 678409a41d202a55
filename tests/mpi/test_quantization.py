"""The stored part of a weight is the part of the stored weight, on any number of ranks, or an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import SymbolicComm
from fuel_parallel import tensor_parallel as tp
from fuel_parallel.errors import ArgumentError

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi

WAYS = [
    ("bfloat16", {}),
    ("int8", {"block": 8}),
    ("int8", {"block": 8, "minimum": True}),
    ("int4", {"block": 8}),
    ("int4", {"block": 8, "minimum": True}),
]


def layers(comm: Any) -> list[Any]:
    """The first and the last layer of an MLP and an embedding, with sizes that do not divide."""
    g = ft.random.Generator(5)
    return [
        tp.ColumnParallel(20, 40, g, comm, block=8, dtype="float64"),
        tp.RowParallel(40, 11, g, comm, block=8, dtype="float64"),
        tp.VocabParallelEmbedding(13, 20, g, comm, dtype="float64"),
    ]


def applied(first: Any, second: Any, table: Any, x: ft.Tensor) -> tuple[ft.Tensor, ft.Tensor]:
    result = second(ft.tanh(first(x + table(ft.asarray([[3, 0, 12]])))))
    return result, ft.grad(ft.sin(result).sum(), x)


@pytest.mark.parametrize(("storage", "options"), WAYS)
def test_parts_are_stored_as_parts_of_the_whole(storage: str, options: Any) -> None:
    mine, whole = layers(world), layers(fp.IdentityComm())
    for layer in (*mine, *whole):
        fp.quantize(layer, storage, **options)
    fp.realize(mine, whole)
    for part, other in zip(mine, whole, strict=True):
        values = other.named_variables()
        for name, variable in part.named_variables().items():
            expected = values[name].numpy()
            if variable.shard is not None:
                assert variable.shard.global_shape == expected.shape
                spans = zip(variable.shard.start, variable.shape, strict=True)
                expected = expected[tuple(slice(start, start + size) for start, size in spans)]
            np.testing.assert_array_equal(variable.numpy(), expected)
    x = ft.asarray(np.random.default_rng(0).normal(size=(1, 3, 20)))
    for found, wanted in zip(applied(*mine, x), applied(*whole, x), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-12, atol=1e-12)


def test_a_checkpoint_of_stored_weights_is_loaded_on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = world.broadcast_object(str(tmp_path_factory.mktemp("stored")) if RANK == 0 else None, type=str)
    mine = {str(i): fp.quantize(layer, "int4", block=8) for i, layer in enumerate(layers(world))}
    fp.checkpoint.save(folder, mine, step=1, comm=world)
    alone = {str(i): fp.quantize(layer, "int4", block=8) for i, layer in enumerate(layers(fp.IdentityComm()))}
    wanted = {n: v.numpy().copy() for layer in alone.values() for n, v in layer.named_variables().items()}
    for layer in alone.values():
        layer.load({name: np.zeros(v.shape) for name, v in layer.named_variables().items()})
    fp.checkpoint.load(folder, alone, comm=fp.IdentityComm())
    found = {n: v.numpy() for layer in alone.values() for n, v in layer.named_variables().items()}
    world.barrier()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_cut_through_blocks_is_an_error() -> None:
    """On the ranks whose part begins or ends within a block; the last rank's does not here."""
    for rank in range(3):
        layer = tp.RowParallel(96, 4, ft.random.Generator(0), SymbolicComm(rank, 3))
        if rank < 2:
            with pytest.raises(ArgumentError, match=r"part from \d+ to \d+ of 96 inputs, .* through blocks of 64; cut"):
                fp.quantize(layer, "int4")
        with pytest.raises(ArgumentError, match=r"cut the layer between blocks, as with RowParallel\(..., block=64\)"):
            fp.quantize(layer, "int8")  # one scale for all inputs, which are on three ranks
        fp.quantize(layer, "int4", block=32)

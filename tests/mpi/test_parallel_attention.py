"""Attention and whole blocks cut over ranks, activations whole or on parts of the sequence, against dense twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint
from fuel_parallel import tensor_parallel as tp
from fuel_parallel.errors import ShapeError
from fuel_parallel.lazy.node import topological

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi
CLOSE = {"rtol": 1e-11, "atol": 1e-12}
HEADS = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(lambda pair: (pair[0] * pair[1], pair[0]))


def drawn(shape: tuple[int, ...], seed: int) -> ft.Tensor:
    return ft.asarray(np.random.default_rng(seed).normal(size=shape))


def box(parameter: fp.Parameter) -> tuple[slice, ...]:
    if parameter.shard is None:
        return (...,)
    return tuple(slice(s, s + n) for s, n in zip(parameter.shard.start, parameter.shape, strict=True))


def compare(found: ft.Tensor, wanted: ft.Tensor, x: ft.Tensor, mine: Any, dense: fp.Module, module: fp.Module) -> None:
    """Values, and the gradients of x and of each parameter, which are the dense ones or their part on this rank.

    `mine` picks from the dense x and result what this rank has.
    """
    wanted_of, found_of = dict(dense.named_parameters()), dict(module.named_parameters())
    assert wanted_of.keys() == found_of.keys()
    wanted_gradients = ft.grad(ft.sin(wanted).sum(), [x, *wanted_of.values()])
    # A loss on parts is the sum of the parts' losses; on whole activations all ranks have the same.
    gradients = ft.grad(ft.sin(found).sum(), [mine.x, *found_of.values()])
    fp.realize(found, wanted, gradients, wanted_gradients)
    np.testing.assert_allclose(found.numpy(), wanted.numpy()[mine.at], **CLOSE)
    np.testing.assert_allclose(gradients[0].numpy(), wanted_gradients[0].numpy()[mine.at], **CLOSE)
    for (name, parameter), gradient, whole in zip(found_of.items(), gradients[1:], wanted_gradients[1:], strict=True):
        np.testing.assert_allclose(gradient.numpy(), whole.numpy()[box(parameter)], **CLOSE, err_msg=name)


class Mine:
    """The part of a batch that this rank has: all of it, or its part of the sequence in dimension 1."""

    def __init__(self, x: ft.Tensor, parts: bool) -> None:
        length = x.shape[1] // N
        self.at = (slice(None), slice(RANK * length, (RANK + 1) * length)) if parts else (slice(None),)
        self.x = ft.asarray(x.numpy()[self.at])


@settings(max_examples=12)
@given(
    heads=HEADS,
    size=st.sampled_from([2, 4]),
    length=st.integers(1, 4),
    parts=st.booleans(),
    causal=st.booleans(),
    bias=st.booleans(),
    rotary=st.booleans(),
)
def test_attention_cut_by_heads_is_the_dense_one(
    heads: tuple[int, int], size: int, length: int, parts: bool, causal: bool, bias: bool, rotary: bool
) -> None:
    options: dict[str, Any] = {
        "kv_heads": heads[1],
        "head_size": size,
        "bias": bias,
        "causal": causal,
        "rotary": fp.Rotary(size) if rotary else None,
        "dtype": "float64",
    }
    sequence_dim = 1 if parts else None
    dense = fp.Attention(6, heads[0], ft.random.Generator(5), **options)
    module = tp.ParallelAttention(6, heads[0], ft.random.Generator(5), world, sequence_dim=sequence_dim, **options)
    again = tp.ParallelAttention.from_dense(dense, world, sequence_dim=sequence_dim)
    x = drawn((2, length * N if parts else length, 6), 1)
    mine = Mine(x, parts)
    compare(module(mine.x), dense(x), x, mine, dense, module)
    np.testing.assert_array_equal(again(mine.x).numpy(), module(mine.x).numpy())


def test_masks_of_all_heads_reach_the_heads_of_a_rank() -> None:
    dense = fp.Attention(6, 5, ft.random.Generator(5), head_size=2, dtype="float64")
    module = tp.ParallelAttention.from_dense(dense, world)
    x = drawn((2, 4, 6), 1)
    mask = ft.asarray(np.random.default_rng(2).random((2, 5, 4, 4)) < 0.7)
    np.testing.assert_allclose(module(x, mask=mask).numpy(), dense(x, mask=mask).numpy(), **CLOSE)
    same_for_all = mask[:, :1]
    np.testing.assert_allclose(module(x, mask=same_for_all).numpy(), dense(x, mask=same_for_all).numpy(), **CLOSE)


class Block(fp.Module):
    """A layer of a decoder, dense or cut, of the same parameters."""

    def __init__(self, g: Any, comm: fp.Communicator | None, sequence_dim: int | None = None) -> None:
        dim, hidden, options = 6, 10, {"dtype": "float64"}
        more = {"sequence_dim": sequence_dim}
        rotary = fp.Rotary(2)
        if comm is None:
            self.token = fp.Embedding(11, dim, g, **options)
            self.attention: Any = fp.Attention(
                dim, 4, g, head_size=2, kv_heads=2, causal=True, rotary=rotary, **options
            )
            self.gate: Any = fp.Linear(dim, hidden, g, **options)
            self.up: Any = fp.Linear(dim, hidden, g, **options)
            self.down: Any = fp.Linear(hidden, dim, g, **options)
        else:
            self.token = tp.VocabParallelEmbedding(11, dim, g, comm, **more, **options)
            self.attention = tp.ParallelAttention(
                dim, 4, g, comm, head_size=2, kv_heads=2, causal=True, rotary=rotary, **more, **options
            )
            self.gate = tp.ColumnParallel(dim, hidden, g, comm, **more, **options)
            self.up = tp.ColumnParallel(dim, hidden, g, comm, **more, **options)
            self.down = tp.RowParallel(hidden, dim, g, comm, **more, **options)
        on_parts = comm is not None and sequence_dim is not None
        self.norm = tp.RMSNorm(dim, comm, **options) if on_parts else fp.RMSNorm(dim, **options)
        self.norm2 = tp.LayerNorm(dim, comm, **options) if on_parts else fp.LayerNorm(dim, **options)

    def __call__(self, tokens: ft.Tensor) -> ft.Tensor:
        x = self.token(tokens)
        x = x + self.attention(self.norm(x))
        y = self.norm2(x)
        return x + self.down(ft.silu(self.gate(y)) * self.up(y))


@pytest.mark.parametrize("parts", [False, True])
def test_a_block_has_the_gradients_of_the_dense_one(parts: bool) -> None:
    tokens = ft.asarray(np.random.default_rng(3).integers(0, 11, (2, 2 * N)))
    dense, module = Block(ft.random.Generator(7), None), Block(ft.random.Generator(7), world, 1 if parts else None)
    wanted, found = dense(tokens), module(tokens)
    names = [name for name, _ in dense.named_parameters()]
    assert [name for name, _ in module.named_parameters()] == names
    wanted_gradients = ft.grad(ft.sin(wanted).sum(), dense.parameters())
    gradients = ft.grad(ft.sin(found).sum(), module.parameters())
    fp.realize(found, wanted, gradients, wanted_gradients)
    at = (slice(None), slice(RANK * 2, RANK * 2 + 2)) if parts else (...,)
    np.testing.assert_allclose(found.numpy(), wanted.numpy()[at], **CLOSE)
    for name, parameter, gradient, whole in zip(names, module.parameters(), gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(gradient.numpy(), whole.numpy()[box(parameter)], **CLOSE, err_msg=name)


@pytest.mark.skipif(N == 1, reason="one rank sends nothing")
def test_layers_that_share_their_input_share_its_communication() -> None:
    """Gate and up, and queries, keys and values: one all-gather forwards, one collective back."""
    tokens = ft.asarray(np.zeros((2, 2 * N), np.int64))

    def count(parts: bool) -> dict[str, int]:
        module = Block(ft.random.Generator(7), world, 1 if parts else None)
        loss = module(tokens).sum()
        nodes = topological([g.node for g in ft.grad(loss, module.parameters())] + [loss.node])
        names = [node.op.name for node in nodes]
        return {name: names.count(name) for name in ("all_reduce", "all_gather", "reduce_scatter")}

    # Forwards embedding, attention and MLP; backwards attention and MLP, and for KV heads that are shared their weights
    # and biases. On parts the norms' and row biases' gradients are small all-reduces besides.
    shared = 4 if N > 2 else 0
    assert count(False) == {"all_reduce": 5 + shared, "all_gather": 0, "reduce_scatter": 0}
    assert count(True) == {"all_reduce": 5 + shared, "all_gather": 5, "reduce_scatter": 5}


def test_dropout_on_parts_drops_what_dropout_of_the_whole_does() -> None:
    x = drawn((3, 4 * N, 5), 1)
    whole = ft.random.Generator(3).dropout(x, 0.4)
    mine = Mine(x, parts=True)
    part = tp.dropout(mine.x, 0.4, ft.random.Generator(3), world, 1)
    np.testing.assert_array_equal(part.numpy(), whole.numpy()[mine.at])


@pytest.mark.skipif(N == 1, reason="one rank has the whole sequence")
def test_a_sequence_that_cannot_be_shared_is_named() -> None:
    layer = tp.RowParallel(N, 3, ft.random.Generator(0), world, sequence_dim=1)
    with pytest.raises(ShapeError, match=rf"a sequence of 1 .*shared equally by {N} ranks; pad it to a multiple"):
        layer(ft.zeros((2, 1, 1)))


def test_shared_heads_are_saved_once_and_loaded_anywhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = world.broadcast_object(str(tmp_path_factory.mktemp("run")) if RANK == 0 else None)
    make = {"kv_heads": 2, "head_size": 2, "dtype": "float64"}
    module = tp.ParallelAttention(6, 6, ft.random.Generator(5), world, **make)
    checkpoint.save(path, {"model": module}, step=1, comm=world)
    dense = fp.Attention(6, 6, ft.random.Generator(99), **make)
    checkpoint.load(path, {"model": dense}, comm=world)
    wanted = fp.Attention(6, 6, ft.random.Generator(5), **make)
    for (name, found), parameter in zip(dense.named_parameters(), wanted.parameters(), strict=True):
        np.testing.assert_array_equal(found.numpy(), parameter.numpy(), err_msg=name)
    again = tp.ParallelAttention(6, 6, ft.random.Generator(99), world, **make)
    checkpoint.load(path, {"model": again}, comm=world)
    for found, parameter in zip(again.parameters(), module.parameters(), strict=True):
        np.testing.assert_array_equal(found.numpy(), parameter.numpy())
    assert world.all_reduce(ft.asarray(owned_elements(again)), fp.ReduceOp.SUM).item() == owned_elements(dense) + sum(
        p.size for p in again.parameters() if p.shard is None
    ) * (N - 1)


def owned_elements(module: fp.Module) -> int:
    """How many elements this rank counts."""
    total = 0
    for parameter in module.parameters():
        slices = parameter.shard.owned if parameter.shard and parameter.shard.owned else (slice(None),) * parameter.ndim
        total += int(np.prod([len(range(n)[s]) for n, s in zip(parameter.shape, slices, strict=True)]))
    return total

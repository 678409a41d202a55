"""Dense models that a plan splits: values and gradients stay, memory and mistakes are told, plans are files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import tensor_parallel as tp
from fuel_parallel.errors import ArgumentError, DataError, ShapeError
from fuel_parallel.lazy.node import topological
from fuel_parallel.partitioning import partition

world = fp.init()
N, RANK = world.world_size, world.rank
pytestmark = pytest.mark.mpi


class Block(fp.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, g: ft.random.Generator) -> None:
        self.attention = fp.Attention(dim, heads, g, kv_heads=kv_heads, causal=True, dtype="float64")
        self.mlp = {
            "up": fp.Linear(dim, hidden, g, dtype="float64"),
            "down": fp.Linear(hidden, dim, g, dtype="float64"),
        }
        self.norm = fp.RMSNorm(dim, dtype="float64")

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp["down"](ft.tanh(self.mlp["up"](x)))


class Model(fp.Module):
    """Has its layers in a list, a dict and a tuple, and the embedding twice."""

    def __init__(self, vocabulary: int, heads: int, kv_heads: int, hidden: int, g: ft.random.Generator) -> None:
        dim = 4 * heads
        self.embedding = fp.Embedding(vocabulary, dim, g, dtype="float64")
        self.blocks = [Block(dim, heads, kv_heads, hidden, g) for _ in range(2)]
        self.heads = (fp.Linear(dim, 3, g, dtype="float64"), {"of": self.embedding})

    def __call__(self, tokens: ft.Tensor) -> ft.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return ft.concat([self.heads[0](x), self.heads[1]["of"].logits(x)], axis=-1)


PLAN = tp.LayerParallelPlan(
    [
        tp.LayerRule("embedding", "vocab"),
        tp.LayerRule("blocks.*.attention", "attention"),
        tp.LayerRule("blocks.1.mlp.*", "replicate"),
        tp.LayerRule("blocks.*.mlp.up", "column"),
        tp.LayerRule("**.down", "row"),
        tp.LayerRule("heads.0", "column", {"gather_output": True}),
    ]
)


def model(*sizes: int) -> Model:
    return Model(*sizes, ft.random.Generator(5))


@settings(max_examples=5)
@given(vocabulary=st.integers(1, 9), kv_heads=st.integers(1, 3), group=st.integers(1, 2), hidden=st.integers(1, 9))
def test_values_and_gradients_stay(vocabulary: int, kv_heads: int, group: int, hidden: int) -> None:
    sizes = (vocabulary, kv_heads * group, kv_heads, hidden)
    dense, split = model(*sizes), tp.parallelize(model(*sizes), PLAN, world)
    tokens = ft.asarray(np.arange(5).reshape(1, 5) % vocabulary)
    wanted, found = dense(tokens), split(tokens)
    names = [name for name, _ in split.named_parameters()]
    assert names == [name for name, _ in dense.named_parameters()]
    gradients = ft.grad(ft.sin(found).sum(), split.parameters())
    wanted_gradients = ft.grad(ft.sin(wanted).sum(), dense.parameters())
    fp.realize(wanted, found, gradients, wanted_gradients)
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-12, atol=1e-12)
    for name, parameter, gradient, whole in zip(names, split.parameters(), gradients, wanted_gradients, strict=True):
        shard = parameter.shard or fp.Shard(whole.shape, (0,) * whole.ndim)
        at = tuple(slice(start, start + size) for start, size in zip(shard.start, parameter.shape, strict=True))
        np.testing.assert_allclose(gradient.numpy(), whole.numpy()[at], rtol=1e-11, atol=1e-12, err_msg=name)


class Named(fp.Module):
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def test_a_ready_plan_finds_the_layers_of_bert() -> None:
    g = ft.random.Generator(0)
    layer = Named(
        attention=fp.Attention(8, 4, g),
        intermediate=Named(dense=fp.Linear(8, 32, g)),
        output=Named(dense=fp.Linear(32, 8, g), LayerNorm=fp.LayerNorm(8)),
    )
    embeddings = Named(word_embeddings=fp.Embedding(30, 8, g), position_embeddings=fp.Embedding(16, 8, g))
    bert = Named(embeddings=embeddings, encoder=Named(layer=[layer]), pooler=Named(dense=fp.Linear(8, 8, g)))
    for model in (bert, Named(bert=bert, classifier=fp.Linear(8, 2, g))):
        listed = tp.describe(model, tp.LayerParallelPlan.ready("bert"), N).splitlines()
        found = [line.split()[:2] for line in listed[1:-1]]
        prefix = "" if model is bert else "bert."
        assert found == [
            [f"{prefix}embeddings.word_embeddings", "vocab"],
            [f"{prefix}encoder.layer.0.attention", "attention"],
            [f"{prefix}encoder.layer.0.intermediate.dense", "column"],
            [f"{prefix}encoder.layer.0.output.dense", "row"],
        ]


def test_what_stays_dense_and_what_is_shared() -> None:
    split = tp.parallelize(model(8, 4, 2, 6), PLAN, world)
    assert isinstance(split.blocks[1].mlp["up"], fp.Linear)
    assert isinstance(split.blocks[0].mlp["up"], tp.ColumnParallel)
    assert isinstance(split.heads[0], tp.ColumnParallel)
    assert split.heads[0].gather_output
    assert split.heads[1]["of"] is split.embedding
    assert isinstance(split.embedding, tp.VocabParallelEmbedding)


def test_a_mesh_gives_its_axis() -> None:
    split = tp.parallelize(model(8, 4, 2, 6), PLAN, fp.Mesh(world, dp=1, tp=-1))
    assert split.embedding.weight.shape[0] == len(partition(8, N)[RANK])
    with pytest.raises(ArgumentError, match="no axis 'tp'; the axes are dp"):
        tp.parallelize(model(8, 4, 2, 6), PLAN, fp.Mesh(world, dp=-1))


@settings(max_examples=5)
@given(vocabulary=st.integers(1, 9), dim=st.integers(1, 5), rows=st.integers(1, 4))
def test_a_head_that_shares_the_table(vocabulary: int, dim: int, rows: int) -> None:
    """Its classes may stay cut: the loss and both gradients are those of the whole."""
    g = ft.random.Generator(2)
    x = g.normal((rows, dim), dtype="float64")
    dense = fp.Embedding(vocabulary, dim, g, dtype="float64")
    split = tp.VocabParallelEmbedding.from_dense(dense, world)
    targets = ft.asarray(np.arange(rows) % vocabulary)
    wanted = ft.cross_entropy(dense.logits(x), targets)
    cut = split.logits(x, gather_output=False)
    found = tp.vocab_parallel_cross_entropy(cut, targets, world, classes=vocabulary)
    whole = split.logits(x)
    of_x, of_table = ft.grad(found, [x, split.weight])
    wanted_of_x, wanted_of_table = ft.grad(wanted, [x, dense.weight])
    fp.realize(whole, found, of_x, of_table, wanted, wanted_of_x, wanted_of_table)
    mine = partition(vocabulary, N)[RANK]
    assert cut.shape == (rows, len(mine))
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(whole.numpy(), dense.logits(x).numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(of_x.numpy(), wanted_of_x.numpy(), rtol=1e-12, atol=1e-12)
    at = slice(mine.start, mine.stop)
    np.testing.assert_allclose(of_table.numpy(), wanted_of_table.numpy()[at], rtol=1e-12, atol=1e-12)


def test_no_rank_draws_a_whole_weight() -> None:
    """The largest node below the parameters is the largest part."""
    whole = 64 * 8 * N
    dense = fp.Linear(64, 8 * N, ft.random.Generator(0))
    embedding = fp.Embedding(8 * N, 64, ft.random.Generator(0))
    split = tp.ColumnParallel.from_dense(dense, world)
    rows = tp.VocabParallelEmbedding.from_dense(embedding, world)
    nodes = topological([one.node for one in [*split.parameters(), *rows.parameters()]])
    assert max(node.spec.size for node in nodes) == whole // N
    mine = partition(8 * N, N)[RANK]
    np.testing.assert_array_equal(split.weight.numpy(), dense.weight.numpy()[:, mine.start : mine.stop])
    np.testing.assert_array_equal(rows.weight.numpy(), embedding.weight.numpy()[mine.start : mine.stop])


@settings(max_examples=15)
@given(data=st.data(), rank=st.integers(0, 3), dim=st.sampled_from(list(tp.ShardDim)))
def test_a_part_is_the_slice(data: Any, rank: int, dim: tp.ShardDim) -> None:
    g = ft.random.Generator(1)
    shape = (data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)))
    row = ft.arange(shape[1], dtype="float32")
    x = ft.where(g.normal(shape) > 0, g.uniform(shape) * row, -ft.ones(shape)) + g.normal((shape[0], 1)).sum()
    shard = tp.make_shard(x, dim, tp.TensorParallelConfig(4), rank)
    at = tuple(slice(start, start + size) for start, size in zip(shard.shard.start, shard.tensor.shape, strict=True))
    np.testing.assert_array_equal(shard.tensor.numpy(), x.numpy()[at])
    assert shard.tensor.shape[dim.value] == len(tp.TensorParallelConfig(4).shard_range(shape[dim.value], rank))


def test_a_plan_is_a_file(tmp_path: Path) -> None:
    for plan in [PLAN, *map(tp.LayerParallelPlan.ready, ("llama", "gpt2", "bert"))]:
        plan.write(tmp_path / "plan.toml")
        assert tp.LayerParallelPlan.read(tmp_path / "plan.toml") == plan
    assert tp.LayerParallelPlan(PLAN.rules[::-1]) != PLAN
    assert str(PLAN).splitlines()[-1].split() == ["heads.0", "column", "gather_output=True"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rule = 3", r"plan.toml: Expected `array`, got `int` - at `\$.rule`; expected \[\[rule\]\] tables"),
        ("[[rule]]\nlayers = 'a'", r"missing required field `style` - at `\$.rule\[0\]`"),
        ("[[rule]]\nlayers = 'a'\nstyle = 'row'\nblok = 1", r"unknown field `blok`"),
        ("[[rule]]\nlayers = 'a'\nstyle = 'row'\n" * 2, "two rules are about 'a'"),
        ("[[rule]", "plan.toml: not TOML"),
    ],
)
def test_files_that_are_no_plans(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(DataError, match=message):
        tp.LayerParallelPlan.read(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"blocks.*.mlp.upp": "column"}, r"'blocks.\*.mlp.upp' names no layer; near are .*blocks.1.mlp.up"),
        (
            {"blocks.*.mlp.up.weight": "column"},
            "names the parameter blocks.0.mlp.up.weight; name its layer, blocks.0.mlp.up",
        ),
        ({"blocks.0": "row"}, "'row' splits Linear, and this is Block; name the layers in it: blocks.0.attention, "),
        ({"embedding": "attention"}, "'attention' splits Attention, and this is Embedding"),
        (
            {"embedding": "rows"},
            "there is no style 'rows'; there are column, row, vocab, attention, sequence, replicate",
        ),
    ],
)
def test_plans_that_do_not_fit(rules: dict[str, str], message: str) -> None:
    dense = model(8, 4, 2, 6)
    with pytest.raises(ArgumentError, match=message):
        tp.parallelize(dense, tp.LayerParallelPlan(rules | {"heads.0": "column"}), world)
    assert isinstance(dense.heads[0], fp.Linear)


def test_all_mistakes_are_told_at_once() -> None:
    plan = tp.LayerParallelPlan(
        [
            tp.LayerRule("blocks.*.mlp.up", "column", {"block": 4}),
            tp.LayerRule("heads.0", "row", {"gather_output": True}),
            tp.LayerRule("nothing", "row"),
            tp.LayerRule("neither", "row", optional=True),
        ]
    )
    with pytest.raises(ArgumentError) as told:
        tp.parallelize(model(8, 4, 2, 6), plan, fp.SymbolicComm(0, 3))
    text = str(told.value)
    for layer in ("blocks.0.mlp.up", "blocks.1.mlp.up"):
        assert f"{layer}, style 'column', 3 ranks: ColumnParallel: 6 columns are no whole number of blocks of 4" in text
    assert "heads.0: style 'row' has no option gather_output; it has block, scatter_input, sequence_dim" in text
    assert "'nothing' names no layer" in text
    assert "neither" not in text


def test_a_listing_adds_up() -> None:
    dense = model(8, 4, 2, 6)
    last = tp.describe(dense, PLAN, 3).splitlines()[-1]
    held = []
    for rank in range(3):
        split = tp.parallelize(model(8, 4, 2, 6), PLAN, fp.SymbolicComm(rank, 3))
        held.append(f"{sum(one.nbytes for one in split.parameters()):,}")
    whole = sum(one.nbytes for one in dense.parameters())
    assert re.split(r" {2,}", last) == ["all", f"{whole:,} bytes", " ".join(held)]
    assert isinstance(dense.embedding, fp.Embedding)


def test_layers_of_ones_own() -> None:
    class Scale(fp.Module):
        def __init__(self, size: int) -> None:
            self.weight = fp.Parameter(ft.arange(size, dtype="float64"))

    class Scales(fp.Module):
        def __init__(self, dense: Scale, comm: fp.Communicator) -> None:
            mine = partition(dense.weight.shape[0], comm.world_size)[comm.rank]
            shard = fp.Shard(dense.weight.shape, (mine.start,))
            self.weight = fp.Parameter(tp.part_of(dense.weight, (mine,)), shard=shard)

    class Holder(fp.Module):
        def __init__(self) -> None:
            self.scale = Scale(7)

    tp.register_style("elements", Scale, Scales)
    try:
        split = tp.parallelize(Holder(), tp.LayerParallelPlan({"scale": "elements"}), world)
    finally:
        del tp.STYLES["elements"]
    assert split.scale.weight.tolist() == list(map(float, partition(7, N)[RANK]))


def test_shards_that_there_are_not() -> None:
    config = tp.TensorParallelConfig(2)
    with pytest.raises(ShapeError, match=r"ShardDim.ROW needs 2 dimensions or more, but the shape is \(3,\)"):
        tp.make_shard(ft.zeros(3), tp.ShardDim.ROW, config, 0)
    with pytest.raises(ArgumentError, match="there is no rank 2; the ranks are 0 to 1"):
        config.shard_range(4, 2)
    with pytest.raises(ArgumentError, match="world_size must be at least 1, but is 0"):
        tp.TensorParallelConfig(0)
    with pytest.raises(ArgumentError, match="there is none that is called 'mamba'; ready are llama, gpt2, bert"):
        tp.LayerParallelPlan.ready("mamba")
    with pytest.raises(ArgumentError, match=r"without empty parts; got 'a\.\.b'"):
        tp.LayerRule("a..b", "row")

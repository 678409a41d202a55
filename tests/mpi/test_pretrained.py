"""Models that transformers wrote, loaded into the parts of 1 to 4 ranks, answer as there, and are written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llama as example
import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint
from fuel_parallel import tensor_parallel as tp
from fuel_parallel.checkpoint import NameTable, StoredAs
from fuel_parallel.errors import ArgumentError, CheckpointError

world = fp.init()
N, RANK = world.world_size, world.rank
GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = ["llama", "llama-uneven", "gpt2"]
pytestmark = pytest.mark.mpi


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that all ranks see."""
    return Path(world.broadcast_object(str(tmp_path), type=str))


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def expected(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "expected.json").read_text())


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = checkpoint.read_huggingface(folder)
    return {key: (one.dtype.name, one.shape, np.asarray(one).tobytes()) for key, one in found.items()}


def test_logits_and_text_are_those_of_transformers(name: str) -> None:
    _, model = example.load(GOLDEN / name, world)
    wanted = expected(name)
    logits = model(ft.asarray(wanted["tokens"]))
    np.testing.assert_allclose(logits.numpy(), np.array(wanted["logits"]), rtol=1e-5, atol=1e-5)
    assert example.go_on(model, wanted["tokens"][0], len(wanted["greedy"])) == wanted["greedy"]


@pytest.mark.parametrize("name", ["llama", "llama-uneven"])
def test_on_parts_of_the_sequence_a_llama_is_the_same(name: str) -> None:
    def load(comm: fp.Communicator, sequence_dim: int | None) -> Any:
        read, build = example.MODELS["llama"]
        model = build(read.read(GOLDEN / name), ft.random.Generator(0), "float64")
        tp.parallelize(model, tp.LayerParallelPlan.ready("llama", sequence_dim=sequence_dim), comm)
        checkpoint.load_huggingface(model, GOLDEN / name, model.names)
        return model

    dense, model = load(fp.IdentityComm(), None), load(world, 1)
    tokens = ft.asarray(np.arange(24).reshape(2, 12))
    wanted, found = dense(tokens), model(tokens)
    wanted_gradients = ft.grad(ft.sin(wanted).sum(), dense.parameters())
    gradients = ft.grad(ft.sin(found).sum(), model.parameters())
    fp.realize(wanted, found, wanted_gradients, gradients)
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-12, atol=1e-12)
    for (key, parameter), gradient, whole in zip(model.named_parameters(), gradients, wanted_gradients, strict=True):
        start = (0,) * parameter.ndim if parameter.shard is None else parameter.shard.start
        at = tuple(slice(first, first + extent) for first, extent in zip(start, parameter.shape, strict=True))
        np.testing.assert_allclose(gradient.numpy(), whole.numpy()[at], rtol=1e-11, atol=1e-11, err_msg=key)
    with pytest.raises(ArgumentError, match="'gpt2' cannot be split along the sequence; ready for that are llama"):
        tp.LayerParallelPlan.ready("gpt2", sequence_dim=1)


def test_files_as_the_hub_has_them_for_gpt2(shared: Path) -> None:
    """Without the prefix, with the causal masks of each layer and the head that shares its table."""
    tensors = {key: np.asarray(one) for key, one in checkpoint.read_huggingface(GOLDEN / "gpt2").items()}
    bare = {key.removeprefix("transformer."): one for key, one in tensors.items()}
    bare |= {"h.0.attn.bias": np.ones((1, 1, 64, 64), np.float32), "lm_head.weight": bare["wte.weight"]}
    if world.is_root:
        checkpoint.export_huggingface(bare, shared)
    world.barrier()
    _, model = example.load(GOLDEN / "gpt2", world)
    _, again = example.load(GOLDEN / "gpt2", world)
    for variable in again.parameters():
        variable.assign(ft.zeros_like(variable))
    checkpoint.load_huggingface(again, shared, model.names)
    for (key, found), wanted in zip(again.named_parameters(), model.parameters(), strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted.numpy(), err_msg=key)


def test_parts_are_those_of_the_dense_model(name: str) -> None:
    _, dense = example.load(GOLDEN / name, fp.IdentityComm())
    _, model = example.load(GOLDEN / name, world)
    whole = dense.named_variables()
    assert model.named_variables().keys() == whole.keys()
    for key, variable in model.named_variables().items():
        start = (0,) * variable.ndim if variable.shard is None else variable.shard.start
        at = tuple(slice(first, first + extent) for first, extent in zip(start, variable.shape, strict=True))
        np.testing.assert_array_equal(variable.numpy(), whole[key].numpy()[at], err_msg=key)
    if N > 1:
        parts = sum(one.size for one in model.named_variables().values())
        assert parts < sum(one.size for one in whole.values())


def test_what_is_exported_is_what_was_loaded(name: str, shared: Path) -> None:
    _, model = example.load(GOLDEN / name, world)
    dtype = "bfloat16" if name == "llama" else None
    files = checkpoint.export_huggingface(
        model, shared, names=model.names, dtype=dtype, comm=world, max_shard_size="40KB"
    )
    assert files[-1] == shared / "model.safetensors.index.json"
    assert stored(shared) == stored(GOLDEN / name)


def test_a_checkpoint_is_exported_under_the_names_of_transformers(shared: Path) -> None:
    _, model = example.load(GOLDEN / "gpt2", world)
    checkpoint.save(shared / "run", {"model": model}, step=1, comm=world)
    if world.is_root:
        checkpoint.export_huggingface(shared / "run", shared / "hf", names=model.names)
        assert stored(shared / "hf") == stored(GOLDEN / "gpt2")
    world.barrier()


def test_a_folder_that_cannot_be_written_fails_on_all_ranks(shared: Path) -> None:
    _, model = example.load(GOLDEN / "gpt2", world)
    if world.is_root:
        (shared / "file").write_text("")
    with pytest.raises(CheckpointError, match="file cannot be written: "):
        checkpoint.export_huggingface(model, shared / "file", names=model.names, comm=world)
    assert world.all_reduce(ft.asarray(1)).item() == N


@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_models_are_told() -> None:
    layer = fp.Linear(3, 4 if RANK else 5, ft.random.Generator(0))
    with pytest.raises(ArgumentError, match=r"weight is float32\[3, 4\] on rank 1 and float32\[3, 5\] on rank 0"):
        checkpoint.export_huggingface(layer, "nowhere", comm=world)
    with pytest.raises(ArgumentError, match="rank 1 holds other tensors than rank 0: b"):
        checkpoint.export_huggingface({"a": ft.ones(2)} | ({"b": ft.ones(2)} if RANK else {}), "nowhere", comm=world)
    part = fp.Parameter(ft.zeros((4, 3)), shard=fp.Shard((4, 6), (0, 3)))
    with pytest.raises(ArgumentError, match=r"a is a part of a tensor of shape \(4, 6\); give comm="):
        checkpoint.export_huggingface({"a": part}, "nowhere")


class Joined(fp.Module):
    """Three layers that a file holds as one."""

    def __init__(self, inputs: int, sizes: tuple[int, ...], dtype: str) -> None:
        g = ft.random.Generator(1)
        self.parts = [fp.Linear(inputs, size, g, dtype=dtype) for size in sizes]


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("style", ["column", "row"])
def test_tensors_that_hold_several_variables(transpose: bool, style: str, shared: Path) -> None:
    names = NameTable(
        [StoredAs(tuple(f"parts.{i}.*" for i in range(3)), "qkv.*", transpose=transpose)], prefix="nothing."
    )
    dense = Joined(7, (6, 3, 2), "float64")
    plan = tp.LayerParallelPlan({"parts.*": style})
    cut = tp.parallelize(Joined(7, (6, 3, 2), "float64"), plan, world)
    checkpoint.export_huggingface(cut, shared, names=names, comm=world)
    weight = np.concatenate([one.weight.numpy() for one in dense.parts], axis=1)
    np.testing.assert_array_equal(checkpoint.read_huggingface(shared)["qkv.weight"], weight.T if transpose else weight)
    fresh = tp.parallelize(Joined(7, (6, 3, 2), "float32"), plan, world)
    checkpoint.load_huggingface(fresh, shared, names)
    for (key, found), wanted in zip(fresh.named_parameters(), cut.parameters(), strict=True):
        assert found.dtype == ft.float32
        np.testing.assert_array_equal(found.numpy(), wanted.numpy().astype("float32"), err_msg=key)
    world.barrier()

"""The layout of Hugging Face, written and read, with the package safetensors as the judge."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint
from fuel_parallel.errors import ArgumentError, CheckpointError, IndexingError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
TENSORS = {
    "model.embed.weight": np.arange(600, dtype=np.float32).reshape(20, 30),
    "model.layers.0.weight": np.arange(500).astype(ml_dtypes.bfloat16).reshape(10, 50),
    "model.norm.weight": np.ones(7, np.float16),
    "lm_head.weight": np.arange(400, dtype=np.float32).reshape(4, 100) - 200,
}


def test_one_file(tmp_path: Path) -> None:
    assert checkpoint.export_huggingface(TENSORS, tmp_path) == [tmp_path / "model.safetensors"]
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
    read = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert {name: one.tobytes() for name, one in read.items()} == {name: one.tobytes() for name, one in TENSORS.items()}
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_many_files_and_an_index(tmp_path: Path) -> None:
    files = checkpoint.export_huggingface(TENSORS, tmp_path, max_shard_size="2.5KB")
    # In the order of the state; what is larger than a file may be has one of its own.
    assert [path.name for path in files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads(files[-1].read_text())
    assert index == {
        "metadata": {"total_size": sum(one.nbytes for one in TENSORS.values())},
        "weight_map": {
            "lm_head.weight": "model-00003-of-00003.safetensors",
            "model.embed.weight": "model-00001-of-00003.safetensors",
            "model.layers.0.weight": "model-00002-of-00003.safetensors",
            "model.norm.weight": "model-00002-of-00003.safetensors",
        },
    }
    assert files[-1].read_text() == json.dumps(index, indent=2, sort_keys=True) + "\n"
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / file, "numpy") as opened:
            assert opened.get_tensor(name).tobytes() == TENSORS[name].tobytes()
    # An export of fewer files leaves none of these behind.
    checkpoint.export_huggingface(TENSORS, tmp_path)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("size", ["5GB", 2500])
def test_what_is_read_is_what_was_written(size: Any, tmp_path: Path) -> None:
    files = checkpoint.export_huggingface(TENSORS, tmp_path, max_shard_size=size)
    for path in (tmp_path, files[-1]):
        read = checkpoint.read_huggingface(path)
        assert list(read) == sorted(TENSORS)
        for name, one in TENSORS.items():
            assert (read[name].shape, read[name].dtype) == (one.shape, one.dtype)
            assert np.array_equal(np.asarray(read[name]), one)
    head = read["lm_head.weight"]
    for key in ((2,), (slice(1, 3), slice(-20, None)), (..., 5), (-1, 7), (slice(3, 1),), (slice(None), slice(0, 999))):
        assert np.array_equal(head[key], TENSORS["lm_head.weight"][key])
        assert head[key].shape == TENSORS["lm_head.weight"][key].shape


def test_what_the_package_writes_is_read(tmp_path: Path) -> None:
    safetensors.numpy.save_file(TENSORS, tmp_path / "weights.safetensors", {"format": "np"})
    for path in (tmp_path, tmp_path / "weights.safetensors"):
        read = checkpoint.read_huggingface(path)
        assert all(np.array_equal(np.asarray(read[name]), one) for name, one in TENSORS.items())


def test_a_slice_reads_its_bytes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.export_huggingface({"w": np.zeros((1000, 2048), np.float32)}, tmp_path)
    stored = checkpoint.read_huggingface(tmp_path)["w"]
    read = []

    def counting(file: int, buffers: Any, offset: int, preadv: Any = os.preadv) -> int:
        read.append(preadv(file, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    assert stored[10:20, 1024:].shape == (10, 1024)
    assert sum(read) == 10 * 1024 * 4


def test_a_model_takes_what_was_read(tmp_path: Path) -> None:
    model, fresh = (fp.Linear(3, 4, ft.random.Generator(seed)) for seed in (0, 1))
    checkpoint.export_huggingface(model, tmp_path)
    fresh.load(checkpoint.read_huggingface(tmp_path))
    assert fresh.weight.tolist() == model.weight.tolist()


def test_a_checkpoint_is_exported_whole(on_ranks: OnRanks, tmp_path: Path) -> None:
    dense = np.arange(24.0).reshape(4, 6)

    def save(comm: Any) -> None:
        rows = fp.partition(6, comm.world_size)[comm.rank]
        weight = fp.Parameter(dense[:, rows.start : rows.stop], shard=fp.Shard((4, 6), (0, rows.start)))
        state = {"model": {"w": weight, "n": 3}, "optimizer": fp.optim.AdamW([weight])}
        checkpoint.save(tmp_path / "run", state, step=5, comm=comm)
        if comm.is_root:
            with pytest.raises(ArgumentError, match=r"w is a part of a tensor of shape \(4, 6\); give comm="):
                checkpoint.export_huggingface({"w": weight}, tmp_path / "hf")

    on_ranks(4, save)
    checkpoint.export_huggingface(tmp_path / "run", tmp_path / "hf")
    exported = safetensors.numpy.load_file(tmp_path / "hf/model.safetensors")
    assert {name: one.tolist() for name, one in exported.items()} == {"w": dense.tolist()}
    checkpoint.export_huggingface(tmp_path / "run", tmp_path / "all", key=None, step=5)
    assert list(checkpoint.read_huggingface(tmp_path / "all")) == [
        "model.w",
        "optimizer.means.model.w",
        "optimizer.squares.model.w",
        "optimizer.step",
    ]
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 6"):
        checkpoint.export_huggingface(tmp_path / "run", tmp_path / "hf", step=6)
    with pytest.raises(ArgumentError, match="there is no tensor to write under 'mode'"):
        checkpoint.export_huggingface(tmp_path / "run", tmp_path / "hf", key="mode")
    written = tmp_path / "run/step-00000005/rank-00000.safetensors"
    data = bytearray(written.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first byte after the header, of model.w
    written.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"the file is damaged: .*; step= exports an earlier checkpoint"):
        checkpoint.export_huggingface(tmp_path / "run", tmp_path / "hf")


def broken_index(folder: Path, weight_map: object) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        checkpoint.read_huggingface(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"expected model.safetensors or .* in it; it holds neither"):
        checkpoint.read_huggingface(tmp_path)
    with pytest.raises(CheckpointError, match=r"w.safetensors, which it names, is not beside it; the download may be"):
        checkpoint.read_huggingface(broken_index(tmp_path, {"w": "w.safetensors"}))
    with pytest.raises(CheckpointError, match=r"'\.\./w' is not the name of a file beside it"):
        checkpoint.read_huggingface(broken_index(tmp_path, {"w": "../w"}))
    with pytest.raises(CheckpointError, match="not an index of safetensors files"):
        checkpoint.read_huggingface(broken_index(tmp_path, ["w"]))
    safetensors.numpy.save_file(TENSORS, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"it says that w is in w.safetensors, and that file does not hold it"):
        checkpoint.read_huggingface(broken_index(tmp_path, {"w": "w.safetensors"}))


def test_arguments_are_checked(tmp_path: Path) -> None:
    for size in ("5 parsecs", 0, "-1GB"):
        with pytest.raises(ArgumentError, match="max_shard_size: expected bytes as a number, or a text such as '5GB'"):
            checkpoint.export_huggingface(TENSORS, tmp_path, max_shard_size=size)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file cannot be written: "):
        checkpoint.export_huggingface(TENSORS, tmp_path / "file")
    checkpoint.export_huggingface(TENSORS, tmp_path)
    stored = checkpoint.read_huggingface(tmp_path)["lm_head.weight"]
    wrong = [((0, 0, 0), "one a dimension"), (4, "index 4 is out of bounds"), (slice(0, 3, 2), "step 1, not 2")]
    for key, message in wrong:
        with pytest.raises(IndexingError, match=message):
            stored[key]

"""Files of others in our modules: which bytes are read, what memory it takes, and what is told when nothing fits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint
from fuel_parallel.checkpoint import NameTable, StoredAs
from fuel_parallel.errors import ArgumentError, CheckpointError

GIANT = """
import json, resource, sys
import fuel_parallel as fp
from fuel_parallel import checkpoint, tensor_parallel as tp

class Layer(fp.Module):
    def __init__(self, generator):
        self.up = fp.Linear(4096, 16384, generator, bias=False, dtype="bfloat16")
        self.down = fp.Linear(16384, 4096, generator, bias=False, dtype="bfloat16")
        self.out = fp.Linear(4096, 4096, generator, bias=False, dtype="bfloat16")

class Model(fp.Module):
    def __init__(self):
        generator = fp.lazy.random.Generator(0)
        self.embedding = fp.Embedding(65536, 4096, generator, dtype="bfloat16")
        self.layers = [Layer(generator) for _ in range(12)]

def read():
    with open("/proc/self/io") as told:
        return int(dict(line.split(": ") for line in told)["rchar"])

model = Model()
plan = tp.LayerParallelPlan({"embedding": "vocab", "**.up": "column", "**.down": "row", "**.out": "row"})
tp.parallelize(model, plan, fp.SymbolicComm(int(sys.argv[2]), 8))
names = checkpoint.NameTable([
    checkpoint.StoredAs("layers.*.weight", "layers.*.weight", transpose=True),
    checkpoint.StoredAs("layers.*.*.weight", "layers.*.*.weight", transpose=True),
    checkpoint.StoredAs("embedding.weight", "embedding.weight"),
])
share = sum(one.nbytes for one in model.parameters())
before, peak = read(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
checkpoint.load_huggingface(model, sys.argv[1], names)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
largest = max(one.nbytes for one in model.parameters())
marks = [model.embedding.weight[0, 0].item(), model.layers[11].down.weight[-1, 7].item()]
print(json.dumps({"share": share, "read": read() - before, "grown": after - peak, "largest": largest, "marks": marks}))
"""


def giant(path: Path) -> int:
    """A file of 4 GB that takes no room; some numbers of it are not zero. Its size."""
    shapes = {"embedding.weight": (65536, 4096)}
    for layer in range(12):
        shapes |= {f"layers.{layer}.up.weight": (16384, 4096), f"layers.{layer}.down.weight": (4096, 16384)}
        shapes |= {f"layers.{layer}.out.weight": (4096, 4096)}
    described, end = {}, 0
    for name, (rows, columns) in shapes.items():
        begin, end = end, end + rows * columns * 2
        described[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [begin, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name, row, column, value in [
            ("embedding.weight", 3 * 8192, 0, 2.0),
            ("layers.11.down.weight", 7, 4 * 2048 - 1, 3.0),
        ]:
            at = described[name]["data_offsets"][0] + (row * shapes[name][1] + column) * 2
            file.seek(8 + len(text) + at)
            file.write(np.array(value, ml_dtypes.bfloat16).tobytes())
    return end


def test_a_rank_reads_its_share_of_a_file_of_4_gb(tmp_path: Path) -> None:
    """In rows of the file (columns of the model) and in columns of it, in runs of 1 KiB and more."""
    assert giant(tmp_path / "model.safetensors") > 4e9
    run = subprocess.run(
        [sys.executable, "-c", GIANT, str(tmp_path), "3"], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["marks"] == [2.0, 3.0]
    assert told["share"] > 0.5e9
    assert told["share"] <= told["read"] < 1.05 * told["share"]
    assert told["grown"] < told["share"] + told["largest"]


class Head(fp.Module):
    def __init__(self, dtype: str = "float32") -> None:
        self.linear = fp.Linear(3, 2, ft.random.Generator(0), dtype=dtype)
        self.scale = fp.Variable(ft.ones(2, dtype=dtype))


def write(path: Path, **tensors: Any) -> Path:
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return path


FITTING = {"linear.weight": np.ones((3, 2), np.float32), "linear.bias": np.zeros(2, np.float32)}


def test_names_and_dtypes_of_the_file(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    folder = write(
        tmp_path,
        **{
            "fc.weight": weight.astype(ml_dtypes.bfloat16),
            "fc.bias": np.array([1, 2], np.float16),
            "old_scale": np.array([5, 6], np.float64),
            "mask": np.zeros(9, bool),
        },
    )
    names = NameTable(
        [
            StoredAs("linear.*", "model.fc.*", transpose=True),
            StoredAs("scale", "model.scale", otherwise="model.old_scale"),
        ],
        ignored=["mask"],
        prefix="model.",
    )
    head = Head()
    checkpoint.load_huggingface(head, folder, names)
    assert head.linear.weight.tolist() == weight.T.tolist()
    assert head.linear.bias.tolist() == [1, 2]
    assert head.scale.tolist() == [5, 6]
    assert {one.dtype for one in head.named_variables().values()} == {ft.float32}


def test_all_that_does_not_fit_is_told_and_nothing_is_loaded(tmp_path: Path) -> None:
    tensors = {
        "linear.weight": np.ones((3, 5), np.float32),
        "linear.bias": np.ones(2, np.int32),
        "extra.a": np.ones(1, np.float32),
        "extra.b": np.ones(1, np.float32),
    }
    head = Head()
    with pytest.raises(CheckpointError) as told:
        checkpoint.load_huggingface(head, write(tmp_path, **tensors))
    assert str(told.value) == (
        f"{tmp_path} does not fit the model: 1 missing: scale (for scale); 2 unexpected: extra.a, extra.b; "
        "2 mismatched: linear.weight (there float32[3, 5], here float32[3, 2] for linear.weight), "
        "linear.bias (there int32[2], here float32[2] for linear.bias); check the model's sizes and the table"
    )
    assert head.scale.tolist() == [1, 1]
    assert head.linear.bias.tolist() == [0, 0]


def test_tables_that_do_not_fit(tmp_path: Path) -> None:
    folder = write(tmp_path, **FITTING)
    with pytest.raises(CheckpointError, match=r"1 missing: scale \(no line of the name table is for it\)"):
        checkpoint.load_huggingface(Head(), folder, NameTable([StoredAs("linear.*", "linear.*")]))
    lacking = NameTable([StoredAs(("linear.*", "other.*"), "linear.*"), StoredAs("scale", "linear.bias")])
    with pytest.raises(CheckpointError, match=r"mismatched: linear.weight \(the model has no other.weight\)"):
        checkpoint.load_huggingface(Head(), folder, lacking)
    unlike = NameTable([StoredAs(("linear.weight", "scale"), "linear.weight"), StoredAs("linear.bias", "linear.bias")])
    with pytest.raises(CheckpointError, match=r"scale of shapes \(3, 2\), \(2,\) cannot be joined"):
        checkpoint.load_huggingface(Head(), folder, unlike)
    for table, message in [
        (NameTable([StoredAs("linear.*", "fc.*")]), "no line of the table names scale"),
        (lacking, "the model has no other.bias, which the table joins to others"),
        (unlike, r"linear.weight and scale cannot be joined as linear.weight: they are float32\[3, 2\]"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            checkpoint.export_huggingface(Head(), tmp_path / "out", names=table)
    with pytest.raises(ArgumentError, match="all names need the same number of wildcards; they have "):
        StoredAs("layers.*.up", "up")
    with pytest.raises(ArgumentError, match="comm= is for a state; a checkpoint is exported by one rank"):
        checkpoint.export_huggingface(tmp_path, tmp_path / "out", comm=fp.IdentityComm())


def test_what_is_exported_is_cast_and_loaded_again(tmp_path: Path) -> None:
    names = NameTable([StoredAs("linear.*", "fc.*", transpose=True), StoredAs("scale", "scale")])
    head, fresh = Head("float64"), Head("float64")
    checkpoint.export_huggingface({"linear": head.linear, "scale": head.scale}, tmp_path, names=names, dtype="bfloat16")
    stored = checkpoint.read_huggingface(tmp_path)
    assert {key: (one.dtype.name, one.shape) for key, one in stored.items()} == {
        "fc.weight": ("bfloat16", (2, 3)),
        "fc.bias": ("bfloat16", (2,)),
        "scale": ("bfloat16", (2,)),
    }
    checkpoint.load_huggingface(fresh, tmp_path, names)
    wanted = head.linear.weight.numpy().astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(fresh.linear.weight.numpy(), wanted)

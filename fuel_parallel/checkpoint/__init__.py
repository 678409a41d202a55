"""Checkpoints: the state of a run in files that survive it, saved by all ranks and loaded onto any number of them.

>>> import tempfile
>>> import fuel_parallel as fp
>>> from fuel_parallel import checkpoint
>>> model = fp.Linear(3, 2, fp.lazy.random.Generator(0))
>>> with tempfile.TemporaryDirectory() as runs:
...     _ = checkpoint.save(runs, {"model": model, "position": 640}, step=10)
...     fresh = fp.Linear(3, 2, fp.lazy.random.Generator(1))
...     loaded = checkpoint.load(runs, {"model": fresh, "position": 0})
>>> loaded.step, loaded.state["position"], bool(fp.lazy.all(fresh.weight == model.weight))
(10, 640, True)

A checkpoint is a folder: a safetensors file for each rank that wrote, and a manifest, which is written last and proves
that the rest is there. Nothing in it is executed when it is read.
"""

from fuel_parallel.checkpoint.exporting import export_huggingface
from fuel_parallel.checkpoint.folders import steps
from fuel_parallel.checkpoint.huggingface import StoredArray, read_huggingface
from fuel_parallel.checkpoint.loading import Loaded, latest, load
from fuel_parallel.checkpoint.names import NameTable, StoredAs
from fuel_parallel.checkpoint.pretrained import load_huggingface
from fuel_parallel.checkpoint.saving import Saving, save
from fuel_parallel.checkpoint.verifying import verify
from fuel_parallel.module import Shard

__all__ = [
    "Loaded",
    "NameTable",
    "Saving",
    "Shard",
    "StoredArray",
    "StoredAs",
    "export_huggingface",
    "latest",
    "load",
    "load_huggingface",
    "read_huggingface",
    "save",
    "steps",
    "verify",
]

"""examples/embed.py embeds the sentences of benchmarks/embed.py: shared over dp, matrices over tp."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import worker

import fuel_parallel as fp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def prepare() -> worker.Prepare:
    """Loads this rank's part of the model, and its sentences."""
    import embed

    job = json.loads((Path(sys.argv[1]) / "job.json").read_text("utf-8"))
    mesh = fp.Mesh.from_environment()
    dp, tp = (mesh[name] if name in mesh else fp.IdentityComm() for name in ("dp", "tp"))
    mine = sorted(job["sentences"], key=lambda sentence: -len(sentence))[dp.rank :: dp.world_size]
    embedder = embed.Embedder.read(Path(job["model"]), tp)
    return lambda number: lambda: float(embedder(mine).mean(dtype="float64"))


if __name__ == "__main__":
    fp.init()
    worker.answer(prepare, f"fuel-parallel {fp.__version__}")

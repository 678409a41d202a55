"""sentence-transformers embeds the sentences of benchmarks/embed.py; each rank its share, with THREADS threads."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import sentence_transformers
import torch
import worker


def prepare() -> worker.Prepare:
    """Loads the model and this rank's sentences."""
    torch.set_num_threads(int(os.environ["THREADS"]))
    job = json.loads((Path(sys.argv[1]) / "job.json").read_text("utf-8"))
    rank, size = worker.place()
    # Dealt out by length as ours are, so that shares take equally long.
    mine = sorted(job["sentences"], key=lambda sentence: -len(sentence))[rank::size]
    model = sentence_transformers.SentenceTransformer(job["model"], device="cpu")

    def step() -> float:
        return float(model.encode(mine, batch_size=32).mean(dtype="float64"))

    return lambda number: step


if __name__ == "__main__":
    worker.answer(prepare, f"sentence-transformers {sentence_transformers.__version__}, torch {torch.__version__}")

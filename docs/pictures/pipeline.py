"""Traces a pipeline on two ranks and draws its step below the prediction: docs/pictures/pipeline.svg."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import numpy as np
import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.pipeline_parallel import PipelineModel, PipelineRunner, StageAssignment, build

world = fp.init()
schedule = build("zb-h1", world.world_size, 6)
generator = ft.random.Generator(0)


class Layer(fp.Module):
    def __init__(self):
        self.hidden = fp.Linear(256, 1024, generator)
        self.out = fp.Linear(1024, 256, generator)

    def __call__(self, x):
        return x + self.out(ft.gelu(self.hidden(x), approximate=True))


model = PipelineModel([Layer() for _ in range(8)], StageAssignment.uniform(8, 2), schedule, world.rank)
fp.realize(model)
runner = PipelineRunner(model.stages, schedule, world, loss=lambda y, t: ft.mean((y - t) ** 2))
x = np.random.default_rng(0).random((6 * 128, 256), dtype=np.float32)
for _ in range(22):
    fp.realize(runner.step(x, x).gradients)
"""

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "train.py").write_text(SCRIPT)
    fuelrun = [sys.executable, "-m", "fuelrun"]
    subprocess.run([*fuelrun, "-n", "2", "--trace", "out.json", "train.py"], cwd=folder, check=True)
    picture = Path(__file__).with_suffix(".svg").resolve()
    subprocess.run([*fuelrun, "trace", "out.json", "--pipeline", "--svg", str(picture)], cwd=folder, check=True)

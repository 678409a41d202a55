"""Traces a small model on two ranks and draws its last step: docs/pictures/trace.svg."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import numpy as np
import fuel_parallel as fp
import fuel_parallel.lazy as ft

world = fp.init()
draw = np.random.default_rng(world.rank)
generator = ft.random.Generator(0)


class Model(fp.Module):
    def __init__(self):
        self.hidden = [fp.Linear(512, 512, generator) for _ in range(3)]
        self.out = fp.Linear(512, 1024, generator)

    def __call__(self, x):
        for layer in self.hidden:
            x = x + ft.gelu(layer(x), approximate=True)
        return self.out(x)


model = Model()
optimizer = fp.optim.AdamW(model.parameters(), lr=1e-3)
fp.realize(model, optimizer)
for step in range(8):
    rows = 256 + 128 * world.rank                              # rank 1 has more to do
    x = ft.asarray(draw.random((rows, 512), dtype=np.float32))
    loss = ft.cross_entropy(model(x), ft.asarray(draw.integers(0, 1024, rows)))
    gradients = fp.data_parallel.average_gradients(ft.grad(loss, model.parameters()), world)
    optimizer.update(gradients)
    fp.realize(loss, model, optimizer)
"""

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "train.py").write_text(SCRIPT)
    fuelrun = [sys.executable, "-m", "fuelrun"]
    subprocess.run([*fuelrun, "-n", "2", "--trace", "out.json", "train.py"], cwd=folder, check=True)
    picture = Path(__file__).with_suffix(".svg").resolve()
    subprocess.run([*fuelrun, "trace", "--svg", str(picture), "out.json"], cwd=folder, check=True)

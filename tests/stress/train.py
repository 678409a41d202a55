"""A small training run for the tests that kill a rank of it: `train.py STEPS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

import fuel_parallel as fp
import fuel_parallel.lazy as ft

world = fp.init()
rng = np.random.default_rng(world.rank)
x = ft.asarray(rng.normal(size=(64, 32)).astype(np.float32))
weights = [fp.Parameter(ft.asarray(np.full((32, 32), 0.01 * k, np.float32))) for k in (1, 2)]
large = fp.Parameter(ft.zeros(100_000))
optimizer = fp.optim.AdamW([*weights, large], lr=1e-3)
for step in range(int(sys.argv[1])):
    loss = (ft.tanh(x @ weights[0]) @ weights[1]).mean() + (large * large).mean()
    gradients = fp.data_parallel.average_gradients(ft.grad(loss, [*weights, large]), world)
    optimizer.update(gradients)
    fp.realize(loss, optimizer)
    print(step, world.rank, loss.item())
    if world.world_size > 2 and step % 4 == 3:
        world.barrier()
Path(f"{os.environ['STRESS_KILL']}.{world.rank}.trained").touch()

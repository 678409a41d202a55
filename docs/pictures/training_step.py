"""Draws a layer's training step on one of four data-parallel ranks: docs/pictures/training_step.svg."""

from __future__ import annotations

from pathlib import Path

import fuel_parallel.lazy as ft
from fuel_parallel.comm import SymbolicComm

comm = SymbolicComm(rank=0, world_size=4)
x, target = ft.asarray([[1.0, 2.0, 3.0]]), ft.asarray([[0.0, 1.0]])
weight = ft.asarray([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
error = ft.tanh(x @ weight) - target
loss = ft.mean(error * error)
gradient = comm.all_reduce(ft.grad(loss, weight))
updated = weight - 0.1 * gradient
ft.show([loss, updated], Path(__file__).with_suffix(".svg"))

"""Draws the plan of a layer cut over two devices: docs/pictures/two_devices.svg."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import fuel_parallel as fp
import fuel_parallel.lazy as ft

group = fp.DeviceGroup(["cpu", "opencl:0"])
x = ft.asarray(np.ones((8, 6), np.float32))
columns = group.place(ft.asarray(np.ones((6, 16), np.float32)), dim=1)
rows = group.place(ft.asarray(np.ones((16, 6), np.float32)), dim=0)
hidden = [ft.relu(part @ weight) for part, weight in zip(group.broadcast(x), columns, strict=True)]
out = group.all_reduce([part @ weight for part, weight in zip(hidden, rows, strict=True)])
order = ft.argsort(hidden[1], axis=1)
ft.show([out, order], Path(__file__).with_suffix(".svg"), plan=True)

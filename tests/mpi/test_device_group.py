"""A GPT cut over the devices of one process learns as the same GPT cut over ranks."""

from __future__ import annotations

import numpy as np
import pytest
from gpt_on_devices import OnDevices, OnRanks, train, windows
from train_gpt import Config

import fuel_parallel as fp

CONFIG = Config(vocabulary=12, dim=16, layers=2, heads=4, context=6, dtype="float64")


@pytest.mark.mpi
def test_devices_of_one_process_and_ranks_have_the_same_losses():
    world = fp.init()

    def data():
        return windows(np.arange(60) * 7 % 12, 6, 2, 4, 0)

    over_ranks = train(OnRanks(CONFIG, world), data(), 0.5)
    over_devices = train(OnDevices(CONFIG, fp.DeviceGroup(["cpu"] * world.world_size)), data(), 0.5)
    assert over_ranks == pytest.approx(over_devices, rel=1e-10)
    assert over_ranks[0] != pytest.approx(over_ranks[-1], rel=1e-3)  # it has learnt something

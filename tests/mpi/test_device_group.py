"""A GPT cut over the devices of one process learns as the same GPT cut over ranks."""

from __future__ import annotations

import pytest
from gpt_on_devices import OnDevices, train_on_ranks

import fuel_parallel as fp


@pytest.mark.mpi
def test_devices_of_one_process_and_ranks_have_the_same_losses():
    world = fp.init()
    over_ranks = train_on_ranks(world, 4)
    over_devices = OnDevices(fp.DeviceGroup(["cpu"] * world.world_size)).train(4)
    assert over_ranks == pytest.approx(over_devices, rel=1e-10)
    assert over_ranks[0] != pytest.approx(over_ranks[-1], rel=1e-3)  # it has learnt something

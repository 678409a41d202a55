"""What is left in /dev/shm of a job that was killed: nothing of the windows that collectives use."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

SHARED = Path("/dev/shm")

SCRIPT = """
import os, signal, time
import numpy as np
import fuel_parallel as fp

def mapped():
    with open("/proc/self/maps") as lines:
        return {line.split(None, 5)[5].strip() for line in lines if "/dev/shm/" in line}

world = fp.init()
world.barrier()
before = mapped()
bucket = world.transport.allocate(4 << 20).view(np.float32)
bucket[:] = 1
world.transport.all_reduce(bucket, fp.ReduceOp.SUM, bucket)
with open(f"windows-{world.rank}.part", "w") as file:
    file.write("\\n".join(sorted(mapped() - before)))
os.rename(f"windows-{world.rank}.part", f"windows-{world.rank}")
world.barrier()
if world.rank == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    world.transport.all_reduce(bucket, fp.ReduceOp.SUM, bucket)
"""


@pytest.mark.skipif(not SHARED.is_dir(), reason="windows lie elsewhere")
def test_a_killed_rank_leaves_no_window(fuelrun) -> None:
    process = fuelrun.start("-n", "2", fuelrun.write(SCRIPT), FUEL_NODE_LOCAL="1")
    fuelrun.wait_for("windows-?", 2)
    windows = set((fuelrun.folder / "windows-0").read_text().splitlines())
    assert len(windows) >= 2, "scratch memory and the bucket"
    assert all(name.endswith("(deleted)") for name in windows), "unlinked while they are in use"
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert fuelrun.nobody_left_within(5)
    assert not [name for name in windows if Path(name.removesuffix(" (deleted)")).exists()]

"""What is left in /dev/shm of a job that was killed: nothing of the windows that collectives use."""

from __future__ import annotations

import mmap
import os
import signal
import time
from pathlib import Path

import pytest

from fuelrun.launch import shared_memory
from fuelrun.launch.shared_memory import SharedFiles

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


@pytest.mark.skipif(not SHARED.is_dir(), reason="windows lie elsewhere")
def test_a_file_that_another_job_is_about_to_map_is_left_to_it(monkeypatch) -> None:
    """A rank makes its segment, fills it, and maps it: for some milliseconds no process has it in its memory."""
    monkeypatch.setattr(shared_memory, "_STARTS_S", 1.0)
    names = [SHARED / f"sm_segment.test.{os.getpid()}.{number}.0" for number in range(2)]
    files = SharedFiles()
    try:
        for name in names:
            name.write_bytes(bytes(4096))
        files.remove(failed=True)
        assert all(name.exists() for name in names)
        with names[0].open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            deadline = time.monotonic() + 10
            while names[1].exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert [name.exists() for name in names] == [True, False]
    finally:
        for name in names:
            name.unlink(missing_ok=True)

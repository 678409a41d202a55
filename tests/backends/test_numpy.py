"""The memory that host arrays come from."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource
import numpy as np
import fuel_parallel.lazy

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for size in (200_000, 1_000_000, 8_000_000):
    for times in range(101):
        if times == 1:
            before = faults()
        a, b = np.ones(size, np.uint8), np.ones(size, np.uint8)
        del a, b
    print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True)
    counts = [int(line) for line in done.stdout.split()]
    assert len(counts) == 3
    assert max(counts) < 100, "each pair of arrays touches new pages"

"""The example of a GPT over devices: the same losses as over ranks, a picture of a step, and what it refuses."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fuel_parallel.backends import check_device
from fuel_parallel.errors import DeviceError

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SMALL = ("--steps", 3, "--dim", 16, "--layers", 1, "--context", 6, "--batch", 2, "--dtype", "float64")


def losses(run: subprocess.CompletedProcess[str]) -> list[str]:
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_devices_and_ranks_have_the_same_losses(start: Start, tmp_path: Path) -> None:
    second = "cpu"
    with contextlib.suppress(DeviceError):
        second = check_device("opencl:0")
    devices = losses(
        start("gpt_on_devices.py", *SMALL, "--devices", f"cpu,{second}", "--draw", "step.svg", folder=tmp_path)
    )
    assert len(devices) == 3
    assert len(set(devices)) == 3
    assert devices == losses(start("gpt_on_devices.py", *SMALL, ranks=2))
    drawn = (tmp_path / "step.svg").read_text("utf-8")
    assert "matmul" in drawn
    assert (f"cpu → {second}" in drawn) == (second != "cpu")


@pytest.mark.parametrize(
    ("words", "ranks", "text"),
    [
        (("--devices", "cpu,cpu"), 2, "--devices cpu,cpu: these are of one process, and there are 2 ranks"),
        (("--draw", "a.svg"), None, "--draw a.svg: draws what runs on which of --devices"),
        (("--devices", "cpu,npu:0"), None, "unknown device 'npu:0'"),
    ],
)
def test_mistakes_end_it_with_one_line(start: Start, words: tuple[str, ...], ranks: int | None, text: str) -> None:
    run = start("gpt_on_devices.py", *SMALL, *words, ranks=ranks)
    assert run.returncode == 2
    assert f"gpt_on_devices.py: {text}" in run.stderr
    assert "Traceback" not in run.stderr

"""One table of compute capabilities, for all formats that name GPUs."""

from __future__ import annotations

import re

import pytest

from fuel_parallel.topology import DeviceTopology
from fuel_parallel.topology.files import examine_text, write
from fuel_parallel.topology.model import DeviceInfo, DeviceKind, NumaDomain
from fuel_parallel.topology.rates import CAPABILITIES, NVLINK, TFLOPS, capability_of, nvlink


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("Tesla T4", 75),
        ("NVIDIA A10", 86),
        ("NVIDIA A100-SXM4-80GB", 80),
        ("NVIDIA GeForce RTX 3090", 86),
        ("NVIDIA L40S", 89),
        ("NVIDIA GH200 480GB", 90),
        ("NVIDIA B200", 100),
        ("NVIDIA A1000", None),
        ("", None),
    ],
)
def test_a_whole_word_of_the_name_says_the_capability(name: str, capability: int | None) -> None:
    assert capability_of(name) == capability


def test_what_has_a_speed_has_a_capability_and_each_capability_has_nvlinks_of_the_least_that_has_such() -> None:
    assert not TFLOPS.keys() - CAPABILITIES.keys()
    for capability in set(CAPABILITIES.values()):
        least = max(known for known in NVLINK if known <= capability)
        assert nvlink(capability, 3) == nvlink(least, 3)


@pytest.mark.parametrize("word", CAPABILITIES)
def test_nvidia_smi_and_nccl_agree_about_every_gpu(word: str) -> None:
    listed = "".join(f"GPU {n}: NVIDIA {word} (UUID: GPU-{n})\n" for n in (0, 1))
    matrix = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tNV2\t0-3\nGPU1\tNV2\tX\t0-3\n"
    found = examine_text(listed + matrix).topology.link("cuda:0", "cuda:1")
    assert found == nvlink(CAPABILITIES[word], 2)
    t = DeviceTopology()
    t.add_numa(NumaDomain(id="numa:0", index=0))
    t.add_device(DeviceInfo(id="cuda:0", kind=DeviceKind.CUDA, name=f"NVIDIA {word}", bus="0000:01:00.0", numa=0))
    assert re.findall(r'sm="(\d+)"', write(t, "nccl")) == [str(CAPABILITIES[word])]

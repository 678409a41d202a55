"""Measured links of GPUs, on the stand-in, whose copies take the time of the host's memory."""

from __future__ import annotations

import pytest
from stand_in import StandInBackend, StandInMemory

from fuel_parallel.backends import available_devices
from fuel_parallel.comm.speed import device_links
from fuel_parallel.comm.speed.device_links import measure_devices, with_measured
from fuel_parallel.topology import (
    DeviceInfo,
    DeviceKind,
    DeviceTopology,
    Interconnect,
    Link,
    NumaDomain,
    Origin,
    Switch,
)
from fuel_parallel.topology.probe import probe


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {f"cuda:{n}": StandInBackend(StandInMemory(f"plain:{n}")) for n in range(3)}
    monkeypatch.setattr(device_links, "available_devices", lambda: ["cpu", *backends])
    monkeypatch.setattr(device_links, "backend_of", lambda name: backends[name])


def machine(prefix: str = "") -> DeviceTopology:
    """GPUs 0 and 1 on an NVSwitch and a PCI switch, GPU 2 alone, and one that this process cannot see."""
    t = DeviceTopology("machine")
    node = prefix.rstrip("/")
    t.add_numa(NumaDomain(id=f"{prefix}numa:0", node=node, index=0))
    t.add_device(DeviceInfo(id=f"{prefix}cpu:0", node=node, kind=DeviceKind.CPU))
    pcie, nvlink = Link(interconnect=Interconnect.PCIE), Link(interconnect=Interconnect.NVLINK, count=4)
    for name, kind in (("pci:0", Interconnect.PCIE), ("nvswitch", Interconnect.NVLINK)):
        t.add_switch(Switch(id=prefix + name, node=node, kind=kind))
    t.add_link(f"{prefix}pci:0", f"{prefix}numa:0", pcie)
    for n in range(4):
        t.add_device(DeviceInfo(id=f"{prefix}cuda:{n}", node=node, kind=DeviceKind.CUDA))
        t.add_link(f"{prefix}cuda:{n}", f"{prefix}{'pci:0' if n < 2 else 'numa:0'}", pcie)
        if n < 2:
            t.add_link(f"{prefix}cuda:{n}", f"{prefix}nvswitch", nvlink)
    return t


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("prefix", ["", "n1/"])
def test_each_link_of_a_gpu_gets_figures_in_both_directions(prefix: str) -> None:
    t = machine(prefix)
    measured = with_measured(t, measure_devices(t, nbytes=1 << 16))
    for source, target in [
        ("cuda:0", "pci:0"),
        ("cuda:1", "pci:0"),
        ("cuda:2", "numa:0"),
        ("cuda:0", "nvswitch"),
        ("cuda:1", "nvswitch"),
    ]:
        for link in (measured.link(prefix + source, prefix + target), measured.link(prefix + target, prefix + source)):
            assert link.origin is Origin.MEASURED
            assert link.bandwidth_mb_s > 1
            assert link.latency_us > 0
            assert link.interconnect is t.link(prefix + source, prefix + target).interconnect
    # What nobody could measure stays as it was: beyond the PCI switch, and of a GPU that is hidden.
    assert measured.link(f"{prefix}pci:0", f"{prefix}numa:0") == t.link(f"{prefix}pci:0", f"{prefix}numa:0")
    assert measured.link(f"{prefix}cuda:3", f"{prefix}numa:0") == t.link(f"{prefix}cuda:3", f"{prefix}numa:0")
    assert measured.device_ids() == t.device_ids()


@pytest.mark.usefixtures("gpus")
def test_direct_links_are_measured_each_way_and_pci_between_gpus_is_not() -> None:
    t = DeviceTopology()
    for n in range(3):
        t.add_device(DeviceInfo(id=f"cuda:{n}", kind=DeviceKind.CUDA))
    t.add_link("cuda:0", "cuda:1", Link(interconnect=Interconnect.INFINITY_FABRIC))
    t.add_link("cuda:1", "cuda:2", Link(interconnect=Interconnect.PCIE))
    assert {(m.source, m.target) for m in measure_devices(t, nbytes=1 << 16)} == {
        ("cuda:0", "cuda:1"),
        ("cuda:1", "cuda:0"),
    }


def test_without_gpus_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_links, "available_devices", lambda: ["cpu"])
    assert measure_devices(machine()) == []


@pytest.mark.gpu
def test_the_gpus_of_this_machine_are_measured() -> None:
    if not any(name.startswith(("cuda", "rocm")) for name in available_devices()):
        pytest.skip("CuPy sees no CUDA or ROCm device")
    t = probe()
    figures = {(m.source, m.target): m for m in measure_devices(t)}
    gpus = [d.id for d in t.devices if d.kind is not DeviceKind.CPU]
    for gpu in gpus:
        assert all(m.mb_s > 100 and m.us > 0 for (source, target), m in figures.items() if gpu in (source, target))

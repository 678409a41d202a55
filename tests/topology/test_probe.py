"""Probing machines: this one, and others that exist as folders of files and as a stand-in for NVML."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuel_parallel.topology import DeviceKind, DeviceTopology, Interconnect
from fuel_parallel.topology.cgroup import quota
from fuel_parallel.topology.cores import format_list, parse_list
from fuel_parallel.topology.model import gb_s
from fuel_parallel.topology.probe import probe
from fuel_parallel.topology.probe.cpu import allowed_cores
from fuel_parallel.topology.probe.nvidia import visible
from fuel_parallel.topology.probe.pci import normal
from fuel_parallel.topology.sysfs import Sysfs


class Machine:
    """Files of /sys and /proc, in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def link(self, path: str, target: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(self.root / target)

    def cpus(self, domains: list[str], vendor: str = "AuthenticAMD", allowed: str = "") -> None:
        every = ",".join(domains)
        model = f"vendor_id\t: {vendor}\nmodel\t\t: 143\nmodel name\t: Some CPU"
        self.write("proc/cpuinfo", model)
        self.write("sys/devices/system/cpu/online", every)
        self.write("proc/self/status", f"Name:\tx\nCpus_allowed_list:\t{allowed or every}")
        for number, cores in enumerate(domains):
            self.write(f"sys/devices/system/node/node{number}/cpulist", cores)
            self.write(f"sys/devices/system/node/node{number}/meminfo", f"Node {number} MemTotal:  1024 kB")

    def card(self, *chain: str, numa: int = 0, speed: str = "16.0 GT/s PCIe", width: int = 16) -> None:
        """A card at the end of a chain of PCI addresses that begins with the port of the host bridge."""
        path = "sys/devices/pci0000:00/" + "/".join(chain)
        for depth, address in enumerate(chain):
            folder = "sys/devices/pci0000:00/" + "/".join(chain[: depth + 1])
            self.write(f"{folder}/max_link_speed", speed)
            self.write(f"{folder}/max_link_width", width)
            self.write(f"{folder}/numa_node", numa)
            if not (self.root / f"sys/bus/pci/devices/{address}").exists():
                self.link(f"sys/bus/pci/devices/{address}", folder)
        self.write(f"{path}/local_cpulist", "0-3")


class FakeNvml:
    """What is asked of NVML, for GPUs given as (bus, remote ends of NVLinks)."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus: list[tuple[str, list[str]]], name: str = "NVIDIA A100-SXM4-80GB") -> None:
        self.gpus, self.name, self.up = gpus, name, False

    def nvmlInit(self) -> None:
        self.up = True

    def nvmlShutdown(self) -> None:
        self.up = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}abc"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.name

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"0000{self.gpus[handle][0].upper()}".encode())

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 * 2**30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 8, 0

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= len(self.gpus[handle][1]):
            raise self.NVMLError("no such link")
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.gpus[handle][1][link])


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(autouse=True)
def all_devices_are_visible(monkeypatch) -> None:
    for variable in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)


def test_this_machine_has_the_cores_that_this_process_may_use() -> None:
    t = probe()
    cores = [core for d in t.devices_of_kind(DeviceKind.CPU) for core in parse_list(d.cores)]
    assert sorted(cores) == sorted(os.sched_getaffinity(0))
    assert all(d.memory_bytes for d in t.devices_of_kind(DeviceKind.CPU))
    assert DeviceTopology.from_description(t.description()) == t


def test_fewer_cores_after_binding() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        (cpu,) = probe().devices_of_kind(DeviceKind.CPU)
    finally:
        os.sched_setaffinity(0, before)
    assert cpu.cores == str(max(before))


def test_sockets_of_which_a_container_has_a_part(machine) -> None:
    machine.cpus(["0-15,32-47", "16-31,48-63"], allowed="3,40")
    t = probe("n1", root=machine.root)
    (cpu,) = t.devices
    assert (cpu.id, cpu.cores, cpu.numa, cpu.name, cpu.memory_bytes) == ("n1/cpu:0", "3,40", 0, "Some CPU", 1 << 20)
    assert [n.cores for n in t.numa_domains] == ["0-15,32-47", "16-31,48-63"]
    between = t.link("n1/numa:0", "n1/numa:1")
    assert between is not None
    assert gb_s(between.bandwidth_mb_s) == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, [(0, "0-2")]),
        (2, [(0, "0-2"), (1, "3-5")]),
        (4, [(0, "0-1"), (0, "2"), (1, "4"), (1, "5")]),
        (6, [(0, "0"), (0, "1"), (0, "2"), (1, "3"), (1, "4"), (1, "5")]),
        (8, [(0, "0"), (0, "1"), (0, "2"), (1, "3"), (1, "4"), (1, "5"), (0, "0"), (0, "1")]),
    ],
)
def test_a_device_for_each_rank(machine, ranks, expected) -> None:
    """Cores of one domain each; more ranks than cores share them."""
    machine.cpus(["0-2", "3-5"])
    t = probe(root=machine.root, ranks=ranks)
    assert [(d.numa, d.cores) for d in t.devices] == expected
    assert [d.id for d in t.devices] == [f"cpu:{n}" for n in range(ranks)]


def test_a_processor_of_unknown_make_has_links_of_unknown_speed(machine) -> None:
    machine.cpus(["0", "1"], vendor="Other")
    assert probe(root=machine.root).bandwidth_mb_s("cpu:0", "cpu:1") is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "250000 100000"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "250000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "100000 100000",
            },
            1.0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/job",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            4.0,
        ),
        ({"proc/self/cgroup": "3:cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1"}, None),
        ({"proc/self/cgroup": "0::/../../etc", "sys/fs/cgroup/cpu.max": "garbage"}, None),
        ({}, None),
    ],
)
def test_the_time_that_a_container_gets(machine, files, expected) -> None:
    for path, text in files.items():
        machine.write(path, text)
    assert quota(Sysfs(machine.root)) == expected


def test_gpus_behind_a_switch_and_on_another_socket(machine) -> None:
    machine.cpus(["0-3", "4-7"])
    root, up = "0000:01:00.0", "0000:02:00.0"
    machine.card(root, up, "0000:03:00.0", "0000:04:00.0")
    machine.card(root, up, "0000:03:01.0", "0000:05:00.0")
    machine.card("0000:80:00.0", "0000:81:00.0", numa=1, speed="8.0 GT/s PCIe")
    nvml = FakeNvml([("0000:04:00.0", []), ("0000:05:00.0", []), ("0000:81:00.0", [])])
    t = probe(root=machine.root, nvml=nvml)
    assert not nvml.up
    near, far = t.route("cuda:0", "cuda:1"), t.route("cuda:0", "cuda:2")
    assert near.parts == ("cuda:0", "pci:0000:02:00.0", "cuda:1")
    assert far.parts == ("cuda:0", "pci:0000:02:00.0", "numa:0", "numa:1", "cuda:2")
    assert gb_s(near.bandwidth_mb_s) == pytest.approx(24.0)
    assert gb_s(far.bandwidth_mb_s) == pytest.approx(12.0)
    gpu = t.device("cuda:2")
    assert (gpu.kind, gpu.numa, gpu.bus, gpu.memory_bytes) == (DeviceKind.CUDA, 1, "0000:81:00.0", 80 * 2**30)
    assert (gpu.name, gpu.tflops, gpu.cores) == ("NVIDIA A100-SXM4-80GB", 312.0, "0-3")


def test_nvlinks_to_each_other_and_to_a_switch(machine) -> None:
    machine.cpus(["0-3"])
    buses = [f"0000:0{n}:00.0" for n in range(1, 5)]
    for bus in buses:
        machine.card(bus)
    switch = "00000000:C4:00.0"
    pairs = FakeNvml([(buses[0], [buses[1]] * 2), (buses[1], [buses[0]] * 2)])
    t = probe(root=machine.root, nvml=pairs)
    assert (t.link("cuda:0", "cuda:1").path, t.link("cuda:0", "cuda:1").count) == ("NV2", 2)
    assert gb_s(t.bandwidth_mb_s("cuda:0", "cuda:1")) == pytest.approx(40.0)
    switched = probe("h", root=machine.root, nvml=FakeNvml([(bus, [switch] * 12) for bus in buses]))
    route = switched.route("h/cuda:0", "h/cuda:3")
    assert route.parts == ("h/cuda:0", "h/nvswitch", "h/cuda:3")
    assert (gb_s(route.bandwidth_mb_s), route.interconnect) == (pytest.approx(240.0), Interconnect.NVLINK)


def test_a_link_to_a_hidden_gpu_is_no_link_to_a_switch(machine, monkeypatch) -> None:
    machine.cpus(["0-3"])
    buses = ["0000:01:00.0", "0000:02:00.0"]
    for bus in buses:
        machine.card(bus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    t = probe(root=machine.root, nvml=FakeNvml([(buses[0], [buses[1]]), (buses[1], [buses[0]])]))
    assert [d.bus for d in t.devices_of_kind(DeviceKind.CUDA)] == [buses[1]]
    assert t.switches == []


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(None, [0, 1, 2]), ("2,0", [2, 0]), ("1,7,0", [1]), ("", []), ("GPU-b,GPU-a", [1, 0]), ("GPU-", []), ("-1", [])],
)
def test_visible_gpus_are_numbered_as_cuda_does(monkeypatch, setting, expected) -> None:
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert visible(3, ["GPU-a", "GPU-b", "GPU-c"]) == expected


def test_without_a_driver_there_are_no_gpus(machine) -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("driver not loaded")

    machine.cpus(["0-3"])
    assert [d.kind for d in probe(root=machine.root, nvml=NoDriver([])).devices] == [DeviceKind.CPU]


def test_amd_gpus_and_their_fabric(machine) -> None:
    machine.cpus(["0-3"])
    nodes = "sys/class/kfd/kfd/topology/nodes"
    machine.write(f"{nodes}/0/properties", "cpu_cores_count 4\nsimd_count 0")
    for number, bus in ((1, 0xC1), (2, 0xC6)):
        machine.card(f"0000:{bus:02x}:00.0")
        facts = f"simd_count 440\ngfx_target_version 90010\nlocation_id {bus << 8}\ndomain 0"
        machine.write(f"{nodes}/{number}/properties", facts)
        machine.write(f"{nodes}/{number}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {64 << 30}")
        link = f"type 11\nnode_from {number}\nnode_to {3 - number}\nmin_bandwidth 50000\nmax_bandwidth 200000"
        machine.write(f"{nodes}/{number}/io_links/0/properties", "type 2\nnode_to 0")
        machine.write(f"{nodes}/{number}/io_links/1/properties", link)
    t = probe(root=machine.root)
    gpu = t.device("rocm:1")
    assert (gpu.name, gpu.memory_bytes, gpu.bus) == ("gfx90a", 64 << 30, "0000:c6:00.0")
    link = t.link("rocm:0", "rocm:1")
    assert link == t.link("rocm:1", "rocm:0")
    assert (link.count, link.interconnect, gb_s(link.bandwidth_mb_s)) == (
        4,
        Interconnect.INFINITY_FABRIC,
        pytest.approx(144.0),
    )


def test_cards_by_their_best_name_and_only_once(machine) -> None:
    machine.cpus(["0-3"])
    machine.card("0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:17:00.0")
    device = "sys/devices/pci0000:00/0000:01:00.0/0000:02:00.0/0000:03:00.0/0000:17:00.0"
    machine.link("sys/class/infiniband/mlx5_0/device", device)
    machine.write("sys/class/infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)")
    machine.link("sys/class/net/ib0/device", device)
    machine.card("0000:19:00.0")
    machine.write("sys/devices/pci0000:00/0000:19:00.0/virtio3/x", "")
    machine.link("sys/class/net/eth0/device", "sys/devices/pci0000:00/0000:19:00.0/virtio3")
    machine.write("sys/class/net/eth0/speed", "-1")
    machine.write("sys/class/net/lo/speed", "10")
    t = probe(root=machine.root)
    assert [(n.id, n.bus, n.numa) for n in t.nics] == [
        ("nic:mlx5_0", "0000:17:00.0", 0),
        ("nic:eth0", "0000:19:00.0", 0),
    ]
    assert gb_s(t.nics[0].speed_mb_s) == pytest.approx(25.0)
    assert t.nics[1].speed_mb_s is None
    assert t.route("nic:mlx5_0", "cpu:0").parts == ("nic:mlx5_0", "pci:0000:02:00.0", "numa:0", "cpu:0")


def test_a_machine_without_any_files_has_cores(machine) -> None:
    t = probe(root=machine.root)
    assert [d.cores for d in t.devices] == [format_list(range(os.cpu_count()))]
    assert allowed_cores(Sysfs(machine.root)) == frozenset()


def test_odd_files_are_not_believed(machine) -> None:
    machine.cpus(["0-3"])
    machine.write("sys/devices/system/node/node0/cpulist", "0-99999999999")
    machine.write("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: lots")
    machine.card("0000:01:00.0", numa=-1, speed="Unknown", width=255)
    t = probe(root=machine.root, nvml=FakeNvml([("0000:01:00.0", [])]))
    assert t.bandwidth_mb_s("cuda:0", "cpu:0") is None


def test_addresses_are_written_one_way() -> None:
    assert normal("00000000:3B:00.0") == normal("3b:00.0") == normal("0000:3b:00.0") == "0000:3b:00.0"

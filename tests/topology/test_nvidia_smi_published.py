"""What people have published of `nvidia-smi topo -m` and `nvidia-smi -L`, read by hand."""

from __future__ import annotations

import pytest

from fuel_parallel.errors import TopologyFileError
from fuel_parallel.topology import Interconnect, files
from tests.topology.nvidia_smi_texts import (
    path,
    paths,
)
from tests.topology.real_files import real


def test_a_dgx1() -> None:
    reading = files.examine(real("nvsmi_dgx1_v100_8gpu_4nic_indented.txt"))
    t = reading.topology
    assert (reading.format.name, len(t), len(t.nics), len(list(t.connections()))) == ("nvidia-smi", 8, 4, 66)
    assert [t.device(f"cuda:{n}").cores for n in (0, 3, 4, 7)] == ["0-19,40-59"] * 2 + ["20-39,60-79"] * 2
    assert (t.device("cuda:0").numa, t.numa_domains) == (None, [])  # there is no such column
    nvlinks = {pair: p for pair, p in paths(t, 8).items() if p.startswith("NV")}
    assert {pair for pair, p in nvlinks.items() if p == "NV2"} == {
        (0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7),
    }  # fmt: skip
    # A V100 has six NVLinks.
    assert [sum(int(p[2:]) for pair, p in nvlinks.items() if n in pair) for n in range(8)] == [6] * 8
    assert (path(t, "cuda:0", "cuda:5"), path(t, "cuda:2", "nic:mlx5_1")) == ("SYS", "PIX")
    assert path(t, "nic:mlx5_2", "nic:mlx5_3") == "PHB"
    link = t.link("cuda:0", "cuda:3")
    assert link is not None
    assert (link.interconnect, link.count, link.bandwidth_mb_s) == (Interconnect.NVLINK, 2, None)


def test_a_dgx_a100_with_twelve_cards() -> None:
    t = files.read(real("nvsmi_dgxa100_8gpu_12mlx5_oldcols.txt"))
    assert (len(t), len(t.nics), len(list(t.connections()))) == (8, 12, 190)
    assert set(paths(t, 8).values()) == {"NV12"}
    assert [d.numa for d in t.devices] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert {n.index: n.cores for n in t.numa_domains} == {
        1: "16-31,144-159",
        3: "48-63,176-191",
        5: "80-95,208-223",
        7: "112-127,240-255",
    }
    assert [path(t, "cuda:4", f"nic:mlx5_{n}") for n in range(4, 8)] == ["SYS", "SYS", "PXB", "PXB"]
    assert path(t, "nic:mlx5_10", "nic:mlx5_11") == "PIX"


def test_eight_v100_between_tabs() -> None:
    t = files.read(real("nvsmi_v100_8gpu_2mlx5_tabs_bareX.txt"))
    ways = paths(t, 8)
    assert (len(t), len(t.nics), len(list(t.connections()))) == (8, 2, 45)
    assert [sum(int(p[2:]) for pair, p in ways.items() if n in pair and p != "SYS") for n in range(8)] == [6] * 8
    assert (ways[0, 7], ways[2, 5], ways[3, 4]) == ("NV2", "NV1", "NV1")
    assert [d.numa for d in t.devices] == [0] * 4 + [1] * 4
    assert (path(t, "cuda:0", "nic:mlx5_0"), path(t, "cuda:2", "nic:mlx5_0")) == ("NODE", "PIX")


def test_four_h100_and_four_cards_without_a_legend_of_them() -> None:
    reading = files.examine(real("nvsmi_4xh100_nv6_4nic.txt"))
    t = reading.topology
    assert (len(t), len(t.nics), len(list(t.connections()))) == (4, 4, 28)
    assert set(paths(t, 4).values()) == {"NV6"}
    assert [[path(t, f"cuda:{a}", f"nic:NIC{b}") == "PIX" for b in range(4)].index(True) for a in range(4)] == [
        0,
        1,
        2,
        3,
    ]
    assert [(d.numa, d.cores) for d in t.devices] == [
        (3, "6,14,22,30"), (1, "4,12,20,28"), (7, "7,15,23,31"), (5, "5,13,21,29"),
    ]  # fmt: skip
    assert reading.notes == ("no legend says which card NIC0, NIC1, NIC2, NIC3 is",)


def test_six_gpus_on_pci_with_colours() -> None:
    reading = files.examine(real("nvsmi_6gpu_pcie_ansi_kvroute.txt"))
    t = reading.topology
    assert ["which hides NVLinks" in note for note in reading.notes] == [True]  # somebody shortened its legend
    ways = paths(t, 6)
    assert {pair for pair, p in ways.items() if p == "PIX"} == {(0, 1), (2, 3), (4, 5)}
    assert {pair for pair, p in ways.items() if p == "NODE"} == {(0, 2), (0, 3), (1, 2), (1, 3)}
    assert sum(p == "SYS" for p in ways.values()) == 8
    assert {n.index: n.cores for n in t.numa_domains} == {0: "0-23,48-71", 1: "24-47,72-95"}
    assert t.bandwidth_mb_s("cuda:0", "cuda:1") is None  # nobody knows which PCI generation


def test_four_gpus_between_spaces() -> None:
    t = files.read(real("nvsmi_4gpu_phb_consumer_spaces.txt"))
    assert (len(t), set(paths(t, 4).values())) == (4, {"PHB"})
    assert {(d.numa, d.cores) for d in t.devices} == {(0, "0-15")}


def test_two_gpus_without_a_legend() -> None:
    t = files.read(real("nvsmi_2gpu_a100pcie_node_kvm_docs.txt"))
    assert (paths(t, 2), {(d.numa, d.cores) for d in t.devices}) == ({(0, 1): "NODE"}, {(1, "28-55,84-111")})


def test_two_gpus_with_a_broken_legend_and_a_matrix_of_access_below() -> None:
    reading = files.examine(real("nvsmi_2gpu_node_wrapped_legend_indented.txt"))
    assert (paths(reading.topology, 2), len(reading.topology)) == ({(0, 1): "NODE"}, 2)
    assert {(d.numa, d.cores) for d in reading.topology.devices} == {(0, "0-15")}
    (note,) = reading.notes
    assert note.startswith("line 19: peer-to-peer access does not work from GPU0 to GPU1 (NS), GPU1 to GPU0 (NS)")


@pytest.mark.parametrize(
    ("name", "cores"),
    [
        ("linux-x86_64__nvidia-geforce-rtx-2080-super__595.71.05", "0-23"),
        ("linux-x86_64__nvidia-geforce-rtx-2080-super__610.57.04", "0-23"),
        ("linux-x86_64__nvidia-geforce-rtx-4080-super__595.71.05", "0-15"),
        ("linux-x86_64__nvidia-h100-80gb-hbm3__590.48.01", "0-19"),
        ("linux-x86_64__nvidia-h100-mig__590.48.01", "0-19"),
        ("linux-x86_64__nvidia-h200__590.48.01", "0-23"),
        ("windows-x86_64__nvidia-geforce-rtx-2080-super__610.62", ""),
    ],
)
def test_a_gpu_by_itself(name: str, cores: str) -> None:
    reading = files.examine(real(f"nvsmi_capture_{name}.txt"))
    (device,) = reading.topology.devices
    assert (device.id, device.cores, device.numa) == ("cuda:0", cores, 0 if cores else None)
    assert (list(reading.topology.connections()), reading.notes) == ([], ())


def test_an_old_driver_on_windows_has_no_matrix() -> None:
    with pytest.raises(TopologyFileError, match="line 1: an error of nvidia-smi and no matrix: the driver of that"):
        files.read(real("nvsmi_capture_windows-x86_64__nvidia-geforce-rtx-2080-super__591.86.txt"))


def test_a_real_list_of_mig_instances() -> None:
    t = files.read(real("nvsmi_L_h100-mig.txt"))
    assert [(d.id, d.name.rsplit(" ", 1)[1]) for d in t.devices] == [
        ("cuda:0:mig:0", "3g.40gb"),
        ("cuda:0:mig:1", "2g.20gb"),
        ("cuda:0:mig:2", "1g.10gb"),
        ("cuda:0:mig:3", "1g.10gb"),
    ]

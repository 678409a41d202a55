"""hwloc's XML: real files of three versions by numbers counted by hand, each oddity, and hostile files."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import TopologyError, TopologyFileError
from fuel_parallel.topology import DeviceKind, DeviceTopology, Interconnect, Link
from fuel_parallel.topology.files import examine, examine_text
from fuel_parallel.topology.model import Cache, Origin, gb_s, mb_s
from tests.topology.real_files import real

HEADS = {
    1: '<!DOCTYPE topology SYSTEM "hwloc.dtd">\n<topology>\n',
    2: '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology version="2.0">\n',
    3: '<topology version="3.0">\n',
}


def file(inside: str, version: int = 2, after: str = "", cpuset: str = "0x0000000f") -> str:
    return (
        f'{HEADS[version]}<object type="Machine" cpuset="{cpuset}"><info name="HostName" value="h"/>\n'
        f"{inside}</object>\n{after}</topology>\n"
    )


def node(index: int, cpuset: str, inside: str = "", memory: str = "1024", **more: str) -> str:
    extra = "".join(f' {key}="{value}"' for key, value in more.items())
    head = f'<object type="NUMANode" os_index="{index}" cpuset="{cpuset}" local_memory="{memory}"{extra}>'
    return f"{head}{inside}</object>\n"


def card(bus: str, kind: str, inside: str = "", speed: str = "15.75", **more: str) -> str:
    extra = "".join(f' {key}="{value}"' for key, value in more.items())
    return (
        f'<object type="PCIDev" pci_busid="{bus}" pci_type="{kind} [0000:0000] a1" pci_link_speed="{speed}"{extra}>'
        f"{inside}</object>\n"
    )


def system_device(name: str, kind: int, gp: str = "", **infos: str) -> str:
    number = f' gp_index="{gp}"' if gp else ""
    inside = "".join(f'<info name="{key}" value="{value}"/>' for key, value in infos.items())
    return f'<object type="OSDev" name="{name}" osdev_type="{kind}"{number}>{inside}</object>'


def rate(t: DeviceTopology, a: str, b: str) -> float | None:
    found = t.bandwidth_mb_s(a, b)
    return None if found is None else round(gb_s(found), 3)


def link(t: DeviceTopology, a: str, b: str) -> Link:
    found = t.link(a, b)
    assert found is not None
    return found


# Real files. CPU devices, GPUs, network cards, NUMA domains, switches: counted in the files.


@pytest.mark.parametrize(
    ("name", "found", "notes"),
    [
        ("hwloc_v1_28intel64-2p2g7c-CoDgroups.xml", (4, 0, 2, 4, 4), 0),
        ("hwloc_v1_8em64t-2p2ca2co-nonodesets.xml", (1, 0, 3, 1, 3), 1),
        ("hwloc_v1_devel09-pci.xml", (2, 0, 3, 2, 0), 1),
        ("hwloc_v1_self_2core_vm.xml", (1, 0, 1, 1, 0), 0),
        ("hwloc_v2_self_2core_vm.xml", (1, 0, 1, 1, 0), 0),
        ("hwloc_v2_24em64t-2n6c2t-pci.xml", (2, 3, 3, 2, 0), 1),
        ("hwloc_v2_power8gpudistances.xml", (2, 4, 0, 2, 0), 0),
        ("hwloc_v3_16amd64-4distances.xml", (8, 0, 0, 8, 0), 3),
        ("hwloc_v3_nvidiaDGX2.xml", (2, 16, 0, 2, 13), 0),  # 12 PCI switches, and NVSwitch
    ],
)
def test_real_files_have_what_was_counted_in_them(name: str, found: tuple[int, ...], notes: int) -> None:
    reading = examine(real(name))
    t = reading.topology
    cpus, gpus = (len(t.devices_of_kind(kind)) for kind in (DeviceKind.CPU, DeviceKind.CUDA))
    assert (cpus, gpus, len(t.nics), len(t.numa_domains), len(t.switches)) == found
    assert len(reading.notes) == notes
    assert reading.format.name == "hwloc"


def test_one_machine_in_two_versions_is_one_topology() -> None:
    old = examine(real("hwloc_v1_self_2core_vm.xml")).topology
    new = examine(real("hwloc_v2_self_2core_vm.xml")).topology
    assert old == new
    (domain,) = new.numa_domains
    assert (domain.cores, domain.memory_bytes) == ("0-1", 15663394816)
    assert domain.caches == (
        Cache(level=1, bytes=32768, cores="0"),
        Cache(level=1, bytes=32768, cores="1"),
        Cache(level=2, bytes=524288, cores="0"),
        Cache(level=2, bytes=524288, cores="1"),
        Cache(level=3, bytes=33554432, cores="0-1"),
    )
    assert (new.name, new.device("cpu:0").name) == ("vm", "AMD EPYC")
    assert (new.nics[0].id, new.nics[0].bus, new.nics[0].numa) == ("nic:eth0", "0000:00:03.0", 0)


def test_power8_has_nvlink_pairs_and_nvlink_to_the_processor() -> None:
    t = examine(real("hwloc_v2_power8gpudistances.xml")).topology
    # "0x00000303,0x03030000,,0x0": words 3 and 2, that is bits 104, 105, 96, 97 and 88, 89, 80, 81.
    assert [n.cores for n in t.numa_domains] == ["0-1,8-9,16-17,24-25", "80-81,88-89,96-97,104-105"]
    gpu = t.device("cuda:2")
    assert (gpu.bus, gpu.numa, gpu.name) == ("000a:01:00.0", 1, "Tesla P100-SXM2-16GB")
    assert gpu.memory_bytes == 16671616 * 1024
    pair = Link(interconnect=Interconnect.NVLINK, bandwidth_mb_s=mb_s(40.0), count=2, path="NV2")
    assert link(t, "cuda:0", "cuda:1") == link(t, "cuda:2", "cuda:3") == link(t, "cuda:0", "numa:0") == pair
    assert t.link("cuda:0", "cuda:2") is None
    assert rate(t, "cuda:0", "cuda:2") == 32.0  # through both processors
    assert (link(t, "numa:0", "numa:1").path, link(t, "numa:0", "numa:1").latency_us) == ("SLIT 40", None)


def test_dgx2_has_six_nvlinks_a_gpu_to_its_switches() -> None:
    t = examine(real("hwloc_v3_nvidiaDGX2.xml")).topology
    assert all(link(t, f"cuda:{n}", "nvswitch").path == "NV6" for n in range(16))
    assert link(t, "cuda:0", "nvswitch").bandwidth_mb_s == mb_s(150.0)
    assert (rate(t, "cuda:0", "cuda:15"), rate(t, "cpu:0", "cpu:1")) == (150.0, 10.0)
    assert link(t, "numa:0", "numa:1").path == "SLIT 21"
    # Above 34:00.0 are 33:00.0, 32:00.0, 2d:04.0, 2c:00.0 and 2b:00.0; the upper ports are 32:00.0 and 2c:00.0.
    assert "pci:0000:32:00.0" in t.links_of("cuda:0")
    assert "pci:0000:2c:00.0" in t.links_of("pci:0000:32:00.0")
    assert (t.device("cuda:0").bus, t.device("cuda:0").name) == ("0000:34:00.0", "Tesla V100-SXM3-32GB-H")
    assert t.device("cuda:15").numa == 1


def test_sub_numa_domains_have_the_firmwares_distances_and_no_made_up_rate() -> None:
    t = examine(real("hwloc_v1_28intel64-2p2g7c-CoDgroups.xml")).topology
    assert [n.cores for n in t.numa_domains] == ["0-6", "7-13", "14-20", "21-27"]
    inside, across = link(t, "numa:0", "numa:1"), link(t, "numa:0", "numa:2")
    assert (inside.path, inside.bandwidth_mb_s) == ("SLIT 21", None)
    assert (across.path, across.bandwidth_mb_s, across.origin) == ("SLIT 31", mb_s(6.0), Origin.ASSUMED)
    assert [n.id for n in t.nics] == ["nic:enp6s0", "nic:enp12s0"]


def test_distances_follow_the_indexes_and_not_the_rows() -> None:
    t = examine(real("hwloc_v3_16amd64-4distances.xml")).topology
    assert t.device("cpu:0").cores == "2-3"  # NUMA node 0 is that of package 1
    assert {link(t, "numa:0", f"numa:{n}").path for n in range(1, 8)} == {"SLIT 20"}
    assert rate(t, "cpu:0", "cpu:1") == 16.0


def test_old_machines_keep_what_they_do_not_say_unknown() -> None:
    t = examine(real("hwloc_v1_8em64t-2p2ca2co-nonodesets.xml")).topology
    (domain,) = t.numa_domains
    assert (domain.index, domain.cores, domain.memory_bytes) == (0, "0-7", 33738452992)
    assert rate(t, "nic:mlx4_0", "cpu:0") is None  # pci_link_speed is 0
    assert sorted(n.name for n in t.nics) == ["eth0", "eth1", "mlx4_0"]
    fermi = examine(real("hwloc_v2_24em64t-2n6c2t-pci.xml")).topology
    assert [d.bus for d in fermi.devices_of_kind(DeviceKind.CUDA)] == ["0000:06:00.0", "0000:14:00.0", "0000:11:00.0"]
    assert link(fermi, "cuda:0", "numa:0").bandwidth_mb_s == mb_s(4.0)
    assert rate(fermi, "cpu:0", "cpu:1") is None  # no CPUVendor
    assert rate(examine(real("hwloc_v1_devel09-pci.xml")).topology, "nic:mlx4_0", "cpu:0") == 2.0


# Oddities.


def test_the_same_number_means_another_device_in_version_3() -> None:
    def names(version: int, kind: int) -> list[str]:
        text = file(node(0, "0xf") + card("0000:01:00.0", "0200 [15b3:1021]", system_device("a0", kind)), version)
        return [n.name for n in examine_text(text).topology.nics]

    assert [kind for kind in (0, 1, 2, 3, 4, 5) if names(2, kind)] == [2, 3]
    assert [kind for kind in (1, 2, 4, 8, 16, 32, 48) if names(3, kind)] == [16, 32, 48]


def test_a_card_goes_by_its_infiniband_name() -> None:
    inside = system_device("ens1", 2) + system_device("ib0", 2) + system_device("mlx5_7", 3)
    t = examine_text(file(node(0, "0xf") + card("0000:01:00.0", "0207 [15b3:1021]", inside))).topology
    assert [n.id for n in t.nics] == ["nic:mlx5_7"]


def test_gpus_are_found_by_a_library_or_by_their_class() -> None:
    cards = (
        card("0000:01:00.0", "0302 [10de:2330]", system_device("nvml1", 1) + system_device("cuda1", 5))
        + card("0000:02:00.0", "0302 [10de:2330]", system_device("nvml0", 1) + system_device("cuda0", 5))
        + card("0000:03:00.0", "0380 [1002:740f]", system_device("rsmi0", 1, RSMIVRAMSize="67043328"))
        + card("0000:04:00.0", "0380 [8086:0bd5]", system_device("ze0", 5))
        + card("0000:05:00.0", "0300 [1a03:2000]")
        + card("0000:06:00.0", "0200 [8086:1521]")
    )
    reading = examine_text(file(node(0, "0xf") + cards))
    t = reading.topology
    assert {d.id: d.bus for d in t.devices if d.bus} == {
        "cuda:1": "0000:01:00.0",
        "cuda:0": "0000:02:00.0",
        "rocm:0": "0000:03:00.0",
        "intel_gpu:0": "0000:04:00.0",
    }
    assert t.device("rocm:0").memory_bytes == 67043328 * 1024
    assert reading.notes == (
        "line 10: the display 0000:05:00.0 [1a03:2000] is left out: nothing says that it can compute",
        "line 11: the network card 0000:06:00.0 is left out: the system has no device for it",
    )


def test_memory_beside_cores_is_a_domain_without_a_device() -> None:
    reading = examine_text(file(node(0, "0xf") + node(1, "0xf", memory="64") + node(2, "0x0", memory="32")))
    t = reading.topology
    assert t.device_ids() == ["cpu:0"]
    assert [n.memory_bytes for n in t.numa_domains] == [1024, 64, 32]
    assert "the cores of NUMA node 1 are those of node 0 too" in reading.notes[0]


def test_a_card_of_a_machine_with_several_domains_belongs_to_none() -> None:
    t = examine_text(file(node(0, "0x3") + node(1, "0xc") + card("0000:01:00.0", "0302 [10de:2330]"))).topology
    assert (t.device("cuda:0").numa, t.links_of("cuda:0")) == (None, {})
    assert rate(t, "cuda:0", "cpu:0") is None


def test_masks_with_empty_words_and_endless_ones() -> None:
    unit = '<object type="PU" os_index="64" cpuset="0x1,,0x0"/><object type="PU" os_index="0" cpuset="0x1"/>'
    t = examine_text(file(node(0, "0x1,,0x0", unit) + node(1, "0x1"), cpuset="0xf...f")).topology
    assert [n.cores for n in t.numa_domains] == ["64", "0"]
    assert examine_text(file(unit, cpuset="0xf...f")).topology.device("cpu:0").cores == "0,64"


FABRIC = (
    '<distances2hetero nbobjs="2" kind="25" name="{}"><indexes>OSDev:7 OSDev:8 </indexes>'
    "<u64values>{}</u64values></distances2hetero>\n"
)


def pair(fabric: str, vendor: str = "0302 [10de:2330]", library: str = "nvml") -> DeviceTopology:
    cards = "".join(card(f"0000:0{n}:00.0", vendor, system_device(f"{library}{n}", 1, str(7 + n))) for n in range(2))
    return examine_text(file(node(0, "0xf") + cards, after=fabric)).topology


def test_fabrics_carry_what_their_matrix_says_and_zero_is_no_link() -> None:
    nvlink = link(pair(FABRIC.format("NVLinkBandwidth", "1000000 450000 450000 1000000")), "cuda:0", "cuda:1")
    assert (nvlink.path, nvlink.count, nvlink.bandwidth_mb_s) == ("NV18", 18, mb_s(450.0))
    assert nvlink.origin is Origin.STATED
    assert pair(FABRIC.format("NVLinkBandwidth", "1000000 0 0 1000000")).link("cuda:0", "cuda:1") is None
    t = pair(FABRIC.format("XGMIBandwidth", "0 50000 50000 0"), "0380 [1002:740f]", "rsmi")
    assert link(t, "rocm:0", "rocm:1") == Link(
        interconnect=Interconnect.INFINITY_FABRIC, bandwidth_mb_s=mb_s(50.0), path="XGMI"
    )


# Refused.


def matrix(attributes: str, indexes: str = "0 1", values: str = "10 20 20 10") -> str:
    inside = f"<indexes>{indexes}</indexes><u64values>{values}</u64values>"
    after = f'<distances2 type="NUMANode" kind="5" indexing="os" {attributes}>{inside}</distances2>'
    return file(node(0, "0x3") + node(1, "0xc"), after=after)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<topology/>", 'there are 0 <object type="Machine"> in <topology>; expected one'),
        ('<topology version="9.0"><object type="Machine"/></topology>', "version '9.0' of hwloc's XML is unknown"),
        (file("", cpuset=""), "no object has a cpuset"),
        (file(node(0, "0xfz")), "line 5, cpuset: '0xfz' is not a mask of cores"),
        (file(node(0, "0x1") + node(0, "0x2")), "line 6, os_index: NUMA node 0 is that of line 5 already"),
        (file('<object type="NUMANode" cpuset="0x1"/>'), "a NUMANode has no os_index"),
        (file(node(0, "0x1", memory="-5")), "local_memory: -5 is below 0"),
        (file(node(0, "0x1", gp_index="4") + node(1, "0x2", gp_index="4")), "gp_index 4 is that of line 5 already"),
        (file("".join(node(n, "0x1") for n in range(600))), "600 NUMA nodes; at most 512"),
        (file(card("nowhere", "0302 [10de:1]")), "'nowhere' is no PCI address"),
        (file(card("0000:01:00.0", "0302 [10de:2330]") * 2), "0000:01:00.0 is that of line 5 already"),
        (file(card("0000:01:00.0", "0302 [10de:2330]", speed="inf")), "'inf' is no number"),
        (
            file("".join(card(f"0000:0{n}:00.0", "0200 [1:1]", system_device("eth0", 2)) for n in range(2))),
            "there are two network cards 'eth0'",
        ),
        (matrix('nbobjs="3"'), "has 2 indexes and 4 values; expected 3 and 9"),
        (matrix('nbobjs="99999"'), "a matrix of 99999 objects; expected 1 to 512"),
        (matrix('nbobjs="2"', "0 0"), "an object twice"),
        (matrix('nbobjs="2"', "0 1", "10 nan 20 10"), "'nan' in <u64values> is no number"),
        (file("", after='<distances2 kind="1"/>' * 65), "more than 64 matrices"),
        ('<!DOCTYPE topology SYSTEM "http://x/evil.dtd">\n<topology/>', "DOCTYPE or entities"),
        ('<!DOCTYPE topology [<!ENTITY a "x">]>\n<topology>&a;</topology>', "DOCTYPE or entities"),
        (file("<object>" * 200), "more than 120 elements inside each other"),
        (file(node(0, "0x1"))[:-20], "this is no complete XML"),
    ],
)
def test_what_does_not_hold_together_is_refused_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(TopologyFileError) as caught:
        examine_text(text, "machine.xml")
    assert str(caught.value).startswith("machine.xml, line ")
    assert reason in str(caught.value)


def test_matrices_of_other_objects_are_left_out_with_a_note() -> None:
    after = (
        '<distances2 type="Core" nbobjs="1" kind="5" indexing="os"><indexes>0</indexes>'
        "<u64values>1</u64values></distances2>"
    )
    reading = examine_text(file(node(0, "0x1"), after=after))
    assert reading.notes == ("line 7: the distances between Cores are left out: no links follow from them",)


VALID = file(
    '<object type="Package" os_index="0" cpuset="0xf"><info name="CPUVendor" value="GenuineIntel"/>'
    + node(0, "0x3", gp_index="1")
    + node(1, "0xc", gp_index="2")
    + '<object type="L3Cache" cpuset="0xf" cache_size="1024" depth="3" cache_type="0"/></object>\n'
    + card("0000:00:00.0", "0302 [10de:2330]", system_device("nvml0", 1, "7"))
    + card("0000:01:00.0", "0302 [10de:2330]", system_device("nvml1", 1, "8")),
    after=FABRIC.format("NVLinkBandwidth", "1000000 450000 450000 1000000")
    + '<distances2 type="NUMANode" nbobjs="2" kind="5" indexing="os"><indexes>0 1</indexes>'
    "<u64values>10 21 21 10</u64values></distances2>\n",
)


@given(place=st.integers(0, len(VALID)), length=st.integers(0, 40), by=st.text(max_size=12))
@settings(max_examples=100, deadline=None)
def test_damaged_files_raise_nothing_but_errors_of_topologies(place: int, length: int, by: str) -> None:
    try:
        examine_text(VALID[:place] + by + VALID[place + length :])
    except TopologyError as reason:
        assert str(reason)  # noqa: PT017 — either outcome is right

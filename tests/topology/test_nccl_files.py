"""NCCL's and RCCL's topology files: real ones by numbers counted by hand, each oddity, and hostile files."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import TopologyError, TopologyFileError
from fuel_parallel.topology import (
    DeviceInfo,
    DeviceKind,
    Interconnect,
    Link,
)
from fuel_parallel.topology.files import Reading, examine, examine_text, write, xml
from fuel_parallel.topology.model import Origin, mb_s
from tests.topology.nccl_files import CPU, counts, gpu, rate, system
from tests.topology.real_files import real


def refused(text: str) -> str:
    with pytest.raises(TopologyFileError) as caught:
        examine_text(text, "topo.xml")
    return str(caught.value)


def gpus_of(reading: Reading) -> list[DeviceInfo]:
    return [d for d in reading.topology.devices if d.kind is not DeviceKind.CPU]


# Real files. GPUs, network cards, NUMA domains, PCI switches: counted in the files.


@pytest.mark.parametrize(
    ("name", "kind", "found", "notes"),
    [
        ("nccl_aws_p4d-24xl-topo.xml", DeviceKind.CUDA, (8, 4, 2, 4), 0),
        ("nccl_aws_p5.48xl-topo.xml", DeviceKind.CUDA, (8, 32, 1, 8), 0),
        ("nccl_azure_ncv4-topo.xml", DeviceKind.CUDA, (4, 1, 4, 0), 8),
        ("nccl_azure_ndv4-topo.xml", DeviceKind.CUDA, (8, 8, 4, 4), 0),
        ("rccl_topo_4p3l.xml", DeviceKind.ROCM, (4, 2, 1, 6), 0),
        ("rccl_topo_8p_90a.xml", DeviceKind.ROCM, (8, 1, 1, 1), 0),
        ("rccl_topo_8p_940.xml", DeviceKind.ROCM, (8, 8, 2, 24), 0),
        ("rccl_topo_8p_pcie.xml", DeviceKind.ROCM, (8, 1, 1, 10), 0),
    ],
)
def test_real_files_have_what_was_counted_in_them_and_survive_being_written(
    name: str, kind: DeviceKind, found: tuple[int, int, int, int], notes: int
) -> None:
    reading = examine(real(name))
    assert reading.format.name == "nccl"
    assert counts(reading.topology) == found
    assert {d.kind for d in gpus_of(reading)} == {kind}
    assert [d.id for d in gpus_of(reading)] == [f"{kind.value}:{n}" for n in range(found[0])]
    assert len(reading.notes) == notes
    assert examine_text(write(reading.topology, "nccl")).topology == reading.topology


def test_p4d_has_pairs_behind_switches_and_two_intel_sockets() -> None:
    t = examine(real("nccl_aws_p4d-24xl-topo.xml")).topology
    assert t.device("cuda:3").bus == "0000:20:1d.0"
    assert (t.device("cuda:3").numa, t.device("cuda:4").numa) == (0, 1)
    # "000000ff,ffff0000,00ffffff": bits 0-23 and 48-71.
    assert [n.cores for n in t.numa_domains] == ["0-23,48-71", "24-47,72-95"]
    route = t.route("cuda:0", "cuda:1")
    assert route is not None
    assert route.parts == ("cuda:0", "pci:ffff:ff:01.0", "cuda:1")
    assert rate(t, "cuda:0", "cuda:1") == 12.0  # Gen3 x16
    assert rate(t, "cuda:0", "cuda:4") == 10.0  # Skylake's sockets
    assert t.nics[0].id == "nic:0000:10:1b.0"
    assert t.nics[0].speed_mb_s is None


def test_p5_has_cards_of_100_gigabits_behind_gen4_switches() -> None:
    t = examine(real("nccl_aws_p5.48xl-topo.xml")).topology
    link = t.link("cuda:0", "pci:0000:00:00.0")
    assert link is not None
    assert (link.path, link.bandwidth_mb_s, link.origin) == ("32 GT/s x16", mb_s(48.0), Origin.ASSUMED)
    assert rate(t, "cuda:0", "cuda:7") == 24.0
    assert rate(t, "nic:rdmap79s0", "cuda:0") == 12.0  # Gen4 x8
    assert (t.nics[0].name, t.nics[0].speed_mb_s) == ("rdmap79s0", mb_s(12.5))
    assert t.device("cuda:0").name == "sm90"


def test_ncv4_says_neither_the_speed_of_its_slots_nor_where_its_nvlinks_go() -> None:
    reading = examine(real("nccl_azure_ncv4-topo.xml"))
    t = reading.topology
    assert [d.numa for d in gpus_of(reading)] == [0, 1, 2, 3]
    assert all(t.link(f"cuda:{n}", f"cuda:{m}") is None for n, m in itertools.permutations(range(4), 2))
    assert rate(t, "cuda:0", "cuda:1") is None
    assert sum("itself" in note for note in reading.notes) == 4
    assert sum("unknown here, 8 GT/s for NCCL" in note for note in reading.notes) == 4
    eth0 = t.link("nic:eth0", "numa:0")
    assert eth0 is not None
    assert (eth0.interconnect, eth0.bandwidth_mb_s) == (Interconnect.UNKNOWN, None)


def test_ndv4_has_a_domain_for_each_pair() -> None:
    t = examine(real("nccl_azure_ndv4-topo.xml")).topology
    assert [d.numa for d in t.devices_of_kind(DeviceKind.CUDA)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (t.device("cuda:0").bus, t.device("cuda:7").bus) == ("0003:00:00.0", "000c:00:00.0")
    assert (rate(t, "cuda:0", "cuda:1"), rate(t, "cuda:0", "cuda:2")) == (24.0, 16.0)


@pytest.mark.parametrize(
    ("name", "architecture", "links_of_each", "one"),
    [
        ("rccl_topo_4p3l.xml", "gfx908", 3, 24.0),
        ("rccl_topo_8p_90a.xml", "gfx90a", 3, 36.0),
        ("rccl_topo_8p_940.xml", "gfx942", 7, 48.0),
        ("rccl_topo_8p_pcie.xml", "gfx906", 0, None),
    ],
)
def test_rccl_files_have_single_links_of_their_architecture(
    name: str, architecture: str, links_of_each: int, one: float | None
) -> None:
    reading = examine(real(name))
    t = reading.topology
    assert {d.name for d in gpus_of(reading)} == {architecture}
    for device in gpus_of(reading):
        peers = {p: link for p, link in t.links_of(device.id).items() if p.startswith("rocm:")}
        assert len(peers) == links_of_each
        for link in peers.values():
            assert (link.path, link.interconnect) == ("XGMI1", Interconnect.INFINITY_FABRIC)
            assert link.bandwidth_mb_s == mb_s(one or 0.0)


def test_mi200_is_not_joined_all_to_all_and_falls_back_on_pcie() -> None:
    t = examine(real("rccl_topo_8p_90a.xml")).topology
    assert t.link("rocm:0", "rocm:6") is not None  # c1 to d9
    assert t.link("rocm:0", "rocm:3") is None
    assert rate(t, "rocm:0", "rocm:3") == 24.0
    slow = t.link("nic:eth0", "pci:0000:91:00.0")
    assert slow is not None
    assert slow.bandwidth_mb_s == mb_s(0.1875)  # Gen1 x1


def test_graph_files_are_refused_with_what_to_do() -> None:
    with pytest.raises(TopologyFileError, match=r"line 1: this is a file of NCCL's rings and trees.*TOPO_DUMP_FILE"):
        examine(real("nccl_azure_ncv4-graph.xml"))
    assert "NCCL_TOPO_DUMP_FILE" in refused('<graphs version="1"><graph id="0"/></graphs>')


# Oddities.


def test_nvlinks_between_gpus_are_added_up_and_cost_what_the_capability_says() -> None:
    text = system(
        gpu("0000:01:00.0", '<nvlink target="0000:02:00.0" count="2"/><nvlink target="0000:02:00.0" count="2"/>'),
        gpu("0000:02:00.0", '<nvlink target="00000000:01:00.0" count="4" tclass="0x030200"/>', dev="1"),
    )
    link = examine_text(text).topology.link("cuda:0", "cuda:1")
    assert link == Link(
        interconnect=Interconnect.NVLINK, bandwidth_mb_s=mb_s(80.0), count=4, path="NV4", origin=Origin.ASSUMED
    )


def test_nvlinks_to_switches_lead_to_one_switch() -> None:
    hidden = '<nvlink target="fffffff:ffff:ff" count="12" tclass="0x068000"/>'
    shown = '<nvlink target="0000:c4:00.0" count="12"/>'
    switch = '<pci busid="0000:c4:00.0" class="0x068000" link_speed="8 GT/s" link_width="2"/>\n'
    t = examine_text(system(gpu("0000:01:00.0", hidden), gpu("0000:02:00.0", shown, dev="1"), switch)).topology
    assert [s.id for s in t.switches] == ["nvswitch"]
    assert rate(t, "cuda:0", "cuda:1") == 240.0
    assert examine_text(write(t, "nccl")).topology == t


def test_links_to_absent_gpus_are_left_out_with_a_note() -> None:
    reading = examine_text(system(gpu("0000:01:00.0", '<nvlink target="0000:02:00.0" count="4" tclass="0x030200"/>')))
    assert reading.topology.links_of("cuda:0").keys() == {"numa:0"}
    assert reading.notes == ("line 4: the link to 0000:02:00.0, which the file does not have, is left out",)


def test_links_to_the_processor_and_between_chips() -> None:
    t = examine_text(system(gpu("0000:01:00.0", '<c2c count="10" bw="44712"/>'), cpu='arch="arm64"')).topology
    link = t.link("cuda:0", "numa:0")
    assert link is not None
    assert (link.path, link.count, link.origin) == ("C2C", 10, Origin.STATED)
    assert link.bandwidth_mb_s == pytest.approx(mb_s(447.12))
    power = examine_text(system(gpu("0000:01:00.0", '<nvlink target="x" count="3" tclass="0x068001"/>'))).topology
    assert rate(power, "cuda:0", "numa:0") == 60.0


def test_without_capability_nvlink_is_unknown_and_not_slow() -> None:
    reading = examine_text(
        system(
            gpu("0000:01:00.0", '<nvlink target="0000:02:00.0" count="4"/>', ""),
            gpu("0000:02:00.0", '<nvlink target="0000:01:00.0" count="4"/>', "", dev="1"),
        )
    )
    link = reading.topology.link("cuda:0", "cuda:1")
    assert link is not None
    assert (link.bandwidth_mb_s, link.count) == (None, 4)
    assert "no sm: what its NVLinks carry is unknown" in reading.notes[0]


@pytest.mark.parametrize(
    ("said", "expected", "note"),
    [
        ('link_speed="16 GT/s" link_width="8"', 12.0, ""),
        ('link_speed="16.0 GT/s" link_width="16"', 24.0, "NCCL does not know '16.0 GT/s' and takes it for 8 GT/s"),
        ('link_speed="32.0 GT/s PCIe" link_width="0"', 48.0, "taken for 16, as NCCL does"),
        ('link_speed="64.0 GT/s PCIe" link_width=""', 96.0, "taken for 16, as NCCL does"),
        ('link_speed="2.5 GT/s" link_width="1"', 0.188, ""),
        ('link_speed="fast" link_width="16"', None, "unknown here, 8 GT/s for NCCL"),
        ("", None, ""),
    ],
)
def test_speeds_of_slots(said: str, expected: float | None, note: str) -> None:
    reading = examine_text(system(f'<pci busid="0000:01:00.0" class="0x030200" {said}/>'))
    assert rate(reading.topology, "cuda:0", "numa:0") == expected
    assert len(reading.notes) == bool(note)
    assert note in "".join(reading.notes)


@pytest.mark.parametrize(
    ("cpu", "expected", "note"),
    [
        ('arch="x86_64" vendor="GenuineIntel" modelid="207"', 40.0, ""),
        ('arch="x86_64" vendor="GenuineIntel" modelid="143"', 22.0, ""),
        ('arch="x86_64" vendor="  Shanghai  " modelid="59"', 6.0, ""),
        ('arch="ppc64"', 32.0, ""),
        ('arch="arm64"', 6.0, ""),
        ('arch="x86_64" vendor="AMD"', None, "5000 GB/s"),
        ('vendor="AuthenticAMD"', 16.0, "no arch"),
    ],
)
def test_between_sockets_it_is_the_vendor_that_says(cpu: str, expected: float | None, note: str) -> None:
    text = f'<system version="1"><cpu numaid="0" affinity="1" {cpu}/><cpu numaid="1" affinity="2" {cpu}/></system>'
    reading = examine_text(text)
    link = reading.topology.link("numa:0", "numa:1")
    assert link is not None
    assert link.path == "SYS"
    assert rate(reading.topology, "cpu:0", "cpu:1") == expected
    assert note in "".join(reading.notes)


def test_gpus_without_numbers_get_the_ones_that_are_left() -> None:
    bare = '<pci busid="0000:0{}:00.0" class="0x030000"/>\n'
    t = examine_text(system(bare.format(1), gpu("0000:02:00.0"), bare.format(3))).topology
    assert {d.bus: d.id for d in t.devices_of_kind(DeviceKind.CUDA)} == {
        "0000:01:00.0": "cuda:1",
        "0000:02:00.0": "cuda:0",
        "0000:03:00.0": "cuda:2",
    }


def test_amd_gpus_are_told_by_vendor_or_class() -> None:
    cards = (
        '<pci busid="0000:01:00.0" class="0x120000" vendor="0x1002"/>\n'
        '<pci busid="0000:02:00.0" class="0x038000"/>\n'
        '<pci busid="0000:03:00.0" class="0x030200" vendor="0x10de"/>\n'
    )
    t = examine_text(system(cards)).topology
    assert t.device_ids() == ["cpu:0", "rocm:0", "rocm:1", "cuda:0"]


def test_what_is_no_card_of_interest_is_left_out_with_a_note() -> None:
    disk, nameless = '<pci busid="0000:05:00.0" class="0x010802"/>\n', '<pci busid="0000:06:00.0"/>\n'
    assert examine_text(system(disk, nameless)).notes == (
        "line 3: the device 0000:05:00.0 of class 0x010802 is left out: neither GPU nor network card nor bridge",
        "line 4: the device 0000:06:00.0 without a class is left out: neither GPU nor network card nor bridge",
        "the file has no GPU",
    )


def test_a_card_with_two_ports_is_a_switch() -> None:
    nets = "".join(f'<net name="mlx5_0" port="{n}" speed="200000"/>' for n in (1, 2))
    card = f'<pci busid="0000:07:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"><nic>{nets}</nic></pci>'
    t = examine_text(system(gpu("0000:01:00.0"), card)).topology
    assert [n.id for n in t.nics] == ["nic:mlx5_0", "nic:mlx5_0:2"]
    assert t.links_of("nic:mlx5_0").keys() == t.links_of("nic:mlx5_0:2").keys() == {"pci:0000:07:00.0"}
    assert len(examine_text(write(t, "nccl")).topology.nics) == 2


def test_pcilinks_join_the_halves_of_a_switch() -> None:
    half = '<pci busid="0000:0{}:00.0" class="0x060400">{}</pci>\n'
    both = half.format(1, '<pcilink target="0000:02:00.0"/>'), half.format(2, '<pcilink target="0000:01:00.0"/>')
    t = examine_text(system(*both)).topology
    link = t.link("pci:0000:01:00.0", "pci:0000:02:00.0")
    assert link is not None
    assert (link.path, link.bandwidth_mb_s) == ("pcilink", None)
    assert examine_text(write(t, "nccl")).topology == t


def test_a_virtual_machine_that_hides_its_domains_has_one() -> None:
    assert examine_text(f'<system><cpu numaid="-1" affinity="f" {CPU}/></system>').topology.has("numa:0")


# Refused.


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<system/>", "line 1: <system> has no <cpu>"),
        ("<system>\n<cpu/></system>", "line 2: <cpu> has no numaid"),
        ('<system><cpu numaid="0"/>\n<cpu numaid="0"/></system>', "line 2, numaid: numaid 0 is that of line 1"),
        ('<system><cpu numaid="-7"/></system>', "no NUMA domain -7"),
        ('<system><cpu numaid="1e3"/></system>', "'1e3' of <cpu> is no whole number"),
        ('<system><cpu numaid="9999999999999999999999"/></system>', "is no whole number"),
        ('<system><cpu numaid="0" affinity="xyz"/></system>', "line 1, affinity: 'xyz' is not a mask of cores"),
        ('<system><cpu numaid="0" host_hash="1"/><cpu numaid="1" host_hash="2"/></system>', "describes 2 hosts"),
        ("<system>" + "".join(f'<cpu numaid="{n}"/>' for n in range(300)) + "</system>", "300 <cpu>; at most 256"),
        (system("<pci/>"), "line 3, busid: <pci> has no PCI address; expected one such as 0000:4f:00.0"),
        (system('<pci busid="0:0"/>'), "'0:0' is no PCI address"),
        (system(gpu("0000:01:00.0"), gpu("01:00.0")), "line 5, busid: the PCI address 0000:01:00.0 is that of line 3"),
        (system(gpu("0000:01:00.0"), gpu("0000:02:00.0")), "dev 0 is that of line 3 already"),
        (system(gpu("0000:01:00.0", '<nvlink target="0000:02:00.0"/>')), "a bundle of None links"),
        (system(gpu("0000:01:00.0", '<nvlink target="0000:02:00.0" count="99999"/>')), "a bundle of 99999 links"),
        (system(gpu("0000:01:00.0", '<c2c count="2" bw="nan"/>')), "'nan' is no number"),
        (system('<pci busid="0000:01:00.0" class="0x030200" link_width="99"/>'), "1 to 32 lanes, not 99"),
        (system('<pci busid="0000:01:00.0" class="0x060400"><pcilink target="0000:01:00.0"/></pci>'), "a cycle"),
        (
            system(
                '<pci busid="0000:01:00.0" class="0x060400"><pci busid="0000:02:00.0" class="0x060400">'
                '<pcilink target="0000:01:00.0"/></pci></pci>'
            ),
            "a cycle",
        ),
        (
            system(
                gpu("0000:01:00.0", '<nvlink target="0000:02:00.0" count="2"/>'),
                gpu("0000:02:00.0", '<nvlink target="0000:01:00.0" count="3"/>', dev="1"),
            ),
            "cuda:0 has 2 links to cuda:1, which has 3 to it",
        ),
        (system('<nic><net name="a"/><net name="a"/><net name="a"/></nic>'), "there are two network cards"),
        ('<system version="1">\n<cpu numaid="0">', "line 2: this is no complete XML"),
        (system()[:60], "this is no complete XML"),
        ("<system a='1' a='2'/>", "this is no complete XML"),
        ('<!DOCTYPE system [<!ENTITY a "x"><!ENTITY b "&a;&a;">]>\n<system>&b;</system>', "DOCTYPE or entities"),
        ('<!DOCTYPE system SYSTEM "file:///etc/passwd"><system/>', "DOCTYPE or entities"),
        ("<system>" + "<pci>" * 5000, "more than 120 elements inside each other"),
        ("<system " + " ".join(f"a{n}='1'" for n in range(99)) + "/>", "more than 64 attributes"),
        (f'<system a="{"x" * 99999}"/>', "more than 16384 characters"),
    ],
)
def test_what_does_not_hold_together_is_refused_with_its_place(text: str, reason: str) -> None:
    message = refused(text)
    assert message.startswith("topo.xml, line ")
    assert reason in message


def test_a_file_of_millions_of_elements_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xml, "MOST_ELEMENTS", 1000)
    assert "more than 1000 elements" in refused("<system>" + "<a/>" * 5000)


def test_one_sided_links_are_one_way_and_noted() -> None:
    reading = examine_text(
        system(gpu("0000:01:00.0", '<nvlink target="0000:02:00.0" count="2"/>'), gpu("0000:02:00.0", dev="1"))
    )
    assert reading.topology.link("cuda:0", "cuda:1") is not None
    assert reading.topology.link("cuda:1", "cuda:0") is None
    assert "says nothing of a way back" in reading.notes[0]


VALID = system(
    '<pci busid="ffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">\n',
    gpu("0000:01:00.0", '<nvlink target="0000:02:00.0" count="4" tclass="0x030200"/>'),
    gpu("0000:02:00.0", '<nvlink target="0000:01:00.0" count="4" tclass="0x030200"/>', dev="1"),
    '<pci busid="0000:03:00.0" class="0x020000"><nic><net name="mlx5_0" speed="400000"/></nic></pci></pci>\n',
)


@given(place=st.integers(0, len(VALID)), length=st.integers(0, 40), by=st.text(max_size=12))
@settings(max_examples=100, deadline=None)
def test_damaged_files_raise_nothing_but_errors_of_topologies(place: int, length: int, by: str) -> None:
    try:
        examine_text(VALID[:place] + by + VALID[place + length :])
    except TopologyError as reason:
        assert str(reason)  # noqa: PT017 — either outcome is right

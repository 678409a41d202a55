"""NCCL's topology files as they are written: for its own reader, and read back."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import TopologyError
from fuel_parallel.topology import (
    DeviceInfo,
    DeviceKind,
    DeviceTopology,
    Interconnect,
    Link,
    Nic,
    NumaDomain,
    Switch,
)
from fuel_parallel.topology.files import examine_text, write
from fuel_parallel.topology.model import mb_s
from tests.topology.nccl_files import CPU, counts, gpu, rate


def small(count: int, *, bus: bool = True) -> DeviceTopology:
    t = DeviceTopology("nccl")
    t.add_numa(NumaDomain(id="numa:0", index=0, cores="0-15"))
    for n in range(count):
        address = f"0000:{n:02x}:00.0" if bus else ""
        t.add_device(DeviceInfo(id=f"cuda:{n}", kind=DeviceKind.CUDA, bus=address, name="NVIDIA H100 80GB", numa=0))
    return t


def test_the_text_is_what_nccls_reader_takes() -> None:
    t = small(2)
    t.add_switch(Switch(id="pci", kind=Interconnect.PCIE))
    t.add_link("pci", "numa:0", Link(interconnect=Interconnect.PCIE, bandwidth_mb_s=mb_s(24.0)))
    for n in range(2):
        t.add_link(f"cuda:{n}", "pci", Link(interconnect=Interconnect.PCIE, path="32 GT/s x16"))
    t.add_link("cuda:0", "cuda:1", Link(interconnect=Interconnect.NVLINK, count=18))
    text = write(t, "nccl")
    assert text == (
        '<system version="1">\n'
        '  <cpu numaid="0" affinity="0000ffff">\n'
        '    <pci busid="ffff:fe:00.1" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">\n'
        '      <pci busid="0000:00:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">\n'
        '        <gpu dev="0" rank="0" sm="90">\n'
        '          <nvlink target="0000:01:00.0" count="18" tclass="0x030200"/>\n'
        "        </gpu>\n"
        "      </pci>\n"
        '      <pci busid="0000:01:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">\n'
        '        <gpu dev="1" rank="1" sm="90">\n'
        '          <nvlink target="0000:00:00.0" count="18" tclass="0x030200"/>\n'
        "        </gpu>\n"
        "      </pci>\n"
        "    </pci>\n"
        "  </cpu>\n"
        "</system>\n"
    )
    assert rate(examine_text(text).topology, "cuda:0", "cuda:1") == 370.8  # 18 x 20.6


def test_gpus_of_which_only_the_domain_is_known_hang_from_it() -> None:
    assert counts(examine_text(write(small(3), "nccl")).topology)[0] == 3


@pytest.mark.parametrize(
    ("t", "reason"),
    [
        (small(1, bus=False), "cuda:0 has no PCI address"),
        (small(641), "at most 640 elements in one; <cpu> has more"),
    ],
)
def test_what_such_a_file_cannot_say_is_refused(t: DeviceTopology, reason: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(reason)):
        write(t, "nccl")


def test_several_machines_are_refused_by_name() -> None:
    t = DeviceTopology("pair")
    for node in "ab":
        t.add_numa(NumaDomain(id=f"{node}/numa:0", node=node, index=0))
    with pytest.raises(TopologyError, match=r"one machine, this topology has 2: a, b; .convert --node NAME"):
        write(t, "nccl")


def test_names_with_quotes_and_gpus_without_a_place_are_refused() -> None:
    t = small(0)
    t.add_nic(Nic(id="nic:a", name='a"b'))
    t.add_link("nic:a", "numa:0", Link())
    with pytest.raises(TopologyError, match="NCCL cannot read name"):
        write(t, "nccl")
    lost = DeviceTopology("lost")
    lost.add_device(DeviceInfo(id="cuda:0", kind=DeviceKind.CUDA, bus="0000:01:00.0"))
    with pytest.raises(TopologyError, match="cuda:0 hangs from no NUMA domain"):
        write(lost, "nccl")


@st.composite
def machines(draw: st.DrawFn) -> str:
    """Domains, switches, GPUs, cards and NVLinks, as text."""
    domains, bus, cards, pairs = draw(st.integers(1, 3)), itertools.count(1), [], {}
    per_domain: list[list[str]] = [[] for _ in range(domains)]
    for index in range(domains):
        for _ in range(draw(st.integers(0, 2))):
            address = f"0000:{next(bus):02x}:00.0"
            per_domain[index].append(address)
            cards.append(address)
    for a, b in itertools.combinations(cards, 2):
        pairs[a, b] = pairs[b, a] = draw(st.integers(0, 18))
    text, dev = '<system version="1">\n', itertools.count()
    for index, mine in enumerate(per_domain):
        text += f'<cpu numaid="{index}" affinity="{draw(st.integers(0, 2**32 - 1)):08x}" {CPU}>\n'
        switched = draw(st.booleans())
        text += f'<pci busid="0000:{next(bus):02x}:00.0" class="0x060400">' * switched
        for address in mine:
            links = [(b, pairs[address, b]) for b in cards if b != address and pairs[address, b]]
            inside = "".join(f'<nvlink target="{b}" count="{n}" tclass="0x030200"/>' for b, n in links)
            text += gpu(address, inside, f'sm="{draw(st.sampled_from([70, 80, 90, 100]))}"', str(next(dev)))
        text += "</pci>" * switched + "</cpu>\n"
    return text + "</system>"


@given(machines())
@settings(max_examples=60, deadline=None)
def test_writing_and_reading_gives_the_same(text: str) -> None:
    t = examine_text(text).topology
    again = examine_text(write(t, "nccl")).topology
    assert again == t
    assert Counter(c.link.path for c in again.connections()) == Counter(c.link.path for c in t.connections())

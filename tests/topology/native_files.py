"""A native file, any topology, and what reading says of them."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from fuel_parallel.errors import TopologyFileError
from fuel_parallel.topology import (
    Cache,
    DeviceInfo,
    DeviceKind,
    DeviceTopology,
    Interconnect,
    Link,
    Nic,
    NumaDomain,
    Origin,
    Switch,
)
from fuel_parallel.topology.cores import format_list
from fuel_parallel.topology.files import examine_text
from fuel_parallel.topology.model import mb_s

CLUSTER = """\
# Two racks.
name = "cluster"

[[node]]
name = "n[01-04]"

[[node.device]]
id = "cuda:[0-1]"
memory = "80 GiB"
tflops = 312
numa = [0, 1]
bus = ["0000:07:00.0", "0000:0f:00.0"]

[[node.nic]]
id = "nic:0"
speed = "200 Gb/s"

[[node.link]]
between = ["cuda:0", "cuda:1"]
kind = "nvlink"
bandwidth = "240 GB/s"
count = 12
path = "NV12"
origin = "assumed"

[[node.link]]
between = ["cuda:*", "nic:0"]
kind = "pcie"

[[switch]]
id = "leaf[1-2]"
kind = "network"

[[link]]
between = ["n[01-04]/nic:0", "leaf[1-2]"]
pairs = "all"
kind = "network"
bandwidth = "100 Gb/s"
latency = "800 ns"

[[override]]
between = ["n03/nic:0", "leaf2"]
bandwidth = 5.5
origin = "measured"

[[override]]
part = "n0*/cuda:1"
memory = "40 GiB"
"""


def read(text: str) -> DeviceTopology:
    return examine_text(text, "file").topology


def refusal(text: str) -> str:
    with pytest.raises(TopologyFileError) as caught:
        read(text)
    return str(caught.value)


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6) | st.sampled_from(
    ["cuda:0", "a01", "[x]", "a,b", " ", "a*", "\\", "n/9", "#", '"', "true", "1e5", "null", "0:1"]
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
indexes = st.none() | st.integers(0, 9)
sizes = st.none() | st.integers(0, 2**60)
rates = st.floats(min_value=1e-300, max_value=1e300, exclude_min=True) | st.sampled_from([mb_s(24.0), mb_s(12.5)])
cores = st.sets(st.integers(0, 40), max_size=5).map(format_list)
caches = st.builds(Cache, level=st.integers(0, 4), bytes=st.integers(0, 2**40), cores=cores)
links = st.builds(
    Link,
    interconnect=st.sampled_from(Interconnect),
    bandwidth_mb_s=st.none() | rates,
    latency_us=st.none() | st.floats(0, 1e300),
    count=st.integers(1, 18),
    path=texts,
    origin=st.sampled_from(Origin),
)


@st.composite
def topologies(draw) -> DeviceTopology:
    """Some parts in machines and some not, ids with and without their machine's name, links one way or both."""
    t = DeviceTopology(draw(texts))
    machines = [*draw(st.lists(names, max_size=3)), ""]
    for inner in draw(st.lists(names, max_size=8)):
        node = draw(st.sampled_from(machines))
        part = draw(st.sampled_from([f"{node}/{inner}", inner]))
        common = {"id": part, "node": node}
        kinds = (
            st.builds(
                DeviceInfo,
                kind=st.sampled_from(DeviceKind),
                name=texts,
                memory_bytes=sizes,
                numa=indexes,
                bus=texts,
                cores=cores,
                tflops=st.none() | rates,
                **{k: st.just(v) for k, v in common.items()},
            ),
            st.builds(
                NumaDomain,
                index=st.integers(0, 9),
                cores=cores,
                memory_bytes=sizes,
                caches=st.lists(caches, max_size=2).map(tuple),
                **{k: st.just(v) for k, v in common.items()},
            ),
            st.builds(
                Nic,
                name=texts,
                numa=indexes,
                bus=texts,
                speed_mb_s=st.none() | rates,
                **{k: st.just(v) for k, v in common.items()},
            ),
            st.builds(
                Switch,
                kind=st.sampled_from(Interconnect),
                name=texts,
                bus=texts,
                **{k: st.just(v) for k, v in common.items()},
            ),
        )
        if not t.has(part):
            t.add(draw(st.one_of(kinds)))
    ids = [part.id for part in t.description().parts]
    some = draw(st.lists(links, min_size=1, max_size=3))
    for a, b in draw(st.lists(st.tuples(*[st.sampled_from(ids)] * 2), max_size=12)) if ids else ():
        if a != b and t.link(a, b) is None:
            link = draw(st.sampled_from(some))
            if t.link(b, a) is None and draw(st.booleans()):
                t.add_link(a, b, link)
            else:
                t.add_directed_link(a, b, link)
    return t

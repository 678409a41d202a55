"""The native file: what it says, that every topology can be said, and that what is wrong is refused with its line."""

from __future__ import annotations

import itertools
import json
import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import TopologyError, TopologyFileError
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
from fuel_parallel.topology.files import FORMATS, examine_text, native, native_expand, write
from fuel_parallel.topology.files.native_edit import edit
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.model import mb_s
from tests.topology.machines import MACHINES, dgx1, fat_tree, mi250

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


def test_a_file_says_what_its_entries_stand_for() -> None:
    t = read(CLUSTER)
    assert (t.name, t.nodes) == ("cluster", ["n01", "n02", "n03", "n04"])
    assert t.device_ids() == [f"n0{n}/cuda:{g}" for n in range(1, 5) for g in range(2)]
    second = t.device("n02/cuda:1")
    assert (second.kind, second.node, second.numa, second.bus) == (DeviceKind.CUDA, "n02", 1, "0000:0f:00.0")
    assert (second.memory_bytes, second.tflops) == (40 * 2**30, 312.0)
    assert t.device("n02/cuda:0").memory_bytes == 80 * 2**30
    assert t.nics[0].speed_mb_s == mb_s(25)
    nvlink = Link(
        interconnect=Interconnect.NVLINK, bandwidth_mb_s=mb_s(240), count=12, path="NV12", origin=Origin.ASSUMED
    )
    assert t.link("n04/cuda:1", "n04/cuda:0") == nvlink
    # What is not said of a link is unknown.
    assert t.link("n01/nic:0", "n01/cuda:1") == Link(interconnect=Interconnect.PCIE)
    network = Link(interconnect=Interconnect.NETWORK, bandwidth_mb_s=mb_s(12.5), latency_us=0.8)
    assert t.link("leaf2", "n01/nic:0") == network
    changed = t.link("n03/nic:0", "leaf2")
    assert (changed.bandwidth_mb_s, changed.latency_us, changed.origin) == (5.5, 0.8, Origin.MEASURED)
    # 4 NVLinks, 8 to cards, 8 of the network
    assert sum(1 for _ in t.connections()) == 20


def test_json_and_yaml_have_the_same_structure() -> None:
    plain = tomllib.loads(CLUSTER)
    assert read(json.dumps(plain)) == read(CLUSTER)
    assert read(native._yaml(plain)) == read(CLUSTER)


@pytest.mark.parametrize("form", native.FORMS)
@pytest.mark.parametrize("name", [*MACHINES, "fat tree", "devices in turns"])
def test_machines_are_written_and_read_again_in_their_order(name, form) -> None:
    special = {"fat tree": lambda: fat_tree(20), "devices in turns": lambda: fat_tree(3, shuffled=1)}
    t = (MACHINES | special)[name]()
    again = read(native.write(t, form))
    assert again == t
    assert again.device_ids() == t.device_ids()
    assert again.nodes == t.nodes or name == "devices in turns"


def test_a_cluster_of_equal_machines_is_a_short_file() -> None:
    small, large = (native.write(fat_tree(machines)) for machines in (2, 32))
    assert len(large.splitlines()) < 60
    assert len(large.splitlines()) < len(small.splitlines()) + 10
    assert 'name = "n[0-31]"' in large
    assert 'between = ["n[16-31]/nic:[0-7]", "leaf1"]' in large


def test_all_pairs_and_packages_are_said_in_few_entries() -> None:
    # Sixteen NVLinks of two widths, and a link to the bus: at most one entry for each GPU and width.
    assert native.write(dgx1()).count("[[link]]") < 12
    # Four packages, four wide links and four narrow ones, and the bus.
    assert native.write(mi250()).count("[[link]]") == 4


def test_the_table_of_formats_writes_it_too() -> None:
    assert FORMATS[0].name == "native"
    assert write(fat_tree(1), "native") == native.write(fat_tree(1))


def test_the_schema_names_all_fields() -> None:
    schema = native.schema()
    fields = schema["$defs"]["DeviceEntry"]["properties"]
    assert set(fields) == {"id", "node", "kind", "name", "memory", "tflops", "numa", "bus", "cores"}
    assert schema["$defs"]["LinkEntry"]["additionalProperties"] is False


# Any topology.

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


@settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))
@given(topologies(), st.sampled_from(native.FORMS))
def test_any_topology_is_said_exactly(t, form) -> None:
    again = read(native.write(t, form))
    assert again == t
    assert again.device_ids() == t.device_ids()


@settings(deadline=None, max_examples=120)
@given(st.data(), st.sampled_from(native.FORMS))
def test_a_spoilt_file_is_refused_or_read_and_nothing_else(data, form) -> None:
    text = native.write(read(CLUSTER), form)
    at = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 30))
    new = data.draw(
        st.text(max_size=3) | st.sampled_from(["[", "]]", "{", "[0-999999999]", "1e999", "-", "\n", "&a *a"])
    )
    try:
        examine_text(text[:at] + new + text[at + cut :])
    except TopologyError as reason:
        refused = str(reason)
    else:
        return
    assert "the text" in refused


# Mistakes.


@pytest.mark.parametrize(
    ("line", "wrong", "message"),
    [
        (9, 'memory = "80 GB/s"', "file, line 9, node[0].device[0].memory: '80 GB/s' is no size of memory; expected"),
        (9, "memory = -1", "-1 is no size of memory"),
        (9, "memory = 99999999999999999999", "line 9, node[0].device[0].memory"),
        (9, "memory = nan", "file, line 9, node[0].device[0].memory: Expected `int | str | null`, got `float`"),
        (
            9,
            'memorie = "1 GiB"',
            "line 9, node[0].device[0].memorie: there is no field 'memorie' here; expected one of",
        ),
        (9, 'node = "n01"', "file, line 9, node[0].device[0].node: a part of a [[node]] table is in that machine"),
        (10, "tflops = inf", "file, line 10, node[0].device[0].tflops: inf is no rate"),
        (11, "numa = [0]", "file, line 11, node[0].device[0].numa: a list of 1 values for 2 ids"),
        (11, "numa = [0, -1]", "file, line 11, node[0].device[0].numa[1]: Expected `int` >= 0"),
        (8, 'id = "gpu:[0-1]"', "of what kind is 'gpu:0'? Give it a kind, one of cpu, cuda"),
        (8, 'id = "cuda:[0-1"', "file, line 8, node[0].device[0].id: 'cuda:[0-1' has a '[' that is not closed"),
        (8, 'id = "cuda:[1-0]"', "'1-0' is no range; expected such as '0-7'"),
        (8, 'id = "cuda:[0-99999999]"', "line 8, node[0].device[0].id: 'cuda:[0-99999999]' stands for more than"),
        (8, 'id = "cuda:*"', "has a '*', which stands for parts that are there already"),
        (8, 'id = "cuda:[0,0]"', "there are two parts 'n01/cuda:0'; the first is node[0].device[0]"),
        (5, 'name = "n[1-900000]"', "with this there are 1800000 parts or links; a topology has at most 1000000"),
        (16, 'speed = "fast"', "file, line 16, node[0].nic[0].speed: 'fast' is no bandwidth"),
        (19, 'between = ["cuda:0", "cuda:2"]', "file, line 19, node[0].link[0].between: there is no part 'n01/cuda:2'"),
        (19, 'between = ["cuda:0", "cuda:0"]', "a link from 'cuda:0' to itself"),
        (19, 'between = ["cuda:0"]', "file, line 19, node[0].link[0].between: Expected `array` of length 2"),
        (19, 'between = ["cuda:0", []]', "an end is an empty list"),
        (19, 'between = ["cuda:0", "nic:0"]', "there is a link from 'n01/cuda:0' to 'n01/nic:0' already: node[0]"),
        (20, 'kind = "nvlonk"', "file, line 20, node[0].link[0].kind: Invalid enum value 'nvlonk'"),
        (21, 'bandwidth = "0 GB/s"', "'0 GB/s' is no bandwidth; expected more than 0"),
        (36, 'pairs = "matching"', "the ends have 4 and 2 parts; to match they have as many"),
        (36, "", 'both ends are several parts, 4 and 2; expected pairs = "all"'),
        (39, 'latency = "-1 us"', "file, line 39, link[0].latency: '-1 us' is no time; expected such as '1.5 us'"),
        (42, 'between = ["n03/nic:0", "n04/nic:0"]', "there is no link from 'n03/nic:0' to 'n04/nic:0'; an override"),
        (43, "memory = 5", "file, line 43, override[0].memory: there is no such field in this override"),
        (47, 'part = "x*"', "file, line 47, override[1].part: 'x*' fits no part"),
        (48, "speed = 5", "file, line 48, override[1].speed: 'n01/cuda:1' has no speed: it is a DeviceInfo"),
        (2, 'name = "x', "file, line 2: this is no TOML"),
        (3, 'name = "x"', "file, line 3: this is no TOML: Cannot overwrite a value"),
        (3, "[[nodes]]", "file, line 3, nodes: there is no field 'nodes' here; expected one of format, name"),
        (2, 'format = "fuel-parallel 2"', "file, line 2, format: Invalid enum value 'fuel-parallel 2'"),
        (2, f"x{'.a' * 5000} = 1", "file, line 2: nested too deeply"),
        (2, f"x = {'[' * 5000}", "file: nested too deeply"),
        (2, f"x = 1{'0' * 5000}", "a number"),
    ],
)
def test_a_mistake_is_refused_with_its_line(line, wrong, message) -> None:
    lines = CLUSTER.split("\n")
    lines[line - 1] = wrong
    assert message in refusal("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "a",\n "name": "b"}', "file, line 2: the key 'name' stands twice in one table"),
        ('{"name": "a",\n', "file, line 2: this is no JSON"),
        ('{"name": "a",\n "device": [{"id": "cuda:0", "tflops":\n NaN}]}', "NaN is no figure of a machine"),
        ('{"name": "a", "device": ' + "[" * 100_000, "file: nested too deeply"),
        ('{"name": "\\ud800"}', "file: half of a pair of surrogates is no letter"),
        ('{"link": [{"between": ["a", "b"], "bandwidth": 1' + "0" * 400 + "}]}", "file"),
        ('{"name": ' + "1" * 5000 + "}", "thousands of digits"),
        ('{"name": "a",\n "device":\n [{"id": "cuda:0"},\n {"id": 5}]}', "file, line 4, device[1].id: Expected `str`"),
        ("name: a\nname: b", "file, line 2: the key 'name' stands twice"),
        ("name: a\ndevice:\n  - id: cuda:0\n  - id: 5\n", "file, line 4, device[1].id: Expected `str`, got `int`"),
        ("name: &x a\ndevice: *x", "file, line 1: anchors, aliases and tags have no meaning"),
        ("name: !!python/name:os.system a", "file, line 1: anchors, aliases and tags"),
        ("name: a\n---\nname: b", "file, line 2: a second document begins here"),
        ("name: {[a]: b}", "file, line 1"),
        ("name: a\ndevice: " + "[" * 500, "file, line 2: nested too deeply"),
        ("name: a\n\tb: c", "file, line 2: this is no YAML"),
        ("name: a\n1: b", "file, line 2: '1' is no key"),
    ],
)
def test_yaml_and_json_are_as_strict(text, message) -> None:
    assert message in refusal(text)


def test_yaml_does_not_take_addresses_for_numbers() -> None:
    t = read("device:\n- {id: 'cuda:0', bus: 0000:07:00.0, name: no, cores: 0-3}")
    assert (t.devices[0].bus, t.devices[0].name) == ("0000:07:00.0", "no")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n01 slots=4",
        "<system version='1'>",
        '{"card0": 1}',
        "- topology: a",
        "SwitchName=s0 Nodes=n[0-3]",
        "node:4",
    ],
)
def test_other_files_are_not_taken_for_it(text) -> None:
    assert not native.matches(Source("other", text))


def test_stars_and_comments_may_be_many() -> None:
    text = f'[[switch]]\nid = "{"a" * 200_000},b/c"\n# {"." * 200}\n[[link]]\nbetween = ["{"*a" * 30}*", "*/*"]\n'
    assert sum(1 for _ in read(text).connections()) == 1
    assert "fits no part" in refusal(text.replace("a*", "aab*"))


def test_the_way_back_is_unknown_of_a_link_one_way() -> None:
    t = read('[[device]]\nid = "cuda:[0-1]"\n[[link]]\nbetween = ["cuda:0", "cuda:1"]\none_way = true\n')
    assert t.link("cuda:0", "cuda:1") == Link()
    assert t.link("cuda:1", "cuda:0") is None


@pytest.mark.parametrize(
    "more",
    [
        '[[link]]\nbetween = ["b*", "b*"]\npairs = "all"\n',
        '[[override]]\nbetween = ["a*", "b1"]\nbandwidth = 1\n',
        '[[override]]\npart = "a[1-4000]"\nname = "x"\n',
    ],
)
def test_names_are_counted_over_all_of_the_file(monkeypatch, more) -> None:
    monkeypatch.setattr(native_expand, "MOST_NAMES", 18_000)
    text = '[[switch]]\nid = "a[1-4000],b[1-2]"\n[[link]]\nbetween = ["a*", "b*"]\npairs = "all"\n'
    assert sum(1 for _ in read(text).connections()) == 8000
    assert "expressions up to here stand for more than 18000 names" in refusal(text + more)


def test_a_file_that_would_take_minutes_is_refused_at_once() -> None:
    assert refusal('name = "a"\n' + "# x\n" * (1 << 20)) == "file: a topology in TOML has at most 4 MiB; this has 4"
    assert "letters; expected at most 1048576" in refusal(f'[[device]]\nid = "cpu:{"0" * (1 << 20)}"')


def test_a_machine_has_something_in_it() -> None:
    text = "".join(f'[[node]]\nname = "n{x}[1-900000]"\n' for x in range(20))
    assert "file, line 1, node[0]: there is nothing in this machine" in refusal(text)


def test_more_links_than_memory_holds_are_counted_first() -> None:
    text = '[[switch]]\nid = "a[1-3000]"\n[[link]]\nbetween = ["a[1-3000]", "a[1-3000]"]\npairs = "all"\n'
    assert "file, line 3, link[0]: with this there are 4500000 parts or links" in refusal(text)


# Editing.

WRITTEN = """\
# My cluster, as its vendor describes it.
[[node]]
name = "n[1-2]"           # two for now

[[node.device]]
id = "cuda:[0-2]"

[[node.link]]             # NVLink
between = ["cuda:[0-2]", "cuda:[0-2]"]
pairs = "all"
bandwidth = "50 GB/s"     # on paper

[[link]]
between = ["n1/cuda:0", "n2/cuda:0"]
latency = "2 us"          # who knows
"""


def both(a: str, b: str, link: Link) -> dict[tuple[str, str], Link]:
    return {(a, b): link, (b, a): link}


def edited(text: str, links: dict[tuple[str, str], Link]) -> str:
    """The text after an edit, which must change what it should and nothing else."""
    after = edit(Source("mine.toml", text), links)
    t, before = read(after), read(text)
    for part in before.description().parts:
        assert t.part(part.id) == part
        for target, link in before.links_of(part.id).items():
            assert t.link(part.id, target) == links.get((part.id, target), link)
    comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
    assert [line.partition("#")[2] for line in after.splitlines() if "#" in line] == comments
    return after


def test_an_entry_for_one_link_is_changed_where_it_stands() -> None:
    link = Link(bandwidth_mb_s=mb_s(11), latency_us=2.5, origin=Origin.MEASURED)
    after = edited(WRITTEN, both("n1/cuda:0", "n2/cuda:0", link))
    assert 'latency = "2.5 us"          # who knows\nbandwidth = "11 GB/s"\norigin = "measured"\n' in after
    assert "override" not in after


def test_one_link_of_many_gets_an_override_and_the_next_time_that_is_changed() -> None:
    link = Link(bandwidth_mb_s=mb_s(44), origin=Origin.MEASURED)
    after = edited(WRITTEN, both("n2/cuda:0", "n2/cuda:1", link))
    assert after.startswith(WRITTEN)
    assert after.endswith(
        '\n[[override]]\nbetween = ["n2/cuda:0", "n2/cuda:1"]\nbandwidth = "44 GB/s"\norigin = "measured"\n'
    )
    again = edited(after, both("n2/cuda:0", "n2/cuda:1", Link(bandwidth_mb_s=mb_s(45), origin=Origin.MEASURED)))
    assert again == after.replace("44 GB/s", "45 GB/s")


def test_when_all_links_of_an_entry_change_alike_the_entry_does() -> None:
    link = Link(bandwidth_mb_s=mb_s(48))
    ends = itertools.permutations(range(3), 2)
    every = [(f"n{node}/cuda:{a}", f"n{node}/cuda:{b}") for (a, b), node in itertools.product(ends, "12")]
    assert edited(WRITTEN, dict.fromkeys(every, link)) == WRITTEN.replace("50 GB/s", "48 GB/s")


@pytest.mark.parametrize(
    ("text", "links", "message"),
    [
        (WRITTEN, both("n1/cuda:0", "n9/cuda:0", Link()), "no link from 'n1/cuda:0' to 'n9/cuda:0'"),
        (WRITTEN, both("n1/cuda:0", "n2/cuda:0", Link()), "a latency that a file states cannot become unknown"),
        ("name: a\n", {}, "mine.toml: only a native file in TOML"),
    ],
)
def test_what_cannot_be_edited_is_said(text, links, message) -> None:
    with pytest.raises(TopologyError) as caught:
        edit(Source("mine.toml", text), links)
    assert message in str(caught.value)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_links_of_any_topology_can_be_edited(data) -> None:
    text = native.write(data.draw(topologies()))
    known = [(c.source, c.target, c.one_way) for c in read(text).connections()]
    new = st.builds(Link, bandwidth_mb_s=rates, latency_us=st.floats(0, 1e9), origin=st.just(Origin.MEASURED))
    some = data.draw(st.lists(new, min_size=1, max_size=2))
    links = {}
    for a, b, one_way in known:
        if data.draw(st.booleans()):
            link = data.draw(st.sampled_from(some))
            links |= {(a, b): link} if one_way else both(a, b, link)
    after = read(edit(Source("mine.toml", text), links))
    for a, b, _ in known:
        assert after.link(a, b) == links.get((a, b), read(text).link(a, b))

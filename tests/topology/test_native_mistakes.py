"""What is wrong in a native file is refused with its line, in bounded time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import TopologyError
from fuel_parallel.topology import (
    Link,
)
from fuel_parallel.topology.files import examine_text, native, native_expand
from fuel_parallel.topology.files.source import Source
from tests.topology.native_files import CLUSTER, read, refusal


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

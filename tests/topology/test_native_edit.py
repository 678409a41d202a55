"""New figures in a file that somebody wrote."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import TopologyError
from fuel_parallel.topology import (
    Link,
    Origin,
)
from fuel_parallel.topology.files import native
from fuel_parallel.topology.files.native_edit import edit
from fuel_parallel.topology.files.source import Source
from fuel_parallel.topology.model import mb_s
from tests.topology.native_files import rates, read, topologies

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

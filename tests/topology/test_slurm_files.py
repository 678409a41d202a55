"""SLURM's topology.conf and topology.yaml, addresses of tasks, and lists of hosts."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topology.real_files import real

from fuel_parallel.errors import TopologyFileError
from fuel_parallel.topology import DeviceKind, DeviceTopology, Interconnect, Link
from fuel_parallel.topology.files import examine, examine_text
from fuel_parallel.topology.files.hostlist import expand
from fuel_parallel.topology.files.slurm import from_address
from fuel_parallel.topology.files.source import Source

TREE = """\
# a small machine room
SwitchName=root Switches=leaf[1-2]
switchname=leaf1 NODES=n[01-02] LinkSpeed=100   # still a comment
SwitchName=leaf2 \\
    Nodes=n[03-04],gpu1
"""
BLOCKS = "BlockName=b1 Nodes=a[1-2]\nBlockName=b2 Nodes=a[3-4]\nBlockName=b3 Nodes=a[5-6]\nBlockSizes=2,4\n"
YAML = """\
- topology: rooted
  cluster_default: true
  tree:
    switches:
      - switch: root
        children: s[1-2]
      - {switch: s1, nodes: "n[1-2]"}
      - {switch: s2, nodes: n3}
- topology: blocks
  block:
    block_sizes: [2, 4]
    blocks:
      - {block: b1, nodes: "n[1-2]"}
      - {block: b2, nodes: "n[3-4]"}
"""


def ends(t: DeviceTopology, part: str) -> set[str]:
    return set(t.links_of(part))


def refused(text: str) -> str:
    with pytest.raises(TopologyFileError) as caught:
        examine_text(text, "topology.conf")
    return str(caught.value)


def test_a_tree_has_switches_above_machines_with_a_cpu_and_a_card() -> None:
    found = examine_text(TREE)
    t = found.topology
    assert found.format.name == "slurm"
    assert t.nodes == ["n01", "n02", "n03", "n04", "gpu1"]
    assert [s.id for s in t.switches] == ["root", "leaf1", "leaf2"]
    assert {s.kind for s in t.switches} == {Interconnect.NETWORK}
    assert t.device("n01/cpu:0").kind is DeviceKind.CPU
    assert ends(t, "leaf2") == {"root", "n03/nic:0", "n04/nic:0", "gpu1/nic:0"}
    assert t.link("n01/nic:0", "leaf1") == Link(interconnect=Interconnect.NETWORK, path="tree")
    route = t.route("n01/cpu:0", "gpu1/cpu:0")
    assert route is not None
    assert route.bandwidth_mb_s is None
    assert len(found.notes) == 1
    assert "line 3: LinkSpeed" in found.notes[0]


def test_blocks_are_joined_as_their_sizes_say_and_what_is_not_stays_unconnected() -> None:
    found = examine_text(BLOCKS)
    t = found.topology
    assert [s.id for s in t.switches] == ["b1", "b2", "b3", "block:4:0", "block:4:1"]
    assert ends(t, "block:4:0") == {"b1", "b2"}
    assert t.route("a1/cpu:0", "a4/cpu:0") is not None
    assert t.route("a1/cpu:0", "a5/cpu:0") is None
    assert "2 groups of blocks" in found.notes[0]


def test_a_ring_links_each_node_to_the_next() -> None:
    t = examine_text("RingName=r1 Nodes=n[1-4]\n").topology
    assert {frozenset((c.source, c.target)) for c in t.connections() if c.link.path == "ring"} == {
        frozenset((f"n{a}/nic:0", f"n{a % 4 + 1}/nic:0")) for a in range(1, 5)
    }
    assert "at most 16" in refused("RingName=r1 Nodes=n[1-17]\n")


def test_nodes_below_two_switches_are_linked_to_both_and_islands_are_noted() -> None:
    found = examine_text("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[2-3]\nSwitchName=c Nodes=n4\n")
    assert ends(found.topology, "n2/nic:0") == {"n2/cpu:0", "a", "b"}
    assert found.notes == (
        "1 nodes are below several switches; SLURM warns of it: n2",
        "2 parts of the network are not connected: links between them are unknown, not slow",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "line 1: switches in a circle: a below b below a"),
        ("SwitchName=a Switches=a\n", "in a circle"),
        ("SwitchName=r Switches=a\nSwitchName=a Switches=b\nSwitchName=b Switches=a\n", "in a circle"),
        (
            "SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n",
            "line 2: the switch 'a' is described twice, first in line 1",
        ),
        ("SwitchName=a Switches=b\n", "line 1: switch 'a' has the switch 'b' below it, which the file does not"),
        ("SwitchName=a\n", "neither nodes nor switches"),
        ("SwitchName=a Nodes=n[1-999999999]\n", "line 1: 'n[1-999999999]' names 999999999 hosts; at most"),
        ("SwitchName=a Nodes=n[1-900][1-900][1-900]\n", "hosts; at most"),
        ("SwitchName=a Nodes=n[4-1]\n", "descends"),
        ("SwitchName=a Nodes=n[1-\n", "expected names and ranges"),
        ("SwitchName=a Nodes=n1, n2\n", "lists have no blanks"),
        ("SwitchName=a Nodes=n1,\n", "an empty name"),
        ("SwitchName=a Nodes=n1 n2\n", "lists have no blanks"),
        ("SwitchName=a Nodes=@compute\n", "expected names and ranges"),
        ("SwitchName=a Nodes=n1 Speed=4\n", "'Speed=4' is not known here; expected switches or nodes or linkspeed"),
        ("SwitchName=a Nodes=n1 Nodes=n2\n", "nodes comes twice"),
        ("SwitchName=a Nodes=n1 \\", "the file is cut"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n1\n", "line 2: blockname after switchname in line 1"),
        ("include other.conf\nSwitchName=a Nodes=n1\n", "line 1: it includes another file"),
        (f"SwitchName={'a' * 65} Nodes=n1\n", "more than 64 characters"),
        ("BlockName=a Nodes=n1\nBlockName=b Nodes=n1\n", "node 'n1' is in the blocks 'a' and 'b'"),
        ("BlockName=a Nodes=n1\nBlockSizes=4,6\n", "line 2: block sizes 4,6: 6 does not fit"),
        ("BlockName=a Nodes=n1\nBlockSizes=0,4\n", "does not fit"),
        ("BlockSizes=4\n", "it describes no block"),
    ],
)
def test_what_does_not_hold_together_is_refused_with_its_line(text: str, said: str) -> None:
    message = refused(text)
    assert message.startswith("topology.conf")
    assert said in message


def test_the_default_topology_of_a_yaml_file_is_read_and_the_others_are_noted() -> None:
    found = examine_text(YAML)
    assert found.format.name == "slurm-yaml"
    assert found.topology.name == "rooted"
    assert ends(found.topology, "root") == {"s1", "s2"}
    assert found.notes == ("'rooted' is read; the file also has blocks (block)",)
    other = examine_text(
        YAML.replace("cluster_default: true\n  tree", "tree").replace("  block:", "  cluster_default: yes\n  block:")
    )
    assert other.topology.nodes == ["n1", "n2", "n3", "n4"]
    assert ends(other.topology, "block:4:0") == {"b1", "b2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- topology: a\n  tree: {switches: []}\n  flat: true\n", "line 1: the topology 'a' has tree and flat"),
        ("- topology: a\n", "has none of them; expected exactly one"),
        ("- topology: a\n  flat: true\n", "line 2: the topology 'a' is flat: it names no nodes"),
        ("- topology: a\n  tree:\n    switches: n1\n", "line 3: expected a list of switches"),
        ("- topology: a\n  topology: b\n", "line 2: the key 'topology' comes twice"),
        ("- topology: &x a\n  tree: *x\n", "line 1: anchors, aliases and tags"),
        ("- topology: !!python/name:os.system a\n", "anchors, aliases and tags"),
        ("- topology: a\n  tree: {switches: [{switch: s, nodes: n1, speed: 3}]}\n", "'speed' is not known here"),
        ("- topology: a\n  tree: " + "[" * 40 + "\n", "nested more than 16 deep"),
        ("- topology: a\n  tree: {switches: [\n", "no YAML"),
        ("topology: a\n", "expected a list of topologies"),
        ("- topology: a\n  ring: {rings: [{ring: r}]}\n", "the ring 'r' has no nodes"),
        ("- topology: a\n  cluster_default: perhaps\n  flat: true\n", "expected true or false"),
        (
            "- topology: a\n  torus3d: {toruses: [{name: t, dims: {x: 2, y: 2, z: 2}, nodes: 'n[1-7]'}]}\n",
            "2x2x2, which takes 8 nodes; it has 7",
        ),
    ],
)
def test_a_yaml_file_that_does_not_hold_together_is_refused_with_its_line(text: str, said: str) -> None:
    assert said in refused(text)


def test_tasks_know_their_tree_from_their_addresses() -> None:
    t = from_address({"n1": "root.a.n1", "n2": "root.a.n2", "n3": "root.b.n3"}, "switch.switch.node")
    assert ends(t, "a") == {"root", "n1/nic:0", "n2/nic:0"}
    assert from_address({"n1": "top[0-1].a.n1"}).links_of("a").keys() == {"top0", "top1", "n1/nic:0"}
    with pytest.raises(TopologyFileError, match="names with dots in them cannot be told apart"):
        from_address({"n1": "root.1.a.n1"}, "switch.switch.node")
    with pytest.raises(TopologyFileError, match="expected the node's own name 'n2'"):
        from_address({"n2": "root.a.n1"})
    with pytest.raises(TopologyFileError, match="no switches in it"):
        from_address({"n1": "n1"}, "node")


def test_a_list_of_hosts_keeps_its_zeros_and_its_order() -> None:
    assert expand(Source("x", ""), "n[08-10],m3,n[1,7]") == ("n08", "n09", "n10", "m3", "n1", "n7")
    assert expand(Source("x", ""), "r[1-2]n[1-2]") == ("r1n1", "r1n2", "r2n1", "r2n2")


def test_hostile_lists_are_refused_in_no_time() -> None:
    began = time.perf_counter()
    for text in ("n[1-99999999999999999]", "a" * 100_000 + "!", "[" * 100_000, "," * 100_000, "n" + "[0-9]" * 1000):
        with pytest.raises(TopologyFileError):
            expand(Source("x", ""), text)
    assert time.perf_counter() - began < 2


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([TREE, BLOCKS, YAML]), st.data())
def test_a_corrupted_file_raises_nothing_else(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 6)))
    new = data.draw(st.text("ab1=[],-: {}\n#&*'\"\\\t", max_size=4))
    with contextlib.suppress(TopologyFileError):
        examine_text(text[:at] + new + text[end:])


# Real files: counted by hand.


@pytest.mark.parametrize(
    ("name", "nodes", "switches", "links"),
    [
        # 500 leaves of 20 nodes, 26 groups, 2 above, a root; a link up of each but the root, and one inside of nodes.
        ("slurm_tree_testcase1.topology.conf", 10_000, 500 + 26 + 2 + 1, 2 * 10_000 + 500 + 26 + 2),
        ("slurm_tree_testcase3.topology.conf", 400, 20 + 2 + 1, 2 * 400 + 20 + 2),
        ("slurm_tree_topograph_oci.topology.conf", 96, 12 + 6 + 1, 2 * 96 + 12 + 6),
        # 8 blocks of 4; pairs, fours and eights of them.
        ("slurm_block_unit.topology.conf", 32, 8 + 4 + 2 + 1, 2 * 32 + 8 + 4 + 2),
        ("slurm_block_check.topology.conf", 32, 8 + 4 + 2 + 1, 2 * 32 + 8 + 4 + 2),
        # 12 blocks of 8; pairs and fours of them, of which three remain.
        ("slurm_block_topograph_dra.topology.conf", 96, 12 + 6 + 3, 2 * 96 + 12 + 6),
        ("slurm_manpage.topology.yaml", 4, 3, 2 * 4 + 2),
        ("slurm_yaml_rooted.topology.yaml", 32, 3, 2 * 32 + 2),
        ("slurm_yaml_disconnected_leaves.topology.yaml", 32, 2, 2 * 32),
        ("slurm_yaml_disconnected_trunks.topology.yaml", 32, 6, 2 * 32 + 4),
    ],
)
def test_real_files_have_the_nodes_switches_and_links_that_they_say(
    name: str, nodes: int, switches: int, links: int
) -> None:
    t = examine(real(name)).topology
    connections = list(t.connections())
    assert (len(t.nodes), len(t.switches), len(connections)) == (nodes, switches, links)
    assert all(c.link.bandwidth_mb_s is None for c in connections)


def test_real_trunks_that_are_not_connected_stay_so() -> None:
    found = examine(real("slurm_yaml_disconnected_trunks.topology.yaml"))
    assert found.topology.route("node1/cpu:0", "node16/cpu:0") is not None
    assert found.topology.route("node1/cpu:0", "node17/cpu:0") is None
    assert "2 parts of the network are not connected" in found.notes[0]

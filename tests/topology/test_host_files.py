"""Host files of all dialects, rank files and lists of nodes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from topology.real_files import real

from fuel_parallel.errors import TopologyFileError
from fuel_parallel.topology import DeviceInfo, DeviceKind, DeviceTopology
from fuel_parallel.topology.files import examine, examine_text, write
from fuel_parallel.topology.files.hostfile import Host, parse
from fuel_parallel.topology.files.source import Source

OPEN_MPI = """\
# two machines
n01 slots=2 max_slots=4   // grown
/* the old
   ones */
me@n02 slots = 1
n01 slots=1
n03
^n03
"""
HYDRA = "n01:2\nn02:1 user=me\nn02\n"
RANKS = "rank 0=n01 slot=0-3\n\nrank 2=n02 slot=0\nrank 1=n01 slot=4,6  # the rest\n"


def refused(text: str) -> str:
    with pytest.raises(TopologyFileError) as caught:
        examine_text(text, "hosts")
    return str(caught.value)


def slots(text: str) -> dict[str, int | None]:
    return {host.name: host.slots for host in parse(Source("hosts", text))}


def test_a_host_file_of_open_mpi_adds_up_what_comes_again() -> None:
    assert parse(Source("hosts", OPEN_MPI)) == (
        Host("n01", slots=3, max_slots=4, line=2, dialect="Open MPI"),
        Host("n02", slots=1, user="me", line=5, dialect="Open MPI"),
    )
    found = examine_text(OPEN_MPI)
    assert found.format.name == "hostfile"
    assert found.topology.device_ids() == ["n01/cpu:0", "n01/cpu:1", "n01/cpu:2", "n02/cpu:0"]
    assert list(found.topology.connections()) == []


def test_a_machine_file_of_hydra_is_told_from_a_host_file() -> None:
    found = examine_text(HYDRA)
    assert found.format.name == "machinefile"
    assert len(found.topology) == 4
    assert "Open MPI takes `host:2` for the name of a host" in found.notes[0]


def test_bare_names_have_no_number_of_slots_and_come_again_as_more() -> None:
    assert slots("a\nb\nb\n") == {"a": None, "b": 2}
    found = examine_text("a\r\nb\r\n")
    assert found.topology.nodes == ["a", "b"]
    assert "2 hosts have no number of slots" in found.notes[0]


def test_the_json_of_mlx_is_a_host_file() -> None:
    found = examine_text('[{"ssh": "me@mac1", "ips": ["10.0.0.1"]}, {"ssh": "mac2", "ips": []}]')
    assert (found.format.name, found.topology.device_ids()) == ("hostfile", ["mac1/cpu:0", "mac2/cpu:0"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n01 slots=2\nn02:2\n", "hosts, line 2: words of MPICH, but line 1 has words of Open MPI"),
        ("n01:2 slots=2\n", "line 1: 'slots=2' is of Open MPI, but 'n01:2' is of MPICH"),
        ("n01 slots=2\nn02 sluts=2\n", "line 2: 'sluts=2' after a host is not known; expected NAME=VALUE of slots"),
        ("n01 slots=2\nn02 two\n", "line 2: 'two' after a host"),
        ("n01 slots=2\n+n2 slots=2\n", "line 2: '+n2' is relative to the hosts that a batch system gives"),
        ("+e:1\n", "line 1: '+e:1' is relative"),
        ("n01 slots=0\n", "expected a number of slots from 1"),
        ("n01 slots=99999999999999\n", "expected a number of slots from 1"),
        ("n01 slots=100000\nn02 slots=100000\n", "line 2: with 'n02' there are more than"),
        ("n01 slots=4 max_slots=2\n", "has 4 slots, but at most 2"),
        ("a@n01 slots=1\nb@n01 slots=1\n", "line 2: 'n01' has the user 'b', but 'a' in line 1"),
        ("n01 slots=1 /* and\nn02\n", "line 1: the comment that begins here has no end"),
        ("n01 slots=1\nn01 slots=1 slots=2\n", "has its slots already"),
        ("^n01\n", "no hosts"),
        ("n01:\nn02:1\n", "line 1"),
        ("rank 0=n01 slot=0\nrank 2=n01 slot=1\n", "line 2: rank 1 is missing, but there is a rank 2"),
        ("rank 0=n01 slot=0\nrank 0=n02 slot=0\n", "line 2: rank 0 comes twice, first in line 1"),
        ("rank 0=+n0 slot=0\n", "line 1: '+n0' is a host by its place"),
        ("rank 0=n01 slot=x\n", "line 1: slot=x: expected cores"),
        ("rank 0=n01 slot=0-999999\n", "line 1"),
        ("rank 0=n01 slot=0\nrank one=n01\n", "line 2: 'rank one=n01': expected `rank N=HOST slot=CORES`"),
        ("n[1-3],,m\n", "line 1: an empty name"),
        ("n[1-999999999]\n", "names 999999999 hosts"),
        ("hello, world\n", "no known format: it begins with 'hello, world'"),
        ("", "no known format: it is empty"),
    ],
)
def test_what_does_not_hold_together_is_refused_with_its_line(text: str, said: str) -> None:
    message = refused(text)
    assert message.startswith("hosts")
    assert said in message


def test_a_rank_file_gives_each_rank_a_device_with_its_cores() -> None:
    found = examine_text(RANKS)
    assert found.format.name == "rankfile"
    assert [(d.id, d.cores) for d in found.topology.devices] == [
        ("n01/cpu:0", "0-3"),
        ("n01/cpu:1", "4,6"),
        ("n02/cpu:0", "0"),
    ]
    assert "logical" in found.notes[0]
    assert "physical" in examine_text("rank 0=a slot=p0-3\n").notes[0]


def test_cores_of_a_package_stay_as_they_are_written() -> None:
    found = examine_text("rank 0=a slot=0:0-3;1:*\nrank 1=a\n")
    assert [(d.cores, d.name) for d in found.topology.devices] == [("", "slot 0:0-3;1:*"), ("", "")]
    assert write(found.topology, "rankfile") == "rank 0=a slot=0:0-3;1:*\nrank 1=a slot=1\n"


def test_a_list_of_nodes_is_taken_in_its_order() -> None:
    found = examine_text("n[01-03,7],gpu1\n")
    assert found.format.name == "nodelist"
    assert found.topology.nodes == ["n7", "n01", "n02", "n03", "gpu1"]
    assert examine_text("b,a\nc[1-2]\n").topology.nodes == ["b", "a", "c1", "c2"]


def test_accelerators_are_slots_where_there_are_some() -> None:
    t = DeviceTopology()
    for n in range(2):
        t.add_device(DeviceInfo(id=f"a/cuda:{n}", node="a", kind=DeviceKind.CUDA, cores="0-7"))
    t.add_device(DeviceInfo(id="a/cpu:0", node="a", kind=DeviceKind.CPU))
    t.add_device(DeviceInfo(id="b/cpu:0", node="b", kind=DeviceKind.CPU, cores="0-3"))
    assert write(t, "hostfile") == "a slots=2\nb slots=1\n"
    assert write(t, "machinefile") == "a:2\nb:1\n"
    assert write(t, "rankfile") == "rank 0=a slot=0\nrank 1=a slot=1\nrank 2=b slot=0-3\n"


NAMES = st.from_regex(r"[a-z][a-z0-9\-]{0,8}", fullmatch=True)


@given(st.dictionaries(NAMES, st.integers(1, 5), min_size=1, max_size=6), st.sampled_from(["hostfile", "machinefile"]))
def test_hosts_are_read_as_they_are_written(hosts: dict[str, int], dialect: str) -> None:
    t = DeviceTopology("hosts")
    for host, number in hosts.items():
        for n in range(number):
            t.add_device(DeviceInfo(id=f"{host}/cpu:{n}", node=host, kind=DeviceKind.CPU))
    found = examine_text(write(t, dialect))
    assert (found.topology, found.format.name) == (t, dialect)


@given(st.lists(st.tuples(NAMES, st.sampled_from(["0-3", "5", "1,3"])), min_size=1, max_size=8))
def test_ranks_are_read_as_they_are_written(ranks: list[tuple[str, str]]) -> None:
    text = "".join(f"rank {n}={host} slot={cores}\n" for n, (host, cores) in enumerate(ranks))
    t = examine_text(text).topology
    assert write(t, "rankfile") == text
    assert examine_text(write(t, "rankfile")).topology == t


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([OPEN_MPI, HYDRA, RANKS, "n[01-03,7],gpu1\n"]), st.data())
def test_a_corrupted_file_raises_nothing_else(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 6)))
    new = data.draw(st.text("an01=[],-:+^@/*#\n\t ", max_size=4))
    with contextlib.suppress(TopologyFileError):
        examine_text(text[:at] + new + text[end:])


# Real files: counted by hand.


@pytest.mark.parametrize(
    ("name", "kind", "ranks"),
    [
        ("ompi_hostfile_mpi4py280.txt", "hostfile", {"no02": 3, "no01": 5}),
        (
            "ompi_hostfile_prrte_docs.txt",
            "hostfile",
            {"node01": 10, "node13": 5, "node15": 1, "node16": 1, "node17": 3},
        ),
        ("mpich_hostfile_eth_wiki.txt", "hostfile", {f"192.148.3.{n}": 1 for n in range(180, 184)}),
        ("mpich_hostfile_verified_forms.txt", "machinefile", {"vm": 4}),
        (
            "ompi_rankfile_issue1614_fqdn.rf",
            "rankfile",
            {f"fengli-{n}.gss.platformlab.ibm.com": 4 for n in (17, 16)},
        ),
        ("ompi_rankfile_issue6277.rfile", "rankfile", {f"clx-orion-00{n}": 2 for n in (3, 4, 5, 6)}),
        ("ompi_rankfile_two_sockets_issue5965.rf", "rankfile", {"loki": 1}),
    ],
)
def test_real_files_have_the_hosts_that_they_say(name: str, kind: str, ranks: dict[str, int]) -> None:
    found = examine(real(name))
    assert found.format.name == kind
    assert {node: len(found.topology.devices_of_node(node)) for node in found.topology.nodes} == ranks


def test_real_ranks_have_the_cores_that_they_say() -> None:
    t = examine(real("ompi_rankfile_issue6277.rfile")).topology
    assert [d.cores for d in t.devices] == ["0", "1", "2", "18", "4", "25", "22", "27"]
    assert t.devices[3].id == "clx-orion-003/cpu:1"


@pytest.mark.parametrize("name", ["ompi_hostfile_relative_prrte_docs.txt", "ompi_rankfile_azure_h100_a100.txt"])
def test_real_files_with_hosts_of_a_job_are_refused(name: str) -> None:
    with pytest.raises(TopologyFileError, match=r"line [12]: '\+n[02]' is .*; name the host"):
        examine(real(name))

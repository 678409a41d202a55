"""Machines and the number of ranks on each."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuel_parallel.errors import LaunchError, TopologyFileError
from fuelrun.launch.hosts import Wish, as_variable, deal, is_here, parse_hosts, read_hosts


def dealt(text: str, **numbers: int) -> str:
    return as_variable(deal(Wish(parse_hosts(text), **numbers)))


@pytest.mark.parametrize(
    ("text", "numbers", "result"),
    [
        ("a,b:4", {}, "a:1,b:4"),
        ("a:2,b:4", {"ranks": 3}, "a:2,b:1"),
        ("a:2,b:4", {"ranks": 2}, "a:2"),
        ("a,b", {"ranks": 5}, "a:3,b:2"),  # nothing was said of slots: as evenly as it goes
        ("a,b,c", {"ranks": 2}, "a:1,b:1"),
        ("a,b", {"per_node": 3}, "a:3,b:3"),
        ("a,b,c", {"nodes": 2, "per_node": 2}, "a:2,b:2"),
        ("a:8,b:8,c:8", {"nodes": 2, "ranks": 6}, "a:3,b:3"),
        ("a:1,b:8", {"nodes": 2, "ranks": 6}, "a:1,b:5"),
        ("n[01-03]:2", {"ranks": 6, "per_node": 2}, "n01:2,n02:2,n03:2"),
        ("a:2,b,a:1", {}, "a:3,b:1"),
        ("gpu-[1-2].cluster.org", {}, "gpu-1.cluster.org:1,gpu-2.cluster.org:1"),
    ],
)
def test_ranks_are_dealt_in_blocks(text: str, numbers: dict[str, int], result: str) -> None:
    assert dealt(text, **numbers) == result


@pytest.mark.parametrize(
    ("text", "numbers", "said"),
    [
        ("a:2,b:4", {"ranks": 8}, "not enough slots: 8 ranks, but the machines take 6 (a 2, b 4); take -n 6, more"),
        ("a:2,b:4", {"per_node": 3}, "not enough slots: 6 ranks, but the machines take 5"),
        ("a,b", {"ranks": 5, "per_node": 2}, "-n 5 is not --ppn 2 ranks on each of 2 machines, which are 4; leave one"),
        ("a,b", {"nodes": 3}, "--nnodes 3 asks for more machines than the 2 of -H or --hostfile (a, b)"),
        ("a,b,c", {"nodes": 3, "ranks": 2}, "-n 2 is less than one rank for each of --nnodes 3"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(text: str, numbers: dict[str, int], said: str) -> None:
    with pytest.raises(LaunchError) as error:
        dealt(text, **numbers)
    assert said in str(error.value)


@pytest.mark.parametrize("numbers", [{"nodes": 2}, {"nodes": 2, "per_node": 2}, {"ranks": 8, "per_node": 4}])
def test_more_machines_need_names(numbers: dict[str, int]) -> None:
    with pytest.raises(LaunchError, match="needs the names of the machines: -H node1,node2 or --hostfile"):
        deal(Wish(**numbers))


@pytest.mark.parametrize("word", ["", "a b", "a:", "a:0", "a:x", "-oProxyCommand=reboot", "me@a", "::1", "a;reboot"])
def test_what_is_no_machine_is_refused(word: str) -> None:
    with pytest.raises(LaunchError, match="is no machine; expected NAME or NAME:RANKS"):
        parse_hosts(f"node1,{word}")


@pytest.mark.parametrize("text", ["n1 slots=2\nn2 slots=2\n", "n1:2\nn2:2\n", "n1 slots=2 # the first\n\nn2 slots=2"])
def test_host_files_of_every_dialect(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    assert as_variable(deal(Wish(read_hosts(file), ranks=4))) == "n1:2,n2:2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n1 slots=2\nn2 slot=2\n", "hosts, line 2: 'slot=2' after a host is not known; expected NAME=VALUE of slots"),
        ("n1\nn2 slots=two\n", "hosts, line 2: 'slots=two': expected a number of slots"),
        ("n1\nme@n2\n", "hosts, line 2: the user 'me' for n2 would be known to one MPI"),
    ],
)
def test_a_typo_in_a_host_file_is_shown_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(TopologyFileError) as error:
        read_hosts(file)
    assert said in str(error.value)


@pytest.mark.parametrize(("name", "here"), [("localhost", True), ("127.0.0.1", True), ("192.0.2.1", False)])
def test_this_machine_knows_itself(name: str, here: bool) -> None:
    assert is_here(name) is here


def test_options_on_the_command_line(fuelrun) -> None:
    script = fuelrun.write("import os; print(os.environ['RANK'])")
    done = fuelrun.run("-H", "localhost:2", script)  # all here: as with -n 2
    assert (done.returncode, sorted(done.stdout.split()), done.stderr) == (0, ["0", "1"], "")
    for words, said in {
        ("-H", "a:2", "-n", "3"): "not enough slots: 3 ranks",
        ("-H", "a", "--hostfile", "b"): "-H and --hostfile both name the machines",
        ("--nnodes", "2"): "--nnodes 2 needs the names of the machines",
        ("--ppn", "0"): "--ppn takes ranks of a machine, a whole number of at least 1; got '0'",
        ("-H", "no-such-machine.invalid"): "'no-such-machine.invalid' is not known here",
        ("--hostfile", "missing"): "cannot read missing: No such file",
        ("--engine", "lam"): "'lam' is not one of",
    }.items():
        done = fuelrun.run(*words, script)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr

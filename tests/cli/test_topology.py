"""`fuelrun topology probe`, `show`, `convert` and `check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from fuel_parallel.topology import DeviceKind, Origin
from fuel_parallel.topology.cores import parse_list
from fuel_parallel.topology.files import examine_text, read
from fuel_parallel.topology.model import mb_s
from fuelrun.topology import check, convert
from fuelrun.topology_input import examine


def test_this_machine_is_told_in_words_and_in_json(fuelrun) -> None:
    words = fuelrun.run("topology", "probe")
    assert (words.returncode, words.stderr) == (0, "")
    assert "numa:0" in words.stdout
    assert "shared memory" in words.stdout
    t = examine_text(fuelrun.run("topology", "probe", "--json").stdout).topology
    cores = {core for d in t.devices_of_kind(DeviceKind.CPU) for core in parse_list(d.cores)}
    assert cores == os.sched_getaffinity(0)


def test_what_was_measured_on_two_ranks_goes_to_a_file_and_back(fuelrun) -> None:
    done = fuelrun.run("topology", "probe", "-n", "2", "--measure", "--per-rank", "-o", "here.json")
    assert done.returncode == 0
    assert "written to" in done.stdout
    t = read(fuelrun.folder / "here.json")
    assert t.device_ids() == ["cpu:0", "cpu:1"]
    # Bound to their own cores, the ranks still know all of them.
    cores = [core for d in t.devices for core in parse_list(d.cores)]
    assert set(cores) == os.sched_getaffinity(0)
    route = t.route("cpu:0", "cpu:1")
    assert {link.origin for link in route.links} == {Origin.MEASURED}
    shown = fuelrun.run("topology", "show", "here.json")
    assert "(measured)" in shown.stdout
    again = fuelrun.run("topology", "show", "here.json", "--json")
    assert json.loads(again.stdout) == json.loads((fuelrun.folder / "here.json").read_text())


PAIR = """\
# My machine.
[[device]]
id = "cpu:[0-1]"

[[numa]]
id = "numa:0"

[[link]]
between = ["cpu:[0-1]", "numa:0"]  # memory
bandwidth = "1 GB/s"
"""


def test_measured_figures_are_put_into_a_file_and_its_comments_stay(fuelrun) -> None:
    fuelrun.write(PAIR, "mine.toml")
    done = fuelrun.run("topology", "probe", "-n", "2", "--measure", "--per-rank", "-o", "mine.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "figures of 2 links written to " in done.stdout
    text = (fuelrun.folder / "mine.toml").read_text()
    assert text.startswith("# My machine.\n")
    assert 'between = ["cpu:[0-1]", "numa:0"]  # memory\n' in text
    link = read(fuelrun.folder / "mine.toml").link("cpu:0", "numa:0")
    assert (link.origin, link.bandwidth_mb_s is None) == (Origin.MEASURED, False)


def test_a_file_of_another_machine_is_left_alone(fuelrun) -> None:
    other = '[[device]]\nid = "cuda:0"\n'
    fuelrun.write(other, "other.toml")
    done = fuelrun.run("topology", "probe", "-n", "2", "--measure", "-o", "other.toml")
    assert "other.toml: it has none of the links that were measured, such as " in done.stderr
    assert (fuelrun.folder / "other.toml").read_text() == other


@pytest.mark.parametrize("name", ["dragonfly", "fat-tree", "laptop", "mi250x", "nvswitch", "workstation"])
def test_examples_are_found_by_name_and_have_no_problems(name) -> None:
    done = CliRunner().invoke(check, [name])
    assert done.output.startswith(f"{name}: native: ")
    assert "problem" not in done.output
    t = examine(name).topology
    first, *others = t.device_ids()
    assert all(t.bandwidth_mb_s(first, other) for other in others)


def test_examples_have_the_devices_and_links_that_they_tell_of() -> None:
    fat, packages, machine = (examine(name).topology for name in ("fat-tree", "mi250x", "nvswitch"))
    assert (len(fat.nodes), len(fat), len(fat.nics), len(fat.switches)) == (32, 256, 256, 32 + 4 + 2)
    assert fat.bandwidth_mb_s("n001/cuda:0", "n032/cuda:7") == mb_s(48)
    assert fat.bandwidth_mb_s("n017/cuda:3", "n001/cuda:0") == mb_s(25)
    assert fat.link("n017/nic:3", "leaf3").bandwidth_mb_s == mb_s(25)
    partners = {d.id: t for d in packages.devices for t, link in packages.links_of(d.id).items() if link.count == 4}
    assert partners["n1/rocm:0"] == "n1/rocm:1"
    assert partners["n2/rocm:7"] == "n2/rocm:6"
    assert machine.route("cuda:3", "nic:3").parts == ("cuda:3", "pci:1", "nic:3")
    dragonfly = examine("dragonfly").topology
    # Inside of four groups six cables each, six between them, and 32 of machines, which have one link inside.
    assert sum(1 for _ in dragonfly.connections()) == 4 * 6 + 6 + 32 + 32


def test_a_file_or_standard_input_is_converted(tmp_path) -> None:
    run = CliRunner().invoke
    (tmp_path / "mine").write_text(PAIR)
    same = read(tmp_path / "mine")
    for suffix in ("toml", "json", "yaml"):
        out = tmp_path / f"out.{suffix}"
        assert f"written to {out}" in run(convert, [str(tmp_path / "mine"), "-o", str(out)]).output
        assert read(out) == same
        printed = run(convert, [str(out), "--to", suffix]).output
        assert printed == out.read_text()
    assert json.loads((tmp_path / "out.json").read_text())["device"] == [{"id": "cpu:[0-1]"}]
    wrong = run(convert, [str(tmp_path / "mine"), "--to", "word"])
    assert "--to word: cannot write a topology as 'word'; the formats are native" in wrong.output


def test_show_takes_standard_input(fuelrun) -> None:
    fuelrun.write(PAIR, "mine")
    words = [sys.executable, "-m", "fuelrun", "topology", "show", "-"]
    done = subprocess.run(words, input=PAIR, capture_output=True, text=True, check=True)
    assert done.stdout == fuelrun.run("topology", "show", "mine").stdout
    assert "cpu:1" in done.stdout


def test_check_says_what_is_there_and_what_looks_wrong(tmp_path) -> None:
    run = CliRunner().invoke
    good, bad, odd = (tmp_path / name for name in ("good", "bad", "odd"))
    good.write_text(PAIR)
    bad.write_text(PAIR.replace("cpu:[0-1]", "cpu:["))
    odd.write_text(PAIR.replace("bandwidth", "one_way = true # ") + '[[device]]\nid = "cuda:0"\n')
    done = run(check, [str(good)])
    assert (done.output, done.exit_code) == (f"{good}: native: 1 machine, 2 devices, 1 NUMA domain, 2 links\n", 0)
    done = run(check, [str(good), str(bad)], standalone_mode=False)
    assert f"refused: {bad}, line 3, device[0].id: 'cpu:[' has a '[' that is not closed" in done.output
    assert done.return_value == 1
    done = run(check, [str(odd), "--json"], standalone_mode=False)
    assert done.return_value == 0
    (found,) = json.loads(done.output)
    assert found["format"] == "native"
    assert found["counts"]["devices"] == 3
    assert found["problems"] == [
        "1 device has no links, such as cuda:0",
        "2 links have no way back, such as cpu:0 to numa:0",
        "of 2 of 2 links the bandwidth is unknown, such as cpu:0 to numa:0",
    ]
    assert run(check, [str(odd), "--strict"], standalone_mode=False).return_value == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "a",', "wrong.json, line 1: this is no JSON"),
        ('{"name": "a", "parts": []}', "there is no field 'parts' here; expected one of format, name, node, numa"),
        ('{"nic": [{"id": "a"}, {"id": "a"}]}', "wrong.json, line 1, nic[1].id: there are two parts 'a'"),
        ("[" * 100_000, "wrong.json: no known format"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(fuelrun, text, message) -> None:
    fuelrun.write(text, "wrong.json")
    done = fuelrun.run("topology", "show", "wrong.json")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_where_nothing_can_be_written_that_is_said_first(fuelrun) -> None:
    done = fuelrun.run("topology", "probe", "-o", "no/where.json")
    assert done.returncode == 2
    assert "--output no/where.json: there is no folder" in done.stderr


def test_help_teaches(fuelrun) -> None:
    text = fuelrun.run("topology", "probe", "--help").stdout
    assert "mpirun -n 64 fuelrun topology probe -o all.toml" in text
    assert "topology" in fuelrun.run("--help").stdout

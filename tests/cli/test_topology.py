"""`fuelrun topology probe` and `show`."""

from __future__ import annotations

import json
import os

import pytest

from fuel_parallel.topology import DeviceKind, Origin
from fuel_parallel.topology.cores import parse_list
from fuel_parallel.topology.text import from_json


def test_this_machine_is_told_in_words_and_in_json(fuelrun) -> None:
    words = fuelrun.run("topology", "probe")
    assert (words.returncode, words.stderr) == (0, "")
    assert "numa:0" in words.stdout
    assert "shared memory" in words.stdout
    t = from_json(fuelrun.run("topology", "probe", "--json").stdout)
    cores = {core for d in t.devices_of_kind(DeviceKind.CPU) for core in parse_list(d.cores)}
    assert cores == os.sched_getaffinity(0)


def test_what_was_measured_on_two_ranks_goes_to_a_file_and_back(fuelrun) -> None:
    done = fuelrun.run("topology", "probe", "-n", "2", "--measure", "--per-rank", "-o", "here.json")
    assert done.returncode == 0
    assert "written to" in done.stdout
    t = from_json((fuelrun.folder / "here.json").read_bytes())
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "wrong.json is no topology: Input data was truncated"),
        ('{"parts": [{"type": "gpu"}]}', "wrong.json is no topology: Invalid value 'gpu' - at `$.parts[0].type`"),
        ('{"parts": [{"type": "nic", "id": "a"}, {"type": "nic", "id": "a"}]}', "two parts with the id 'a'"),
        ("[" * 100_000, "wrong.json is no topology"),
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
    assert "mpirun -n 64 fuelrun topology probe -o all.json" in text
    assert "topology" in fuelrun.run("--help").stdout

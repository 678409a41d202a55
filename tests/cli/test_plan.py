"""`fuelrun plan`, and the command `place` of `fuelrun topology`: thin, so only what they add is tested."""

from __future__ import annotations

import json
import tomllib

import pytest
from click.testing import CliRunner

from fuel_parallel.errors import TopologyFileError
from fuel_parallel.topology.files import native
from fuelrun.place import place
from fuelrun.plan import plan
from tests.topology.machines import fat_tree, two_nodes

MODEL = "layers = 8\nhidden = 1024\nheads = 16\nsequence = 512\nglobal_batch = 64\nvocabulary = 50304\n"


@pytest.fixture
def files(tmp_path):
    for name, topology in (("fat.json", fat_tree(2)), ("pair.json", two_nodes(shuffled=3))):
        (tmp_path / name).write_text(native.write(topology, "json"))
    (tmp_path / "model.toml").write_text(MODEL)
    return tmp_path


def run(command, *words):
    return CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False, standalone_mode=False)


def test_plans_are_a_table_json_and_a_file(files) -> None:
    words = ["--topology", files / "fat.json", "--model", files / "model.toml"]
    lines = run(plan, *words, "--best", 3).output.splitlines()
    assert lines[0].split()[:3] == ["dp", "pp", "tp"]
    assert len(lines) == 4
    found = json.loads(run(plan, *words, "--json", "-o", files / "mesh.toml").output)
    assert len(found) == 10
    assert found[0]["strategy"]["dp"] == int(lines[1].split()[0])
    written = tomllib.loads((files / "mesh.toml").read_text())
    assert written["mesh"] == {axis["name"]: axis["size"] for axis in found[0]["mesh"]}


def test_a_file_that_is_no_topology_is_said(files) -> None:
    with pytest.raises(TopologyFileError, match=r"model.toml: no known format: it begins with 'layers = 8'"):
        run(plan, "--topology", files / "model.toml", "--model", files / "model.toml")


def test_a_placement_is_text_json_and_a_rankfile(files) -> None:
    words = [files / "pair.json", "--axis", "dp=2", "--axis", "tp=4:all_reduce:16MiB", "--within-node", "tp"]
    text = run(place, *words).output.splitlines()
    assert "2 of 2 tp groups inside of a machine" in text[0]
    assert text[-1].endswith("dp=1, tp=3")
    assert json.loads(run(place, *words, "--json").output)["axes"][1]["nbytes"] == 16 << 20
    assert run(place, *words, "--rankfile").output.startswith("rank 0=n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--axis", "tp"], "expected NAME=SIZE"),
        (["--axis", "tp=0"], "expected NAME=SIZE"),
        (["--axis", "tp=4:gather"], "'gather' is neither a collective"),
        (["--axis", "tp=4", "--within-node", "dp"], "there is no such axis; the axes are tp"),
    ],
)
def test_other_words_are_refused(files, words, message) -> None:
    with pytest.raises(Exception, match=message):
        run(place, files / "pair.json", *words)

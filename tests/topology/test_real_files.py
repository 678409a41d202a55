"""Every real file: read or refused with a reason, the same after a round through our own file and its own format."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuel_parallel.errors import TopologyFileError
from fuel_parallel.topology import files
from fuel_parallel.topology.files import native
from tests.topology.real_files import FOLDER, real

REFUSED = {
    "SOURCES.md": "no known format",
    "amdsmi_topology_json_excerpt.txt": "line 60: a second JSON text",
    "env_intelmpi_2021.18_rank1of3.txt": "no known format",
    "env_mpich_5.0.2_hydra_rank1of3.txt": "no known format",
    "env_openmpi_5.0.11_rank1of3.txt": "no known format",
    "nccl_azure_ncv4-graph.xml": "line 1: this is a file of NCCL's rings and trees",
    "nvsmi_capture_windows-x86_64__nvidia-geforce-rtx-2080-super__591.86.txt": "line 1: an error of nvidia-smi",
    "ompi_hostfile_relative_prrte_docs.txt": "line 1: '+n2' is relative to the hosts",
    "ompi_rankfile_azure_h100_a100.txt": "line 2: '+n0' is a host by its place",
    "rocmsmi_4xmi210_xgmi_cut_mid_row.txt": "line 21: the row of GPU3 in 'link type' is cut",
    "rocmsmi_side_by_side_handmade_4xmi50.txt": "line 1: tables side by side",
}
FORMATS = {
    "amdsmi": "amd-smi",
    "hwloc": "hwloc",
    "mpich": "machinefile",
    "nccl": "nccl",
    "nvsmi": "nvidia-smi",
    "ompi_hostfile": "hostfile",
    "ompi_rankfile": "rankfile",
    "rccl": "nccl",
    "rocmsmi": "rocm-smi",
    "slurm": "slurm",
}
EXCEPT = {"mpich_hostfile_eth_wiki.txt": "hostfile"}  # names alone: a file of either
ALL = sorted(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else []
READ = [name for name in ALL if name not in REFUSED]


def test_there_are_real_files() -> None:
    real("SOURCES.md")
    assert set(REFUSED) < set(ALL)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(TopologyFileError) as error:
        files.read(real(name))
    assert str(error.value).startswith(f"{FOLDER / name}")
    assert REFUSED[name] in str(error.value)


@pytest.mark.parametrize("name", READ)
def test_each_is_of_the_format_that_it_is(name: str) -> None:
    found = files.examine(real(name)).format.name.removesuffix("-yaml")
    assert found == EXCEPT.get(name) or found == next(f for start, f in FORMATS.items() if name.startswith(start))


@pytest.mark.parametrize("name", READ)
def test_each_is_the_same_after_a_round_through_our_file(name: str) -> None:
    whole = files.read(real(name))
    forms = native.FORMS if len(whole) < 1000 else native.FORMS[:1]
    for form in forms:
        again = files.examine_text(native.write(whole, form))
        assert again.format.name == "native"
        assert again.topology == whole
        assert again.topology.device_ids() == whole.device_ids()


@pytest.mark.parametrize("name", READ)
def test_what_is_exported_is_read_again_by_its_own_reader(name: str, tmp_path: Path) -> None:
    reading = files.examine(real(name))
    if not reading.format.writes or (len(reading.topology.nodes) > 1 and reading.format.name == "nccl"):
        pytest.skip(f"{reading.format.title} is not written")
    (tmp_path / "again").write_text(files.write(reading.topology, reading.format.name))
    again = files.examine(tmp_path / "again")
    assert again.format == reading.format
    assert again.topology.device_ids() == reading.topology.device_ids()
    assert [d.cores for d in again.topology.devices] == [d.cores for d in reading.topology.devices]

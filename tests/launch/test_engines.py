"""The command lines and variables of each MPI's launcher, for this machine and for others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuel_parallel.errors import LaunchError
from fuel_parallel.topology.files.hostfile import Host
from fuelrun.launch import find, network
from fuelrun.launch.engine import Job
from fuelrun.launch.find import Library
from fuelrun.launch.intelmpi import IntelMpi
from fuelrun.launch.mpich import Mpich
from fuelrun.launch.mvapich import Mvapich
from fuelrun.launch.network import Interface
from fuelrun.launch.openmpi import OpenMpi

HERE = os.getcwd()
MPIRUN = Path("/opt/mpi/bin/mpirun")
FAR = Job(
    ranks=3,
    command=("python", "train.py"),
    arguments=("--mine",),
    hosts=(Host("a", 2), Host("b", 1)),
    interface="10.1.0.0/16",
    forwarded=("PATH", "FUEL_X"),
    agent=("/bin/ssh", "-o", "BatchMode=yes"),
)
NEAR = Job(ranks=3, command=("python", "train.py"))


@pytest.fixture(autouse=True)
def _interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: (Interface("ib0", "10.1.0.7", 16),))
    monkeypatch.setattr(os, "getuid", lambda: 1000)


def test_open_mpi_5() -> None:
    engine = OpenMpi(MPIRUN, "5.0.11")
    start = [str(MPIRUN), "-n", "3", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    assert engine.command(NEAR) == [*start, "python", "train.py"]
    between = ["--prefix", "/opt/mpi", "--wdir", HERE, "--host", "a:2,b:1", "-x", "PATH", "-x", "FUEL_X"]
    assert engine.command(FAR) == [*start, *between, "--mine", "python", "train.py"]
    assert engine.variables(FAR, {}) == {
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_btl_tcp_if_include": "10.1.0.0/16",
        "PRTE_MCA_plm_ssh_agent": "/bin/ssh -o BatchMode=yes",
        "PRTE_MCA_prte_if_include": "10.1.0.0/16",
    }
    left_over = engine.variables(FAR, {"SLURM_JOB_ID": "7", "OMPI_MCA_btl_tcp_if_include": "eth1"})
    assert left_over["PRTE_MCA_ras"] == left_over["PRTE_MCA_plm"] == "^slurm"
    assert "OMPI_MCA_btl_tcp_if_include" not in left_over  # the user's own


def test_open_mpi_4_has_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OpenMpi(MPIRUN, "4.1.6")
    assert engine.variables(FAR, {}) == {
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_btl_tcp_if_include": "10.1.0.0/16",
        "OMPI_MCA_oob_tcp_if_include": "10.1.0.0/16",
        "OMPI_MCA_plm_rsh_agent": "/bin/ssh -o BatchMode=yes",
    }
    assert "--allow-run-as-root" not in engine.command(FAR)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert "--allow-run-as-root" in engine.command(FAR)
    assert "--allow-run-as-root" not in OpenMpi(MPIRUN, "5.0.11").command(FAR)


@pytest.mark.parametrize("kind", [Mpich, Mvapich])
def test_hydra(kind: type[Mpich]) -> None:
    engine = kind(MPIRUN, "4.2.1")
    assert engine.command(NEAR) == [str(MPIRUN), "-n", "3", "python", "train.py"]
    between = ["-launcher", "ssh", "-launcher-exec", "/bin/ssh", "-rmk", "user", "-hosts", "a:2,b:1", "-wdir", HERE]
    between += ["-iface", "ib0", "-genvlist", "PATH,FUEL_X"]
    assert engine.command(FAR) == [str(MPIRUN), "-n", "3", *between, "--mine", "python", "train.py"]
    assert engine.variables(FAR, {})["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-o BatchMode=yes"


def test_mvapich_binds_nothing() -> None:
    engine = Mvapich(MPIRUN, "3.0")
    assert engine.variables(NEAR, {"MV2_ENABLE_AFFINITY": "1"}) == {"MVP_ENABLE_AFFINITY": "0"}
    crowded = Job(ranks=3, command=(), shared_cores=True)
    assert {"MV2_USE_BLOCKING": "1", "MVP_USE_BLOCKING": "1"}.items() <= engine.variables(crowded, {}).items()


def test_intel_mpi_has_a_set_of_words_for_each_machine_where_they_differ() -> None:
    engine = IntelMpi(MPIRUN, "2021.18")
    assert engine.command(FAR) == [
        *(str(MPIRUN), "-genvlist", "PATH,FUEL_X", "--mine"),
        *("-host", "a", "-n", "2", "-wdir", HERE, "python", "train.py", ":"),
        *("-host", "b", "-n", "1", "-wdir", HERE, "python", "train.py"),
    ]
    even = Job(ranks=4, command=("x",), hosts=(Host("a", 2), Host("b", 2)), forwarded=("PATH",), agent=("/bin/ssh",))
    words = ["-genvlist", "PATH", "-hosts", "a,b", "-ppn", "2", "-n", "4", "-wdir", HERE, "x"]
    assert engine.command(even) == [str(MPIRUN), *words]


def test_intel_mpis_variables() -> None:
    assert IntelMpi(MPIRUN, "2021.18").variables(FAR, {"I_MPI_PIN": "1"}) == {
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": "/bin/ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-o BatchMode=yes",
        "I_MPI_HYDRA_RMK": "user",
        "I_MPI_HYDRA_IFACE": "ib0",
        "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0",
    }


@pytest.mark.parametrize(
    ("library", "mpirun", "kind"),
    [
        ("Open MPI v5.0.1", "mpirun (Open MPI) 5.0.1", OpenMpi),
        ("MPICH Version: 4.2.1", "HYDRA build details: Version: 4.2.1", Mpich),
        ("MVAPICH Version: 3.0", "HYDRA build details: Version: 4.2.1", Mvapich),
        ("MVAPICH2 Version: 2.3.7", "HYDRA build details: Version: 3.2.1", Mvapich),
        ("Intel(R) MPI Library 2021.18 for Linux* OS", "Intel(R) MPI Library for Linux* OS, Version 2021.18", IntelMpi),
    ],
)
def test_the_engine_is_that_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, mpirun: str, kind: type
) -> None:
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{mpirun}'\n")
    program.chmod(0o755)
    known = Library("4", library, None)
    monkeypatch.setattr(find, "library", lambda: known)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.delenv("FUEL_MPIRUN", raising=False)
    engine = find.find_engine()
    assert type(engine) is kind
    assert find.explain(engine, known).startswith(f"{kind.name}, because that is the MPI that mpi4py loads")
    wanted = next(name for name, one in find.ENGINES.items() if one is kind)
    assert type(find.find_engine(wanted=wanted)) is kind
    another = "openmpi" if kind is not OpenMpi else "mpich"
    with pytest.raises(LaunchError, match=f"--engine {another} starts ranks of .*; leave --engine out"):
        find.find_engine(wanted=another)

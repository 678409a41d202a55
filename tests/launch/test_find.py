"""The mpirun that belongs to the library."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuel_parallel.errors import LaunchError
from fuelrun.launch import find
from fuelrun.launch.find import Library, Mpirun, flavour


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to …", "Open MPI", "5.0.11"),
        ("mpirun.real (OpenRTE) 2.1.1", "Open MPI", ""),
        ("prterun (PRRTE) 3.0.8", "Open MPI", "3.0.8"),
        ("HYDRA build details:\n    Version:                                 4.2.1\n", "MPICH", "4.2.1"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101", "Intel MPI", "2021.18"),
        ("usage: something else", None, ""),
    ],
)
def test_launchers_tell_who_they_are(text: str, name: str | None, version: str) -> None:
    found = Mpirun(Path("mpirun"), text)
    assert (found.flavour, found.version) == (name, version)


@pytest.mark.parametrize(
    ("text", "name"),
    [("Open MPI v5.0.11, package: …", "Open MPI"), ("MPICH Version:      5.0.2", "MPICH"), ("Another MPI", None)],
)
def test_libraries_tell_who_they_are(text: str, name: str | None) -> None:
    assert flavour(text) == name


def fake_mpirun(folder: Path, says: str) -> Path:
    folder.mkdir(parents=True)
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_the_librarys_own_prefix_comes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = fake_mpirun(tmp_path / "mpi" / "bin", "mpirun (Open MPI) 5.0.1")
    fake_mpirun(tmp_path / "other", "HYDRA build details: Version: 4.2")
    monkeypatch.setenv("PATH", f"{tmp_path / 'other'}:/bin:/usr/bin")
    lib = Library("4", "Open MPI v5.0.1", tmp_path / "mpi" / "lib" / "libmpi.so.40")
    found = find.mpirun_of(lib)
    assert found is not None
    assert found.path == own


def test_another_mpis_launcher_is_never_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpirun(tmp_path / "other", "HYDRA build details: Version: 4.2")
    monkeypatch.setenv("PATH", str(tmp_path / "other"))
    assert find.mpirun_of(Library("4", "Open MPI v5.0.1", tmp_path / "lib" / "x" / "libmpi.so.40")) is None


def test_a_missing_mpirun_is_an_error_with_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("FUEL_MPIRUN", raising=False)
    monkeypatch.setattr(find, "library", lambda: Library("4", "MPICH Version: 5.0", tmp_path / "a" / "b" / "libmpi.so"))
    with pytest.raises(LaunchError, match="pip install mpich brings library and mpirun"):
        find.find_engine()


def test_the_library_of_this_environment_has_its_mpirun() -> None:
    engine = find.find_engine()
    assert engine.name == find.library().flavour
    assert find.ask_mpirun(engine.mpirun).belongs_to(find.library())


def test_a_given_mpirun_of_another_mpi_is_refused(tmp_path: Path) -> None:
    other = "HYDRA build details:" if find.library().flavour == "Open MPI" else "mpirun (Open MPI) 5.0.11"
    with pytest.raises(LaunchError, match="every rank would be alone"):
        find.find_engine(str(fake_mpirun(tmp_path / "bin", other)))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the library's path is read from /proc")
def test_the_librarys_path_is_known() -> None:
    path = find.library().path
    assert path is not None
    assert path.exists()


def test_intel_mpis_library_tells_its_version() -> None:
    library = Library("4.1", "Intel(R) MPI Library 2021.18.1 for Linux* OS", None)
    assert (library.flavour, library.version) == ("Intel MPI", "2021.18.1")

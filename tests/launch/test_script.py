"""A script runs on a rank as it does under Python itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fuel_parallel.errors import LaunchError
from fuelrun.launch.script import Script

SELF = """
import os, pickle, sys
class Local: pass
print(__name__, __file__, sys.argv, sys.path[0], __package__, __spec__ and __spec__.name)
print(type(pickle.loads(pickle.dumps(Local()))) is Local, sys.modules["__main__"].Local is Local, Local.__module__)
"""


def python(fuelrun, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=fuelrun.folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("name", ["script.py", "./script.py", "inner/script.py"])
def test_a_script_is_main_as_under_python(fuelrun, name: str) -> None:
    (fuelrun.folder / "inner").mkdir()
    fuelrun.write(SELF, name)
    assert fuelrun.run(name, "-n", "3", "--help").stdout == python(fuelrun, name, "-n", "3", "--help")


@pytest.mark.parametrize("name", ["package.train", "package", "single"])
def test_a_module_is_main_as_under_python(fuelrun, name: str) -> None:
    (fuelrun.folder / "package").mkdir()
    for path in ("package/train.py", "package/__main__.py", "single.py"):
        fuelrun.write(SELF, path)
    fuelrun.write("", "package/__init__.py")
    assert fuelrun.run("-m", name, "-m", "x").stdout == python(fuelrun, "-m", name, "-m", "x")


def test_relative_imports_work_in_a_module(fuelrun) -> None:
    (fuelrun.folder / "package").mkdir()
    fuelrun.write("value = 4", "package/__init__.py")
    fuelrun.write("from . import value; print(value)", "package/train.py")
    assert fuelrun.run("-n", "2", "-m", "package.train").stdout == "4\n4\n"


def test_multiprocessing_starts_from_the_script(fuelrun) -> None:
    name = fuelrun.write(
        "import multiprocessing\ndef double(x): return 2 * x\nif __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(double, [1, 2]))"
    )
    assert fuelrun.run(name).stdout == "[2, 4]\n"


def test_a_script_without_an_end_of_line_or_with_another_encoding_runs(fuelrun) -> None:
    (fuelrun.folder / "latin.py").write_bytes("# coding: latin-1\nprint(ascii('é'))".encode("latin-1"))
    assert fuelrun.run("latin.py").stdout == "'\\xe9'\n"


def test_checking_a_module_imports_nothing(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "loud"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "train.py").write_text("pass")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    Script("loud.train", module=True).check()


def test_binary_data_is_no_script(tmp_path) -> None:
    path = tmp_path / "data.py"
    path.write_bytes(b"\x7fELF\0\0")
    with pytest.raises(LaunchError, match="is no Python script: it holds binary data"):
        Script(str(path)).check()


def test_the_words_of_a_command_come_back() -> None:
    for script in (Script("a.py", ("-m", "x")), Script("a.b", ("--", "-n"), module=True)):
        assert Script.from_command(list(script.command())) == script

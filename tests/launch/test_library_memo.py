"""What is remembered about the MPI library, and when it is forgotten."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from fuelrun.launch import find, library_memo


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libmpi.so.40"
    path.write_bytes(b"a library")
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def answer(library: Path) -> dict[str, str | None]:
    return {"mpi4py": "4.1.2", "version": "Open MPI v5.0.11", "path": str(library)}


def test_an_answer_is_kept_for_this_python_alone(library: Path, environ: dict[str, str], monkeypatch) -> None:
    library_memo.remember(answer(library), environ)
    assert library_memo.recall(environ) == answer(library)
    monkeypatch.setattr(sys, "executable", "/usr/bin/another-python")
    assert library_memo.recall(environ) is None


@pytest.mark.parametrize("name", library_memo.VARIABLES)
def test_another_search_path_asks_anew(library: Path, environ: dict[str, str], name: str) -> None:
    library_memo.remember(answer(library), environ)
    assert library_memo.recall({**environ, name: "/opt/lib"}) is None


def test_another_library_asks_anew(library: Path, environ: dict[str, str]) -> None:
    library_memo.remember(answer(library), environ)
    library.write_bytes(b"a newer library")
    assert library_memo.recall(environ) is None
    library_memo.remember(answer(library), environ)
    library.unlink()
    assert library_memo.recall(environ) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"answer": {}}', '{"asked": [], "answer": {"path": 3}}'])
def test_a_broken_file_asks_anew(library: Path, environ: dict[str, str], text: str) -> None:
    library_memo.remember(answer(library), environ)
    (file,) = Path(environ["XDG_CACHE_HOME"], "fuelrun").iterdir()
    file.write_text(text)
    assert library_memo.recall(environ) is None


def test_where_nothing_can_be_written_nothing_is_kept(library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    library_memo.remember(answer(library), environ)
    assert library_memo.recall(environ) is None


def test_the_second_question_starts_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = find.ask_library()
    find.library.cache_clear()
    monkeypatch.setattr(find.subprocess, "run", None)
    assert find.library() == asked
    (file,) = (tmp_path / "fuelrun").iterdir()
    assert json.loads(file.read_text())["answer"]["path"] == os.fspath(asked.path or "")
    find.library.cache_clear()

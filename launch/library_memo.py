"""What is remembered between starts: which MPI mpi4py loads. Asking takes a Python of its own, a tenth of a second.

It is forgotten as soon as anything changes that could change the answer: this Python, mpi4py or libmpi as files, the
search paths of the loader. `fuelrun doctor` always asks anew.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "MPI4PY_LIBMPI", "MPI4PY_MPIABI", "PYTHONPATH", "PYTHONHOME")
"""What decides which library the loader takes."""


def recall(environ: Mapping[str, str]) -> dict[str, str] | None:
    """What `remember` was given, if it still holds; None if not."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(_file(environ).read_bytes())
        answer: dict[str, str] = kept["answer"]
        if kept["asked"] == _question(environ, answer["path"]) and all(isinstance(v, str) for v in answer.values()):
            return answer
    return None


def remember(answer: Mapping[str, str | None], environ: Mapping[str, str]) -> None:
    """Keep an answer that has a `path`. A folder that cannot be written is no reason to fail."""
    if not answer.get("path"):
        return
    file = _file(environ)
    draft = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_text(json.dumps({"asked": _question(environ, str(answer["path"])), "answer": dict(answer)}))
        draft.replace(file)


def _file(environ: Mapping[str, str]) -> Path:
    """One for each Python."""
    folder = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", ""), ".cache")
    return Path(folder, "fuelrun", sys.executable.strip("/").replace("/", "%") + ".json")


def _question(environ: Mapping[str, str], library: str) -> list[list[str | int]]:
    """All that the answer hangs on, as JSON gives it back."""
    spec = importlib.util.find_spec("mpi4py")
    package = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    files = [Path("/etc/ld.so.cache"), Path(library), Path(library).resolve(), *sorted(package.glob("*.so")), package]
    variables: list[list[str | int]] = [[name, environ.get(name, "")] for name in VARIABLES]
    stamps: list[list[str | int]] = [[str(file), *_stamp(file)] for file in files]
    return [*variables, *stamps]


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size

"""The folder of a run: `step-00001200/` for each checkpoint, and names that begin with a dot for what is not one.

A checkpoint is made as `.saving-00001200-x`, and gets its name when all is on the disk. One that is replaced is
`.replaced-00001200` for that moment, one that is removed becomes `.removed-00001200` first. So a folder `step-…` is
whole at any moment; left-overs of killed runs are cleared when the next checkpoint is saved.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from fuel_parallel.checkpoint.manifest import NAME
from fuel_parallel.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(r"\.replaced-(\d{8,})")
_LEFT_OVER = re.compile(r"\.(saving|removed)-\d{8,}(-.*)?")


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps of which there are checkpoints, in order. They are complete; `verify` tells whether they are sound.

    >>> steps("a folder that does not exist")
    []
    """
    found = set()
    for name in _entries(Path(directory)):
        match = _STEP.fullmatch(name) or _REPLACED.fullmatch(name)
        if match and Path(directory, name, NAME).exists():
            found.add(int(match[1]))
    return sorted(found)


def folder_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    path = directory / f"step-{step:08d}"
    aside = _replaced(directory, step)
    return aside if not path.exists() and aside.exists() else path


def begin(directory: Path, step: int) -> Path:
    """A new folder for a checkpoint that is being made; clears what killed runs have left."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CheckpointError(
            f"{directory}: a folder is expected here, and there is a file; choose another one"
        ) from None
    _clear(directory)
    path = directory / f".saving-{step:08d}-{secrets.token_hex(4)}"
    path.mkdir()
    return path


def publish(made: Path, directory: Path, step: int) -> Path:
    """Gives a finished folder its name; it is on the disk when this returns."""
    path, aside = directory / f"step-{step:08d}", _replaced(directory, step)
    sync(made)
    if path.exists():
        path.rename(aside)
    try:
        made.rename(path)
    except OSError:
        with suppress(OSError):
            aside.rename(path)
        raise
    sync(directory)
    shutil.rmtree(aside, ignore_errors=True)
    return path


def prune(directory: Path, keep: int, written: int) -> None:
    """Removes all but the last `keep` checkpoints; the one that was just written stays in any case."""
    for step in steps(directory)[:-keep]:
        if step != written:
            aside = directory / f".removed-{step:08d}"
            shutil.rmtree(aside, ignore_errors=True)
            folder_of(directory, step).rename(aside)
            shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    """Brings the entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entries(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise CheckpointError(f"{directory}: a folder of checkpoints is expected here, and there is a file") from None
    except OSError as reason:
        raise CheckpointError(f"{directory}: cannot be read: {reason.strerror}") from None


def _replaced(directory: Path, step: int) -> Path:
    return directory / f".replaced-{step:08d}"


def _clear(directory: Path) -> None:
    for name in _entries(directory):
        if _LEFT_OVER.fullmatch(name):
            shutil.rmtree(directory / name, ignore_errors=True)
        elif match := _REPLACED.fullmatch(name):
            path = directory / f"step-{match[1]}"
            if path.exists():
                shutil.rmtree(directory / name, ignore_errors=True)
            else:
                (directory / name).rename(path)

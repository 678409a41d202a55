"""Files that are written whole or not at all: as a draft next to their place, which then takes it."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def take_place(draft: Path, path: Path) -> None:
    """The draft becomes the file at `path`, in place of one that is there.

    Raises `OSError` if there is something else than a file, with the draft gone: a rename would replace a device such
    as /dev/null as readily as a file.
    """
    if can_take(path):
        draft.replace(path)
        return
    draft.unlink(missing_ok=True)
    raise OSError(errno.EINVAL, "it is a device or the like, and no file", os.fspath(path))


def can_take(path: Path) -> bool:
    """Whether a file may be put there: it is one, or nothing is there."""
    return path.is_file() or not path.exists()

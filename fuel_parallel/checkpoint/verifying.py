"""Whether a checkpoint is sound: every file whole, every piece with its checksum. The ranks share the work by bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from fuel_parallel.arguments import checked
from fuel_parallel.checkpoint import folders, manifest, tensor_file
from fuel_parallel.checkpoint.manifest import Manifest, StoredFile, StoredPiece
from fuel_parallel.checkpoint.ranks import Outcome, attempt, first_problem, on_all, resolve
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import CheckpointError
from fuel_parallel.mesh import Mesh


class Found(NamedTuple):
    """A checkpoint that was opened: its manifest, or what is wrong about it."""

    folder: Path
    manifest: Manifest | None
    problem: str


@checked
def verify(
    directory: str | os.PathLike[str], *, step: int | None = None, comm: Communicator | Mesh | None = None
) -> dict[int, str]:
    """What is wrong with each checkpoint, by step; empty if all are sound. A collective call.

    Args:
        directory: The folder of the run.
        step: The one to look at; None for all.
        comm: Whose ranks share the reading; None for all ranks.

    >>> verify("a folder that does not exist")
    {}
    """
    ranks, _ = resolve(comm)
    found = {one: open_checkpoint(Path(directory), one, ranks).problem for one in agreed_steps(directory, step, ranks)}
    return {one: problem for one, problem in found.items() if problem}


def agreed_steps(directory: str | os.PathLike[str], step: int | None, comm: Communicator) -> list[int]:
    """The steps as rank 0 sees them, or the one that was asked for. A collective call."""
    outcome: Outcome = comm.broadcast_object(attempt(lambda: folders.steps(directory)), type=Outcome)
    if outcome.problem:
        raise CheckpointError(outcome.problem)
    if step is None:
        return list(outcome.value)
    if step not in outcome.value:
        raise CheckpointError(f"{directory}: there is no checkpoint of step {step}; {_there_are(outcome.value)}")
    return [step]


def open_checkpoint(
    directory: Path,
    step: int,
    comm: Communicator,
    *,
    wanted: Callable[[str], bool] = lambda name: True,
    checksums: bool = True,
) -> Found:
    """Reads the manifest of a checkpoint, and verifies the tensors whose names are wanted. A collective call."""
    folder = folders.folder_of(directory, step)
    # One rank reads it: a thousand at once would be slow, and must not come to different ends.
    text: Outcome = comm.broadcast_object(
        attempt(lambda: (folder / manifest.NAME).read_bytes()) if comm.is_root else None, type=Outcome
    )
    opened = attempt(lambda: manifest.decode(text.value, folder / manifest.NAME)) if not text.problem else text
    if opened.problem:  # the same on all ranks
        return Found(folder, None, opened.problem)
    described: Manifest = opened.value
    pieces = list(_pieces(described, wanted))
    headers = sorted(described.files.items())[comm.rank :: comm.world_size]

    def check() -> None:
        for name, file in headers:
            _check_header(folder / name, file, checksums)
        _check(folder, described, _share(pieces, comm), checksums)

    mine = attempt(check)
    return Found(folder, described, first_problem(on_all(comm, mine)))


def newest_sound(directory: Path, before: int, comm: Communicator) -> int | None:
    """The newest sound checkpoint that is older than a step; None if there is none. A collective call."""
    for step in reversed(agreed_steps(directory, None, comm)):
        if step < before and not open_checkpoint(directory, step, comm).problem:
            return step
    return None


class _Named(NamedTuple):
    name: str
    piece: StoredPiece
    nbytes: int


def _pieces(described: Manifest, wanted: Callable[[str], bool]) -> Iterator[_Named]:
    for name, tensor in described.tensors.items():
        if wanted(name):
            yield from (_Named(name, piece, tensor.nbytes(piece)) for piece in tensor.pieces)


def _share(pieces: list[_Named], comm: Communicator) -> Iterator[_Named]:
    """This rank's part of the pieces: those whose middle lies in its part of all bytes, in the order of the files."""
    total = sum(one.nbytes for one in pieces) or 1
    before = 0
    for one in sorted(pieces, key=lambda one: (one.piece.file, one.piece.offset)):
        if (before + one.nbytes / 2) * comm.world_size // total == comm.rank:
            yield one
        before += one.nbytes


def _check_header(path: Path, file: StoredFile, checksums: bool) -> None:
    """Raises `CheckpointError` if the header of a file is damaged. Whether all is there, `_check` sees."""
    if checksums and path.exists() and path.stat().st_size >= file.header:
        with path.open("rb") as opened:
            found = tensor_file.checksum(opened.fileno(), 0, file.header)
        if f"{found:08x}" != file.crc32:
            raise CheckpointError(f"{path}: the file is damaged: its header has checksum {found:08x}, not {file.crc32}")


def _check(folder: Path, described: Manifest, pieces: Iterable[_Named], checksums: bool) -> None:
    """Raises `CheckpointError` at the first piece that is not what the manifest says."""
    file, descriptor = "", -1
    try:
        for one in pieces:
            path = folder / one.piece.file
            if one.piece.file != file:
                if descriptor >= 0:
                    os.close(descriptor)
                    descriptor = -1
                file, descriptor = one.piece.file, _opened(path, one.name)
            size = os.fstat(descriptor).st_size
            if size < one.piece.offset + one.nbytes:
                raise CheckpointError(
                    f"{path}: the file is cut off: it has {size} bytes of {described.files[file].size}; tensor "
                    f"{one.name!r} is "
                    "not whole"
                )
            found = tensor_file.checksum(descriptor, one.piece.offset, one.nbytes) if checksums else None
            if found is not None and f"{found:08x}" != one.piece.crc32:
                raise CheckpointError(
                    f"{path}: the file is damaged: tensor {one.name!r} has checksum {found:08x}, not {one.piece.crc32}"
                )
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _opened(path: Path, name: str) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as reason:
        raise CheckpointError(f"{path}, which holds tensor {name!r}, cannot be read: {reason.strerror}") from None


def _there_are(steps: list[int]) -> str:
    if not steps:
        return "there is none at all"
    shown = ", ".join(map(str, steps[-5:]))
    return f"there are those of steps {'…, ' if len(steps) > 5 else ''}{shown}"

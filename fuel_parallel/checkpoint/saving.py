"""Saving: each rank writes one file, the manifest comes last, and a checkpoint is there whole or not at all.

    plan      the ranks tell each other what they hold; each box is given to one of its holders
    write     each rank writes its file into a folder with another name, down to the disk
    agree     if one rank fails, all raise, and the folder is removed
    publish   rank 0 writes the manifest and gives the folder its name

In the background only `write` and `publish` are left to threads, which know nothing of MPI: each rank leaves word of
its file in the folder, and rank 0 publishes when all have. `agree` then waits for `wait()`, the next save or the
script's end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fuel_parallel import failure
from fuel_parallel.arguments import checked
from fuel_parallel.checkpoint import folders, manifest, plan, tensor_file
from fuel_parallel.checkpoint.manifest import Manifest, StoredFile, StoredPiece, StoredTensor
from fuel_parallel.checkpoint.ranks import Outcome, attempt, first_problem, on_all, on_root, resolve
from fuel_parallel.checkpoint.state import Held, Named, named
from fuel_parallel.checkpoint.tensor_file import Entry
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ArgumentError, CheckpointError
from fuel_parallel.mesh import Mesh
from fuel_parallel.runtime.realize import realize

_POLL_S = 0.01
_METADATA = {"format": "fuel_parallel"}


@checked
def save(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    step: int,
    comm: Communicator | Mesh | None = None,
    keep: int | None = None,
    background: bool = False,
) -> Saving:
    """Saves a state as the checkpoint `directory/step-00001200`. A collective call.

    Lazy tensors in it are computed. A checkpoint of that step that is there already is replaced. If a rank fails, all
    raise `CheckpointError`, and earlier checkpoints stay.

    Args:
        directory: The folder of the run, which all ranks see; made if it is not there.
        state: A nest of tensors, plain values, modules, optimizers and generators, see `docs/checkpoints.md`.
        step: Its number.
        comm: Whose ranks save, or their mesh, whose axes are noted; None for all ranks.
        keep: How many checkpoints stay, the last ones; None for all.
        background: Return when the values are held, and write them meanwhile. At most one such save is under way: the
            next one, `wait()` or the end of the script waits for it and raises if it failed.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save(folder, {"position": 17}, step=3)
    ...     saved.path.name, saved.done()
    ('step-00000003', True)
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ArgumentError(f"save: step is a whole number of at least 0, not {step!r}")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ArgumentError(f"save: keep is how many checkpoints stay, at least 1, or None for all; not {keep!r}")
    ranks, axes = resolve(comm)
    finish_pending()
    mine = named(state)
    realize(*mine.lazy())
    view = plan.merge(plan.exchange(plan.listing_of(mine), ranks))
    pieces = plan.pieces_of(view, ranks.world_size)
    made = Path(on_root(ranks, lambda: str(folders.begin(Path(directory).absolute(), step))))
    saving = Saving(_Job(made, step, keep, view, pieces, axes, ranks.world_size, ranks.rank), ranks)
    saving._start(_entries(mine, view, pieces, ranks.rank, copy=background), background)
    return saving


class Saving:
    """A checkpoint that is being saved, or has been."""

    def __init__(self, job: _Job, comm: Communicator) -> None:
        self._job = job
        self._comm = comm
        self._written = threading.Event()
        self._others_told = threading.Event()
        self._mine = Outcome()
        self._published: Outcome | None = None
        self._thread: threading.Thread | None = None

    @property
    def step(self) -> int:
        """The number of the step."""
        return self._job.step

    @property
    def path(self) -> Path:
        """The folder that is the checkpoint as soon as it is there."""
        return self._job.final

    def done(self) -> bool:
        """Whether this rank has written its part."""
        return self._written.is_set()

    def wait(self) -> None:
        """Returns when the checkpoint is there. A collective call; raises `CheckpointError` on all ranks if one "
        "failed.
        """
        if _pending is self:
            finish_pending()

    def _start(self, entries: list[Entry], background: bool) -> None:
        global _pending
        if not background:
            self._mine = attempt(lambda: self._job.write(entries))
            self._written.set()
            self._finish()
            return
        _pending = self
        _finish_at_the_end()
        self._thread = threading.Thread(target=self._work, args=(entries,), name="checkpoint", daemon=True)
        self._thread.start()

    def _work(self, entries: list[Entry]) -> None:
        """The thread: it meets the other ranks in the folder only."""
        self._mine = attempt(lambda: self._job.write(entries))
        entries.clear()  # lets the values go
        if not self._mine.problem and self._job.rank:
            attempt(lambda: self._job.leave_word(self._mine.value))  # if that fails, `_finish` tells it
        self._written.set()
        if self._job.rank or self._mine.problem:
            return
        while (sums := self._job.words(self._mine.value)) is None:
            if self._others_told.wait(_POLL_S):
                return
        self._published = attempt(lambda: self._job.publish(sums))

    def _finish(self) -> None:
        self._written.wait()
        outcomes = on_all(self._comm, self._mine)
        self._others_told.set()
        if self._thread is not None:
            self._thread.join()
        problem = first_problem(outcomes)
        if problem:
            if self._comm.is_root:
                shutil.rmtree(self._job.made, ignore_errors=True)
        else:
            problem = self._comm.broadcast_object(self._publish_on_root([one.value for one in outcomes]), type=str)
        if problem:
            raise CheckpointError(f"step {self.step} is not saved: {problem}; {self._job.what_is_left()}")

    def _publish_on_root(self, sums: list[list[int]]) -> str:
        if not self._comm.is_root:
            return ""
        if self._published is None:
            self._published = attempt(lambda: self._job.publish(sums))
        if self._published.problem:
            shutil.rmtree(self._job.made, ignore_errors=True)
        return self._published.problem


_pending: Saving | None = None
_at_the_end = False


def finish_pending() -> None:
    """Waits for the save that is under way, if there is one. A collective call."""
    global _pending
    saving, _pending = _pending, None
    if saving is not None:
        saving._finish()


def _finish_at_the_end() -> None:
    """Registered once, before what `fp.init()` registers: ranks still talk then."""
    global _at_the_end
    if not _at_the_end:
        failure.at_the_end.insert(0, finish_pending)
        _at_the_end = True


class _Job:
    """The files of one save, and how each comes about."""

    def __init__(
        self,
        made: Path,
        step: int,
        keep: int | None,
        view: plan.View,
        pieces: list[plan.Piece],
        axes: dict[str, int],
        world_size: int,
        rank: int,
    ) -> None:
        self.made, self.step, self.keep = made, step, keep
        self.view, self.axes = view, axes
        self.world_size, self.rank = world_size, rank
        self.final = made.parent / f"step-{step:08d}"
        self.pieces_by_file = _by_file(pieces, view)

    def write(self, entries: list[Entry]) -> list[int]:
        """Writes the file of this rank, if it has one; the checksum of each piece."""
        path = self.made / _file_of(self.rank)
        if not entries:
            return []
        try:
            return tensor_file.write(path, entries, _METADATA)
        except OSError as reason:
            raise CheckpointError(f"{path} cannot be written: {reason.strerror or reason}") from None

    def leave_word(self, sums: list[int]) -> None:
        """Tells rank 0 that the file of this rank is on the disk."""
        path = self.made / f"rank-{self.rank:05d}.json"
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(sums))
        draft.rename(path)

    def words(self, mine: list[int]) -> list[list[int]] | None:
        """What all ranks have left, rank 0 being this one; None as long as one is missing."""
        found = [mine]
        for rank in range(1, self.world_size):
            try:
                found.append(msgspec.json.decode((self.made / f"rank-{rank:05d}.json").read_bytes(), type=list[int]))
            except (OSError, msgspec.DecodeError):
                return None
        return found

    def publish(self, sums: list[list[int]]) -> None:
        """Writes the manifest and gives the folder its name."""
        tensors = {
            name: StoredTensor(spread.dtype.name, spread.shape, []) for name, spread in self.view.tensors.items()
        }
        files: dict[str, StoredFile] = {}
        for rank, pieces in self.pieces_by_file.items():
            file = _file_of(rank)
            header = tensor_file.header([entry for entry, _ in pieces], _METADATA)
            at = len(header)
            for (entry, piece), total in zip(pieces, sums[rank], strict=True):
                stored = StoredPiece(file, at, piece.box.start, piece.box.shape, f"{total:08x}")
                tensors[piece.name].pieces.append(stored)
                at += entry.nbytes
            files[file] = StoredFile(at, len(header), f"{zlib.crc32(header):08x}")
            self._check_seen(file, at)
        for rank in range(1, self.world_size):
            with contextlib.suppress(OSError):
                (self.made / f"rank-{rank:05d}.json").unlink()
        described = Manifest(self.step, self.world_size, self.axes, files, tensors, self.view.values)
        with (self.made / manifest.NAME).open("xb") as out:
            out.write(manifest.encode(described))
            out.flush()
            os.fsync(out.fileno())
        folders.publish(self.made, self.final.parent, self.step)
        if self.keep is not None:
            with contextlib.suppress(OSError):  # the checkpoint is there; what could not be removed is tried next time
                folders.prune(self.final.parent, self.keep, self.step)

    def what_is_left(self) -> str:
        """What there is instead of the checkpoint that could not be saved."""
        with contextlib.suppress(CheckpointError):
            if earlier := folders.steps(self.final.parent):
                return f"the last checkpoint there is that of step {earlier[-1]}"
        return f"there is no checkpoint in {self.final.parent}"

    def _check_seen(self, file: str, size: int) -> None:
        path = self.made / file
        seen = path.stat().st_size if path.exists() else None
        if seen != size:
            raise CheckpointError(
                f"{path} should have {size} bytes, and rank 0 sees {'no such file' if seen is None else seen}; "
                "the folder must be on a file system that all hosts share"
            )


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _nothing() -> np.ndarray[Any, Any]:
    raise RuntimeError("a piece of another rank has no value here")


def _by_file(pieces: list[plan.Piece], view: plan.View) -> dict[int, list[tuple[Entry, plan.Piece]]]:
    """The pieces of each rank's file, in order; without their values."""
    found: dict[int, list[tuple[Entry, plan.Piece]]] = {}
    for piece in pieces:
        spread = view.tensors[piece.name]
        entry = Entry(plan.key_of(piece, spread.shape), spread.dtype, piece.box.shape, _nothing)
        found.setdefault(piece.writer, []).append((entry, piece))
    for rank, rows in found.items():
        of_key = {entry.key: piece for entry, piece in rows}
        found[rank] = [(entry, of_key[entry.key]) for entry in tensor_file.in_order(entry for entry, _ in rows)]
    return found


def _entries(mine: Named, view: plan.View, pieces: list[plan.Piece], rank: int, copy: bool) -> list[Entry]:
    """What this rank writes. With `copy` the values are held as they are now, in host memory."""
    found = []
    kept: dict[str, np.ndarray[Any, Any]] = {}
    for piece in pieces:
        if piece.writer != rank:
            continue
        held = mine.tensors[piece.name]
        cut = piece.box.within(held.box)
        value = partial(_part, held, cut)
        if copy:
            if piece.name not in kept:
                # The array of a tensor of the library is never written to while somebody holds it.
                kept[piece.name] = held.leaf.copy() if isinstance(held.leaf, np.ndarray) else held.array()
            value = partial(np.asarray, kept[piece.name][cut])
        key = plan.key_of(piece, view.tensors[piece.name].shape)
        found.append(Entry(key, held.dtype, piece.box.shape, value))
    return tensor_file.in_order(found)


def _part(held: Held, cut: tuple[slice, ...]) -> np.ndarray[Any, Any]:
    return held.array()[cut]

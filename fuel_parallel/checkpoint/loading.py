"""Loading: onto any number of ranks and any cut of the tensors, reading what each rank needs.

The newest sound checkpoint is looked for first, by all ranks together; then each rank reads the overlaps of the boxes
that it holds with the pieces that were written. A tensor is in memory once, as the value that it gets.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fuel_parallel.arguments import checked
from fuel_parallel.checkpoint import plan, tensor_file
from fuel_parallel.checkpoint.boxes import Box, overlap
from fuel_parallel.checkpoint.manifest import Manifest, StoredTensor
from fuel_parallel.checkpoint.ranks import attempt, first_problem, on_all, resolve
from fuel_parallel.checkpoint.saving import finish_pending
from fuel_parallel.checkpoint.state import Named, decoded, named, rebuilt
from fuel_parallel.checkpoint.verifying import Found, agreed_steps, newest_sound, open_checkpoint
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import CheckpointError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.mesh import Mesh
from fuel_parallel.module import Variable

_SHOWN = 3  # names in a message, of those that are missing and the like


@dataclass(frozen=True)
class Loaded:
    """What `load` found.

    Args:
        step: The step of the checkpoint. state: The nest that was given, with the plain values and tensors that were
        read. Modules, optimizers, generators
            and variables in it are the same objects as before.
        skipped: Newer checkpoints that are not sound, by step, and why.
    """

    step: int
    state: Any
    skipped: dict[int, str] = field(default_factory=dict)


@checked
def latest(directory: str | os.PathLike[str], *, comm: Communicator | Mesh | None = None) -> int | None:
    """The step of the newest checkpoint, None if there is none: the same on all ranks. A collective call.

    >>> latest("a folder that does not exist")
    """
    finish_pending()
    ranks, _ = resolve(comm)
    return max(agreed_steps(directory, None, ranks), default=None)


@checked
def load(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    step: int | None = None,
    comm: Communicator | Mesh | None = None,
    verify: bool = True,
) -> Loaded:
    """Loads a checkpoint into a state like the one that was saved, on any number of ranks. A collective call.

    Variables of modules and optimizers get their values, generators and objects with `__restore__` go on where they
    were; what cannot be changed in place (plain values, tensors that are no variables) is in the nest that is returned.
    Top-level keys that the state leaves out are not read; below those that it has, names, shapes and dtypes must be the
    same. Raises `CheckpointError` on all ranks, and then nothing has changed unless a file became unreadable meanwhile.

    Args:
        directory: The folder of the run.
        state: As it was saved. A variable is cut as its `shard` says, whatever it was cut like when it was saved.
        step: Which one; None for the newest that is sound, with a warning if that is not the newest.
        comm: Whose ranks load; None for all ranks.
        verify: Compare the checksums of what is needed first; the ranks share that.

    >>> import tempfile
    >>> from fuel_parallel.checkpoint import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(folder, {"position": 17, "names": ["a", "b"]}, step=3)
    ...     load(folder, {"position": 0})
    Loaded(step=3, state={'position': 17}, skipped={})
    """
    finish_pending()
    ranks, _ = resolve(comm)
    mine = named(state)
    view = plan.merge(plan.exchange(plan.listing_of(mine), ranks))
    found, skipped = _sound(Path(directory), step, view, ranks, verify)
    described = found.manifest
    if described is None:
        raise RuntimeError("a sound checkpoint has a manifest")
    if problem := _difference(view, described):
        raise CheckpointError(f"{found.folder}: {problem}")
    values = {name: decoded(described.values[name]) for name in mine.values}
    fresh: dict[str, Tensor | np.ndarray[Any, Any]] = {}
    reading = attempt(lambda: _read_all(found.folder, described, mine, fresh))
    if problem := first_problem(on_all(ranks, reading)):
        raise CheckpointError(f"{found.folder}: it became unreadable while it was loaded: {problem}")
    return Loaded(described.step, rebuilt(state, fresh, values), skipped)


def read_box(tensor: StoredTensor, box: Box, files: dict[str, int]) -> np.ndarray[Any, Any]:
    """A box of a stored tensor, put together from its pieces; `files` are the open files of the checkpoint."""
    out = np.empty(box.shape, dtypes.dtype(tensor.dtype))
    for piece in tensor.pieces:
        shared = overlap(piece.box, box)
        if shared is None:
            continue
        inside = Box(tuple(a - b for a, b in zip(shared.start, piece.start, strict=True)), shared.shape)
        part = out[shared.within(box)] if box.shape else out
        tensor_file.read_box(files[piece.file], tensor.place(piece), inside, part)
    return out


def opened(folder: Path, tensors: Iterable[StoredTensor], stack: ExitStack) -> dict[str, int]:
    """The files of these tensors, opened until the stack ends."""
    files: dict[str, int] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            if piece.file not in files:
                files[piece.file] = os.open(folder / piece.file, os.O_RDONLY)
                stack.callback(os.close, files[piece.file])
    return files


def _sound(
    directory: Path, step: int | None, view: plan.View, comm: Communicator, checksums: bool
) -> tuple[Found, dict[int, str]]:
    """The checkpoint to load, and what is wrong with newer ones."""
    skipped: dict[int, str] = {}
    for candidate in reversed(agreed_steps(directory, step, comm)):
        found = open_checkpoint(directory, candidate, comm, wanted=view.tensors.__contains__, checksums=checksums)
        if not found.problem:
            if skipped and comm.is_root:
                text = "; ".join(f"step {bad}: {why}" for bad, why in skipped.items())
                warnings.warn(
                    f"{directory}: going back to the checkpoint of step {candidate}, the newest that is sound: {text}",
                    RuntimeWarning,
                    stacklevel=3,
                )
            return found, skipped
        skipped[candidate] = found.problem
    if step is not None:
        earlier = newest_sound(directory, step, comm)
        remedy = (
            "no earlier one is sound" if earlier is None else f"the checkpoint of step {earlier} is sound, load that"
        )
        raise CheckpointError(f"{skipped[step]}; {remedy}")
    if skipped:
        text = "; ".join(f"step {bad}: {why}" for bad, why in skipped.items())
        raise CheckpointError(f"{directory}: no checkpoint is sound: {text}")
    raise CheckpointError(
        f"{directory}: there is no checkpoint{'' if directory.exists() else ', nor such a folder'}; "
        "latest() tells whether there is one"
    )


def _difference(view: plan.View, described: Manifest) -> str:
    """What keeps the state of all ranks from being the checkpoint's; empty if nothing does."""
    wanted, there = view.tensors.keys() | view.values.keys(), described.tensors.keys() | described.values.keys()
    asked = {_top(name) for name in wanted}
    missing = sorted(wanted - there)
    unexpected = sorted(name for name in there - wanted if _top(name) in asked)
    mismatched = []
    for name in sorted(wanted & there):
        ours, stored = view.tensors.get(name), described.tensors.get(name)
        if ours is None and stored is None:
            continue
        here = "a plain value" if ours is None else f"{ours.dtype.name}{list(ours.shape)}"
        saved = "a plain value" if stored is None else f"{stored.dtype}{list(stored.shape)}"
        if here != saved:
            mismatched.append(f"{name} (saved {saved}, here {here})")
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched))
        if names
    ]
    if not problems:
        return ""
    return (
        f"the checkpoint is of another state: {'; '.join(problems)}; build the model with the settings it was "
        "saved with, "
        "or leave top-level keys of the state out"
    )


def _top(name: str) -> str:
    return name.partition(".")[0]


def _read_all(folder: Path, described: Manifest, mine: Named, fresh: dict[str, Tensor | np.ndarray[Any, Any]]) -> None:
    """Reads the tensors of this rank, one after the other; those that are no variables are put into `fresh`."""
    with ExitStack() as stack:
        files = opened(folder, (described.tensors[name] for name in mine.tensors), stack)
        for name, held in mine.tensors.items():
            array = read_box(described.tensors[name], held.box, files)
            if isinstance(held.leaf, np.ndarray):
                fresh[name] = array
                continue
            tensor = creation.to_device(creation.asarray(array, copy=False), held.leaf.device).realize()
            del array
            if isinstance(held.leaf, Variable):
                held.leaf.assign(tensor)
                fresh[name] = held.leaf
            else:
                fresh[name] = tensor

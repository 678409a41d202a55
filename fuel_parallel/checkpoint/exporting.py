"""Writing tensors for Hugging Face: from a checkpoint, or from a state, whole or cut over ranks."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fuel_parallel.arguments import checked
from fuel_parallel.checkpoint import folders, loading, tensor_file
from fuel_parallel.checkpoint.boxes import whole
from fuel_parallel.checkpoint.gathering import gathered, together
from fuel_parallel.checkpoint.huggingface import INDEX, SINGLE, Array
from fuel_parallel.checkpoint.manifest import StoredTensor
from fuel_parallel.checkpoint.names import NameTable
from fuel_parallel.checkpoint.state import named
from fuel_parallel.checkpoint.tensor_file import Entry
from fuel_parallel.checkpoint.verifying import open_checkpoint
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.comm.identity import IdentityComm
from fuel_parallel.errors import ArgumentError, CheckpointError
from fuel_parallel.lazy import dtypes
from fuel_parallel.sizes import bytes_of

_METADATA = {"format": "pt"}


@checked
def export_huggingface(
    source: Any,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    key: str | None = "model",
    max_shard_size: int | str = "5GB",
    names: NameTable | None = None,
    dtype: Any = None,
    comm: Communicator | None = None,
) -> list[Path]:
    """Writes the tensors of a checkpoint or a state for Hugging Face; the files, the index last.

    One rank calls it, or, with `comm`, all ranks of that: rank 0 gathers one tensor after the other and writes.

    Args:
        source: The folder of a run, or a state such as a module or a dict of tensors.
        path: The folder to write to; made if it is not there.
        step: Which checkpoint of the folder; None for the newest. Its checksums are compared first.
        key: Of a checkpoint, what stands under this key, named without it; None for all tensors.
        max_shard_size: The largest file, but for a single tensor that is larger: bytes, or "500MB".
        names: What the tensors are called in the files, and how they are put together; None for the names they have.
        dtype: What floating tensors are cast to, such as "bfloat16"; None for what they are.
        comm: The ranks that hold the parts of a state's tensors, such as `mesh["tp"]`; None if they are whole here.

    Raises `ArgumentError` for tensors that are not whole and names that do not fit, `CheckpointError`, on all ranks of
    `comm`, for what cannot be read or written.

    >>> import tempfile
    >>> import fuel_parallel.lazy as ft
    >>> from fuel_parallel import checkpoint
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = export_huggingface({"a": ft.ones((2, 3)), "b": ft.zeros(4)}, folder)
    ...     checkpoint.read_huggingface(folder)["a"][1:, :2].tolist(), written[-1].name
    ([[1.0, 1.0]], 'model.safetensors')
    """
    largest = _bytes(max_shard_size)
    with ExitStack() as stack:
        is_folder = isinstance(source, str | os.PathLike)
        if is_folder and comm is not None:
            raise ArgumentError("export_huggingface: comm= is for a state; a checkpoint is exported by one rank")
        entries = _of_checkpoint(Path(source), step, key, stack) if is_folder else _of_state(source, comm)
        if not entries:
            raise ArgumentError(
                f"export_huggingface: there is no tensor to write{f' under {key!r}' if is_folder else ''}"
            )
        entries = entries if names is None else names.stored(entries)
        entries = entries if dtype is None else [_cast(entry, dtypes.dtype(dtype)) for entry in entries]
        files = [tensor_file.in_order(one) for one in _files(entries, largest)]
        if comm is None:
            return _write_to(Path(path), files)
        return together(comm, files, lambda turns: _write_to(Path(path), turns))


def _write_to(target: Path, files: list[list[Entry]]) -> list[Path]:
    try:
        target.mkdir(parents=True, exist_ok=True)
        return _write(target, files)
    except OSError as reason:
        raise CheckpointError(f"{reason.filename or target} cannot be written: {reason.strerror}") from None


def _cast(entry: Entry, dtype: dtypes.DType) -> Entry:
    if dtypes.kind(entry.dtype) != "real floating" or dtypes.kind(dtype) != "real floating":
        return entry
    return Entry(entry.key, dtype, entry.shape, lambda: entry.array().astype(dtype, copy=False))


def _of_state(state: Any, comm: Communicator | None) -> list[Entry]:
    tensors = named(state).tensors
    if comm is not None:
        return gathered(tensors, comm)
    entries = []
    for name, held in tensors.items():
        if held.box != whole(held.global_shape):
            raise ArgumentError(
                f"export_huggingface: {name} is a part of a tensor of shape {held.global_shape}; give comm=, the ranks "
                "that hold the others, and call it on all of them"
            )
        entries.append(Entry(name, held.dtype, held.global_shape, held.array))
    return entries


def _of_checkpoint(directory: Path, step: int | None, key: str | None, stack: ExitStack) -> list[Entry]:
    there = folders.steps(directory)
    if not there or (step is not None and step not in there):
        raise CheckpointError(f"{directory}: there is no checkpoint{'' if step is None else f' of step {step}'}")
    prefix = "" if key is None else f"{key}."
    newest = there[-1] if step is None else step
    found = open_checkpoint(directory, newest, IdentityComm(), wanted=lambda name: name.startswith(prefix))
    if found.manifest is None or found.problem:
        raise CheckpointError(f"{found.problem}; step= exports an earlier checkpoint")
    wanted = {name: one for name, one in found.manifest.tensors.items() if name.startswith(prefix)}
    try:
        files = loading.opened(found.folder, wanted.values(), stack)
    except OSError as reason:
        raise CheckpointError(f"{reason.filename}: {reason.strerror}") from None
    entries = []
    for name, one in wanted.items():

        def read(one: StoredTensor = one) -> Array:
            return loading.read_box(one, whole(one.shape), files)

        entries.append(Entry(name.removeprefix(prefix), dtypes.dtype(one.dtype), one.shape, read))
    return entries


def _files(entries: Sequence[Entry], largest: int) -> Iterator[list[Entry]]:
    """Entries in their order, file by file."""
    file: list[Entry] = []
    filled = 0
    for entry in entries:
        if file and filled + entry.nbytes > largest:
            yield file
            file, filled = [], 0
        file.append(entry)
        filled += entry.nbytes
    yield file


def _write(target: Path, files: list[list[Entry]]) -> list[Path]:
    """Writes under other names first, so that no half file has a name that is read."""
    count = len(files)
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    drafts = [target / f".{name}.draft" for name in names]
    for draft, entries in zip(drafts, files, strict=True):
        draft.unlink(missing_ok=True)
        tensor_file.write(draft, entries, _METADATA)
    for old in target.glob("model*.safetensors*"):
        if old.name == INDEX or re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", old.name):
            old.unlink()  # of an earlier export: an index and files that do not belong together would be read
    written = [draft.rename(target / name) for draft, name in zip(drafts, names, strict=True)]
    if count > 1:
        weight_map = {entry.key: name for name, entries in zip(names, files, strict=True) for entry in entries}
        total = sum(entry.nbytes for entries in files for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        draft = target / f".{INDEX}.draft"
        draft.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        written.append(draft.rename(target / INDEX))
    folders.sync(target)
    return written


def _bytes(size: int | str) -> int:
    found = bytes_of(size) if isinstance(size, str) else size
    if found is None or found <= 0:
        raise ArgumentError(
            f"max_shard_size: expected bytes as a number, or a text such as '5GB' or '500MB'; got {size!r}"
        )
    return found

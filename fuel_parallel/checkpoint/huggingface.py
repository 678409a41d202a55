"""The layout of Hugging Face: `model.safetensors`, or `model-00001-of-0000N.safetensors` with an index beside them.

What is read is read lazily and by the slice; what is written, transformers and others read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fuel_parallel.checkpoint import folders, loading, tensor_file
from fuel_parallel.checkpoint.boxes import Box, whole
from fuel_parallel.checkpoint.manifest import StoredTensor
from fuel_parallel.checkpoint.state import named
from fuel_parallel.checkpoint.tensor_file import Entry, Place
from fuel_parallel.checkpoint.verifying import open_checkpoint
from fuel_parallel.comm.identity import IdentityComm
from fuel_parallel.errors import ArgumentError, CheckpointError, IndexingError
from fuel_parallel.lazy import dtypes

Array = np.ndarray[Any, Any]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class StoredArray:
    """A tensor in a file: indexing reads what is asked for, `numpy.asarray` all of it."""

    path: Path
    place: Place

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each dimension."""
        return self.place.shape

    @property
    def dtype(self) -> dtypes.DType:
        """Data type of the elements."""
        return self.place.dtype

    def __getitem__(self, key: Any) -> Array:
        keys = key if isinstance(key, tuple) else (key,)
        box, dropped = _box_of(keys, self.shape)
        out = np.empty(box.shape, self.dtype)
        with ExitStack() as stack:
            file = os.open(self.path, os.O_RDONLY)
            stack.callback(os.close, file)
            try:
                tensor_file.read_box(file, self.place, box, out)
            except (OSError, EOFError) as reason:
                raise CheckpointError(f"{self.path} cannot be read: {reason}") from None
        return out.reshape([n for dim, n in enumerate(box.shape) if dim not in dropped])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        value = self[...]
        return value if dtype is None else value.astype(dtype, copy=False)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_huggingface(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
    """The tensors of a folder, index or safetensors file by name; no value is read yet.

    Give them to `Module.load` whole, or slice out what a rank needs: `tensors["lm_head.weight"][:, 100:200]`.
    """
    file = _file_to_read(Path(path))
    if file.name.endswith(".index.json"):
        weight_map = _weight_map(file)
        placed = {name: tensor_file.places(file.parent / name) for name in sorted(set(weight_map.values()))}
        for tensor, name in weight_map.items():
            if tensor not in placed[name]:
                raise CheckpointError(f"{file}: it says that {tensor} is in {name}, and that file does not hold it")
        return {
            tensor: StoredArray(file.parent / name, placed[name][tensor]) for tensor, name in sorted(weight_map.items())
        }
    return {tensor: StoredArray(file, place) for tensor, place in sorted(tensor_file.places(file).items())}


def export_huggingface(
    source: Any,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    key: str | None = "model",
    max_shard_size: int | str = "5GB",
) -> list[Path]:
    """Writes the tensors of a checkpoint or a state for Hugging Face; the files, the index last. One rank calls it.

    Args:
        source: The folder of a run, or a state such as a module or a dict of tensors, whole on this rank.
        path: The folder to write to; made if it is not there.
        step: Which checkpoint of the folder; None for the newest. Its checksums are compared first.
        key: Of a checkpoint, what stands under this key, named without it; None for all tensors.
        max_shard_size: The largest file, but for a single tensor that is larger: bytes, or "500MB".

    >>> import tempfile
    >>> import fuel_parallel.lazy as ft
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = export_huggingface({"a": ft.ones((2, 3)), "b": ft.zeros(4)}, folder)
    ...     np.asarray(read_huggingface(folder)["a"][1:, :2]).tolist(), written[-1].name
    ([[1.0, 1.0]], 'model.safetensors')
    """
    largest = _bytes(max_shard_size)
    with ExitStack() as stack:
        is_folder = isinstance(source, str | os.PathLike)
        entries = _of_checkpoint(Path(source), step, key, stack) if is_folder else _of_state(source)
        if not entries:
            raise ArgumentError(
                f"export_huggingface: there is no tensor to write{f' under {key!r}' if is_folder else ''}"
            )
        target = Path(path)
        try:
            target.mkdir(parents=True, exist_ok=True)
            return _write(target, list(_files(entries, largest)))
        except OSError as reason:
            raise CheckpointError(f"{reason.filename or target} cannot be written: {reason.strerror}") from None


def _of_state(state: Any) -> list[Entry]:
    entries = []
    for name, held in named(state).tensors.items():
        if held.box != whole(held.global_shape):
            raise ArgumentError(
                f"export_huggingface: {name} is a part of a tensor of shape {held.global_shape}; save a "
                "checkpoint from all "
                "ranks, and export that"
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
        tensor_file.write(draft, tensor_file.in_order(entries), _METADATA)
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


def _file_to_read(path: Path) -> Path:
    if not path.is_dir():
        if path.exists():
            return path
        raise CheckpointError(f"{path}: there is no such file or folder")
    for name in (INDEX, SINGLE):
        if (path / name).exists():
            return path / name
    alone = sorted([*path.glob("*.safetensors.index.json"), *path.glob("*.safetensors")])
    if len(alone) != 1:
        raise CheckpointError(
            f"{path}: expected {SINGLE} or {INDEX} in it; it holds {[one.name for one in alone] or 'neither'}"
        )
    return alone[0]


def _weight_map(file: Path) -> dict[str, str]:
    try:
        weight_map = msgspec.json.decode(file.read_bytes(), type=_Index).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as reason:
        raise CheckpointError(f"{file}: not an index of safetensors files: {reason}") from None
    for name in set(weight_map.values()):
        if "/" in name or name.startswith("."):
            raise CheckpointError(f"{file}: {name!r} is not the name of a file beside it")
        if not (file.parent / name).exists():
            raise CheckpointError(f"{file}: {name}, which it names, is not beside it; the download may be incomplete")
    return weight_map


def _bytes(size: int | str) -> int:
    match = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)", size.strip(), re.IGNORECASE) if isinstance(size, str) else None
    )
    found = size if isinstance(size, int) else int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if found <= 0:
        raise ArgumentError(
            f"max_shard_size: expected bytes as a number, or a text such as '5GB' or '500MB'; got {size!r}"
        )
    return found


def _box_of(keys: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Box, set[int]]:
    """The box that an index means, and the dimensions that integers drop."""
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys = (*keys[:at], *[slice(None)] * (len(shape) - len(keys) + 1), *keys[at + 1 :])
    keys = (*keys, *[slice(None)] * (len(shape) - len(keys)))
    if len(keys) != len(shape) or not all(isinstance(one, slice | int) for one in keys):
        raise IndexingError(
            f"a stored tensor of shape {shape} is indexed by ints and slices, one a dimension; got {keys}"
        )
    start, extents, dropped = [], [], set[int]()
    for dim, (one, extent) in enumerate(zip(keys, shape, strict=True)):
        if isinstance(one, int):
            if not -extent <= one < extent:
                raise IndexingError(f"index {one} is out of bounds for dimension {dim} of shape {shape}")
            dropped.add(dim)
            one = slice(one % extent, one % extent + 1)
        first, stop, stride = one.indices(extent)
        if stride != 1:
            raise IndexingError(f"a stored tensor is sliced with step 1, not {stride}")
        start.append(first)
        extents.append(max(0, stop - first))
    return Box(tuple(start), tuple(extents)), dropped

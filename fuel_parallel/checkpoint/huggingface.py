"""The layout of Hugging Face: `model.safetensors`, or `model-00001-of-0000N.safetensors` with an index beside them.

What is read is read lazily and by the slice. By preads: of a mapped file nobody could say what was read, and one that
is cut off meanwhile would kill the process.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fuel_parallel.arguments import checked
from fuel_parallel.checkpoint import tensor_file
from fuel_parallel.checkpoint.boxes import Box
from fuel_parallel.checkpoint.tensor_file import Place
from fuel_parallel.errors import CheckpointError, IndexingError
from fuel_parallel.lazy import dtypes

Array = np.ndarray[Any, Any]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


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


@checked
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

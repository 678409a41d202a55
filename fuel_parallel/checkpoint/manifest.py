"""The manifest: what a checkpoint holds and where, as JSON, with a checksum of its own. It is written last."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

from fuel_parallel.checkpoint.boxes import Box, gap_or_clash
from fuel_parallel.checkpoint.tensor_file import Place
from fuel_parallel.errors import CheckpointError, DTypeError
from fuel_parallel.lazy import dtypes

NAME = "manifest.json"
VERSION = 1
_FILE = re.compile(r"rank-\d+\.safetensors")


class StoredPiece(msgspec.Struct, frozen=True):
    """A box of a tensor, and where its bytes are: `offset` counts from the beginning of the file."""

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: str

    @property
    def box(self) -> Box:
        """What part of the tensor it is."""
        return Box(self.start, self.shape)


class StoredFile(msgspec.Struct, frozen=True):
    """A file: its size in bytes, and that of its header, which has a checksum as well."""

    size: int
    header: int
    crc32: str


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor, and the pieces that make it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[StoredPiece]

    def place(self, piece: StoredPiece) -> Place:
        """Where a piece of it lies in its file."""
        return Place(dtypes.dtype(self.dtype), piece.shape, piece.offset)

    def nbytes(self, piece: StoredPiece) -> int:
        """Bytes of a piece of it."""
        return piece.box.size * dtypes.dtype(self.dtype).itemsize


class Manifest(msgspec.Struct, frozen=True):
    """A checkpoint: `values` is what is no tensor."""

    step: int
    world_size: int
    mesh: dict[str, int]
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    values: dict[str, Any]
    version: int = VERSION


class _Sealed(msgspec.Struct):
    sha256: str
    checkpoint: msgspec.Raw


def encode(manifest: Manifest) -> bytes:
    """The text of the file."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return msgspec.json.encode(_Sealed(hashlib.sha256(body).hexdigest(), msgspec.Raw(body))) + b"\n"


def decode(text: bytes, path: Path) -> Manifest:
    """The manifest of a file's text. Raises `CheckpointError` if that is damaged or does not hold together."""
    try:
        sealed = msgspec.json.decode(text, type=_Sealed)
        if hashlib.sha256(bytes(sealed.checkpoint)).hexdigest() != sealed.sha256:
            raise CheckpointError(f"{path}: the file is damaged: it does not have its checksum")
        manifest = msgspec.json.decode(sealed.checkpoint, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as reason:
        raise CheckpointError(f"{path}: the file is damaged or cut off: {reason}") from None
    if manifest.version != VERSION:
        raise CheckpointError(
            f"{path}: the checkpoint has version {manifest.version}, this library reads version {VERSION}; "
            "read it with a newer fuel-parallel"
        )
    for name, tensor in manifest.tensors.items():
        if problem := _problem(manifest, tensor):
            raise CheckpointError(f"{path}: tensor {name!r}: {problem}")
    return manifest


def _problem(manifest: Manifest, tensor: StoredTensor) -> str:
    """What is wrong about the description of a tensor; empty if nothing is."""
    try:
        dtypes.dtype(tensor.dtype)
    except DTypeError as reason:
        return str(reason)
    for piece in tensor.pieces:
        if not _FILE.fullmatch(piece.file) or piece.file not in manifest.files:
            return f"its file {piece.file!r} is none of this checkpoint's"
        if not piece.box.lies_in(tensor.shape):
            return f"a piece of shape {piece.shape} at {piece.start} does not lie in shape {tensor.shape}"
        if not 0 <= piece.offset <= manifest.files[piece.file].size - tensor.nbytes(piece):
            return f"a piece at byte {piece.offset} does not lie in {piece.file}"
    return gap_or_clash([piece.box for piece in tensor.pieces], tensor.shape)

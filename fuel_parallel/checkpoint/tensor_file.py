"""Files of tensors in the safetensors format, written piece by piece and read by the byte.

The format: eight bytes with the length of a JSON header, the header with dtype, shape and bytes of each tensor, then
the bytes. A writer of our own holds one piece in memory at a time where the package safetensors wants all of them at
once, sums up what it writes while it is in the cache, and a reader of our own reads no byte that nobody asked for.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fuel_parallel.checkpoint.boxes import Box, split_rows
from fuel_parallel.errors import CheckpointError
from fuel_parallel.lazy import dtypes

Array = np.ndarray[Any, Any]

NAMES: dict[dtypes.DType, str] = {
    dtypes.bool_: "BOOL",
    dtypes.int8: "I8",
    dtypes.int16: "I16",
    dtypes.int32: "I32",
    dtypes.int64: "I64",
    dtypes.uint8: "U8",
    dtypes.uint16: "U16",
    dtypes.uint32: "U32",
    dtypes.uint64: "U64",
    dtypes.float16: "F16",
    dtypes.bfloat16: "BF16",
    dtypes.float32: "F32",
    dtypes.float64: "F64",
    dtypes.complex64: "C64",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}

_BLOCK = 1 << 20  # bytes that are summed up and written at once
_SHORT = 512  # bytes; runs that are shorter are read together with what lies between them
_WIDE = 8 << 20  # bytes of narrow columns that are read at once
_LARGEST_HEADER = 100_000_000  # as the package safetensors has it


@dataclass(frozen=True)
class Entry:
    """One tensor to be written: its key in the file, and where its value comes from when its turn is there."""

    key: str
    dtype: dtypes.DType
    shape: tuple[int, ...]
    array: Callable[[], Array]

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Described(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file: `offset` counts from the beginning of the file."""

    dtype: dtypes.DType
    shape: tuple[int, ...]
    offset: int


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Entries in the order in which they stand in a file: large elements first, so that each is aligned."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.key))


def header(entries: Sequence[Entry], metadata: dict[str, str] | None = None) -> bytes:
    """What comes before the bytes of the entries."""
    described: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.nbytes
        name, shape = _written_as(entry.dtype, entry.shape)
        described[entry.key] = _Described(name, shape, (begin, end))
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, entries: Sequence[Entry], metadata: dict[str, str] | None = None) -> list[int]:
    """Writes a new file down to the disk; the CRC-32 of the bytes of each entry."""
    sums = []
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header(entries, metadata)))
        for entry in entries:
            sums.append(_write_all(file.fileno(), bytes_of(np.asarray(entry.array(), order="C"))))
        os.fsync(file.fileno())
    return sums


def places(path: Path) -> dict[str, Place]:
    """Where the tensors of a file lie. Raises `CheckpointError` if it is no whole safetensors file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
            raise CheckpointError(
                f"{path}: not a safetensors file, or cut off: its header does not fit in {size} bytes"
            )
        text = file.read(length)
    return {key: _place(path, key, entry, 8 + length, size) for key, entry in _decode(path, text).items()}


def checksum(file: int, offset: int, size: int) -> int:
    """The CRC-32 of bytes of an open file."""
    total = 0
    buffer = memoryview(bytearray(min(_BLOCK, size)))
    for at in range(0, size, _BLOCK):
        part = buffer[: min(_BLOCK, size - at)]
        read_exactly(file, part, offset + at)
        total = zlib.crc32(part, total)
    return total


def read_box(file: int, place: Place, box: Box, out: Array) -> None:
    """Reads a box of a tensor into `out`, an array of its shape and dtype.

    Read is what is asked for, where that is runs of half a kilobyte or more; shorter runs are read with what is between
    them.
    """
    if not box.size:
        return
    # Dimensions from `inner` on are taken whole: the box is runs of consecutive bytes.
    inner = len(place.shape)
    while inner and box.shape[inner - 1] == place.shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    run = math.prod(box.shape[outer:]) * place.dtype.itemsize
    if run < _SHORT and outer:
        _read_wider(file, place, box, outer, out)
        return
    strides = [math.prod(place.shape[dim + 1 :]) for dim in range(len(place.shape))]
    first = sum(at * stride for at, stride in zip(box.start, strides, strict=True))
    for index in np.ndindex(*box.shape[:outer]):
        at = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
        part = out[index]
        if not isinstance(part, np.ndarray):  # a scalar: `out` is 0-d
            part = out
        whole = part if part.flags.c_contiguous else np.empty(part.shape, place.dtype)
        read_exactly(file, bytes_of(whole), place.offset + at * place.dtype.itemsize)
        if whole is not part:
            part[...] = whole


def _read_wider(file: int, place: Place, box: Box, dim: int, out: Array) -> None:
    """Reads narrow columns: a few rows at a time, with `dim` as wide as it is in the file."""
    start = (*box.start[:dim], 0, *box.start[dim + 1 :])
    shape = (*box.shape[:dim], place.shape[dim], *box.shape[dim + 1 :])
    columns = (slice(None),) * dim + (slice(box.start[dim], box.start[dim] + box.shape[dim]),)
    rows = max(1, _WIDE // (math.prod(shape[1:]) * place.dtype.itemsize))
    for part in split_rows(Box(start, shape), rows):
        read = np.empty(part.shape, place.dtype)
        read_box(file, place, part, read)
        row = part.start[0] - start[0]
        out[row : row + part.shape[0]] = read[columns]


def bytes_of(array: Array) -> memoryview:
    """The bytes of a contiguous array, in place."""
    return array.reshape(-1).view(np.uint8).data


def read_exactly(file: int, buffer: memoryview, offset: int) -> None:
    """Fills the buffer from an open file."""
    while buffer:
        count = os.preadv(file, [buffer], offset)
        if not count:
            raise EOFError(f"the file ends {len(buffer)} bytes too early")
        buffer, offset = buffer[count:], offset + count


def _write_all(file: int, data: memoryview) -> int:
    """Writes everything; its CRC-32."""
    total = 0
    for at in range(0, len(data), _BLOCK):
        part = data[at : at + _BLOCK]
        total = zlib.crc32(part, total)
        while part:
            part = part[os.write(file, part) :]
    return total


def _written_as(dtype: dtypes.DType, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape in the header. complex128, which the format lacks, is pairs of floats."""
    return ("F64", (*shape, 2)) if dtype == dtypes.complex128 else (NAMES[dtype], shape)


def _decode(path: Path, text: bytes) -> dict[str, _Described]:
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {key: msgspec.json.decode(entry, type=_Described) for key, entry in raw.items()}
    except msgspec.DecodeError as reason:
        raise CheckpointError(f"{path}: not a safetensors file, or damaged: {reason}") from None


def _place(path: Path, key: str, entry: _Described, base: int, size: int) -> Place:
    begin, end = entry.data_offsets
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"{path}: {key} has dtype {entry.dtype}; known are {', '.join(DTYPES)}")
    dtype = DTYPES[entry.dtype]
    fits = 0 <= begin <= end and min(entry.shape, default=0) >= 0
    if not fits or end - begin != math.prod(entry.shape) * dtype.itemsize:
        raise CheckpointError(f"{path}: {key} of {entry.dtype}{list(entry.shape)} cannot be bytes {begin} to {end}")
    if base + end > size:
        raise CheckpointError(f"{path}: cut off: {key} ends at byte {base + end}, but the file has {size}")
    return Place(dtype, entry.shape, base + begin)

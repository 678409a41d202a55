"""Our safetensors files are those of the package safetensors, and no byte is read that nobody asked for."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.checkpoint import tensor_file
from fuel_parallel.checkpoint.boxes import Box, whole
from fuel_parallel.checkpoint.tensor_file import Entry, Place
from fuel_parallel.errors import CheckpointError
from fuel_parallel.lazy import dtypes

SHAPES = [(), (0,), (3,), (2, 0, 4), (4, 5), (2, 3, 4)]


def values(dtype: dtypes.DType, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    words = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    return (words % 2).astype(bool)[..., 0] if dtype == dtypes.bool_ else words.view(dtype)[..., 0]


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def entry(key: str, array: np.ndarray) -> Entry:
    return Entry(key, dtypes.dtype(array.dtype), array.shape, lambda: array)


ARRAYS = {
    f"{dtype.name}.{index}": values(dtype, shape)
    for dtype in dtypes.ALL
    if dtype != dtypes.complex128
    for index, shape in enumerate(SHAPES)
}


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    entries = tensor_file.in_order(entry(key, array) for key, array in ARRAYS.items())
    sums = tensor_file.write(tmp_path / "ours", entries, {"format": "pt"})
    read = safetensors.numpy.load_file(tmp_path / "ours")
    assert read.keys() == ARRAYS.keys()
    assert all(same_bytes(read[key], array) for key, array in ARRAYS.items())
    assert sums == [zlib.crc32(entry.array().tobytes()) for entry in entries]
    with safetensors.safe_open(tmp_path / "ours", "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_we_read_what_the_package_writes(tmp_path: Path) -> None:
    safetensors.numpy.save_file(ARRAYS, tmp_path / "theirs", {"who": "they"})
    places = tensor_file.places(tmp_path / "theirs")
    assert places.keys() == ARRAYS.keys()
    file = os.open(tmp_path / "theirs", os.O_RDONLY)
    for key, place in places.items():
        out = np.empty(place.shape, place.dtype)
        tensor_file.read_box(file, place, whole(place.shape), out)
        assert same_bytes(out, ARRAYS[key])
    os.close(file)


def test_complex128_is_pairs_of_floats(tmp_path: Path) -> None:
    array = np.array([[1 + 2j, 3 - 1j]])
    tensor_file.write(tmp_path / "ours", [entry("z", array)])
    assert safetensors.numpy.load_file(tmp_path / "ours")["z"].tolist() == [[[1.0, 2.0], [3.0, -1.0]]]


@st.composite
def boxes_of_a_shape(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 7, 40, 1500]), min_size=0, max_size=3)))
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@given(boxes_of_a_shape())
def test_a_box_is_what_slicing_gives(drawn: tuple[tuple[int, ...], Box]) -> None:
    shape, box = drawn
    if np.prod(shape) > 100_000:
        shape, box = shape[:2], Box(box.start[:2], box.shape[:2])
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    file = os.memfd_create("array")
    os.write(file, b"before" + array.tobytes())
    out = np.empty(box.shape, np.int32)
    tensor_file.read_box(file, Place(dtypes.int32, shape, 6), box, out)
    os.close(file)
    assert np.array_equal(out, array[box.within(whole(shape))])


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        (Box((0, 0), (64, 4096)), 64 * 4096 * 4),  # all
        (Box((16, 0), (8, 4096)), 8 * 4096 * 4),  # rows
        (Box((0, 2048), (64, 2048)), 64 * 2048 * 4),  # columns, of two pages a row
        (Box((3, 1024), (2, 1024)), 2 * 1024 * 4),  # a page of two rows
        (Box((3, 7), (16, 128)), 16 * 128 * 4),  # half a kilobyte of a row
        (Box((8, 7), (4, 3)), 4 * 4096 * 4),  # a few columns are read with their rows, and with no other row
        (Box((5, 9), (0, 3)), 0),
    ],
)
def test_only_what_is_asked_for_is_read(box: Box, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(64 * 4096, dtype=np.float32).reshape(64, 4096)
    file = os.memfd_create("array")
    os.write(file, array.tobytes())
    read = []

    def counting(file: int, buffers: list[memoryview], offset: int, preadv=os.preadv) -> int:
        read.append(preadv(file, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    out = np.empty(box.shape, np.float32)
    tensor_file.read_box(file, Place(dtypes.float32, array.shape, 0), box, out)
    os.close(file)
    assert np.array_equal(out, array[box.within(whole(array.shape))])
    assert sum(read) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "its header does not fit in 0 bytes"),
        (b"\xff" * 20, "its header does not fit in 20 bytes"),
        (b"\2\0\0\0\0\0\0\0[]", "not a safetensors file, or damaged"),
        (b'a\0\0\0\0\0\0\0{"x":{"dtype":"F8","shape":[1],"data_offsets":[0,1]}}' + b" " * 60, "x has dtype F8; known"),
        (b'a\0\0\0\0\0\0\0{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}' + b" " * 60, "cannot be bytes 0 to 1"),
        (b'a\0\0\0\0\0\0\0{"x":{"dtype":"U8","shape":[90],"data_offsets":[0,90]}}' + b" " * 60, "cut off: x ends at"),
        (b'a\0\0\0\0\0\0\0{"x":{"dtype":"U8","shape":[-1],"data_offsets":[1,0]}}' + b" " * 60, "be bytes 1 to 0"),
    ],
)
def test_what_is_no_file_of_tensors_is_said(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(CheckpointError, match=message):
        tensor_file.places(tmp_path / "file")

"""Whatever the tensors were cut like, they load onto any other cut, and each rank reads what it needs."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint
from fuel_parallel.checkpoint import plan
from fuel_parallel.checkpoint.boxes import Box, whole

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
Case = tuple[tuple[int, ...], list[Box], list[int], list[Box]]
DTYPES = [np.float64, np.float32, np.int16, np.bool_]


def cut_up(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """A random partition of a box, by cutting again and again."""
    dims = [dim for dim, extent in enumerate(box.shape) if extent > 1]
    if not depth or not dims or not draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, box.shape[dim] - 1))

    def part(first: int, extent: int) -> Box:
        start, shape = list(box.start), list(box.shape)
        start[dim], shape[dim] = start[dim] + first, extent
        return Box(tuple(start), tuple(shape))

    halves = part(0, at), part(at, box.shape[dim] - at)
    return [one for half in halves for one in cut_up(draw, half, depth - 1)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A shape; the boxes of a partition; which box each saving rank holds; what each loading rank wants."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=0, max_size=4)))
    boxes = cut_up(draw, whole(shape), 3)
    holders = [*range(len(boxes)), *draw(st.lists(st.integers(0, len(boxes) - 1), max_size=3))]
    wanted = []
    for _ in range(draw(st.integers(1, 5))):
        ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        wanted.append(Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)))
    return shape, boxes, holders, wanted


def part(dense: np.ndarray, box: Box) -> fp.Parameter:
    return fp.Parameter(dense[box.within(whole(dense.shape))], shard=fp.Shard(dense.shape, box.start))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60)
@given(case=cases(), dtype=st.sampled_from(DTYPES), piece_bytes=st.sampled_from([8, 100, 1 << 20]))
def test_any_cut_loads_onto_any_other(
    case: Case, dtype: Any, piece_bytes: int, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, boxes, holders, wanted = case
    monkeypatch.setattr(plan.pieces_of, "__defaults__", (piece_bytes,))
    dense = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:

        def save(comm: Any) -> None:
            checkpoint.save(folder, {"w": part(dense, boxes[holders[comm.rank]]), "step": 3}, step=1, comm=comm)

        def load(comm: Any) -> tuple[fp.Parameter, int]:
            mine = part(np.zeros(shape, dtype), wanted[comm.rank])
            loaded = checkpoint.load(folder, {"w": mine, "step": 0}, comm=comm)
            return mine, loaded.state["step"]

        on_ranks(len(holders), save)
        results = on_ranks(len(wanted), load)
        _, files = checkpoint_files(Path(folder))
    for (mine, step), box in zip(results, wanted, strict=True):
        assert step == 3
        assert np.array_equal(mine.numpy(), dense[box.within(whole(shape))])
    # Replicas are written once.
    assert sum(files.values()) < dense.nbytes + 500 * max(1, len(files)) * (1 + dense.nbytes // piece_bytes)


def checkpoint_files(folder: Path) -> tuple[list[str], dict[str, int]]:
    there = {path.name: path.stat().st_size for path in folder.glob("step-*/*")}
    return list(there), {name: size for name, size in there.items() if name != "manifest.json"}


def test_a_rank_reads_its_shard_and_no_more(on_ranks: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = np.random.default_rng(0).normal(size=(512, 2048))

    def save(comm: Any) -> None:
        checkpoint.save(tmp_path, {"w": along(dense, 0, comm), "b": along(dense, 1, comm)}, step=1, comm=comm)

    on_ranks(4, save)
    read: list[int] = []

    def counting(file: int, buffers: Any, offset: int, preadv: Any = os.preadv) -> int:
        read.append(preadv(file, buffers, offset))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)

    def load(verify: bool) -> Callable[[Any], None]:
        def on_rank(comm: Any) -> None:
            # By rows where it was cut by columns, and the other way round.
            state = {"w": along(np.zeros_like(dense), 1, comm), "b": along(np.zeros_like(dense), 0, comm)}
            checkpoint.load(tmp_path, state, comm=comm, verify=verify)
            for name, dim in (("w", 1), ("b", 0)):
                assert np.array_equal(state[name].numpy(), along(dense, dim, comm).numpy())

        return on_rank

    on_ranks(2, load(verify=False))
    assert sum(read) == 2 * dense.nbytes
    read.clear()
    on_ranks(2, load(verify=True))  # together the ranks read all of it once more, and the headers
    headers = sum(path.stat().st_size for path in tmp_path.glob("step-*/*.safetensors")) - 2 * dense.nbytes
    assert sum(read) == 4 * dense.nbytes + headers
    read.clear()
    one = fp.Variable(np.zeros((1, 2048)), shard=fp.Shard(dense.shape, (3, 0)))
    checkpoint.load(tmp_path, {"w": one}, verify=False)
    assert sum(read) == one.nbytes


def test_a_tensor_is_in_memory_once(tmp_path: Path) -> None:
    size, count = 4 << 20, 8
    state = {f"w{i}": fp.Variable(np.full(size // 8, float(i))) for i in range(count)}
    tracemalloc.start()
    try:
        checkpoint.save(tmp_path, state, step=1)
        saving = tracemalloc.get_traced_memory()[1]
        fresh = {name: fp.Variable(ft.zeros(size // 8, dtype="float64")) for name in state}
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        checkpoint.load(tmp_path, fresh)
        loading = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert saving < size // 2  # no copy is made of what is written
    assert count * size <= loading < (count + 1) * size
    assert all(fresh[name].numpy()[0] == one.numpy()[0] for name, one in state.items())


def along(dense: np.ndarray, dim: int, comm: Any) -> fp.Parameter:
    rows = fp.partition(dense.shape[dim], comm.world_size)[comm.rank]
    start = [0] * dense.ndim
    start[dim] = rows.start
    shape = list(dense.shape)
    shape[dim] = len(rows)
    return part(dense, Box(tuple(start), tuple(shape)))

"""Attention over pages is dense attention over the tokens in them, whatever the batch and wherever the pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel.lazy as ft
from fuel_parallel.errors import DTypeError, FuelError, IndexingError, ShapeError
from fuel_parallel.lazy.ops import paged_attention as op
from tests.stand_in import StandInMemory

Array = np.ndarray[Any, Any]


class Ragged:
    """A drawn batch: sequences of some length over a shuffled pool, of which some share their first pages."""

    def __init__(self, draw: Any, *, even: bool = True, dtype: Any = np.float64) -> None:
        rng = np.random.default_rng(draw(st.integers(0, 999)))
        self.page = draw(st.integers(1, 5))
        self.dim = draw(st.integers(1, 4))
        kv_heads = draw(st.integers(1, 3))
        group = draw(st.integers(1, 3))
        self.groups = (
            [group] * kv_heads if even else draw(st.lists(st.integers(1, 3), min_size=kv_heads, max_size=kv_heads))
        )
        self.lengths = draw(st.lists(st.integers(0, 13), min_size=1, max_size=4))
        self.counts = [draw(st.integers(0, length)) for length in self.lengths]
        needed = [-(-length // self.page) for length in self.lengths]
        pages = max(1, sum(needed) + draw(st.integers(0, 2)))
        order = rng.permutation(pages) if draw(st.booleans()) else np.arange(pages)
        most = max(1, *needed, draw(st.integers(1, 5)))
        # What a row has beyond its sequence's pages must not matter, not even that there are no such pages.
        self.table = np.full((len(needed), most), 10**6, np.int32)
        taken = 0
        for row, count in enumerate(needed):
            self.table[row, :count] = order[taken : taken + count]
            taken += count
            shared = draw(st.integers(0, min(count, needed[0]))) if row else 0
            self.table[row, :shared] = self.table[0, :shared]
        self.starts = np.concatenate([[0], np.cumsum(self.counts)])
        tokens = int(self.starts[-1]) + draw(st.integers(0, 3))
        self.query = rng.normal(size=(tokens, sum(self.groups), self.dim)).astype(dtype)
        self.keys, self.values = (rng.normal(size=(pages, self.page, kv_heads, self.dim)) for _ in range(2))

    def attend(self, keys: Any, values: Any, **options: Any) -> Array:
        where = map(ft.asarray, (self.table, self.lengths, self.starts))
        return ft.paged_attention(ft.asarray(self.query), keys, values, *where, **options).numpy()

    def dense(self, keys: Array, values: Array, scale: float | None = None) -> Array:
        """By the matrix of all scores, sequence by sequence and head by head, in float64."""
        out = np.zeros(self.query.shape)
        serving = [kv for kv, count in enumerate(self.groups) for _ in range(count)]
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            places = np.arange(length)
            pages, offsets = self.table[row, places // self.page], places % self.page
            rows = slice(self.starts[row], self.starts[row + 1])
            for head, kv in enumerate(serving):
                scores = self.query[rows, head].astype(np.float64) @ keys[pages, offsets, kv].T
                scores *= self.dim**-0.5 if scale is None else scale
                scores[~np.tri(count, length, length - count, dtype=bool)] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e9))
                out[rows, head] = weights / weights.sum(-1, keepdims=True) @ values[pages, offsets, kv]
        return out


@pytest.fixture(params=["whole", "blocks"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and queries as they come, or in blocks so small that every batch has several."""
    if request.param == "blocks":
        monkeypatch.setattr(op, "KEY_ELEMENTS", 8)
        monkeypatch.setattr(op, "SCORES", 12)


@pytest.mark.usefixtures("sizes")
@settings(max_examples=60)
@given(st.data())
def test_a_ragged_batch_attends_as_dense_attention_does(data: Any) -> None:
    batch = Ragged(data.draw, even=data.draw(st.booleans()))
    options = {"scale": data.draw(st.sampled_from([None, 0.3])), "groups": batch.groups}
    found = batch.attend(ft.asarray(batch.keys), ft.asarray(batch.values), **options)
    np.testing.assert_allclose(found, batch.dense(batch.keys, batch.values, options["scale"]), rtol=1e-12, atol=1e-13)


@pytest.mark.usefixtures("sizes")
@settings(max_examples=25)
@given(st.data(), st.sampled_from(["float32", "float16", "bfloat16"]), st.sampled_from(["float32", "bfloat16"]))
def test_pages_and_queries_of_fewer_bits_cost_one_rounding(data: Any, stored: str, asked: str) -> None:
    batch = Ragged(data.draw, dtype=ft.dtype(asked))
    keys, values = (ft.asarray(x).astype(stored) for x in (batch.keys, batch.values))
    wanted = batch.dense(*(x.numpy().astype(np.float64) for x in (keys, values)))
    found = batch.attend(keys, values)
    assert found.dtype == ft.dtype(asked)
    tolerance = 2e-6 if asked == "float32" else 5e-3
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("sizes")
@settings(max_examples=25)
@given(st.data())
def test_int8_stands_for_its_scale_times_its_steps(data: Any) -> None:
    batch = Ragged(data.draw)
    steps = [np.round(x * 40).clip(-127, 127).astype(np.int8) for x in (batch.keys, batch.values)]
    scales = [np.abs(x[..., 0]).astype(np.float32) for x in (batch.keys, batch.values)]
    wanted = batch.dense(*(s * scale[..., None].astype(np.float64) for s, scale in zip(steps, scales, strict=True)))
    names = ("key_scales", "value_scales")
    found = batch.attend(*map(ft.asarray, steps), **dict(zip(names, map(ft.asarray, scales), strict=True)))
    np.testing.assert_allclose(found, wanted, rtol=1e-11, atol=1e-11)


@settings(max_examples=15)
@given(st.data())
def test_the_kernel_uses_nothing_but_the_device_s_own_arrays(data: Any) -> None:
    """On arrays that do not become numpy's by themselves, with work that is done late, as CuPy's."""
    xp = StandInMemory().array_module
    batch = Ragged(data.draw, even=data.draw(st.booleans()))
    on_device = map(xp.asarray, (batch.query, batch.keys, batch.values))
    inputs = (*on_device, batch.table, np.array(batch.lengths), batch.starts)
    found = op.PAGED_ATTENTION.kernel(xp, inputs, batch.dim**-0.5, tuple(batch.groups))
    np.testing.assert_allclose(found.get(), batch.dense(batch.keys, batch.values), rtol=1e-12, atol=1e-13)


def test_writes_and_copies_on_a_device_s_own_arrays() -> None:
    xp = StandInMemory().array_module
    x, new = np.arange(12.0).reshape(3, 2, 2), np.array([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]])
    found = op.WRITE_PAGES.kernel(xp, xp.asarray(x), xp.asarray(new), np.array([4, -1, 0])).get()
    np.testing.assert_array_equal(found.reshape(6, 2)[[0, 1, 4]], [[-5.0, -6.0], [2.0, 3.0], [-1.0, -2.0]])
    found = op.COPY_PAGES.kernel(xp, xp.asarray(x), np.array([0, 1]), np.array([1, 2])).get()
    np.testing.assert_array_equal(found, x[[0, 0, 0]])


ONE = {
    "query": (2, 2, 4),
    "keys": (3, 2, 1, 4),
    "values": (3, 2, 1, 4),
    "page_table": (1, 2),
    "lengths": 1,
    "starts": 2,
}


STEPS = ft.zeros((3, 2, 1, 4), dtype="int8")


def refused(change: dict[str, Any], options: dict[str, Any] | None = None) -> None:
    made = [
        ft.zeros(shape, dtype="int32" if place > 2 else "float32") if not isinstance(shape, ft.Tensor) else shape
        for place, shape in enumerate((ONE | change).values())
    ]
    ft.paged_attention(*made, **(options or {}))


@pytest.mark.parametrize(
    ("change", "options", "error", "text"),
    [
        ({"query": (2, 4)}, {}, ShapeError, r"expected query \[tokens, heads, dim\], keys and values \[pages, page"),
        ({"values": (3, 2, 1, 5)}, {}, ShapeError, r"got \(2, 2, 4\), \(3, 2, 1, 4\) and \(3, 2, 1, 5\)"),
        ({"query": (2, 2, 3)}, {}, ShapeError, "expected query"),
        ({"starts": 3}, {}, ShapeError, r"starts \[sequences \+ 1\]; got \(1, 2\), \(1,\) and \(3,\)"),
        ({"page_table": (2, 2)}, {}, ShapeError, "expected page_table"),
        ({"lengths": ft.zeros(1)}, {}, DTypeError, "lengths must be integers on the CPU, not float32"),
        ({"query": (2, 3, 4), "keys": (3, 2, 2, 4), "values": (3, 2, 2, 4)}, {}, ShapeError, "3 query heads cannot be"),
        ({}, {"groups": [1]}, ShapeError, r"2 query heads cannot be served by 1 key heads as \(1,\)"),
        ({}, {"key_scales": ft.zeros((3, 2, 1))}, DTypeError, "int8 needs key_scales and value_scales"),
        ({"keys": STEPS, "values": STEPS}, {}, DTypeError, "int8 needs"),
        ({"keys": ft.zeros((3, 2, 1, 4), dtype="int16")}, {}, DTypeError, "one floating dtype or int8"),
        ({"query": ft.zeros((2, 2, 4), dtype="int32")}, {}, DTypeError, "int32"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_an_error_where_it_is_built(
    change: dict[str, Any], options: dict[str, Any], error: type[FuelError], text: str
) -> None:
    refused({})
    with pytest.raises(error, match=text):
        refused(change, options)


def attend(table: Any, length: int, queries: int) -> Array:
    pages = ft.ones((2, 2, 1, 1))
    return ft.paged_attention(
        ft.ones((3, 1, 1)), pages, pages, *map(ft.asarray, (table, [length], [0, queries]))
    ).numpy()


def test_places_that_are_not_there_are_errors() -> None:
    assert attend([[1, 0]], 3, 2).ravel().tolist() == [1, 1, 0]
    with pytest.raises(ShapeError, match="sequence 0 has 2 query tokens, 1 tokens, and pages for 2"):
        attend([[0]], 1, 2)
    with pytest.raises(ShapeError, match="sequence 0 has 1 query tokens, 3 tokens, and pages for 2"):
        attend([[0]], 3, 1)
    with pytest.raises(IndexingError, match="there is no page 2: these pages have 2, from 0 on"):
        attend([[0, 2]], 3, 1)
    with pytest.raises(IndexingError, match="there is no slot 6: these pages have 6, from 0 on"):
        ft.write_pages(ft.zeros((3, 2)), ft.ones(1), ft.asarray([6])).numpy()
    with pytest.raises(IndexingError, match="there is no page 3"):
        ft.copy_pages(ft.zeros((3, 2)), ft.asarray([0]), ft.asarray([3])).numpy()
    with pytest.raises(DTypeError, match="pages are float32, the new tokens float64; use astype"):
        ft.write_pages(ft.zeros((3, 2)), ft.ones(1, dtype="float64"), ft.asarray([0]))
    with pytest.raises(ShapeError, match=r"got \(3, 2\), \(2,\) and \(1,\)"):
        ft.write_pages(ft.zeros((3, 2)), ft.ones(2), ft.asarray([0]))
    with pytest.raises(ShapeError, match="as many sources as targets"):
        ft.copy_pages(ft.zeros((3, 2)), ft.asarray([0]), ft.asarray([1, 2]))


def test_there_is_no_gradient() -> None:
    query, pages = ft.ones((1, 1, 1)), ft.ones((1, 1, 1, 1))
    found = ft.paged_attention(query, pages, pages, *map(ft.asarray, ([[0]], [1], [0, 1])))
    with pytest.raises(FuelError, match="paged_attention"):
        ft.grad(ft.sum(found), query)

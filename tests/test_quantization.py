"""Stored weights: how near they are to the weights, what multiplying with them gives, and how many bytes they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import quantization, stored_matmul
from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError

STEPS = {"int8": 254, "int4": 14}
STORED = {
    "storage": st.sampled_from(["int8", "int4"]),
    "minimum": st.booleans(),
    "block": st.sampled_from([None, 2, 6, 32]),
    "axis": st.integers(0, 1),
}


def matrix(*shape: int, dtype: str = "float64") -> ft.Tensor:
    spread = np.random.default_rng(shape).normal(size=shape) * np.exp(np.random.default_rng(1).normal(size=shape[1:]))
    return ft.asarray(spread + 0.3, dtype=dtype)


def half_steps(weight: np.ndarray[Any, Any], storage: str, block: int, minimum: bool, axis: int) -> Any:
    """Half the distance between neighbouring codes, of each element."""
    rows = weight if axis == 0 else weight.T
    bound = np.empty_like(rows)
    for start in range(0, len(rows), block):
        part = rows[start : start + block]
        span = part.max(0) - part.min(0) if minimum else 2 * np.abs(part).max(0)
        bound[start : start + block] = span / (STEPS[storage] + minimum) / 2
    return bound if axis == 0 else bound.T


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 70), columns=st.integers(0, 9), **STORED)
def test_an_element_is_off_by_half_a_step_at_most(
    rows: int, columns: int, storage: str, minimum: bool, block: int | None, axis: int
) -> None:
    weight = matrix(rows, columns)
    stored = fp.StoredWeight(weight, storage, block=block, minimum=minimum, axis=axis)
    whole = weight.numpy()
    found = stored.dequantize().numpy()
    assert (found.shape, found.dtype) == (whole.shape, whole.dtype)
    per_channel = block is None and storage == "int8"
    bound = half_steps(whole, storage, max(whole.shape[axis], 1) if per_channel else block or 64, minimum, axis)
    # Scales and minima are kept in float32.
    assert (np.abs(found - whole) <= bound * (1 + 1e-5) + np.abs(whole) * 1e-6).all()


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 40),
    columns=st.integers(0, 9),
    batch=st.sampled_from([(), (3,), (2, 2)]),
    storage=st.sampled_from(quantization.STORAGES),
    minimum=st.booleans(),
    block=st.sampled_from([None, 2, 6]),
)
def test_the_product_is_that_with_the_decoded_matrix(
    rows: int, columns: int, batch: tuple[int, ...], storage: str, minimum: bool, block: int | None
) -> None:
    if storage not in STEPS:
        minimum, block = False, None
    stored = fp.StoredWeight(matrix(rows, columns), storage, minimum=minimum, block=block)
    x = ft.asarray(np.random.default_rng(0).normal(size=(*batch, rows)))
    decoded = stored.dequantize("float64")
    found, wanted = x @ stored, x @ decoded
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-12, atol=1e-12)
    first = ft.grad(ft.sin(x @ stored).sum(), x)
    wanted_first = ft.grad(ft.sin(x @ decoded).sum(), x)
    second, wanted_second = ft.grad((first * first).sum(), x), ft.grad((wanted_first * wanted_first).sum(), x)
    np.testing.assert_allclose(first.numpy(), wanted_first.numpy(), rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(second.numpy(), wanted_second.numpy(), rtol=1e-11, atol=1e-10)


def test_a_large_product_is_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_matmul, "DECODED", 100)
    x = ft.asarray(np.random.default_rng(0).normal(size=(3, 90)))
    for storage, block in [("int8", None), ("int8", 10), ("int4", 32), ("bfloat16", None)]:
        stored = fp.StoredWeight(matrix(90, 7), storage, block=block)
        np.testing.assert_allclose((x @ stored).numpy(), (x @ stored.dequantize()).numpy(), rtol=1e-12, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(tokens=st.lists(st.integers(0, 10), max_size=6), **{k: v for k, v in STORED.items() if k != "axis"})
def test_rows_of_a_table_are_decoded_alone(tokens: list[int], storage: str, minimum: bool, block: int | None) -> None:
    table = fp.Embedding(11, 10, ft.random.Generator(0))
    fp.quantize(table, storage, minimum=minimum, block=block)
    indices = ft.asarray(np.array(tokens, dtype=np.int64))
    rows = table(indices)
    np.testing.assert_array_equal(rows.numpy(), table.weight.dequantize().numpy()[tokens])
    assert (rows.dtype.name, table(indices.reshape(1, -1)).shape) == ("float32", (1, len(tokens), 10))


def test_a_head_may_share_a_stored_table() -> None:
    table = fp.quantize(fp.Embedding(11, 10, ft.random.Generator(0)), "int4")
    x = ft.asarray(np.random.default_rng(0).normal(size=(3, 10)), dtype="float32")
    wanted = x.numpy() @ table.weight.dequantize().numpy().T
    np.testing.assert_allclose(table.logits(x).numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("storage", "options", "per_weight"),
    [
        ("float32", {}, 4),
        ("float16", {}, 2),
        ("bfloat16", {}, 2),
        ("int8", {}, 1 + 4 / 256),
        ("int8", {"block": 32}, 1 + 4 / 32),
        ("int4", {}, 0.5 + 4 / 64),
        ("int4", {"block": 32}, 0.5 + 4 / 32),
        ("int4", {"block": 32, "minimum": True}, 0.5 + 8 / 32),
    ],
)
def test_a_model_takes_the_bytes_that_the_table_says(storage: str, options: Any, per_weight: float) -> None:
    """Counted in the arrays that the process holds, before and after."""
    model = fp.Linear(256, 512, ft.random.Generator(0), bias=False)
    fp.realize(model)
    before = model.weight.numpy().nbytes
    fp.quantize(model, storage, **options)
    fp.realize(model)
    held = sum(variable.node.value.nbytes for variable in model.named_variables().values())
    assert held == model.weight.nbytes == 256 * 512 * per_weight
    assert before == 256 * 512 * 4
    assert not any(variable.node.inputs for variable in model.named_variables().values())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("storage", quantization.STORAGES)
def test_results_are_in_the_dtype_of_the_activations(storage: str, dtype: str) -> None:
    layer = fp.quantize(fp.Linear(8, 4, ft.random.Generator(0), bias=False), storage)
    y = layer(ft.ones((2, 8), dtype=dtype))
    wanted = layer.weight.dequantize("float64").numpy().sum(0)
    assert y.dtype.name == dtype
    np.testing.assert_allclose(y.numpy().astype("float64"), [wanted] * 2, rtol=0.02, atol=0.01)


class Model(fp.Module):
    def __init__(self) -> None:
        g = ft.random.Generator(0)
        self.token = fp.Embedding(16, 8, g)
        self.blocks = [{"norm": fp.RMSNorm(8), "layer": fp.Linear(8, 8, g)} for _ in range(2)]
        self.head = fp.Linear(8, 16, g)

    def __call__(self, tokens: ft.Tensor) -> ft.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = x + block["layer"](block["norm"](x))
        return self.head(x)


def test_layers_of_a_model_are_found_and_the_rest_stays_trainable() -> None:
    model = fp.quantize(Model(), "int8", only=lambda name: not name.startswith("head"))
    assert [n for n, _ in model.named_parameters()] == [
        "blocks.0.norm.weight",
        "blocks.0.layer.bias",
        "blocks.1.norm.weight",
        "blocks.1.layer.bias",
        "head.weight",
        "head.bias",
    ]
    assert {"token.weight.codes", "blocks.1.layer.weight.scales"} <= model.named_variables().keys()
    loss = ft.sin(model(ft.asarray([[1, 2, 3]]))).sum()
    gradients = ft.grad(loss, model.parameters())
    assert all(float(ft.max(ft.abs(g))) > 0 for g in gradients)


def test_a_checkpoint_keeps_the_packed_bytes(tmp_path: Any) -> None:
    model, fresh = (fp.quantize(Model(), "int4", block=2) for _ in range(2))
    fresh.load({name: np.zeros(v.shape) for name, v in fresh.named_variables().items()})
    fp.checkpoint.save(tmp_path, {"model": model}, step=1)
    fp.checkpoint.load(tmp_path, {"model": fresh})
    tokens = ft.asarray([[3, 1, 15]])
    np.testing.assert_array_equal(fresh(tokens).numpy(), model(tokens).numpy())
    assert fresh.head.weight.codes.dtype.name == "uint8"


def test_mistakes_are_named() -> None:
    linear = fp.Linear(8, 4, ft.random.Generator(0))
    with pytest.raises(ArgumentError, match=r"storage is one of 'float32', .*'int4', not 'int3'"):
        fp.quantize(linear, "int3")
    with pytest.raises(ArgumentError, match="block is an even number such as 32 or 64, not 7"):
        fp.quantize(linear, "int4", block=7)
    with pytest.raises(ArgumentError, match="block and minimum go with 'int8' and 'int4', not with 'float16'"):
        fp.quantize(linear, "float16", block=32)
    with pytest.raises(ArgumentError, match="RMSNorm has no linear layer or embedding"):
        fp.quantize(fp.RMSNorm(4), "int8")
    with pytest.raises(ShapeError, match=r"weight must be a matrix, but has shape \(3,\)"):
        fp.StoredWeight(ft.zeros(3), "int8")
    with pytest.raises(DTypeError, match="weight must be floating, not int64"):
        fp.StoredWeight(ft.zeros((2, 2), dtype="int64"), "int8")
    stored = fp.StoredWeight(ft.zeros((8, 4)), "int8")
    with pytest.raises(ShapeError, match=r"matmul: shapes \(2, 5\) and \(8, 4\) do not fit"):
        ft.zeros((2, 5)) @ stored
    with pytest.raises(ArgumentError, match=r"rows are looked up in tables \(axis=1\)"):
        stored[ft.asarray([1])]
    assert (np.zeros((2, 8)) @ stored).shape == (2, 4)

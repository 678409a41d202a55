"""Each expression computes what numpy's kernel does, on values where that is not easy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fuel_parallel.errors import FuelError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import OPS, Spec
from fuel_parallel.runtime.codegen.expressions import EXPRESSIONS, NOT_EXPRESSED, Unsupported, is_expressed
from fuel_parallel.runtime.codegen.kernel import kernel_for
from fuel_parallel.runtime.codegen.lowering import LOWERINGS
from fuel_parallel.runtime.passes import grid
from fuel_parallel.runtime.program import Extent, Operation, Program

REAL = (dtypes.bool_, *dtypes.SIGNED, *dtypes.UNSIGNED, *dtypes.FLOATING)
FUSED = sorted({op.name for op in OPS.values() if op.elementwise} | set(grid._RULES))
ELEMENTWISE = [name for name in FUSED if OPS[name].elementwise and name not in ("astype", "where", *NOT_EXPRESSED)]
INEXACT = {
    *("exp", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh"),
    *("tanh", "asinh", "acosh", "atanh", "erf", "sigmoid", "silu", "gelu_tanh", "gelu_erf", "pow", "atan2", "hypot"),
    "logaddexp",
}
"""Ops whose last bits depend on the mathematics library."""


def special_values(dtype):
    """Values at which functions differ that should not."""
    if dtype == dtypes.bool_:
        return [False, True]
    if dtype in (*dtypes.SIGNED, *dtypes.UNSIGNED):
        info = np.iinfo(dtype)
        some = [0, 1, 2, 3, 5, 7, 8, 31, 63, 100, -1, -2, -3, -7, info.min, info.min + 1, info.max, info.max - 1]
        return [v for v in some if info.min <= v <= info.max]
    finite = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.7, 7.0, 90.0, 300.0, 1e-3, 6e-5, 1e-7, 60000.0]
    return [*finite, *[-v for v in finite], np.inf, -np.inf, np.nan]


def spec_of(name, operand_dtypes):
    try:
        return OPS[name].infer(*[Spec((2, 2), d) for d in operand_dtypes])
    except FuelError:
        return None
    except TypeError:
        return None


def arity(name):
    return next(n for n in (1, 2) if any(spec_of(name, (d,) * n) for d in dtypes.ALL))


def program_of(calls):
    """A program of calls (op's name, arrays, result's dtype, attributes), and the arrays, all of one length."""
    n = max(len(array) for _, arrays, *_ in calls for array in arrays)
    inputs = [np.resize(array, n) for _, arrays, *_ in calls for array in arrays]
    operations, used = [], 0
    for name, arrays, result, attrs in calls:
        operations.append(Operation(OPS[name], tuple(range(used, used + len(arrays))), attrs, result, Extent.FULL))
        used += len(arrays)
    program = Program(
        n,
        1,
        ((Extent.FULL, 0),) * used,
        tuple(array.dtype for array in inputs),
        tuple(operations),
        tuple((used + i, (n,)) for i in range(len(calls))),
        n,
    )
    return program, inputs


def assert_same(mine, theirs, exact=True, cancels=False):
    assert mine.dtype == theirs.dtype
    if mine.dtype.kind in "biu":
        np.testing.assert_array_equal(mine, theirs)
        return
    precision = 4 * dtypes_eps(mine.dtype)
    with np.errstate(all="ignore"):
        a, b = mine.astype(np.float64), theirs.astype(np.float64)
        near = np.abs(a - b) <= (0 if exact else precision * np.abs(b) + (precision if cancels else 1e-45))
    wrong = ~((a == b) | near | (np.isnan(a) & np.isnan(b)))
    assert not wrong.any(), f"{a[wrong]} in place of {b[wrong]}"


def dtypes_eps(dtype):
    return {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-23, "float64": 2**-52}[dtype.name]


def test_every_op_that_fusion_takes_has_an_expression_or_a_reason():
    without = [name for name in FUSED if not (is_expressed(name) or name in LOWERINGS or name in NOT_EXPRESSED)]
    assert not without, f"add {without} to EXPRESSIONS or LOWERINGS, or give a reason in NOT_EXPRESSED"


def test_the_tables_name_no_op_that_is_gone():
    assert {*EXPRESSIONS, *LOWERINGS, *NOT_EXPRESSED} - {"at_index", "extreme_at", "lower", "upper"} <= set(OPS)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_expression(name, on_host, by_blocks):
    count, calls = arity(name), []
    for dtype in REAL:
        result = spec_of(name, (dtype,) * count)
        if result is None:
            continue
        rows = list(itertools.product(special_values(dtype), repeat=count))
        if name == "pow" and dtype in (*dtypes.SIGNED, *dtypes.UNSIGNED):
            rows = [r for r in rows if r[1] >= 0]  # numpy refuses a negative power of an integer
        arrays = [np.array([r[i] for r in rows], dtype=dtype) for i in range(count)]
        calls.append((name, arrays, result.dtype, ()))
    program, arrays = program_of(calls)
    for mine, theirs in zip(on_host(program, arrays), by_blocks(program, arrays), strict=True):
        assert_same(
            mine, theirs, exact=name not in INEXACT, cancels=name in ("sigmoid", "silu", "gelu_tanh", "gelu_erf")
        )


@pytest.mark.parametrize("source", REAL, ids=str)
def test_astype(source, on_host, by_blocks):
    calls = []
    for result in REAL:
        values = np.array(special_values(source), dtype=source)
        if source in dtypes.FLOATING and result in (*dtypes.SIGNED, *dtypes.UNSIGNED):
            # Out of bounds a cast is what the machine makes of it, in numpy as well.
            low = 0 if result in dtypes.UNSIGNED else -100
            wide = values.astype(np.float64)
            values = values[(wide >= low) & (wide <= 100)]
        calls.append(("astype", [values], result, (result,)))
    program, arrays = program_of(calls)
    for mine, theirs in zip(on_host(program, arrays), by_blocks(program, arrays), strict=True):
        assert_same(mine, theirs)


def test_where(on_host, by_blocks):
    calls = []
    for dtype in REAL:
        values = np.array(special_values(dtype), dtype=dtype)
        calls.append(("where", [np.arange(len(values)) % 3 == 0, values, values[::-1]], dtype, ()))
    program, arrays = program_of(calls)
    for mine, theirs in zip(on_host(program, arrays), by_blocks(program, arrays), strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("half", [dtypes.float16, dtypes.bfloat16], ids=str)
def test_all_halves_are_loaded_and_stored_as_they_are(half, on_host, by_blocks):
    every = np.arange(65536, dtype=np.uint16).view(half)
    # Halfway between neighbours, and just beside.
    floats = every.astype(np.float32)
    floats = floats[np.isfinite(floats)]
    with np.errstate(all="ignore"):
        between = floats * np.float32(1 + dtypes_eps(half) / 2)
    bits = between.view(np.int32)
    around = np.concatenate([bits - 1, bits, bits + 1]).view(np.float32)
    widen = ("astype", [every], dtypes.float32, (dtypes.float32,))
    program, arrays = program_of([widen, ("astype", [around], half, (half,))])
    for mine, theirs in zip(on_host(program, arrays), by_blocks(program, arrays), strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("dtype", [dtypes.complex64, dtypes.complex128], ids=str)
def test_complex_numbers_are_declined_with_a_reason(dtype):
    x = np.ones(4, dtype)
    with pytest.raises(Unsupported, match=f"add of {dtype.name}: complex numbers are not expressed"):
        kernel_for(program_of([("add", [x, x], dtype, ())])[0])


def test_an_unknown_op_is_declined_by_name():
    x = np.ones(4, np.float32)
    with pytest.raises(Unsupported, match="matmul of float32 has no C expression"):
        kernel_for(program_of([("matmul", [x, x], dtypes.float32, ())])[0])

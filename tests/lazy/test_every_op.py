"""Each op of the registry computes what numpy computes, in every floating dtype and on any device."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import numpy as np
import pytest

import fuel_parallel
import fuel_parallel.lazy as ft
from fuel_parallel.errors import FuelError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import OPS, Node, Spec

# How far a result may be from that of float64, relative to the largest element.
TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-2}


def nodes_below(tensor: ft.Tensor) -> set[Node]:
    stack: list[Node] = [tensor.node]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.inputs)
    return seen


def nodes_of(op: str, tensor: ft.Tensor) -> list[Node]:
    return [node for node in nodes_below(tensor) if node.op.name == op]


def close(found: np.ndarray[Any, Any], wanted: Any, tolerance: float) -> None:
    wanted = np.asarray(wanted)
    assert found.shape == wanted.shape
    if wanted.dtype.kind in "biu":
        np.testing.assert_array_equal(found, wanted)
    else:
        scale = np.nanmax(np.abs(wanted), initial=1.0)
        np.testing.assert_allclose(found.astype(wanted.dtype), wanted, rtol=tolerance, atol=tolerance * scale)


def test_no_op_is_without_a_case(covered: dict[str, set[str]]) -> None:
    ours = {name for name, op in OPS.items() if op.infer.__module__.startswith("fuel_parallel.lazy")}
    assert ours == covered["case"] | covered["elsewhere"]
    assert not covered["case"] & covered["elsewhere"]


def test_value_and_dtype_are_those_of_numpy(case: Any) -> None:
    built = case.build(*map(ft.asarray, case.inputs))
    assert case.op in {node.op.name for node in nodes_below(built)}
    wanted = np.asarray(case.oracle(*case.inputs))
    assert built.dtype == wanted.dtype
    assert built.shape == wanted.shape
    close(built.numpy(), wanted, TOLERANCE["float64"])


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16], ids=lambda d: d.name)
def test_narrow_floats_are_rounded_only_at_the_end(case: Any, dtype: Any) -> None:
    if not case.reals or case.op in ("nextafter", "floor_divide", "remainder"):
        pytest.skip("no floating inputs, or a result that jumps with its inputs")
    inputs = [ft.asarray(x).astype(dtype) if x.dtype.kind == "f" else ft.asarray(x) for x in case.inputs]
    built = case.build(*inputs)
    wanted = np.asarray(case.oracle(*(x.numpy().astype(np.float64) if x.dtype == dtype else x.numpy() for x in inputs)))
    if any(dtypes.kind(node.spec.dtype) == "complex floating" for node in nodes_below(built)):
        dtype = dtypes.float32  # there is no narrower complex dtype than complex64
    assert built.dtype == (wanted.dtype if wanted.dtype.kind != "f" or case.op == "astype" else dtype)
    close(built.numpy(), wanted, TOLERANCE[dtype.name])


def test_no_op_is_without_a_shape_rule_in_words() -> None:
    for module in pkgutil.walk_packages(fuel_parallel.__path__, "fuel_parallel."):
        importlib.import_module(module.name)
    assert [name for name, op in OPS.items() if not op.shapes] == []


def test_an_op_takes_the_dtypes_of_its_domain_and_is_never_built_with_others(case: Any) -> None:
    op = OPS[case.op]
    (node, *_) = nodes_of(case.op, case.build(*map(ft.asarray, case.inputs)))
    usual = node.inputs[0].spec.dtype
    for dtype in dtypes.ALL:
        if dtype in op.domain:
            specs = [
                Spec(i.spec.shape, dtype if i.spec.dtype is usual else i.spec.dtype, i.spec.device) for i in node.inputs
            ]
            assert (op.infer(tuple(specs), *node.attrs) if op.variadic else op.infer(*specs, *node.attrs)) is not None
            continue
        inputs = [ft.asarray(x) if x.dtype != usual else ft.astype(ft.asarray(x), dtype) for x in case.inputs]
        try:
            built = nodes_of(case.op, case.build(*inputs))
        except FuelError:
            continue
        assert all(node.inputs[0].spec.dtype is not dtype for node in built)


def test_value_on_another_device(case: Any, other_device: str) -> None:
    moved = [ft.to_device(ft.asarray(x), other_device) for x in case.inputs]
    built = case.build(*moved)
    assert built.device == other_device
    close(built.numpy(), case.oracle(*case.inputs), TOLERANCE["float64"])


def test_shape_is_inferred_without_running(case: Any) -> None:
    built = case.build(*map(ft.asarray, case.inputs))
    assert not built.is_realized
    inferred = built.node.spec
    value = built.numpy()
    assert (value.shape, value.dtype) == (inferred.shape, inferred.dtype)

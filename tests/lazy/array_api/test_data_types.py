"""The standard's data type functions, and what the namespace says about itself."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from lazy.array_api.agreement import FLOATS, INTEGERS, NAMES, agree, arrays, refuses, strict, values

import fuel_parallel.lazy as ft

DTYPES = st.sampled_from([np.dtype(name) for name in NAMES])
KINDS = ["bool", "signed integer", "unsigned integer", "integral", "real floating", "complex floating", "numeric"]
NOT_OF_THE_STANDARD = {"ArrayAPIStrictFlags", "Device", "array_api_strict", "fft", "linalg"} | {
    f"{verb}_array_api_strict_flags" for verb in ("get", "set", "reset")
}
LATER = {"broadcast_shapes", "isin"}  # 2025.12


def names_of(namespace: Any) -> set[str]:
    return {name for name in namespace.__all__ if not name.startswith("_")} - NOT_OF_THE_STANDARD - LATER


@pytest.mark.parametrize("part", ["", "linalg", "fft"])
def test_all_names_are_there_with_the_arguments_of_the_reference(part: str) -> None:
    theirs, ours = (getattr(namespace, part) if part else namespace for namespace in (strict, ft))
    assert {name for name in names_of(theirs) if not hasattr(ours, name)} == set()
    for name in names_of(theirs):
        if inspect.isfunction(getattr(theirs, name)):
            wanted = inspect.signature(getattr(theirs, name)).parameters.values()
            found = inspect.signature(getattr(ours, name)).parameters
            for parameter in wanted:
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                    assert parameter.name in found, name
                    assert found[parameter.name].kind is not inspect.Parameter.POSITIONAL_ONLY, name


@settings(max_examples=80)
@given(DTYPES, DTYPES)
def test_promotion(a: Any, b: Any) -> None:
    # Between kinds, which the standard leaves open, there is more: tests/lazy/test_dtypes.py.
    if not refuses("result_type", a, b):
        agree("result_type", a, b)
        agree("result_type", np.ones(1, a), b)
        agree("can_cast", a, b)


@settings(max_examples=40)
@given(arrays(), DTYPES)
def test_astype(x: Any, dtype: Any) -> None:
    agree("astype", x, dtype)
    agree("astype", x, dtype, copy=False)


@settings(max_examples=25)
@given(hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_dims=3, max_side=3))
def test_broadcasting(shapes: Any) -> None:
    x, y = (values("int32", shape) for shape in shapes.input_shapes)
    agree("broadcast_arrays", x, y)
    agree("broadcast_to", x, shapes.result_shape)
    agree("broadcast_to", values("int32", shapes.result_shape), x.shape)


@settings(max_examples=40)
@given(DTYPES, st.one_of(st.sampled_from(KINDS), DTYPES, st.tuples(st.sampled_from(KINDS), DTYPES)))
def test_isdtype(dtype: Any, kind: Any) -> None:
    agree("isdtype", dtype, kind)


@pytest.mark.parametrize("name", INTEGERS)
def test_limits_of_integers(name: str) -> None:
    for field in ("bits", "max", "min", "dtype"):
        agree(lambda xp, field=field: getattr(xp.iinfo(getattr(xp, name)), field))


@pytest.mark.parametrize("name", [*FLOATS, "complex64"])
def test_limits_of_floats(name: str) -> None:
    for field in ("bits", "eps", "max", "min", "smallest_normal", "dtype"):
        agree(lambda xp, field=field: getattr(xp.finfo(getattr(xp, name)), field))


@pytest.mark.parametrize("kind", [None, *KINDS, ("bool", "integral")])
def test_the_namespace_lists_the_dtypes_of_the_standard(kind: Any) -> None:
    info, wanted = ft.__array_namespace_info__(), strict.__array_namespace_info__()
    assert {name: d.name for name, d in info.dtypes(kind=kind).items()} == {
        name: name for name in wanted.dtypes(kind=kind)
    }
    for name, d in info.default_dtypes().items():
        assert d.kind == wanted.default_dtypes()[name]._np_dtype.kind
    assert info.capabilities().keys() == wanted.capabilities().keys()

"""A name that a tensor or the library does not have is told with what is written here instead."""

from __future__ import annotations

import re

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import UnknownNameError
from fuel_parallel.names_elsewhere import _INSTEAD


@pytest.mark.parametrize(
    ("owner", "name", "written"),
    [
        (ft.ones(3), "grad", "a tensor has no 'grad': gradients are functions of a loss: ft.grad(loss, wanted)"),
        (ft.ones(3), "exp", "a tensor has no 'exp': ft.exp(x)"),
        (ft.ones(3), "add_", "a tensor has no 'add_': a tensor never changes its value; x = ft.add(x, ...)"),
        (ft.ones(3), "shpae", "a tensor has no 'shpae': is x.shape meant?"),
        (ft.ones(3), "qwertz", "a tensor has no 'qwertz'"),
        (ft, "cat", "fuel_parallel.lazy has no 'cat': ft.concat(tensors, axis=axis)"),
        (ft, "sofmax", "fuel_parallel.lazy has no 'sofmax': is ft.softmax meant?"),
        (fp, "zeros", "fuel_parallel has no 'zeros': it is in fuel_parallel.lazy, as ft.zeros"),
        (fp, "Lineer", "fuel_parallel has no 'Lineer': is fp.Linear meant?"),
        (fp, "tensor", "fuel_parallel has no 'tensor': ft.asarray(values)"),
    ],
)
def test_the_message_says_what_to_write(owner: object, name: str, written: str) -> None:
    with pytest.raises(UnknownNameError, match=f"^{re.escape(written)}$"):
        getattr(owner, name)
    assert not hasattr(owner, name)


def test_what_is_named_instead_is_there() -> None:
    for written in _INSTEAD.values():
        for path in re.findall(r"\bft((?:\.\w+)+)\(", written):
            found: object = ft
            for part in path[1:].split("."):
                found = getattr(ft.random.Generator(0) if isinstance(found, type) else found, part)
            assert callable(found), written
        for attribute in re.findall(r"\bx\.(\w+)", written):
            assert hasattr(ft.ones((2, 2)), attribute), written


def test_what_python_and_numpy_ask_for_is_not_there_quietly() -> None:
    for owner in (ft.ones(3), ft, fp):
        with pytest.raises(AttributeError, match=r"^__array_interface__$"):
            getattr(owner, "__array_interface__")  # noqa: B009
    np.testing.assert_array_equal(np.asarray(ft.ones(3)), np.ones(3))

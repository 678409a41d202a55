"""Arguments of a wrong kind are told as the user's mistake, wherever a script hands them in."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.arguments import checked, whole
from fuel_parallel.drafts import can_take, take_place

WORLD = fp.IdentityComm()
GENERATOR = ft.random.Generator(0)


def layer() -> fp.Linear:
    return fp.Linear(4, 2, GENERATOR)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a string as size": (
        lambda: fp.Linear("4", 2, GENERATOR),
        "inputs is a whole number, not the str '4'",
    ),
    "a seed as generator": (lambda: fp.Linear(4, 2, 0), "random.Generator"),
    "a generator of NumPy": (lambda: fp.Embedding(4, 2, np.random.default_rng()), "random.Generator"),
    "a module as parameters": (lambda: fp.optim.AdamW(layer()), "model.parameters"),
    "tensors as parameters": (lambda: fp.optim.SGD([ft.ones(2)], lr=0.1), r"SGD: parameters\[0\] is a Parameter"),
    "a parameter twice": (lambda: fp.optim.AdamW(layer().parameters() * 2), "listed twice"),
    "a rate from a file": (lambda: fp.optim.AdamW(layer().parameters(), lr="1e-3"), "lr is a number"),
    "one beta": (lambda: fp.optim.AdamW(layer().parameters(), betas=0.9), "betas is a tuple"),
    "no gradients": (lambda: fp.optim.AdamW(layer().parameters()).update(None), "gradients is a list"),
    "gradients missing": (lambda: fp.optim.AdamW(layer().parameters()).update([None] * 2), r"gradients\[0\]"),
    "gradients of NumPy": (lambda: layer().weight.assign(np.ones((4, 2))), "expected a tensor, not ndarray"),
    "a size as communicator": (lambda: fp.Mesh(4, dp=-1), "fp.init()"),
    "a number as axis": (lambda: fp.Mesh(WORLD, dp=-1)[0], "no axis 0; the axes are dp"),
    "a mesh as communicator": (lambda: fp.data_parallel.average_gradients([], fp.Mesh(WORLD, dp=-1)), "mesh.'dp'."),
    "no gradient to average": (lambda: fp.data_parallel.average_gradients([None], WORLD), "found NoneType"),
    "a string as parts": (lambda: fp.partition("5", 2), "whole numbers"),
    "a count as iterable": (lambda: fp.progress(3), "something to loop over"),
    "no folder": (lambda: fp.checkpoint.save(None, {"a": 1}, step=0), "directory is a string or a path"),
    "a string as step": (lambda: fp.checkpoint.load("runs", {"a": 1}, step="7"), "step is a whole number or None"),
    "a probability above 1": (lambda: GENERATOR.bernoulli((2,), 1.5), "probability must lie in"),
    "a negative deviation": (lambda: GENERATOR.normal((2,), 0.0, -1.0), "std must not be negative"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_what_was_expected(mistake) -> None:
    act, expected = MISTAKES[mistake]
    with pytest.raises(fp.FuelError, match=expected):
        act()


def test_integers_and_numbers_of_numpy_are_taken() -> None:
    assert ft.random.Generator(np.int64(3)).seed == 3
    assert fp.Mesh(WORLD, dp=np.int32(1)).axes == {"dp": 1}
    assert fp.Linear(np.int64(4), np.uint8(2), GENERATOR).weight.shape == (4, 2)
    assert fp.optim.SGD(iter(layer().parameters()), lr=np.float32(0.5)).lr == 0.5
    assert [whole(value) for value in (np.int8(3), 3.0, True, "3", None)] == [3, None, None, None, None]


def test_what_an_annotation_leaves_open_passes() -> None:
    @checked
    def function(x: Any, *rest: Any, name: str | None = None) -> tuple[Any, ...]:
        return (x, *rest, name)

    assert function(None, 1, 2) == (None, 1, 2, None)
    with pytest.raises(fp.FuelError, match="function: name is a string or None, not 3"):
        function(1, name=3)  # type: ignore[arg-type]


def test_a_draft_takes_the_place_of_files_only(tmp_path) -> None:
    draft, path = tmp_path / "draft", tmp_path / "path"
    for _ in range(2):
        draft.write_text("whole")
        take_place(draft, path)
        assert path.read_text() == "whole"
    os.mkfifo(tmp_path / "pipe")
    draft.write_text("whole")
    with pytest.raises(OSError, match="no file"):
        take_place(draft, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    assert not draft.exists()
    assert not can_take(Path(os.devnull))

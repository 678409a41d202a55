"""Files that were cut off, flipped, exchanged or lost: that is named, and the last sound checkpoint is found."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fuel_parallel import checkpoint
from fuel_parallel.errors import CheckpointError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
Damage = Callable[[Path], None]


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.full((20, 10), float(step)), "b": np.arange(10) + step}, "position": step}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (6, 12, 18):
        checkpoint.save(tmp_path, state(step), step=step)
    return tmp_path


def flipped(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def cut_off(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


TENSORS, MANIFEST = "rank-00000.safetensors", "manifest.json"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "a flipped bit": (
        lambda folder: flipped(folder / TENSORS, -100),
        r"rank-00000.safetensors: the file is damaged: tensor 'model\.w' has checksum [0-9a-f]{8}, not [0-9a-f]{8}",
    ),
    "a flipped bit in the header": (
        lambda folder: flipped(folder / TENSORS, 30),
        r"rank-00000.safetensors: the file is damaged: its header has checksum",
    ),
    "cut off": (
        lambda folder: cut_off(folder / TENSORS, 300),
        r"rank-00000.safetensors: the file is cut off: it has 300 bytes of \d+; tensor 'model\.w' is not whole",
    ),
    "empty": (lambda folder: cut_off(folder / TENSORS, 0), r"it has 0 bytes of \d+; tensor 'model\.b' is not whole"),
    "gone": (
        lambda folder: (folder / TENSORS).unlink(),
        r"rank-00000.safetensors, which holds tensor 'model\.b', cannot be read: No such file or directory",
    ),
    "of another checkpoint": (
        lambda folder: shutil.copy(folder.parent / "step-00000006" / TENSORS, folder / TENSORS) and None,
        r"tensor 'model\.b' has checksum",
    ),
    "a flipped bit in the manifest": (
        lambda folder: flipped(folder / MANIFEST, 500),
        r"manifest.json: the file is damaged",
    ),
    "manifest cut off": (lambda folder: cut_off(folder / MANIFEST, 400), r"manifest.json: the file is damaged or cut"),
    "manifest empty": (lambda folder: cut_off(folder / MANIFEST, 0), r"manifest.json: the file is damaged or cut off"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_last_sound_one_is_found(kind: str, run: Path) -> None:
    damage, text = DAMAGES[kind]
    damage(run / "step-00000018")
    with pytest.warns(RuntimeWarning, match=rf"going back to the checkpoint of step 12, the newest.*{text}"):
        loaded = checkpoint.load(run, state(0))
    assert (loaded.step, loaded.state["position"], list(loaded.skipped)) == (12, 12, [18])
    assert np.array_equal(loaded.state["model"]["w"], state(12)["model"]["w"])
    problems = checkpoint.verify(run)
    assert list(problems) == [18]
    assert re.search(text, problems[18])
    assert checkpoint.verify(run, step=12) == {}


@pytest.mark.parametrize("kind", DAMAGES)
def test_one_that_was_asked_for_is_an_error_that_says_which_is_sound(kind: str, run: Path) -> None:
    damage, text = DAMAGES[kind]
    damage(run / "step-00000018")
    flipped(run / "step-00000012" / TENSORS, -1)
    with pytest.raises(CheckpointError, match=rf"{text}.*; the checkpoint of step 6 is sound, load that"):
        checkpoint.load(run, state(0), step=18)


def test_none_is_sound(run: Path) -> None:
    for step in (6, 12, 18):
        cut_off(run / f"step-{step:08d}" / TENSORS, 300)
    with pytest.raises(CheckpointError, match=r"no checkpoint is sound: step 18: .*; step 12: .*; step 6: "):
        checkpoint.load(run, state(0))
    with pytest.raises(CheckpointError, match=r"tensor 'model.w' is not whole; no earlier one is sound"):
        checkpoint.load(run, state(0), step=12)


def test_no_checkpoint(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint of step 7; there are those of steps 6, 12, 18"):
        checkpoint.load(run, state(0), step=7)
    with pytest.raises(CheckpointError, match=r"missing: there is no checkpoint, nor such a folder; latest\(\) tells"):
        checkpoint.load(tmp_path / "missing", state(0))


def test_every_flipped_bit_is_noticed(run: Path) -> None:
    """A few of them: of each file, at random places."""
    rng = random.Random(0)
    folder = run / "step-00000018"
    for name in (TENSORS, MANIFEST):
        whole = (folder / name).read_bytes()
        for _ in range(100):
            flipped(folder / name, rng.randrange(len(whole) - 1), rng.randrange(8))
            assert list(checkpoint.verify(run, step=18)) == [18]
            (folder / name).write_bytes(whole)
    assert checkpoint.verify(run) == {}


def test_every_cut_is_noticed(run: Path) -> None:
    folder = run / "step-00000018"
    for name in (TENSORS, MANIFEST):
        whole = (folder / name).read_bytes()
        for size in range(0, len(whole) - 1, 37):
            (folder / name).write_bytes(whole[:size])
            assert list(checkpoint.verify(run, step=18)) == [18]
        (folder / name).write_bytes(whole)


def test_ranks_go_back_together(on_ranks: OnRanks, run: Path) -> None:
    # Only one of the ranks has the damaged piece in its part of the checking.
    flipped(run / "step-00000018" / TENSORS, -1)
    with pytest.warns(RuntimeWarning, match="step 12"):
        loaded = on_ranks(3, lambda comm: checkpoint.load(run, state(0), comm=comm))
    assert [one.step for one in loaded] == [12, 12, 12]
    assert len({str(one.skipped) for one in loaded}) == 1


def test_nothing_has_changed_when_it_is_not_loaded(run: Path) -> None:
    import fuel_parallel as fp

    variable = fp.Variable(np.zeros((20, 10)))
    for step in (6, 12, 18):
        flipped(run / f"step-{step:08d}" / TENSORS, -1)
    with pytest.raises(CheckpointError):
        checkpoint.load(run, {"model": {"w": variable, "b": np.arange(10)}})
    assert not variable.numpy().any()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 1', '"version": 2', r"the checkpoint has version 2, this library reads version 1; read it"),
        ("rank-00000.safetensors", "../../../etc/passwd", r"its file '../../../etc/passwd' is none of"),
        ('"float64"', '"float63"', r"tensor 'model.w': 'float63' is not a dtype of this library"),
    ],
)
def test_a_manifest_is_not_believed_blindly(old: str, new: str, message: str, run: Path) -> None:
    import hashlib

    path = run / "step-00000018" / MANIFEST
    body = path.read_text().partition('"checkpoint":')[2].rstrip()[:-1].replace(old, new)
    digest = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(f'{{"sha256":"{digest}","checkpoint":{body}}}')
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(run, state(0), step=18)

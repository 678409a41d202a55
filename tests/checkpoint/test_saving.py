"""Saving: whole or not at all, the last ones kept, in the background with the values of that moment."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint
from fuel_parallel.checkpoint import tensor_file
from fuel_parallel.errors import ArgumentError, CheckpointError

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10, 20):
        saved = checkpoint.save(tmp_path / "new" / "run", {"x": step}, step=step, keep=2)
        assert saved.path.is_dir()
    assert names(tmp_path / "new" / "run") == ["step-00000010", "step-00000020"]
    assert checkpoint.steps(tmp_path / "new" / "run") == [10, 20]
    assert checkpoint.latest(tmp_path / "new" / "run") == 20
    # What was just written stays, even if there are later ones, of a run that was gone back on.
    checkpoint.save(tmp_path / "new" / "run", {"x": 5}, step=5, keep=1)
    assert checkpoint.steps(tmp_path / "new" / "run") == [5, 20]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    for x in (1, 2):
        checkpoint.save(tmp_path, {"x": x}, step=3)
    assert names(tmp_path) == ["step-00000003"]
    assert checkpoint.load(tmp_path, {"x": 0}).state == {"x": 2}


def test_a_save_that_was_killed_while_it_replaced_one_loses_none(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": 1}, step=3)
    (tmp_path / "step-00000003").rename(tmp_path / ".replaced-00000003")
    assert checkpoint.latest(tmp_path) == 3
    assert checkpoint.load(tmp_path, {"x": 0}).state == {"x": 1}
    checkpoint.save(tmp_path, {"x": 2}, step=4)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_what_killed_runs_left_is_cleared(tmp_path: Path) -> None:
    for name in (".saving-00000007-abcd", ".removed-00000001", ".my-own-folder", "step-00000009"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_text("half")
    assert checkpoint.steps(tmp_path) == []  # the one without a manifest is none
    checkpoint.save(tmp_path, {"x": 2}, step=8)
    assert names(tmp_path) == [".my-own-folder", "step-00000008", "step-00000009"]


def test_files_are_on_the_disk_before_the_folder_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.partition("-0000")[0])
        fsync(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    checkpoint.save(tmp_path, {"x": np.zeros(3)}, step=1)
    assert events == ["rank", "manifest.json", ".saving", "rename", tmp_path.name]


def test_in_the_background_values_are_those_of_that_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), tensor_file.write

    def waiting(*arguments: Any) -> list[int]:
        assert go.wait(20)
        return write(*arguments)

    monkeypatch.setattr(tensor_file, "write", waiting)
    model = fp.Linear(64, 64, ft.random.Generator(0))
    optimizer = fp.optim.AdamW(model.parameters(), lr=0.1)
    array = np.arange(5)
    state = {"model": model, "optimizer": optimizer, "array": array, "step": 1}

    def train() -> None:
        loss = ft.square(model(ft.ones((4, 64)))).sum()
        optimizer.update(ft.grad(loss, model.parameters()))
        fp.realize(loss, model, optimizer)

    train()
    before = {name: v.numpy().copy() for name, v in model.named_variables().items()}
    saving = checkpoint.save(tmp_path, state, step=1, background=True)
    assert not saving.done()
    assert checkpoint.steps(tmp_path) == []
    for _ in range(3):
        train()
    array += 1
    assert not np.array_equal(model.weight.numpy(), before["weight"])
    go.set()
    saving.wait()
    assert saving.done()
    fresh = fp.Linear(64, 64, ft.random.Generator(1))
    loaded = checkpoint.load(tmp_path, {"model": fresh, "array": np.zeros(5, int)})
    assert all(np.array_equal(fresh.named_variables()[name].numpy(), value) for name, value in before.items())
    assert loaded.state["array"].tolist() == [0, 1, 2, 3, 4]


def test_in_the_background_a_checkpoint_is_there_without_anybody_waiting(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"x": np.zeros(100)}, step=1, background=True)
    deadline = threading.Event()
    for _ in range(1000):
        if checkpoint.steps(tmp_path):
            break
        deadline.wait(0.01)
    assert checkpoint.steps(tmp_path) == [1]
    checkpoint.save(tmp_path, {"x": np.zeros(100)}, step=2, background=True).wait()
    assert checkpoint.verify(tmp_path) == {}


def test_the_end_of_a_script_waits(tmp_path: Path) -> None:
    script = (
        "import sys, numpy as np\nfrom fuel_parallel import checkpoint\n"
        "checkpoint.save(sys.argv[1], {'x': np.zeros(10**6)}, step=1, background=True)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert checkpoint.steps(tmp_path) == [1]
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    command = [sys.executable, "-c", limit + script, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert run.stderr.startswith("fuel_parallel.errors.CheckpointError: step 1 is not saved: ")
    assert "File too large; the last checkpoint there is that of step 1" in run.stderr
    assert names(tmp_path) == ["step-00000001"]


def failing(*arguments: Any) -> list[int]:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("background", [False, True])
def test_a_failure_leaves_the_last_checkpoint(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, {"x": np.zeros(3)}, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "write", failing)
        text = (
            r"^step 2 is not saved: .*\.saving-00000002-\w+/rank-00000.safetensors cannot be written: No space left on "
            r"device; the last checkpoint there is that of step 1$"
        )
        if background:
            checkpoint.save(tmp_path, {"x": np.ones(3)}, step=2, background=True)
            with pytest.raises(CheckpointError, match=text):
                checkpoint.save(tmp_path, {"x": np.ones(3)}, step=3)
        else:
            with pytest.raises(CheckpointError, match=text):
                checkpoint.save(tmp_path, {"x": np.ones(3)}, step=2)
    assert names(tmp_path) == ["step-00000001"]
    checkpoint.save(tmp_path, {"x": np.ones(3)}, step=2)  # and the next one is as if nothing had been
    assert checkpoint.verify(tmp_path) == {}


def test_all_ranks_raise_if_one_fails(on_ranks: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = tensor_file.write

    def fails_on_two(path: Path, *rest: Any) -> list[int]:
        return failing() if path.name == "rank-00002.safetensors" else write(path, *rest)

    monkeypatch.setattr(tensor_file, "write", fails_on_two)

    def save(comm: Any) -> str:
        state = {f"w{i}": np.zeros(10) for i in range(8)}
        with pytest.raises(CheckpointError) as error:
            checkpoint.save(tmp_path, state, step=5, comm=comm)
        return str(error.value)

    said = set(on_ranks(4, save))
    assert len(said) == 1
    text = said.pop()
    assert "step 5 is not saved: rank 2 on " in text
    assert "rank-00002.safetensors cannot be written: No space left on device; there is no checkpoint in " in text
    assert names(tmp_path) == []


def test_a_folder_that_hosts_do_not_share_is_noticed(
    on_ranks: OnRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = tensor_file.write

    def elsewhere(path: Path, *rest: Any) -> list[int]:
        sums = write(path, *rest)
        if path.name == "rank-00001.safetensors":
            path.unlink()  # it is on another host's disk
        return sums

    monkeypatch.setattr(tensor_file, "write", elsewhere)
    with pytest.raises(CheckpointError, match=r"rank 0 sees no such file; the folder must be on a file system that"):
        on_ranks(2, lambda comm: checkpoint.save(tmp_path, {"a": np.zeros(4), "b": np.zeros(4)}, step=5, comm=comm))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    checkpoint.save(small_disk, {"x": np.zeros(50_000)}, step=1)
    for background in (False, True):
        with pytest.raises(CheckpointError, match=r"rank-00000.safetensors cannot be written: No space left on device"):
            checkpoint.save(small_disk, {"x": np.zeros(100_000)}, step=2, background=background).wait()
        assert names(small_disk) == ["step-00000001"]
    assert checkpoint.load(small_disk, {"x": np.zeros(50_000)}).step == 1


def test_a_read_only_folder(small_disk: Path) -> None:
    checkpoint.save(small_disk, {"x": 1}, step=1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"small/\.saving-00000002-\w+: Read-only file system"):
        checkpoint.save(small_disk, {"x": 1}, step=2)
    assert checkpoint.load(small_disk, {"x": 0}).step == 1


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    script = (
        "import resource, sys, numpy as np\nfrom fuel_parallel import checkpoint\n"
        "checkpoint.save(sys.argv[1], {'x': np.zeros(100)}, step=1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "checkpoint.save(sys.argv[1], {'x': np.zeros(100_000)}, step=2)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    text = "rank-00000.safetensors cannot be written: File too large; the last checkpoint there is that of step 1"
    assert text in run.stderr
    assert names(tmp_path) == ["step-00000001"]


def test_wrong_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"a folder is expected here, and there is a file; choose"):
            checkpoint.save(path, {"x": 1}, step=1)
        with pytest.raises(CheckpointError, match=r"a folder of checkpoints is expected here, and there is a file"):
            checkpoint.load(path, {"x": 1})
    with pytest.raises(CheckpointError, match=r"^/proc/no-such.*: No such file or directory"):
        checkpoint.save("/proc/no-such/folder", {"x": 1}, step=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": -1}, "step is a whole number of at least 0, not -1"),
        ({"step": 1.5}, r"not 1\.5"),
        ({"step": True}, "not True"),
        ({"step": 1, "keep": 0}, "keep is how many checkpoints stay, at least 1, or None for all; not 0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        checkpoint.save(tmp_path, {"x": 1}, **arguments)


def test_the_manifest_says_who_saved(tmp_path: Path) -> None:
    mesh = fp.Mesh(fp.IdentityComm(), dp=-1, tp=1)
    checkpoint.save(tmp_path, {"x": 1}, step=7, comm=mesh)
    read = msgspec.json.decode((tmp_path / "step-00000007/manifest.json").read_bytes())["checkpoint"]
    assert (read["version"], read["step"], read["world_size"], read["mesh"]) == (1, 7, 1, {"dp": 1, "tp": 1})

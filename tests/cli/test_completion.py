"""What the shell is told when a user presses Tab."""

from __future__ import annotations

import pytest


def completed(fuelrun, words: str, at: int) -> list[str]:
    environ = {"_FUELRUN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(at)}
    done = fuelrun.run(**environ)
    assert done.returncode == 0, done.stderr
    return [line.partition(",")[2] or line for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("words", "at", "expected"),
    [
        ("fuelrun topo", 1, "topology"),
        ("fuelrun --topo", 1, "--topology"),
        ("fuelrun -n 2 --tag", 3, "--tag-output"),
        ("fuelrun topology con", 2, "convert"),
        ("fuelrun topology convert x --ma", 4, "--machine"),
        ("fuelrun run --thr", 2, "--threads"),
    ],
)
def test_commands_and_options(fuelrun, words: str, at: int, expected: str) -> None:
    assert expected in completed(fuelrun, words, at)


def test_scripts_are_files(fuelrun) -> None:
    environ = {"_FUELRUN_COMPLETE": "bash_complete", "COMP_WORDS": "fuelrun tra", "COMP_CWORD": "1"}
    assert fuelrun.run(**environ).stdout.splitlines() == ["plain,trace", "file,tra"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shells_own_part(fuelrun, shell: str) -> None:
    done = fuelrun.run(_FUELRUN_COMPLETE=f"{shell}_source")
    if shell == "bash" and done.returncode:
        pytest.skip(f"no bash that click supports: {done.stderr.strip()[:80]}")
    assert (done.returncode, "_FUELRUN_COMPLETE" in done.stdout) == (0, True), done.stderr

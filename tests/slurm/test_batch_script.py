"""The batch scripts that fuelrun writes: whatever a user gives stays what it is, or is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import ArgumentError
from fuelrun.launch.batch_script import BatchScript, job_name, log_file

ANY = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=30)
# Tells of itself with NUL between: words, value of A, working folder.
ECHO = r"""printf '%s\0' "$@" "$A" "$PWD" """


def run(text: str, folder: Path) -> list[str]:
    done = subprocess.run(["bash"], input=os.fsencode(text), cwd=folder, capture_output=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr
    return os.fsdecode(done.stdout).split("\0")[:-1]


@settings(max_examples=60, deadline=None)
@given(words=st.lists(ANY, max_size=4), value=ANY, folder=ANY)
def test_any_words_and_values_reach_the_command_unchanged(tmp_path_factory, words, value, folder) -> None:
    root = tmp_path_factory.mktemp("any")
    folder = folder.replace("/", "").strip(".").encode()[:100].decode(errors="ignore") or "plain"
    (root / folder).mkdir()
    command = ("bash", "-c", ECHO, "name", *words)
    text = BatchScript(command, (("nodes", "2"),), folder=str(root / folder), variables={"A": value}).text()
    assert subprocess.run(["bash", "-n"], input=os.fsencode(text), check=False).returncode == 0
    assert run(text, root) == [*words, value, str(root / folder)]


@settings(max_examples=200, deadline=None)
@given(value=st.text(max_size=12), option=st.sampled_from(["job-name", "partition", "constraint", "output", "time"]))
def test_an_option_is_one_line_and_one_word_or_refused(value: str, option: str) -> None:
    try:
        text = BatchScript(("true",), ((option, value or "x"),)).text()
    except ArgumentError:
        assert option == "time" or any(not sign.isprintable() or sign in "\"'`\\" for sign in value)
        return
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("#SBATCH")] == [lines[2]]
    word = lines[2].partition("=")[2]
    assert word == (value or "x") or word == f'"{value}"'
    assert not any(sign in value for sign in "\"'`\\\n\r")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("time", "2 hours", "expected 90 \\(minutes\\), 2:00:00 or 1-12:00"),
        ("array", "1..9", "expected 0-9"),
        ("gpus-per-node", "all", "expected 8 or a100:8"),
        ("job-name", "a\n#SBATCH --uid=0", "cannot stand in an #SBATCH line"),
    ],
)
def test_what_sbatch_would_misread_is_refused(option: str, value: str, expected: str) -> None:
    with pytest.raises(ArgumentError, match=expected):
        BatchScript(("true",), ((option, value),)).text()


def test_names_of_variables_are_checked() -> None:
    with pytest.raises(ArgumentError, match="letters, digits and _ only"):
        BatchScript(("true",), variables={"A;reboot": "1"}).text()


def test_the_name_and_the_log_follow_from_the_script() -> None:
    assert job_name("a b/$(reboot).py") == "reboot"
    assert job_name("///") == "job"
    assert log_file("", "train", array=False) == "train-%j.log"
    assert log_file("100%", "train", array=True) == "100%%/train-%A_%a.log"
    with pytest.raises(ArgumentError, match="leave the / out"):
        log_file("", "a/b", array=False)


def fuelrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FUELRUN_")}
    return subprocess.run(
        [sys.executable, "-m", "fuelrun", "sbatch", *words],
        cwd=folder,
        env={**environ, "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_what_is_printed_is_the_script_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    options = "--nodes 4 --gpus-per-node 8 --time 2:00:00 --array 0-9 --signal-before 120 --requeue --module gcc/13"
    more = ("--sbatch-args", "--mem=0 --mail-type END", "--activate", f"{tmp_path}/venv", "--log-dir", "logs")
    done = fuelrun(tmp_path, *options.split(), *more, "train.py", "--nodes", "9")
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == f"""\
#!/bin/bash -l
# Ranks under SLURM, written by fuelrun sbatch. Submit it with: sbatch FILE
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=2:00:00
#SBATCH --array=0-9
#SBATCH --output=logs/train-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --mem=0
#SBATCH --mail-type END

module load gcc/13 || exit
source {tmp_path}/venv/bin/activate || exit
cd -- {tmp_path} || exit

# exec: fuelrun takes this shell's place, gets the signals for the batch script, and passes them on to ranks.
exec python -m fuelrun train.py --nodes 9
"""
    )
    assert "make logs before you submit" in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("missing.py",), "there is no script 'missing.py'"),
        (("--activate", "./nothing", "train.py"), "neither bin/activate"),
        (("--sbatch-args", "n1", "train.py"), "'n1' belongs to no option"),
        (("--run-args", "'", "train.py"), "quote it as in a shell"),
        (("--nodes", "0", "train.py"), "whole number of at least 1; got '0'"),
        (("--submit", "train.py"), "cannot start sbatch"),
        (("broken.py",), "broken.py, line 1"),
    ],
)
def test_a_mistake_is_one_line_with_a_remedy(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    (tmp_path / "train.py").write_text("pass")
    (tmp_path / "broken.py").write_text("def")
    done = fuelrun(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1

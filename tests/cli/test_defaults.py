"""Defaults of fuelrun's options, and who wins: the command line, variables, the project's file, the user's file."""

from __future__ import annotations

from pathlib import Path

import pytest

SHOW = "import os; print(os.environ.get('RANK'), os.environ['OMP_NUM_THREADS'], os.environ.get('COLOUR'))"


@pytest.fixture
def own(fuelrun, tmp_path: Path):
    """The user's file, and a script that shows what came of it."""
    fuelrun.write(SHOW, "show.py")
    (tmp_path / "config").mkdir(exist_ok=True)

    def write(user: str = "", project: str = "") -> dict[str, str]:
        (tmp_path / "config" / "fuelrun.toml").write_text(user)
        (fuelrun.folder / "fuelrun.toml").write_text(project)
        return {"XDG_CONFIG_HOME": str(tmp_path / "config")}

    return write


def shown(done) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_each_place_wins_over_the_weaker_ones(fuelrun, own) -> None:
    where = own(user="threads = 2\n[env]\nCOLOUR = 'red'", project="threads = 3")
    assert shown(fuelrun.run("show.py", **where)) == "0 3 red"
    assert shown(fuelrun.run("show.py", **where, FUELRUN_THREADS="4")) == "0 4 red"
    assert shown(fuelrun.run("--threads", "5", "show.py", **where, FUELRUN_THREADS="4")) == "0 5 red"
    assert shown(fuelrun.run("--env", "COLOUR=blue", "show.py", **where)) == "0 3 blue"


def test_a_number_of_ranks_in_a_file_starts_them_but_not_inside_of_a_job(fuelrun, own, mpirun: str) -> None:
    where = own(project="ranks = 2\ntag-output = true")
    assert sorted(shown(fuelrun.run("show.py", **where)).splitlines()) == ["[0/2] 0 1 None", "[1/2] 1 1 None"]
    inside = fuelrun.run("--env", "COLOUR=x", "show.py", **where, FUELRUN_RANKS="7", command=(mpirun, "-n", "2"))
    assert "[0/2] 0 1 x" in shown(inside).splitlines()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rank = 2", "there is no option 'rank'; did you mean ranks?"),
        ("xyzzy = 2", "there is no option 'xyzzy'; the keys are bind, engine, env, grace,"),
        ("ranks = 'two'", "fuelrun.toml: ranks: -n takes the number of ranks, a whole number of at least 1; got 'two'"),
        ("quiet = 1", "quiet = 1: expected true or false"),
        ("mpi-args = 1", "mpi-args = 1: expected a list of texts"),
        ("threads = [1]", "threads = [1]: expected a text or a number"),
        ("dry-run = true", "there is no option 'dry-run'"),
        ("ranks =", "fuelrun.toml is no TOML"),
    ],
)
def test_mistakes_in_a_file_name_the_file_and_the_key(fuelrun, own, text: str, said: str) -> None:
    done = fuelrun.run("show.py", **own(project=text))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_variable_that_nobody_reads_is_told(fuelrun, own) -> None:
    done = fuelrun.run("show.py", **own(), FUELRUN_RANK="2")
    assert shown(done) == "0 1 None"
    assert "fuelrun: FUELRUN_RANK is set, but there is no such option" in done.stderr
    assert not fuelrun.run("-q", "show.py", **own(), FUELRUN_RANK="2").stderr


def test_variables_of_ranks(fuelrun, own) -> None:
    where = own()
    assert sorted(shown(fuelrun.run("-n", "2", "--env", "COLOUR", "show.py", **where, COLOUR="a b")).splitlines()) == [
        "0 1 a b",
        "1 1 a b",
    ]
    done = fuelrun.run("--env", "NOT_SET_ANYWHERE", "show.py", **where)
    assert (done.returncode, done.stderr) == (
        2,
        "fuelrun: --env NOT_SET_ANYWHERE: NOT_SET_ANYWHERE is not set here; --env NAME=VALUE sets it, --env NAME "
        "passes it on\n",
    )

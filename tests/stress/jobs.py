"""Jobs of random programs, as fuelrun runs them, and the smallest part of a program that still fails."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from programs import Program, draw

from fuel_parallel.environment import without_launcher

SCRIPT = Path(__file__).with_name("run_programs.py")
TIMEOUT_S = 20  # how long a collective may wait
AT_A_TIME = 100  # programs in one job: their communicators stay, and an MPI has so many


@dataclass(frozen=True)
class Outcome:
    """How a job ended; `seed` is that of its last program."""

    code: int
    said: str
    seed: int


def run(ranks: int, first: int, count: int, style: str, only: set[int] | None = None) -> Outcome:
    """A job of `count` programs."""
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder, "seed")
        words = ["--first", str(first), "--count", str(count), "--style", style, "--progress", str(progress)]
        if only is not None:
            words += ["--only", ",".join(map(str, sorted(only)))]
        fuelrun = [sys.executable, "-m", "fuelrun", "--quiet", "--timeout", str(TIMEOUT_S), "-n", str(ranks)]
        done = subprocess.run(
            [*fuelrun, str(SCRIPT), *words],
            cwd=folder,
            env=without_launcher(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=20 * TIMEOUT_S,
            check=False,
        )
        seed = int(progress.read_text()) if progress.exists() else first
    return Outcome(done.returncode, done.stdout + done.stderr, seed)


def failure(ranks: int, first: int, count: int, style: str) -> str:
    """Empty if all of `count` programs do what they should, else the one that does not, as small as it gets."""
    for begin in range(first, first + count, AT_A_TIME):
        outcome = run(ranks, begin, min(AT_A_TIME, first + count - begin), style)
        if outcome.code != 0:
            return explain(ranks, outcome, style)
    return ""


def explain(ranks: int, outcome: Outcome, style: str) -> str:
    """The program of a failed job: its seed, its text, which of its steps are enough to fail, what the ranks said."""
    program, _ = draw(outcome.seed, ranks, style)
    only, said = shrink(program, outcome.said, style)
    steps = ",".join(map(str, sorted(only)))
    again = f"fuelrun -n {ranks} {SCRIPT.name} --first {outcome.seed} --style '{style}' --only {steps}"
    return f"{program}\nThe steps that are enough: {steps}. Again: {again}\nexit status {outcome.code}:\n{said}"


def shrink(program: Program, said: str, style: str) -> tuple[set[int], str]:
    """Leaves out one step after the other, the last first, as long as what is left fails; and what that says."""
    only = set(range(len(program.steps)))
    if not run(program.ranks, program.seed, 1, style, only).code:
        return only, f"{said}\n(alone in a job it passes: something of the programs before it is needed)"
    for step in sorted(only, reverse=True):
        less = only - {step}
        needed = any(program.steps[s].source == step for s in less)
        needed |= any(program.groups[program.steps[s].group].made_by == step for s in less)
        if needed or (program.broken is not None and program.broken.step == step):
            continue
        outcome = run(program.ranks, program.seed, 1, style, less)
        if outcome.code:
            only, said = less, outcome.said
    return only, said

"""Starting a job again after it died: `--max-restarts K`.

What a script saved is its own matter (`fp.checkpoint`): it is started with the same words and goes on from there. How
often it has been started again stands in FUEL_RESTART.

A job that died before its first step would die again, so it is not started again; neither is one that its user or a
scheduler ended, one whose ranks ran different collectives, and one that failed twice in a row in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from fuelrun.launch.plan import Plan
from fuelrun.launch.supervise import supervise
from fuelrun.launch.verdict import Ending, Verdict

RESTART = "FUEL_RESTART"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
LONG_S = 60.0
"""A rank that lived for so long has done something, whether it told fuelrun or not: scripts may use mpi4py alone."""

_WOULD_FAIL_AGAIN = ("CollectiveMismatchError:",)

Planner = Callable[[Plan, Collection[int]], Plan]
"""Gives the plan of the next start after one whose ranks, the named ones, were on machines that are gone."""


def run_with_restarts(
    planner: Planner,
    first: Plan,
    most: int,
    tell: Callable[[str], object],
    pause: Callable[[float], object] = time.sleep,
) -> Verdict:
    """Run a job, and start it again up to `most` times. `tell` takes one line each time."""
    plan, number = first, 0
    earlier: list[Verdict] = []
    while True:
        verdict = supervise(replace(plan, added={**plan.added, RESTART: str(number)}))
        if verdict.code == 0 or verdict.final or most == 0:
            return verdict
        reason = why_not(verdict, earlier)
        if number == most:
            times = "once" if most == 1 else f"{most} times"
            return replace(verdict, message=f"{verdict.message}; it was started again {times} (--max-restarts {most})")
        if reason:
            return replace(verdict, message=f"{verdict.message}; not started again: {reason}")
        number += 1
        earlier.append(verdict)
        wait = min(FIRST_PAUSE_S * 2 ** (number - 1), LONGEST_PAUSE_S)
        tell(f"{verdict.message}; restart {number} of {most} in {wait:.0f} s")
        pause(wait)
        plan = planner(plan, [loss.rank for loss in verdict.ending.losses if loss.silent] if verdict.ending else [])


def why_not(verdict: Verdict, earlier: list[Verdict]) -> str:
    """Why a job that ended so is not started again; "" if it is."""
    ending = verdict.ending
    if ending is None or verdict.final:
        return "it was asked to end"
    failure = ending.cause()
    if failure is not None and failure.reason.startswith(_WOULD_FAIL_AGAIN):
        return "it would fail again"
    if not made_progress(ending):
        before = [v.ending for v in earlier if v.ending is not None]
        if not any(made_progress(e) for e in before):
            return "it ended before its first step"
        if before and not made_progress(before[-1]):
            return "it ended before its first step, twice in a row"
    last = earlier[-1].ending.cause() if earlier and earlier[-1].ending is not None else None
    if failure is not None and last is not None and failure.reason == last.reason:
        return "it failed like this before"
    return ""


def made_progress(ending: Ending) -> bool:
    """Whether some rank came to its first step, or lived for long."""
    return any(
        record.progressed or (record.ended or ending.when) - record.started >= LONG_S
        for record in ending.records.values()
    )

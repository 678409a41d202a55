"""Random programs of collectives: the correct ones give what numpy gives, the broken ones raise, and none hangs.

`FUEL_STRESS_PROGRAMS` is how many are tried in all (90); `FUEL_STRESS_SEED` is the first of their seeds (0).
"""

from __future__ import annotations

import os

import pytest
from jobs import failure, run
from programs import BREAKS, KINDS, draw

PROGRAMS = int(os.environ.get("FUEL_STRESS_PROGRAMS", "90"))
SEED = int(os.environ.get("FUEL_STRESS_SEED", "0"))
LONG = pytest.mark.timeout(60 + PROGRAMS)
RANKS = (2, 3, 4)


@LONG
@pytest.mark.parametrize("ranks", RANKS)
def test_correct_programs_give_what_numpy_gives(ranks: int) -> None:
    if found := failure(ranks, SEED, PROGRAMS // 6, "correct"):
        pytest.fail(found)


@LONG
@pytest.mark.parametrize("ranks", RANKS)
def test_programs_broken_in_their_only_communicator_raise_on_all_ranks_which_can_go_on(ranks: int) -> None:
    if found := failure(ranks, SEED, PROGRAMS // 7, "broken in one communicator"):
        pytest.fail(found)


@LONG
def test_programs_broken_anywhere_end_the_job_with_one_mismatch() -> None:
    for number in range(max(PROGRAMS // 40, 1)):
        ranks, seed = RANKS[number % len(RANKS)], SEED + number
        program, _ = draw(seed, ranks, "broken")
        if program.broken is None:
            continue
        outcome = run(ranks, seed, 1, "broken")
        found = f"{program}\nexit status {outcome.code}:\n{outcome.said}"
        assert outcome.code == 1, found
        assert outcome.said.count("CollectiveMismatchError") >= 1, found
        assert outcome.said.count("Likely cause") == 1, found


def test_the_draw_reaches_every_kind_and_every_way_to_break() -> None:
    drawn = [draw(seed, 3, "broken")[0] for seed in range(300)]
    assert {step.kind for program in drawn for step in program.steps} == set(KINDS)
    assert {program.broken.how for program in drawn if program.broken is not None} == set(BREAKS)
    assert any(len(group.members) == 2 and group.made_by for program in drawn for group in program.groups)
    assert {len(program.steps) for program in drawn} == set(range(2, 15))

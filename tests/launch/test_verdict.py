"""How a job is judged from what is known at its end."""

from __future__ import annotations

from fuelrun.launch.engine import Death
from fuelrun.launch.records import RankRecord
from fuelrun.launch.verdict import Ending, Verdict, judge


def records(**codes: int | None) -> dict[int, RankRecord]:
    """`r0=0` ended well, `r1=None` still ran, `r2=3` failed; later names failed later."""
    found = {}
    for when, (name, code) in enumerate(codes.items()):
        rank = int(name[1:])
        found[rank] = RankRecord(rank, 100 + rank, "host", 0.0, None if code is None else when, code, f"reason {code}")
    return found


def test_all_ended_well() -> None:
    assert judge(Ending(2, records(r0=0, r1=0))) == Verdict(0)


def test_mpiruns_status_0_does_not_make_a_missing_rank_good() -> None:
    verdict = judge(Ending(2, records(r0=0), messages=("mpirun said this\n",)))
    assert verdict == Verdict(1, "rank 1 of 2 did not start", ("mpirun said this\n",))


def test_mpiruns_failure_counts_though_all_ended_well() -> None:
    assert judge(Ending(1, records(r0=0), code=11)).code == 11


def test_the_first_failure_gives_the_code() -> None:
    verdict = judge(Ending(3, records(r2=5, r0=7, r1=None), code=9, death=Death(signal=15)))
    assert verdict == Verdict(5, "rank 2 of 3 failed: reason 5")


def test_an_error_of_mpi_about_a_rank_that_was_killed_before_it_is_not_the_cause() -> None:
    """MPICH's ranks may raise before anybody has ended them."""
    killed = Death(2, signal=9)
    found = Ending(
        3, records(r1=1, r0=None, r2=None), gone=(2, 1), death=Death(1, aborted=True), lost=killed, lost_at=-1
    )
    verdict = judge(found)
    assert verdict.code == 137
    assert verdict.message.startswith("rank 2 of 3 (process 102) was killed by signal 9 (SIGKILL)")


def test_a_failure_is_the_cause_of_those_who_went_after_it() -> None:
    found = Ending(3, records(r1=5, r0=None, r2=None), gone=(2, 1), lost=Death(2, signal=9), lost_at=1)
    assert judge(found) == Verdict(5, "rank 1 of 3 failed: reason 5")


def test_whoever_went_with_a_last_word_was_not_lost() -> None:
    found = Ending(2, records(r1=5, r0=3), gone=(0, 1), lost=Death(0), lost_at=-1)
    assert judge(found) == Verdict(5, "rank 1 of 2 failed: reason 5")


def test_ranks_that_failed_alike_are_named_together() -> None:
    assert judge(Ending(3, records(r2=1, r0=1, r1=0))).message == "ranks 0 and 2 of 3 failed: reason 1"


def test_a_signal_is_128_plus_it_and_the_first_to_go_is_named() -> None:
    verdict = judge(Ending(2, records(r0=None, r1=None), gone=(1, 0), code=9, death=Death(signal=9)))
    assert verdict.code == 137
    assert verdict.message.startswith("rank 1 of 2 (process 101) was killed by signal 9 (SIGKILL)")


def test_a_status_above_128_is_a_signal_even_where_mpirun_did_not_say_so() -> None:
    verdict = judge(Ending(2, records(r0=None, r1=None), gone=(1, 0), code=137))
    assert verdict.code == 137
    assert verdict.message.startswith("rank 1 of 2 (process 101) was killed by signal 9 (SIGKILL)")


def test_who_vanished_first_is_named() -> None:
    verdict = judge(Ending(2, records(r0=None, r1=None), gone=(1, 0)))
    assert verdict.code == 1
    assert verdict.message.startswith("rank 1 of 2 (process 101) ended before the script did")


def test_mpi_abort_counts_though_mpich_lets_scripts_go_on_after_it() -> None:
    verdict = judge(Ending(2, records(r0=0, r1=0), code=7, death=Death(1, aborted=True)))
    assert verdict == Verdict(7, "rank 1 of 2 (process 101) called MPI_Abort(7)")


def test_the_users_signal_comes_before_all_else() -> None:
    assert judge(Ending(2, records(r0=0, r1=1), stopped_by=2)) == Verdict(130, final=True)

"""The choice of a transport for device arrays, from what ranks know: a pure function."""

from __future__ import annotations

import pytest

from fuel_parallel.comm.cuda_probe import Verdict
from fuel_parallel.comm.device import Facts, check_settings, decide, nccl_obstacle
from fuel_parallel.errors import ArgumentError, CommunicatorError

YES, NO = Verdict(True, 2, "it was right"), Verdict(False, 2, "it crashed")


def facts(*ranks, setting="auto", nccl=""):
    """Of ranks given as (host, identity of the GPU)."""
    return [Facts(setting, host, f"cuda:{i}", gpu, nccl) for i, (host, gpu) in enumerate(ranks)]


APART = [("a", "01:00"), ("a", "02:00"), ("b", "01:00")]


def test_ranks_with_a_gpu_each_take_nccl():
    assert nccl_obstacle(facts(*APART)) == ""
    choice = decide(facts(*APART), "", [])
    assert str(choice) == "nccl: each of 3 ranks has a GPU of its own"


@pytest.mark.parametrize(
    ("ranks", "nccl", "obstacle"),
    [
        ([("a", "01:00"), ("a", "01:00")], "", "ranks 0 and 1 share cuda:1 of a"),
        ([("a", "01:00"), ("a", "")], "", "which GPU rank 1 has is not known"),
        (APART, "CuPy has no NCCL", "CuPy has no NCCL (rank 0)"),
    ],
)
def test_what_keeps_ranks_from_nccl(ranks, nccl, obstacle):
    assert nccl_obstacle(facts(*ranks, nccl=nccl)) == obstacle


def test_nccl_is_not_looked_at_where_something_else_is_asked_for():
    assert nccl_obstacle(facts(*APART, setting="staged")) == "not asked for"


def test_an_mpi_that_was_right_is_taken_and_one_that_was_not_is_staged():
    assert decide(facts(*APART), "no NCCL", [YES, YES]).kind == "mpi"
    choice = decide(facts(*APART), "no NCCL", [YES, NO])
    assert str(choice) == "staged: NCCL: no NCCL; MPI on device memory: it crashed"


def test_one_rank_that_sent_to_itself_is_enough_only_when_asked_for():
    alone = Verdict(True, 1, "one process alone was right")
    choice = decide(facts(*APART), "no NCCL", [alone])
    assert str(choice) == "staged: NCCL: no NCCL; MPI on device memory: only one process alone was right"
    assert decide(facts(*APART, setting="mpi"), "not asked for", [alone]).kind == "mpi"


def test_what_is_asked_for_is_taken_or_an_error():
    assert decide(facts(*APART, setting="mpi"), "not asked for", [YES]).kind == "mpi"
    assert decide(facts(*APART, setting="staged"), "not asked for", []).kind == "staged"
    assert decide(facts(*APART, setting="nccl"), "", []).kind == "nccl"
    with pytest.raises(CommunicatorError, match=r"FUEL_TRANSPORT=mpi, .* it crashed; start with a CUDA-aware MPI"):
        decide(facts(*APART, setting="mpi"), "not asked for", [YES, NO])
    with pytest.raises(CommunicatorError, match=r"FUEL_TRANSPORT=nccl, .*: no NCCL; give each rank a GPU of its own"):
        decide(facts(*APART, setting="nccl"), "no NCCL", [YES])


def test_settings_are_checked_by_all_ranks_alike():
    check_settings(facts(*APART))
    with pytest.raises(ArgumentError, match="FUEL_TRANSPORT='gdr' on rank 0: expected one of auto, nccl, mpi, staged"):
        check_settings(facts(*APART, setting="gdr"))
    mixed = [*facts(("a", "1")), *facts(("a", "2"), setting="mpi")]
    with pytest.raises(ArgumentError, match="is 'auto' on rank 0 and 'mpi' on rank 1; export it"):
        check_settings(mixed)

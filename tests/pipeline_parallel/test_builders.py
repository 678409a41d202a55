"""Every schedule can run, and has the bubble and the memory that its paper says, at unit costs (F = I = W = 1)."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuel_parallel.errors import ArgumentError
from fuel_parallel.pipeline_parallel import (
    ActionKind,
    Costs,
    PipelineConfig,
    Schedule,
    ScheduleKind,
    StageOp,
    build,
    check,
    simulate,
)
from fuel_parallel.pipeline_parallel.builders import virtual_stages_of

DEPTHS, MICROBATCHES, VIRTUAL = st.integers(1, 9), st.integers(1, 20), st.integers(1, 4)


def idle(schedule: Schedule) -> list[float]:
    """Of each rank, in the whole time of the schedule."""
    timeline = simulate(schedule)
    return [timeline.total - timeline.busy(rank) for rank in range(schedule.num_ranks)]


def idle_between(schedule: Schedule) -> list[float]:
    """Of each rank, from its first action to its last."""
    timeline = simulate(schedule)
    return [row[-1].end - row[0].start - timeline.busy(rank) for rank, row in enumerate(timeline.ranks)]


@given(st.sampled_from(ScheduleKind), DEPTHS, MICROBATCHES, VIRTUAL)
def test_every_schedule_can_run_and_keeps_its_promise(kind: ScheduleKind, s: int, m: int, v: int) -> None:
    schedule = build(kind, s, m, v if virtual_stages_of(kind)[1] else None)
    check(schedule)
    assert schedule.most_held
    assert schedule.num_stages == s * (v if virtual_stages_of(kind)[1] else virtual_stages_of(kind)[0])
    assert schedule.has_backward == (kind is not ScheduleKind.INFERENCE)


@given(st.sampled_from(["gpipe", "1f1b"]), DEPTHS, MICROBATCHES)
def test_gpipe_and_1f1b_have_one_bubble(kind: str, s: int, m: int) -> None:
    schedule = build(kind, s, m)
    assert schedule.total_steps() == 3 * (m + s - 1)
    assert Fraction(schedule.bubble_steps(), schedule.total_steps() * s) == Fraction(s - 1, m + s - 1)
    assert schedule.bubble_ratio() == pytest.approx((s - 1) / (m + s - 1), rel=1e-15)


@given(DEPTHS, MICROBATCHES)
def test_1f1b_holds_no_more_than_its_depth(s: int, m: int) -> None:
    assert build("1f1b", s, m).held() == [min(m, s - rank) for rank in range(s)]
    assert build("gpipe", s, m).held() == [m] * s


@given(DEPTHS, st.integers(1, 5), VIRTUAL)
def test_interleaving_divides_the_bubble(s: int, rounds: int, v: int) -> None:
    m = s * rounds
    schedule = build("interleaved-1f1b", s, m, v)
    assert Fraction(schedule.bubble_steps(), schedule.total_steps() * s) == Fraction(s - 1, v * m + s - 1)
    assert schedule.held() == [min(v * m, 2 * (s - rank - 1) + (v - 1) * s + 1) for rank in range(s)]


@given(DEPTHS, MICROBATCHES)
def test_one_stage_a_rank_interleaved_is_1f1b_with_a_longer_warm_up(s: int, m: int) -> None:
    """As in Megatron-LM's count of warm-up forwards, which is twice that of 1F1B, for messages in flight."""
    assert simulate(build("interleaved-1f1b", s, m, 1)).total == 3 * (m + s - 1)


@given(DEPTHS, st.integers(0, 8), VIRTUAL)
def test_breadth_first_has_the_bubble_of_interleaving(s: int, more: int, v: int) -> None:
    m = s + more
    schedule = build("breadth-first", s, m, v)
    assert Fraction(schedule.bubble_steps(), schedule.total_steps() * s) == Fraction(s - 1, v * m + s - 1)
    assert schedule.held() == [v * m] * s
    assert build("inference", s, m, v).total_steps() == v * m + s - 1
    assert build("inference", s, m, v).held() == [0] * s


@given(DEPTHS, st.integers(0, 12))
def test_zb_h1_has_a_third_of_the_bubble_at_the_memory_of_1f1b(s: int, more: int) -> None:
    m = s + more
    schedule = build("zb-h1", s, m)
    assert idle(schedule) == [s - 1] * s
    assert schedule.held() == [s] * s


@given(DEPTHS, st.integers(0, 12))
def test_zb_h2_has_no_bubble_within_a_rank(s: int, more: int) -> None:
    schedule = build("zb-h2", s, 2 * s - 1 + more)
    assert idle_between(schedule) == [0] * s
    assert schedule.held() == [2 * s - 1] * s
    assert simulate(schedule).bubble_ratio_of_span() == pytest.approx(0)


@given(DEPTHS, st.integers(0, 12))
def test_zb_v_has_no_bubble_at_the_memory_of_1f1b(s: int, more: int) -> None:
    schedule = build("zb-v", s, 2 * s - 1 + more)
    assert idle_between(schedule) == [0] * s
    assert schedule.held() == [2 * s] * s, "as 1F1B: S of a rank's stages, each in two halves"


@given(DEPTHS, st.integers(0, 8))
def test_dualpipe_v_in_sequence_has_a_bubble_of_s_less_one_and_one_activation_more(s: int, more: int) -> None:
    schedule = build("dualpipe-v", s, 2 * s + more)
    assert idle(schedule) == [s - 1] * s
    assert schedule.held() == [2 * s + 1] * s


@given(st.integers(2, 9), st.integers(0, 8))
def test_the_bubbles_of_the_zero_bubble_paper_at_other_costs(s: int, more: int) -> None:
    """Table 1 of arXiv:2401.10241: (S-1)(F+I-W) where the parts of a backward are alike, F being longer."""
    schedule = build("zb-h1", s, 2 * s + more)
    timeline = simulate(schedule, Costs(forward=2, backward_input=2, backward_weight=2))
    assert timeline.total - timeline.busy(0) == (s - 1) * 2


@pytest.mark.parametrize(("s", "m"), [(4, 8), (4, 16), (8, 32)])
def test_zero_bubbles_are_in_the_order_of_the_papers(s: int, m: int) -> None:
    spans = {kind: simulate(build(kind, s, m)).span for kind in ("1f1b", "zb-h1", "zb-h2")}
    assert spans["1f1b"] == 3 * (m + s - 1)
    assert spans["zb-h1"] == 3 * m + s - 1
    assert spans["zb-h2"] == 3 * m


@given(st.sampled_from(ScheduleKind), st.integers(1, 5), st.integers(1, 9))
@example(ScheduleKind.DUALPIPE_V, 3, 6)
def test_steps_cover_the_time_of_every_rank(kind: ScheduleKind, s: int, m: int) -> None:
    schedule = PipelineConfig(s, m).build_schedule(kind)
    total = schedule.total_steps()
    for rank in range(s):
        row = [step for step in schedule.steps if step.rank == rank]
        assert [step.time for step in row] == [sum(one.duration for one in row[:n]) for n in range(len(row))]
        assert sum(step.duration for step in row) == total
    assert schedule.bubble_steps() == sum(
        step.op is StageOp.IDLE for time in range(total) for step in schedule.at_time(time)
    )


def test_steps_say_what_is_done() -> None:
    first, second = PipelineConfig(num_stages=2, num_microbatches=1).build_schedule(ScheduleKind.GPIPE).at_time(1)
    assert (first.op, first.stage) == (StageOp.IDLE, None)
    assert (second.op, second.stage, second.microbatch, second.duration) == (StageOp.FORWARD, 1, 0, 1)
    assert second.action is not None
    assert second.action.kind is ActionKind.FORWARD


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("2f2b", 2, 2), "'2f2b' is no kind of schedule; there are gpipe, 1f1b"),
        (("1f1b", 0, 2), "num_ranks is a whole number of at least 1; got 0"),
        (("1f1b", 2, 2.5), "num_microbatches is a whole number of at least 1; got 2.5"),
        (("1f1b", 2, 2, 2), "a rank of it holds 1 stage, not 2; those with any number are interleaved-1f1b"),
        (("zb-v", 2, 2, 3), "a rank of it holds 2 stages, not 3"),
    ],
)
def test_other_sizes_are_refused(words: tuple, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build(*words)


def test_a_time_outside_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"at_time\(6\): the schedule lasts from 0 to 5"):
        build("gpipe", 2, 1).at_time(6)


def test_a_placement_without_a_rank_is_refused() -> None:
    with pytest.raises(ArgumentError, match="placement gives each stage one of 2 ranks"):
        Schedule("mine", 1, (0, 0), ((), ()))

"""Every schedule can run, and has the bubble and the memory that its paper says, at unit costs (F = I = W = 1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import ArgumentError
from fuel_parallel.pipeline_parallel import (
    Action,
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
from fuel_parallel.pipeline_parallel.dependencies import Dependencies, known_as

some = settings(max_examples=400 if os.environ.get("FUEL_STRESS") else 40)
DEPTHS, MICROBATCHES, VIRTUAL = st.integers(1, 9), st.integers(1, 20), st.integers(1, 4)


def idle(schedule: Schedule) -> list[float]:
    """Of each rank, in the whole time of the schedule."""
    timeline = simulate(schedule)
    return [timeline.total - timeline.busy(rank) for rank in range(schedule.num_ranks)]


def idle_between(schedule: Schedule) -> list[float]:
    """Of each rank, from its first action to its last."""
    timeline = simulate(schedule)
    return [row[-1].end - row[0].start - timeline.busy(rank) for rank, row in enumerate(timeline.ranks)]


@some
@given(st.sampled_from(ScheduleKind), DEPTHS, MICROBATCHES, VIRTUAL)
def test_every_schedule_can_run_and_keeps_its_promise(kind: ScheduleKind, s: int, m: int, v: int) -> None:
    schedule = build(kind, s, m, v if virtual_stages_of(kind)[1] else None)
    check(schedule)
    assert schedule.most_held
    assert schedule.num_stages == s * (v if virtual_stages_of(kind)[1] else virtual_stages_of(kind)[0])
    assert schedule.has_backward == (kind is not ScheduleKind.INFERENCE)


@some
@given(st.sampled_from(["gpipe", "1f1b"]), DEPTHS, MICROBATCHES)
def test_gpipe_and_1f1b_have_one_bubble(kind: str, s: int, m: int) -> None:
    schedule = build(kind, s, m)
    assert schedule.total_steps() == 3 * (m + s - 1)
    assert Fraction(schedule.bubble_steps(), schedule.total_steps() * s) == Fraction(s - 1, m + s - 1)
    assert schedule.bubble_ratio() == pytest.approx((s - 1) / (m + s - 1), rel=1e-15)


@some
@given(DEPTHS, MICROBATCHES)
def test_1f1b_holds_no_more_than_its_depth(s: int, m: int) -> None:
    assert build("1f1b", s, m).held() == [min(m, s - rank) for rank in range(s)]
    assert build("gpipe", s, m).held() == [m] * s


@some
@given(DEPTHS, st.integers(1, 5), VIRTUAL)
def test_interleaving_divides_the_bubble(s: int, rounds: int, v: int) -> None:
    m = s * rounds
    schedule = build("interleaved-1f1b", s, m, v)
    assert Fraction(schedule.bubble_steps(), schedule.total_steps() * s) == Fraction(s - 1, v * m + s - 1)
    assert schedule.held() == [min(v * m, 2 * (s - rank - 1) + (v - 1) * s + 1) for rank in range(s)]


@some
@given(DEPTHS, MICROBATCHES)
def test_one_stage_a_rank_interleaved_is_1f1b_with_a_longer_warm_up(s: int, m: int) -> None:
    """As in Megatron-LM's count of warm-up forwards, which is twice that of 1F1B, for messages in flight."""
    assert simulate(build("interleaved-1f1b", s, m, 1)).total == 3 * (m + s - 1)


@some
@given(DEPTHS, st.integers(0, 8), VIRTUAL)
def test_breadth_first_has_the_bubble_of_interleaving(s: int, more: int, v: int) -> None:
    m = s + more
    schedule = build("breadth-first", s, m, v)
    assert Fraction(schedule.bubble_steps(), schedule.total_steps() * s) == Fraction(s - 1, v * m + s - 1)
    assert schedule.held() == [v * m] * s
    assert build("inference", s, m, v).total_steps() == v * m + s - 1
    assert build("inference", s, m, v).held() == [0] * s


@some
@given(DEPTHS, st.integers(0, 12))
def test_zb_h1_has_a_third_of_the_bubble_at_the_memory_of_1f1b(s: int, more: int) -> None:
    m = s + more
    schedule = build("zb-h1", s, m)
    assert idle(schedule) == [s - 1] * s
    assert schedule.held() == [s] * s


@some
@given(DEPTHS, st.integers(0, 12))
def test_zb_h2_has_no_bubble_within_a_rank(s: int, more: int) -> None:
    schedule = build("zb-h2", s, 2 * s - 1 + more)
    assert idle_between(schedule) == [0] * s
    assert schedule.held() == [2 * s - 1] * s
    assert simulate(schedule).bubble_ratio_of_span() == pytest.approx(0)


@some
@given(DEPTHS, st.integers(0, 12))
def test_zb_v_has_no_bubble_at_the_memory_of_1f1b(s: int, more: int) -> None:
    schedule = build("zb-v", s, 2 * s - 1 + more)
    assert idle_between(schedule) == [0] * s
    assert schedule.held() == [2 * s] * s, "as 1F1B: S of a rank's stages, each in two halves"


@some
@given(DEPTHS, st.integers(0, 8))
def test_dualpipe_v_in_sequence_has_a_bubble_of_s_less_one_and_one_activation_more(s: int, more: int) -> None:
    schedule = build("dualpipe-v", s, 2 * s + more)
    assert idle(schedule) == [s - 1] * s
    assert schedule.held() == [2 * s + 1] * s


@some
@given(st.integers(1, 8), st.integers(0, 8), st.integers(1, 6), st.integers(0, 6), st.integers(0, 6))
def test_the_bubbles_of_the_zero_bubble_paper_at_other_costs(s: int, more: int, w: int, f: int, i: int) -> None:
    """Table 1 of arXiv:2401.10241, where the weight part is the shortest."""
    m, f, i = 2 * s + more, w + f, w + i
    costs = Costs(forward=f, backward_input=i, backward_weight=w)
    expected = {"1f1b": f + i + w, "zb-h1": f + i - w, "zb-h2": f + i - 2 * w}
    for kind, each in expected.items():
        timeline = simulate(build(kind, s, m), costs)
        assert timeline.span - m * (f + i + w) == (s - 1) * each


@some
@given(st.integers(1, 7), st.integers(0, 6), st.integers(0, 2))
def test_the_bubble_of_dualpipe_v_whose_pairs_end_as_one(s: int, more: int, hidden: int) -> None:
    """(S-1)(FB+B-3W), as published with DeepSeek-V3, for pairs of a time FB that is less than F+B by what they hide."""
    schedule = build("dualpipe-v", s, 2 * s + more)
    pair = 3 - hidden / 2
    total, busy = time_in_pairs(schedule, pair)
    assert total - min(busy) == pytest.approx((s - 1) * (pair + 2 - 3))


def time_in_pairs(schedule: Schedule, pair: float) -> tuple[float, list[float]]:
    """The time of a schedule and the work of each rank, where a forward and the backward after it are one action."""
    duration = {ActionKind.BACKWARD: 2.0}
    dependencies = Dependencies(schedule)
    groups = [list(grouped(order)) for order in schedule.orders]
    done: dict[Action, float] = {}
    free, busy = [0.0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    while any(groups):
        before = sum(map(len, groups))
        for rank, rest in enumerate(groups):
            needs = [need for action in rest[0] for need in dependencies.needs(action)] if rest else []
            if rest and all(need in done for need in needs):
                group = rest.pop(0)
                took = pair if len(group) == 2 else duration.get(group[0].kind, 1.0)
                free[rank] = max([free[rank], *(done[need] for need in needs)]) + took
                busy[rank] += took
                done |= {known_as(action): free[rank] for action in group}
        assert sum(map(len, groups)) < before, "the pairs wait for each other"
    return max(free), busy


def grouped(order: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
    at = 0
    while at < len(order):
        two = order[at : at + 2]
        kinds = [action.kind for action in two]
        size = 2 if kinds == [ActionKind.FORWARD, ActionKind.BACKWARD] and two[0].stage != two[1].stage else 1
        yield order[at : at + size]
        at += size


@pytest.mark.parametrize(("s", "m"), [(4, 8), (4, 16), (8, 32)])
def test_zero_bubbles_are_in_the_order_of_the_papers(s: int, m: int) -> None:
    spans = {kind: simulate(build(kind, s, m)).span for kind in ("1f1b", "zb-h1", "zb-h2")}
    assert spans["1f1b"] == 3 * (m + s - 1)
    assert spans["zb-h1"] == 3 * m + s - 1
    assert spans["zb-h2"] == 3 * m


@some
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

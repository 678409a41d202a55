"""What was measured is read from a trace, and predicts what was measured."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import DataError
from fuel_parallel.pipeline_parallel import (
    ActionKind,
    Costs,
    Measurement,
    ScheduleKind,
    Timeline,
    build,
    differences,
    read_trace,
    simulate,
    with_reductions,
)
from fuel_parallel.pipeline_parallel.actions import COMPUTE, RECEIVES
from tests.pipeline_parallel.recordings import rank_info, trace_of, with_waits, write

KINDS = [kind for kind in ScheduleKind if kind is not ScheduleKind.INFERENCE]


def drawn_costs(data, stages: int) -> Costs:
    """With messages that are shorter than any action, so that none waits behind another."""
    times = [data.draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages)) for _ in range(4)]
    messages = data.draw(st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=stages - 1, max_size=stages - 1))
    return Costs(*times[:3], message=messages, reduce=times[3])


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(1, 6), st.data())
def test_costs_that_were_measured_predict_what_was_measured(kind: ScheduleKind, s: int, m: int, data) -> None:
    schedule = with_reductions(build(kind, s, m))
    truth = simulate(schedule, drawn_costs(data, schedule.num_stages))
    with tempfile.TemporaryDirectory() as folder:
        trace = trace_of(schedule, {n: with_waits(schedule, truth) for n in range(3)})
        found = read_trace(write(Path(folder, "out.json"), trace))
    assert [one.schedule.orders for one in found] == [schedule.orders]
    measured = found[0].timeline()
    assert computed(measured) == pytest.approx(computed(truth))
    assert measured.bubble_ratio() == pytest.approx(truth.bubble_ratio())
    assert measured.peak_memory == tuple(schedule.held())
    predicted = simulate(schedule, found[0].costs())
    assert computed(predicted) == pytest.approx(computed(truth))
    for one in differences(predicted, measured):
        assert one.measured == pytest.approx(one.predicted, abs=1e-9)


def computed(timeline: Timeline) -> list[float]:
    return [
        time
        for row in timeline.ranks
        for span in row
        if span.action.kind not in RECEIVES
        for time in (span.start, span.end)
    ]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(KINDS), st.integers(2, 4), st.integers(1, 5), st.data())
def test_medians_of_steps_keep_order_and_do_not_overlap(kind: ScheduleKind, s: int, m: int, data) -> None:
    schedule = build(kind, s, m)
    steps = {n: with_waits(schedule, simulate(schedule, drawn_costs(data, schedule.num_stages))) for n in range(5)}
    measured = Measurement(schedule, steps)
    middle = measured.timeline()
    for rank, spans in enumerate(middle.ranks):
        assert [span.action for span in spans] == [span.action for span in steps[0].ranks[rank]]
        assert all(one.end <= other.start for one, other in pairwise(spans))
    counted = measured.counted()
    ends = [[one.ranks[rank][-1].end for one in counted] for rank in range(s)]
    assert max(map(min, ends)) <= middle.total <= max(map(max, ends))


def test_the_first_steps_do_not_count_unless_there_are_no_others() -> None:
    schedule = build("gpipe", 2, 2)
    steps = [simulate(schedule, Costs(forward=time)) for time in (50, 30, 2, 3, 4)]
    assert Measurement(schedule, dict(enumerate(steps))).costs().forward == [3, 3]
    assert Measurement(schedule, {0: steps[0]}).costs().forward == [50, 50]
    assert Measurement(schedule, dict(enumerate(steps[:2]))).costs().forward == [30, 30]
    assert Measurement(schedule, dict(enumerate(steps))).timeline(step=1) == steps[1]
    with pytest.raises(DataError, match="there is no whole step 7; there are those from 0 to 4"):
        Measurement(schedule, dict(enumerate(steps))).timeline(step=7)


def test_a_schedule_of_whole_backwards_knows_no_parts() -> None:
    schedule = build("1f1b", 2, 3)
    costs = Measurement(schedule, {0: simulate(schedule, Costs(backward=[5, 6]))}).costs()
    assert (costs.backward_input, costs.backward_weight, costs.backward) == (None, None, [5, 6])


def test_parts_on_some_stages_tell_the_ratio_on_the_others() -> None:
    schedule = build("dualpipe-v", 3, 3)
    kinds = {(action.stage, action.kind) for order in schedule.orders for action in order}
    split = {stage for stage, kind in kinds if kind is ActionKind.BACKWARD_WEIGHT}
    assert split
    assert split != set(range(6)), "or another schedule should stand here"
    truth = Costs(backward_input=[1, 2, 3, 4, 5, 6], backward_weight=[3, 6, 9, 12, 15, 18])
    costs = Measurement(schedule, {0: simulate(schedule, truth)}).costs()
    assert costs.backward_input == pytest.approx(truth.backward_input)
    assert costs.backward_weight == pytest.approx(truth.backward_weight)


def test_replicas_are_measured_apart_and_broken_steps_are_left_out(tmp_path: Path) -> None:
    schedule = build("1f1b", 2, 2)
    step = with_waits(schedule, simulate(schedule, Costs(message=0.5)))
    trace = trace_of(schedule, {0: step, 4: step, 5: step}, replicas=2)
    events = trace["traceEvents"]
    late = [e for e in events if e["pid"] == 3 and e["name"] == "1B1" and e["args"]["step"] == 5]
    events.remove(*late)
    found = read_trace(write(tmp_path / "out.json", trace))
    assert [sorted(one.steps) for one in found] == [[0, 4, 5], [0, 4]]


def test_to_stand_still_before_the_first_action_is_no_part_of_a_rank_s_span() -> None:
    schedule = build("zb-h1", 3, 5)
    plain = simulate(schedule)
    waited = with_waits(schedule, plain)
    assert waited.ranks[2][0].start == 0
    assert waited.ranks[2][0].action.kind in RECEIVES
    assert (waited.span, waited.total) == (plain.span, plain.total)
    assert waited.bubble_ratio_of_span() == plain.bubble_ratio_of_span()


def test_steps_of_another_schedule_are_refused() -> None:
    timeline = simulate(build("1f1b", 2, 2))
    with pytest.raises(DataError, match="gpipe: in step 0, rank 1 has run 1F0 1B0 1F1 1B1, which is not its order"):
        Measurement(build("gpipe", 2, 2), {0: timeline})
    with pytest.raises(DataError, match="there is no step"):
        Measurement(build("gpipe", 2, 2), {})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda trace: trace["traceEvents"][1].update(name="0X0"), "'0X0' is no action"),
        (lambda trace: trace["traceEvents"][1].update(args={}), "missing required field `pipeline`"),
        (lambda trace: trace["traceEvents"][1].update(args={"pipeline": 3, "step": 0}), "that the file does not have"),
        (lambda trace: trace["fuel_parallel"]["ranks"][0].update(pipelines=[{}]), "missing required field `comm`"),
        (lambda trace: trace.update(traceEvents=[]), "there is no whole step of a pipeline in it"),
        (lambda trace: trace["fuel_parallel"].update(ranks=[rank_info(0, 1)], x=trace["traceEvents"].clear()), "whole"),
    ],
)
def test_a_trace_that_is_none_of_pipelines_is_refused(tmp_path: Path, change, says: str) -> None:
    schedule = build("gpipe", 1, 1)
    trace = trace_of(schedule, {0: simulate(schedule)})
    change(trace)
    with pytest.raises(DataError, match=says):
        read_trace(write(tmp_path / "out.json", trace))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json: No such file or directory"):
        read_trace(tmp_path / "none.json")


def test_only_computing_is_busy() -> None:
    schedule = with_reductions(build("gpipe", 2, 1))
    waited = with_waits(schedule, simulate(schedule, Costs(message=0.5, reduce=1)))
    work = [span.end - span.start for span in waited.ranks[0] if span.action.kind in COMPUTE]
    assert waited.busy(0) == sum(work) == 3

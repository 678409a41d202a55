"""The search finds what trying every way by hand finds, and costs follow the workload."""

from __future__ import annotations

import pytest

from fuel_parallel.errors import ArgumentError
from fuel_parallel.pipeline_parallel import ScheduleKind, Workload, build, lower, search, simulate


def test_the_quickest_comes_first_and_more_microbatches_cost_overhead() -> None:
    workload = Workload(overhead=0.002)
    found = search(4, workload, num_microbatches=[4, 8, 16, 32, 64])
    times = [one.timeline.total for one in found]
    assert times == sorted(times)
    assert {one.kind for one in found} == set(ScheduleKind) - {ScheduleKind.INFERENCE}
    gpipe = [one for one in found if one.kind is ScheduleKind.GPIPE]
    assert gpipe[0].schedule.num_microbatches not in (4, 64)
    for one in gpipe:
        m = one.schedule.num_microbatches
        assert one.timeline.total == pytest.approx((m + 3) * 3 * (1 / (4 * m) + 0.002))


def test_memory_rules_schedules_out() -> None:
    found = search(4, Workload(), kinds=["gpipe", "1f1b"], num_microbatches=[8], most_memory=0.2)
    assert [one.kind for one in found] == [ScheduleKind.ONE_F_ONE_B]
    assert found[0].peak_memory == pytest.approx(4 / 32)
    with pytest.raises(ArgumentError, match=r"most_memory=0.1: the least that any needs is 0.125"):
        search(4, Workload(), kinds=["gpipe", "1f1b"], num_microbatches=[8], most_memory=0.1)


def test_layers_that_cannot_be_cut_make_stages_uneven() -> None:
    workload = Workload(layers=[1, 1, 2])
    costs = workload.costs(build("gpipe", 2, 4))
    assert costs.forward == pytest.approx([1 / 8, 1 / 8])
    assert workload.costs(build("gpipe", 3, 1)).forward == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    found = search(2, workload, num_microbatches=[4])
    assert {one.schedule.num_stages for one in found} == {2}, "three layers make no four stages"
    with pytest.raises(ArgumentError, match="each needs more stages than layers"):
        search(4, workload, num_microbatches=[4])


def test_blocking_messages_cost_time() -> None:
    options = {"kinds": ["1f1b"], "num_microbatches": [4]}
    one = search(2, Workload(message=0.1), **options)[0].timeline.total
    other = search(2, Workload(message=0.1, blocking=True), **options)[0].timeline.total
    costs = Workload(message=0.1).costs(build("1f1b", 2, 4))
    assert other == simulate(lower(build("1f1b", 2, 4)), costs).total > one

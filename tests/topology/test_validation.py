"""Predictions beside measurements."""

from __future__ import annotations

import pytest

from fuel_parallel.errors import ArgumentError
from fuel_parallel.topology import Interconnect, Link
from fuel_parallel.topology.validation import Timing, table, validate
from tests.topology.machines import gpus, link


def test_timings_stand_beside_their_predictions() -> None:
    t = gpus(3)
    t.add_link("cuda:0", "cuda:1", link(10, 5.0))
    t.add_link("cuda:1", "cuda:2", Link(interconnect=Interconnect.PCIE))
    exact = t.transfer_time_us("cuda:0", "cuda:1", 1 << 20)
    found = validate(t, [Timing("p2p", 2, 1 << 20, exact), ("p2p", 2, 1 << 20, 2 * exact), ("p2p", 3, 8, 1.0)])
    assert [one.ratio() for one in found] == [pytest.approx(1.0), pytest.approx(0.5), None]
    assert table(found).splitlines()[-1].split() == ["p2p", "3", "8", "1.0", "unknown"]


@pytest.mark.parametrize(
    ("timing", "message"),
    [
        (("scan", 2, 8, 1.0), "no prediction for 'scan'; there is one for all_reduce"),
        (("p2p", 9, 8, 1.0), "1 to 2 ranks"),
        (("p2p", 2, 8, 0.0), "more than 0 us"),
    ],
)
def test_other_timings_are_refused(timing: tuple[str, int, int, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        validate(gpus(2), [timing])

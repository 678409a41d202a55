"""Schedules are written to tables and read from them; what is no schedule is refused with its place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuel_parallel.errors import ScheduleError
from fuel_parallel.pipeline_parallel import ScheduleKind, build, check, from_csv, lower, read_csv, to_csv


@settings(max_examples=40)
@given(st.sampled_from(ScheduleKind), st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_what_is_written_is_read(kind: ScheduleKind, s: int, m: int, lowered: bool) -> None:
    schedule = lower(build(kind, s, m)) if lowered else build(kind, s, m)
    read = from_csv(to_csv(schedule), schedule.name)
    assert (read.orders, read.placement, read.num_microbatches) == (schedule.orders, schedule.placement, m)


def test_a_table_of_pytorch_can_be_read(tmp_path) -> None:
    """DualPipe-V on two ranks for four micro-batches, with its pairs, as it exports it; it is ours."""
    path = tmp_path / "theirs.csv"
    path.write_text(
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3\n"
        ",1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3\n"
    )
    schedule = read_csv(path)
    check(schedule)
    assert (schedule.name, schedule.placement, schedule.num_microbatches) == ("theirs", (0, 1, 1, 0), 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is nothing in it; expected a row of actions for each rank"),
        ("0F0,,0Q0\n", "mine.csv: row 1, column 3: '0Q0' is no action"),
        ("0F0,0B0\n\n0F1\n", "row 3, column 1: 0F1 is of stage 0, which row 1 has"),
        ("0F0,0B0\n5F0\n", "stage 1 is on no rank, though stage 5 is"),
        ("0F0,999999999F0\n", "stage 1 is on no rank"),
    ],
)
def test_what_is_no_schedule_is_refused(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message):
        read_csv(path)


def test_what_is_no_file_is_refused(tmp_path) -> None:
    with pytest.raises(ScheduleError, match="cannot be read: No such file"):
        read_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\x00")
    with pytest.raises(ScheduleError, match="no text in UTF-8"):
        read_csv(tmp_path / "binary.csv")

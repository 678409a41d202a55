"""Actions are written and read as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuel_parallel.errors import ScheduleError
from fuel_parallel.pipeline_parallel import Action, ActionKind, parse_action, parse_actions, text_of

NUMBERS = st.integers(0, 10**9 - 1)
ACTIONS = st.builds(
    Action, st.sampled_from([kind for kind in ActionKind if kind is not ActionKind.REDUCE_GRAD]), NUMBERS, NUMBERS
) | st.builds(Action, st.just(ActionKind.REDUCE_GRAD), NUMBERS)


@given(st.lists(ACTIONS))
def test_what_is_written_is_read(actions: list[Action]) -> None:
    assert parse_actions(text_of(actions)) == tuple(actions)


def test_pairs_of_pytorch_are_two_actions() -> None:
    assert text_of(parse_actions("0F0 (3F1;0B2)OVERLAP_F_B")) == "0F0 3F1 0B2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0", r"'F0' is no action: expected a stage, a kind and a micro-batch, such as 0F3"),
        ("0X1", "'0X1' is no action"),
        ("0F", "'0F' is no action: the micro-batch is missing"),
        ("0REDUCE_GRAD1", "REDUCE_GRAD is of a stage and takes no micro-batch"),
        ("-1F0", "is no action"),
        ("٠F٠", "is no action"),
        ("0F99999999999", "is no action"),
        ("(0F1;x)OVERLAP_F_B", "'x' is no action"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_actions(text)


def test_one_action_is_not_two() -> None:
    with pytest.raises(ScheduleError, match="is no action"):
        parse_action("0F0 0F1")

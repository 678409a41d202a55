"""`Action`: one thing that a rank of a pipeline does, with its stage and its micro-batch, as data and as text.

    0F3          forward of micro-batch 3 through stage 0
    1B0          its whole backward; 1I0 and 1W0 are its two parts, for the input and for the weights
    0SEND_F3     stage 0 sends what came out of its forward; 1RECV_F3: stage 1 takes it
    1SEND_B0     stage 1 sends the gradient of its input; 0RECV_B0: stage 0 takes it
    0REDUCE_GRAD the weight gradients of stage 0 are complete: they can be averaged over replicas

The text is that of PyTorch's `torch.distributed.pipelining`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from fuel_parallel.errors import ScheduleError


class ActionKind(enum.Enum):
    """What is done; the value is its name in text."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"


COMPUTE = frozenset(
    {ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT},
)
SENDS = frozenset({ActionKind.SEND_F, ActionKind.SEND_B})
RECEIVES = frozenset({ActionKind.RECV_F, ActionKind.RECV_B})
BACKWARDS = COMPUTE - {ActionKind.FORWARD}
RELEASES = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT})
"""After one of these the activations of a forward are needed no more."""

ALL_MICROBATCHES = -1
"""The micro-batch of `REDUCE_GRAD`."""

_KINDS = "|".join(sorted((kind.value for kind in ActionKind), key=len, reverse=True))
_ACTION = re.compile(rf"(\d{{1,9}})({_KINDS})(\d{{0,9}})", re.ASCII)
_OVERLAPPED = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_EXPECTED = "expected a stage, a kind and a micro-batch, such as 0F3, 1B0, 1I0, 1W0, 0SEND_F3, 1RECV_F3 or 0REDUCE_GRAD"


@dataclass(frozen=True, slots=True)
class Action:
    """One action of the rank that holds `stage`. `str` is its text.

    >>> str(Action(ActionKind.FORWARD, stage=0, microbatch=3))
    '0F3'
    """

    kind: ActionKind
    stage: int
    microbatch: int = ALL_MICROBATCHES

    def __str__(self) -> str:
        number = "" if self.microbatch == ALL_MICROBATCHES else self.microbatch
        return f"{self.stage}{self.kind.value}{number}"


def parse_action(text: str) -> Action:
    """The action of a text. Raises `ScheduleError`.

    >>> parse_action("1SEND_B0")
    Action(kind=<ActionKind.SEND_B: 'SEND_B'>, stage=1, microbatch=0)
    """
    found = _ACTION.fullmatch(text.strip())
    if found is None:
        raise ScheduleError(f"{text.strip()[:40]!r} is no action: {_EXPECTED}")
    stage, kind, number = found.groups()
    whole = kind == ActionKind.REDUCE_GRAD.value
    if bool(number) == whole:
        said = "REDUCE_GRAD is of a stage and takes no micro-batch" if whole else "the micro-batch is missing"
        raise ScheduleError(f"{text.strip()[:40]!r} is no action: {said}; {_EXPECTED}")
    return Action(ActionKind(kind), int(stage), ALL_MICROBATCHES if whole else int(number))


def parse_cell(text: str) -> list[Action]:
    """The actions of a cell of a table: none when it is blank, else one.

    PyTorch's `(7F1;0B0)OVERLAP_F_B`, a forward and a backward side by side, is the two in this order.

    >>> [str(action) for action in parse_cell("(7F1;0B0)OVERLAP_F_B")]
    ['7F1', '0B0']
    """
    pair = _OVERLAPPED.fullmatch(text.strip())
    if pair is not None:
        return [parse_action(half) for half in pair.groups()]
    return [parse_action(text)] if text.strip() else []


def parse_actions(text: str) -> tuple[Action, ...]:
    """Actions with blanks between them; `" ".join(map(str, actions))` is the way back. Raises `ScheduleError`.

    >>> [action.kind.name for action in parse_actions("0F0 0F1 0B0")]
    ['FORWARD', 'FORWARD', 'BACKWARD']
    """
    return tuple(action for word in text.split() for action in parse_cell(word))


def text_of(actions: Iterable[Action]) -> str:
    """The text of actions in a row.

    >>> text_of(parse_actions("0F0  0B0"))
    '0F0 0B0'
    """
    return " ".join(map(str, actions))

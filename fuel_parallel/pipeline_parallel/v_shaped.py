"""Schedules on two stages a rank in the shape of a V: ZB-V and DualPipe-V.

The first and the last stage lie on rank 0, so its loss comes back to where its input went in, and every rank's two
stages together hold about the same memory. Each rank's order is a sequence of phases: a few actions, so many times.
Below, 0 is a rank's stage on the way down and 1 the one on the way up.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from fuel_parallel.pipeline_parallel.actions import Action, ActionKind
from fuel_parallel.pipeline_parallel.schedule import Schedule, v_shape


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Zero bubble at the memory of 1F1B (Qi et al., 2023, arXiv:2401.10241, and 2024, arXiv:2405.15362).

    With F = I = W nothing is idle from a rank's first action to its last for M >= 2S-1. A rank holds min(2M, 2S)
    activations of stages, of which each is half a rank's.
    """
    count = max(num_microbatches, 2 * num_ranks - 1)
    orders = []
    for rank in range(num_ranks):
        phases = _Phases(rank, 2 * num_ranks - 1 - rank, count)
        phases.repeat(2 * (num_ranks - rank) - 1, "F0")
        phases.repeat(rank, "F1 F0")
        phases.repeat(num_ranks - rank, "F1 I1 W1")
        phases.repeat(count - num_ranks, "F0 I0 W0 F1 I1 W1")
        phases.repeat(rank, "I0 I1")
        phases.repeat(num_ranks - rank, "I0 W0")
        phases.repeat(num_ranks, "W1")
        phases.repeat(num_ranks, "W0")
        orders.append(phases.order(num_microbatches))
    held = (2 * min(num_microbatches, num_ranks),) * num_ranks
    return Schedule("zb-v", num_microbatches, v_shape(num_ranks), orders=tuple(orders), most_held=held)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipe (DeepSeek-V3, 2024, arXiv:2412.19437) cut in half, so that it needs its weights only once.

    In its steady state a forward and a backward of a rank's two stages stand next to each other, to hide the one's
    communication behind the other's computation. Where such a pair ends as one, and for M >= 2S, each rank is idle for
    (S-1)(FB+B-3W), FB being the time of a pair; for less where one runs after the other. A rank holds at most 2S+1
    activations of stages, of which each is half a rank's.
    """
    count = max(num_microbatches, 2 * num_ranks)
    orders = []
    for rank in range(num_ranks):
        phases = _Phases(rank, 2 * num_ranks - 1 - rank, count)
        outer, inner = rank + 1, num_ranks - rank - 1  # ranks on either side of the way from here to the turn
        phases.repeat(2 * inner, "F0")
        phases.repeat(outer, "F0 F1")
        phases.repeat(inner, "I1 W F1")
        phases.repeat(count - 2 * num_ranks + outer, "F0 B1 F1 B0")
        phases.repeat(inner, "B1 F1 B0")
        # The last backwards of this phase are split, so that others wait for half as long.
        whole = outer // 2
        phases.repeat(whole, "B1 B0")
        phases.repeat(1, "I1 I0" if rank % 2 else "B1 I0")
        phases.repeat(outer - whole - 1, "I1 I0")
        phases.repeat(inner, "W I0")
        phases.repeat(outer, "W")
        orders.append(phases.order(num_microbatches))
    held = (min(2 * num_microbatches, 2 * num_ranks + 1),) * num_ranks
    return Schedule("dualpipe-v", num_microbatches, v_shape(num_ranks), orders=tuple(orders), most_held=held)


@dataclass
class _Phases:
    """Writes the order of one rank, phase by phase; each kind of action takes its stage's micro-batches in turn.

    `W` alone is the oldest weight part that is still to be done, of either stage.
    """

    down: int
    up: int
    microbatches: int
    actions: list[Action] = field(default_factory=list)
    turns: Counter[tuple[str, int]] = field(default_factory=Counter)
    delayed: deque[Action] = field(default_factory=deque)

    def repeat(self, times: int, words: str) -> None:
        """Some actions, so many times; of a kind and a stage never more than there are micro-batches."""
        for word in words.split() * times:
            self._one(word)

    def order(self, microbatches: int) -> tuple[Action, ...]:
        """What was written, of the first micro-batches alone: an order without the others is an order still."""
        return tuple(action for action in self.actions if action.microbatch < microbatches)

    def _one(self, word: str) -> None:
        if word == "W":
            self.actions.append(self.delayed.popleft())
            return
        kind, stage = word[0], (self.down, self.up)[int(word[1])]
        turn = "B" if kind == "I" else kind  # whole or in two parts, the backwards are counted together
        microbatch = self.turns[turn, stage]
        if microbatch == self.microbatches:
            return
        self.turns[turn, stage] += 1
        self.actions.append(Action(ActionKind(kind), stage, microbatch))
        if kind == "I":
            self.delayed.append(Action(ActionKind.BACKWARD_WEIGHT, stage, microbatch))

"""Schedules that alternate forwards and backwards: 1F1B, its zero-bubble forms ZB-H1 and ZB-H2, and interleaved 1F1B.

Rank s begins with a number of forwards, the *warm-up*, and then follows each backward by one forward, so it holds the
activations of its warm-up and no more, however many micro-batches there are. The three without virtual stages differ in
two numbers only: how long the warm-up of a rank is, and by how many micro-batches the weight part of a backward lags
behind its input part, to be done where the rank would wait.
"""

from __future__ import annotations

from fuel_parallel.pipeline_parallel.actions import Action, ActionKind
from fuel_parallel.pipeline_parallel.schedule import Schedule, loop

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD
BACKWARD_INPUT, BACKWARD_WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """PipeDream-flush (Narayanan et al., 2020, arXiv:2006.09503).

    Bubble ratio (S-1)/(M+S-1), as GPipe; rank s holds min(M, S-s) activations.
    """
    orders = []
    for rank in range(num_ranks):
        warm_up = num_ranks - rank
        order = [Action(FORWARD, rank, one) for one in range(min(warm_up, num_microbatches))]
        for one in range(num_microbatches):
            order.append(Action(BACKWARD, rank, one))
            if one + warm_up < num_microbatches:
                order.append(Action(FORWARD, rank, one + warm_up))
        orders.append(tuple(order))
    held = tuple(min(num_microbatches, num_ranks - rank) for rank in range(num_ranks))
    return Schedule("1f1b", num_microbatches, loop(num_ranks), tuple(orders), held)


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B whose weight parts fill a part of the bubble (Qi et al., 2023, arXiv:2401.10241).

    Idle (S-1)(F+I-W) on each rank for M >= S; a rank holds min(M, S) activations, as the first one of 1F1B.
    """
    warm_ups = [num_ranks - rank for rank in range(num_ranks)]
    return _split_backward("zb-h1", num_microbatches, warm_ups, list(range(num_ranks)))


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """A longer warm-up as well, and no bubble from a rank's first action to its last (arXiv:2401.10241).

    Idle (S-1)(F+I-2W) on each rank for M >= 2S-1, counted from its first action to its last: the next step must be able
    to follow rank by rank. A rank holds min(M, 2S-1) activations.
    """
    warm_ups = [2 * (num_ranks - rank) - 1 for rank in range(num_ranks)]
    return _split_backward("zb-h2", num_microbatches, warm_ups, [2 * rank for rank in range(num_ranks)])


def _split_backward(name: str, microbatches: int, warm_ups: list[int], lags: list[int]) -> Schedule:
    orders = []
    for rank, (warm_up, lag) in enumerate(zip(warm_ups, lags, strict=True)):
        order = [Action(FORWARD, rank, one) for one in range(min(warm_up, microbatches))]
        for one in range(microbatches):
            order.append(Action(BACKWARD_INPUT, rank, one))
            if one >= lag:
                order.append(Action(BACKWARD_WEIGHT, rank, one - lag))
            if one + warm_up < microbatches:
                order.append(Action(FORWARD, rank, one + warm_up))
        late = range(max(microbatches - lag, 0), microbatches)
        orders.append((*order, *(Action(BACKWARD_WEIGHT, rank, one) for one in late)))
    held = tuple(min(microbatches, warm_up + lag) for warm_up, lag in zip(warm_ups, lags, strict=True))
    return Schedule(name, microbatches, loop(len(warm_ups)), tuple(orders), held)


def interleaved_1f1b(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    """1F1B on several stages a rank, S micro-batches at a time through each (Narayanan et al., 2021, arXiv:2104.04473).

    Bubble ratio (S-1)/(vM+S-1) where S divides M. Rank s holds min(vM, 2(S-s-1) + (v-1)S + 1) activations of stages, of
    which each is the v-th part of a rank's. Any M will do: it is rounded up, and what is too much is left out.
    """
    rounded = -(-num_microbatches // num_ranks) * num_ranks
    count = virtual_stages * rounded
    orders, held = [], []
    for rank in range(num_ranks):
        warm_up = min(count, 2 * (num_ranks - rank - 1) + (virtual_stages - 1) * num_ranks + 1)
        forwards = [_turn(FORWARD, n, rank, num_ranks, virtual_stages) for n in range(count)]
        backwards = [_turn(BACKWARD, n, rank, num_ranks, virtual_stages) for n in range(count)]
        order = forwards[:warm_up]
        for n, backward in enumerate(backwards):
            order.append(backward)
            order += forwards[warm_up + n : warm_up + n + 1]
        orders.append(tuple(action for action in order if action.microbatch < num_microbatches))
        held.append(min(virtual_stages * num_microbatches, warm_up))
    return Schedule("interleaved-1f1b", num_microbatches, loop(num_ranks, virtual_stages), tuple(orders), tuple(held))


def _turn(kind: ActionKind, n: int, rank: int, ranks: int, virtual: int) -> Action:
    """The n-th forward or backward of a rank: S micro-batches through each of its stages in turn."""
    group, within = divmod(n, ranks * virtual)
    part, one = divmod(within, ranks)
    if kind is BACKWARD:
        part = virtual - 1 - part
    return Action(kind, part * ranks + rank, group * ranks + one)

"""Schedules that run all forwards first: GPipe, breadth-first and inference.

Each rank holds every activation of the step, so memory grows with the micro-batches; in exchange the order is plain,
and with breadth-first each stage works on all micro-batches at a stretch, which suits weights that are gathered for it.
"""

from __future__ import annotations

from fuel_parallel.pipeline_parallel.actions import Action, ActionKind
from fuel_parallel.pipeline_parallel.schedule import Schedule, loop


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2018, arXiv:1811.06965).

    Bubble ratio (S-1)/(M+S-1); M activations held. Backwards come in the order of the forwards, so that gradients are
    summed in the order in which 1F1B sums them.
    """
    return _all_forward("gpipe", num_ranks, num_microbatches, 1, backward=True)


def breadth_first(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    """All micro-batches through a stage before the rank's next one (Lamy-Poirier, 2022, arXiv:2211.05953).

    Bubble ratio (S-1)/(vM+S-1) for M >= S; vM activations of stages held.
    """
    return _all_forward("breadth-first", num_ranks, num_microbatches, virtual_stages, backward=True)


def inference(num_ranks: int, num_microbatches: int, virtual_stages: int) -> Schedule:
    """Forwards alone. Bubble ratio (S-1)/(vM+S-1) for M >= S; nothing is held."""
    return _all_forward("inference", num_ranks, num_microbatches, virtual_stages, backward=False)


def forward_only(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Forwards alone, through the stages where a schedule has them.

    >>> from fuel_parallel.pipeline_parallel import build
    >>> print(forward_only(build("zb-v", 2, 4), 2))
    zb-v forward: 2 micro-batches, 4 stages on 2 ranks
    rank 0: 0F0 0F1 3F0 3F1
    rank 1: 1F0 1F1 2F0 2F1
    """
    return _through(f"{schedule.name} forward", num_microbatches, schedule.placement, backward=False)


def _all_forward(name: str, ranks: int, microbatches: int, virtual: int, backward: bool) -> Schedule:
    return _through(name, microbatches, loop(ranks, virtual), backward)


def _through(name: str, microbatches: int, placement: tuple[int, ...], backward: bool) -> Schedule:
    orders, held = [], []
    for rank in range(max(placement) + 1):
        stages = [stage for stage, of in enumerate(placement) if of == rank]
        order = [Action(ActionKind.FORWARD, stage, one) for stage in stages for one in range(microbatches)]
        if backward:
            order += [Action(ActionKind.BACKWARD, stage, one) for stage in stages[::-1] for one in range(microbatches)]
        orders.append(tuple(order))
        held.append(len(stages) * microbatches if backward else 0)
    return Schedule(name, microbatches, placement, tuple(orders), tuple(held))

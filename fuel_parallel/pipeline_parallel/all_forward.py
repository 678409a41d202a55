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


def _all_forward(name: str, ranks: int, microbatches: int, virtual: int, backward: bool) -> Schedule:
    placement = loop(ranks, virtual)
    orders = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        order = [Action(ActionKind.FORWARD, stage, one) for stage in stages for one in range(microbatches)]
        if backward:
            order += [Action(ActionKind.BACKWARD, stage, one) for stage in stages[::-1] for one in range(microbatches)]
        orders.append(tuple(order))
    held = virtual * microbatches if backward else 0
    return Schedule(name, microbatches, placement, tuple(orders), (held,) * ranks)

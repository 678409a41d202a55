"""Schedules in a random order that can happen."""

from __future__ import annotations

import random

from fuel_parallel.pipeline_parallel import Action, ActionKind, Schedule
from fuel_parallel.pipeline_parallel.dependencies import Dependencies, known_as
from fuel_parallel.pipeline_parallel.schedule import loop, v_shape


def random_schedule(s: int, v: int, m: int, random: random.Random) -> Schedule:
    """For `s` ranks with `v` stages each and `m` micro-batches; backwards are whole or in two parts, as it comes."""
    placement = v_shape(s) if v == 2 and random.random() < 0.5 else loop(s, v)
    left = [Action(ActionKind.FORWARD, stage, one) for stage in range(s * v) for one in range(m)]
    for stage in range(s * v):
        for one in range(m):
            whole = random.random() < 0.5
            kinds = [ActionKind.BACKWARD] if whole else [ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT]
            left += [Action(kind, stage, one) for kind in kinds]
    needs = Dependencies(Schedule("random", m, placement, ((),) * s)).needs
    orders: list[list[Action]] = [[] for _ in range(s)]
    done: set[Action] = set()
    while left:
        action = random.choice([one for one in left if done.issuperset(needs(one))])
        left.remove(action)
        done.add(known_as(action))
        orders[placement[action.stage]].append(action)
    return Schedule("random", m, placement, tuple(map(tuple, orders)))

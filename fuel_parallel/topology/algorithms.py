"""Collectives as steps: in each step some members send to others, all at the same time.

A step is what the alpha-beta model of Hockney (Parallel Computing 20, 1994) prices. The algorithms are those of
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (IJHPCA 19, 2005), rings
as in Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms" (JPDC 69, 2009), and two levels of rings in between.
The arithmetic of a reduction is not counted: links are slower than adders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum

import msgspec

SHIFTS = 64
"""An all-to-all of more members is priced by so many of its steps, evenly spread."""


class Collective(Enum):
    """What members of a group do together. `nbytes` of each is the size of the array named here."""

    ALL_REDUCE = "all_reduce"  # that every member has, before and after
    REDUCE_SCATTER = "reduce_scatter"  # that every member has before
    ALL_GATHER = "all_gather"  # that every member has after
    BROADCAST = "broadcast"  # that the root sends
    ALL_TO_ALL = "all_to_all"  # that every member has, before and after
    P2P = "p2p"  # that each member hands to the next one, as the stages of a pipeline do


class Step(msgspec.Struct, frozen=True):
    """Members `sources[i]` send `fraction` of the array to `targets[i]`; `times` such steps follow each other."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    fraction: float
    times: int = 1


Steps = tuple[Step, ...]


@functools.lru_cache(maxsize=1024)
def algorithms(collective: Collective, members: int) -> dict[str, Steps]:
    """The steps of each algorithm that there is for a collective of so many members.

    >>> algorithms(Collective.ALL_REDUCE, 4)["ring"]
    (Step(sources=(0, 1, 2, 3), targets=(1, 2, 3, 0), fraction=0.25, times=6),)
    >>> sorted(algorithms(Collective.ALL_REDUCE, 4))
    ['halving-doubling', 'hierarchical/2', 'ring', 'tree']
    """
    if members < 2:
        return {"none": ()}
    return _ALGORITHMS[collective](members)


def _all_reduce(n: int) -> dict[str, Steps]:
    found = {
        "ring": _ring(n, times=2 * (n - 1)),
        "halving-doubling": _fold(n, (*_halving(n), *_halving(n)[::-1])),
        "tree": (*(_turned(step) for step in reversed(_tree(n))), *_tree(n)),
    }
    for block in _blocks(n):
        inside = _rings_inside(n, block)
        across = _rings_across(n, block)
        found[f"hierarchical/{block}"] = (inside, _repeated(across, 2), inside)
    return found


def _reduce_scatter(n: int) -> dict[str, Steps]:
    found = {"ring": _ring(n, times=n - 1)}
    if n & (n - 1) == 0:
        found["halving-doubling"] = _halving(n)
    for block in _blocks(n):
        found[f"hierarchical/{block}"] = (_rings_inside(n, block), _rings_across(n, block))
    return found


def _all_gather(n: int) -> dict[str, Steps]:
    return {name: steps[::-1] for name, steps in _reduce_scatter(n).items()}


def _broadcast(n: int) -> dict[str, Steps]:
    scatter = []
    # A binomial tree again, but each member is sent only what those below it need.
    for step, span in zip(_tree(n), reversed([1 << k for k in range((n - 1).bit_length())]), strict=True):
        scatter.append(Step(step.sources, step.targets, min(span, n) / n))
    return {"tree": _tree(n), "scatter-all-gather": (*scatter, *_ring(n, times=n - 1))}


def _all_to_all(n: int) -> dict[str, Steps]:
    shifts = range(1, n) if n <= SHIFTS else [1 + (n - 2) * k // (SHIFTS - 1) for k in range(SHIFTS)]
    members = tuple(range(n))
    weight = (n - 1) / len(shifts)
    steps = [Step(members, tuple((i + shift) % n for i in members), weight / n) for shift in shifts]
    return {"pairwise": tuple(steps)}


def _p2p(n: int) -> dict[str, Steps]:
    return {"direct": (Step(tuple(range(n - 1)), tuple(range(1, n)), 1.0),)}


_ALGORITHMS: dict[Collective, Callable[[int], dict[str, Steps]]] = {
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.ALL_GATHER: _all_gather,
    Collective.BROADCAST: _broadcast,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.P2P: _p2p,
}


def _ring(n: int, times: int) -> Steps:
    return (Step(tuple(range(n)), tuple((i + 1) % n for i in range(n)), 1 / n, times),)


def _halving(n: int) -> Steps:
    """Recursive halving among the greatest power of two of members: partners far away first, with half of the array."""
    power = 1 << n.bit_length() - 1
    members = tuple(range(power))
    spans = [power >> k for k in range(1, power.bit_length())]
    return tuple(Step(members, tuple(i ^ span for i in members), span / power) for span in spans)


def _fold(n: int, steps: Steps) -> Steps:
    """Members beyond the power of two hand their array to a partner first and get the result from it at the end."""
    power = 1 << n.bit_length() - 1
    if power == n:
        return steps
    beyond, partners = tuple(range(power, n)), tuple(range(n - power))
    return (Step(beyond, partners, 1.0), *steps, Step(partners, beyond, 1.0))


def _tree(n: int) -> Steps:
    """A binomial tree from member 0: in each step whoever has the array sends all of it to one more."""
    steps = []
    for k in reversed(range((n - 1).bit_length())):
        sources = [i for i in range(0, n, 2 << k) if i + (1 << k) < n]
        steps.append(Step(tuple(sources), tuple(i + (1 << k) for i in sources), 1.0))
    return tuple(steps)


def _turned(step: Step) -> Step:
    return Step(step.targets, step.sources, step.fraction, step.times)


def _repeated(step: Step, times: int) -> Step:
    return Step(step.sources, step.targets, step.fraction, step.times * times)


def _blocks(n: int) -> list[int]:
    return [block for block in range(2, n // 2 + 1) if n % block == 0]


def _rings_inside(n: int, block: int) -> Step:
    """A reduce-scatter or all-gather ring in each block of neighbours."""
    targets = tuple(i - i % block + (i % block + 1) % block for i in range(n))
    return Step(tuple(range(n)), targets, 1 / block, block - 1)


def _rings_across(n: int, block: int) -> Step:
    """And one through the members at the same place of all blocks, for that place's part of the array."""
    return Step(tuple(range(n)), tuple((i + block) % n for i in range(n)), 1 / n, n // block - 1)

"""Random programs of collectives, as values: what every rank calls in which order, and what must come of it.

A program is drawn from a seed alone, so all ranks of a job and the process that started it have the same one. While it
is drawn it is also run, by numpy and in one process: that is how the draw knows which call is legal next, and what the
ranks must have at the end.

A rank may realize what it has whenever it likes (`cuts`), as long as all ranks have the same when a barrier or a split
comes. A broken program has one `Break`: one rank that does one thing differently.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fuel_parallel import ReduceOp
from fuel_parallel.comm.reduction import identity
from fuel_parallel.lazy import dtypes
from fuel_parallel.partitioning import partition

Array = np.ndarray[Any, Any]
ByRank = dict[int, Array]

UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
WITH_OP = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
WITH_ROOT = ("reduce", "broadcast", "broadcast_object")
AT_ONCE = ("barrier", "split", "broadcast_object", "all_gather_object")
KINDS = (*WITH_OP, "broadcast", "all_gather", "all_to_all", "shift", "message", *AT_ONCE)
SHAPES = ((), (0,), (1,), (3,), (7,), (2, 3), (4, 0), (5, 2), (2, 1, 3))
LARGE_SHAPES = ((5_000,), (20_000,), (70_000,), (41, 900))  # by way of shared memory, some in place


@dataclass(frozen=True)
class Group:
    """A communicator: its ranks, as they are numbered in the world, and the step that makes it."""

    members: tuple[int, ...]
    made_by: int | None
    color: int | None


@dataclass(frozen=True)
class Step:
    """One call. `source` is the step whose value goes in, made small if `digits`; None for data of the rank's own."""

    kind: str
    group: int
    dtype: Any = None
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    source: int | None = None
    digits: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    dropped: bool = False  # nobody keeps the value, so nobody runs it


@dataclass(frozen=True)
class Break:
    """What one rank does differently at one step."""

    step: int
    rank: int
    how: str


@dataclass(frozen=True)
class Program:
    """`cuts[rank][step]` are the steps whose values a rank realizes after that step."""

    seed: int
    ranks: int
    groups: tuple[Group, ...]
    steps: tuple[Step, ...]
    cuts: dict[int, dict[int, tuple[int, ...]]]
    broken: Break | None = None

    def __str__(self) -> str:
        lines = [f"program of seed {self.seed} on {self.ranks} ranks"]
        for number, step in enumerate(self.steps):
            lines.append(f"  v{number} = {self.words(step)}")
            cuts = [f"rank {rank} {at[number]}" for rank, at in self.cuts.items() if number in at]
            if cuts:
                lines.append(f"      realized after it: {'; '.join(cuts)}")
        if self.broken is not None:
            lines.append(f"  but rank {self.broken.rank} at v{self.broken.step}: {self.broken.how}")
        return "\n".join(lines)

    def words(self, step: Step) -> str:
        """One call in words."""
        what = "" if step.dtype is None else f"{step.dtype.name}{sorted(set(step.shapes.values()))}"
        if step.source is not None:
            what = f"v{step.source}{' > 1' if step.digits else ''}: {what}"
        facts = ", ".join(f"{name}={getattr(value, 'name', value)}" for name, value in step.facts.items())
        lost = "  (kept by nobody)" if step.dropped else ""
        return f"g{step.group}{list(self.groups[step.group].members)}.{step.kind}({what}; {facts}){lost}"


# Values.


def data(number: int, rank: int, dtype: Any, shape: tuple[int, ...]) -> Array:
    """What a rank puts in at a step: whole numbers from 0 to 3."""
    size = int(np.prod(shape, dtype=np.int64))
    x = (np.arange(size) * (2 * rank + 3) + number + rank) % 4
    return (x * (1 + 1j) if dtype.kind == "c" else x).astype(dtype).reshape(shape)


def digits(x: Array) -> Array:
    """Zeros and ones of the same dtype, for sums of sums would not be exact."""
    if x.dtype.kind == "b":
        return x
    return np.asarray((x.real if x.dtype.kind == "c" else x) > 1.1).astype(x.dtype)


def reduced(xs: list[Array], op: ReduceOp) -> Array:
    """The reduction as the documentation defines it."""
    wide = dtypes.accumulated_in(xs[0].dtype)
    total = xs[0].astype(wide)
    for x in xs[1:]:
        total = np.asarray(UFUNCS[op](total, x.astype(wide)))
    if op is ReduceOp.AVG:
        total = np.asarray(np.divide(total, total.dtype.type(len(xs))))
    return total.astype(xs[0].dtype)


def parts(x: Array, n: int, dim: int) -> list[Array]:
    """`x` cut along `dim` by `partition`."""
    return [x[(slice(None),) * dim + (slice(p.start, p.stop),)] for p in partition(x.shape[dim], n)]


def outcome(kind: str, xs: list[Array], facts: dict[str, Any]) -> list[Array]:
    """What each rank of a group gets from what each puts in."""
    n = len(xs)
    op = facts.get("op")
    if kind == "all_reduce":
        return [reduced(xs, op)] * n
    if kind == "reduce":
        return [reduced(xs, op) if r == facts["root"] else np.zeros_like(xs[0]) for r in range(n)]
    if kind == "reduce_scatter":
        return parts(reduced(xs, op), n, facts["dim"])
    if kind in ("scan", "exscan"):
        return [_scanned(xs, r, op, kind == "exscan", facts["reverse"]) for r in range(n)]
    if kind == "broadcast":
        return [xs[facts["root"]]] * n
    if kind == "all_gather":
        return [np.concatenate(xs, axis=facts["dim"])] * n
    if kind == "all_to_all":
        blocks = [parts(x, n, facts["split_dim"]) for x in xs]
        return [np.concatenate([blocks[s][r] for s in range(n)], axis=facts["concat_dim"]) for r in range(n)]
    sources = [r - facts["offset"] for r in range(n)]  # shift
    return [xs[s % n] if facts["wrap"] or 0 <= s < n else np.zeros_like(xs[0]) for s in sources]


def _scanned(xs: list[Array], rank: int, op: ReduceOp, exclusive: bool, reverse: bool) -> Array:
    before = xs[rank + 1 :][::-1] if reverse else xs[:rank]
    terms = before if exclusive else [*before, xs[rank]]
    if not terms:
        return np.full(xs[rank].shape, identity(op, xs[rank].dtype), xs[rank].dtype)
    return reduced(terms, op)


# Drawing.

STYLES = ("correct", "broken in one communicator", "broken")
BREAKS = ("drop", "end", "kind", "dtype", "shape", "op", "root", "dimension", "swap")


def draw(seed: int, ranks: int, style: str = "correct", most_steps: int | None = None) -> tuple[Program, list[ByRank]]:
    """The program of a seed, and by step and rank what must come of it. `most_steps` cuts it short."""
    return _Draw(random.Random(f"{seed} {ranks} {style}"), seed, ranks, style).program(most_steps)


class _Draw:
    def __init__(self, rng: random.Random, seed: int, ranks: int, style: str) -> None:
        self.rng, self.seed, self.ranks, self.style = rng, seed, ranks, style
        self.groups = [Group(tuple(range(ranks)), None, None)]
        self.steps: list[Step] = []
        self.values: list[ByRank] = []
        self.tame: list[bool] = []  # whether a value is small enough to be taken as it is
        self.cuts: dict[int, dict[int, tuple[int, ...]]] = {rank: {} for rank in range(ranks)}

    def program(self, most_steps: int | None) -> tuple[Program, list[ByRank]]:
        kinds = KINDS
        if self.style == "broken in one communicator":
            kinds = tuple(kind for kind in KINDS if kind not in ("split", "message"))
        count = self.rng.randint(2, 14)
        for _ in range(count if most_steps is None else min(count, most_steps)):
            self.step(self.rng.choice(kinds))
        found = Program(self.seed, self.ranks, tuple(self.groups), tuple(self.steps), self.cuts)
        if self.style != "correct":
            found = replace(found, broken=self.draw_break())
        return found, self.values

    def step(self, kind: str) -> None:
        rng, number = self.rng, len(self.steps)
        group = rng.randrange(len(self.groups))
        members = self.groups[group].members
        n = len(members)
        facts: dict[str, Any] = {}
        if kind in WITH_ROOT:
            facts["root"] = rng.randrange(n)
        if kind in ("barrier", "split"):
            self.flush(members)
        if kind == "split":
            facts["colors"] = {rank: rng.choice((0, 1, None)) for rank in members}
            facts["keys"] = {rank: rng.randint(0, 2) for rank in members}
            for color in (0, 1):
                chosen = [rank for rank in members if facts["colors"][rank] == color]
                if chosen:
                    chosen.sort(key=lambda rank: (facts["keys"][rank], members.index(rank)))
                    self.groups.append(Group(tuple(chosen), number, color))
        if kind == "message" and n == 1:
            kind, facts = "barrier", {}
            self.flush(members)
        if kind in AT_ONCE:
            self.add(Step(kind, group, facts=facts), {}, tame=False)
            return
        step, xs = self.operand(kind, group, members)
        if kind in WITH_OP:
            facts["op"] = rng.choice(self.ops_for(kind, step.dtype))
        if kind in ("scan", "exscan"):
            facts["reverse"] = rng.random() < 0.5
        if kind == "shift":
            facts |= {"offset": rng.randint(-n, n), "wrap": rng.random() < 0.5}
        if kind == "message":
            source, dest = rng.sample(range(n), 2)
            facts |= {"source": source, "dest": dest, "tag": rng.randint(0, 2)}
            self.add(replace(step, facts=facts), {members[dest]: xs[source]}, tame=False)
            self.draw_cuts()
            return
        facts |= step.facts
        ys = outcome(kind, xs, facts)
        exact = facts.get("op") is not ReduceOp.AVG
        small = all(y.size == 0 or np.abs(y.astype(np.complex128)).max() < 4.5 for y in ys)
        dropped = rng.random() < 0.08
        self.add(
            replace(step, facts=facts, dropped=dropped),
            {} if dropped else dict(zip(members, ys, strict=True)),
            tame=exact and small,
        )
        self.draw_cuts()

    def operand(self, kind: str, group: int, members: tuple[int, ...]) -> tuple[Step, list[Array]]:
        """What goes in: an earlier value where one fits, or new data."""
        rng, number, n = self.rng, len(self.steps), len(members)
        earlier = [place for place, value in enumerate(self.values) if all(rank in value for rank in members) and value]
        if earlier and rng.random() < 0.5:
            source = rng.choice(earlier)
            tame = self.tame[source]
            xs = [self.values[source][rank] if tame else digits(self.values[source][rank]) for rank in members]
            facts = self.fitting(kind, [x.shape for x in xs])
            if facts is not None and (kind != "message" or xs[0].nbytes < 1024):
                shapes = dict(zip(members, (x.shape for x in xs), strict=True))
                return Step(kind, group, xs[0].dtype, shapes, source, not tame, facts), xs
        dtype = rng.choice(dtypes.ALL)
        for _ in range(100):
            large = kind != "message" and rng.random() < 0.06
            shape = rng.choice(LARGE_SHAPES if large else SHAPES)
            shapes_by_place = [shape] * n
            if kind in ("all_gather", "all_to_all") and shape and rng.random() < 0.5:
                dim, size = rng.randrange(len(shape)), rng.randint(0, 9)
                shapes_by_place = [(*shape[:dim], len(p), *shape[dim + 1 :]) for p in partition(size, n)]
            facts = self.fitting(kind, shapes_by_place)
            if facts is not None:
                break
        shapes = dict(zip(members, shapes_by_place, strict=True))
        xs = [data(number, rank, dtype, shapes[rank]) for rank in members]
        return Step(kind, group, dtype, shapes, facts=facts or {}), xs

    def fitting(self, kind: str, shapes: list[tuple[int, ...]]) -> dict[str, Any] | None:
        """The dimensions along which shards of these shapes can go into a collective; None where they cannot."""
        rng, n = self.rng, len(shapes)
        alike = len(set(shapes)) == 1
        if kind not in ("all_gather", "all_to_all", "reduce_scatter"):
            return {} if alike else None
        if any(not shape for shape in shapes) or len({len(shape) for shape in shapes}) > 1:
            return None
        differing = [d for d in range(len(shapes[0])) if len({shape[d] for shape in shapes}) > 1]
        if len(differing) > 1 or (differing and kind == "reduce_scatter"):
            return None
        dim = differing[0] if differing else rng.randrange(len(shapes[0]))
        size = sum(shape[dim] for shape in shapes)
        if [shape[dim] for shape in shapes] != [len(part) for part in partition(size, n)]:
            return None
        whole = {"size": size} if differing else {}
        if kind != "all_to_all":
            return {"dim": dim, **whole}
        split_dim = rng.randrange(len(shapes[0]))
        if split_dim == dim and (differing or shapes[0][dim] % n):
            return None
        return {"split_dim": split_dim, "concat_dim": dim, **whole}

    def ops_for(self, kind: str, dtype: Any) -> list[ReduceOp]:
        ops = list(ReduceOp)
        if kind in ("scan", "exscan") or dtypes.kind(dtype) in ("bool", "integral"):
            ops.remove(ReduceOp.AVG)
        if dtype.kind == "c":
            ops = [op for op in ops if op not in (ReduceOp.MIN, ReduceOp.MAX)]
        return ops

    def add(self, step: Step, value: ByRank, *, tame: bool) -> None:
        self.steps.append(step)
        self.values.append(value)
        self.tame.append(tame)

    def draw_cuts(self) -> None:
        number = len(self.steps) - 1
        for rank in range(self.ranks):
            mine = [place for place, value in enumerate(self.values) if rank in value]
            if mine and self.rng.random() < 0.25:
                self.cuts[rank][number] = tuple(sorted(self.rng.sample(mine, self.rng.randint(1, len(mine)))))

    def flush(self, members: tuple[int, ...]) -> None:
        """The members realize all that they have: a barrier and a split run at once, wherever the others are."""
        if self.steps:
            for rank in members:
                mine = tuple(place for place, value in enumerate(self.values) if rank in value)
                if mine:
                    self.cuts[rank][len(self.steps) - 1] = mine

    # Breaking.

    def draw_break(self) -> Break | None:
        """None where no step can be broken."""
        places = list(range(len(self.steps)))
        self.rng.shuffle(places)
        hows = list(BREAKS)
        for place in places:
            step = self.steps[place]
            members = self.groups[step.group].members
            if step.dropped or len(members) == 1 or _is_local(step, len(members)):
                continue
            self.rng.shuffle(hows)
            rank = self.rng.choice(members)
            if step.kind == "message":
                rank = members[step.facts[self.rng.choice(("source", "dest"))]]
            for how in hows:
                if self.breaks(place, rank, how):
                    return Break(place, rank, how)
        return None

    def breaks(self, place: int, rank: int, how: str) -> bool:
        step = self.steps[place]
        if step.kind == "message":
            return how == "drop"
        if how == "dtype":
            return other_dtype(step) is not None
        if how == "shape":
            return step.dtype is not None
        if how == "op":
            return step.kind in WITH_OP and len(self.ops_for(step.kind, step.dtype)) > 1
        if how == "root":
            return step.kind in WITH_ROOT
        if how == "dimension":
            return step.kind == "reduce_scatter" and len(step.shapes[rank]) > 1
        if how == "swap":
            return self.swaps(place, rank)
        if how == "kind":
            return step.kind != "barrier"
        return True

    def swaps(self, place: int, rank: int) -> bool:
        """Whether the order of a step and the next one matters."""
        if place + 1 == len(self.steps):
            return False
        one, two = self.steps[place : place + 2]
        members = self.groups[two.group].members
        if rank not in members or two.dropped or two.source == place or "split" in (one.kind, two.kind):
            return False
        if one.kind == "barrier" and two.kind not in AT_ONCE:  # which runs later, whenever it was built
            return False
        if "message" in (one.kind, two.kind) or _is_local(two, len(members)):
            return False
        if one.group != two.group:
            return len(set(members) & set(self.groups[one.group].members)) > 1
        return (one.kind, one.dtype) != (two.kind, two.dtype)


def _is_local(step: Step, n: int) -> bool:
    """A shift by nothing, or beyond the end, moves nothing."""
    if step.kind != "shift":
        return False
    offset = step.facts["offset"]
    return offset % n == 0 if step.facts["wrap"] else abs(offset) >= n


def other_dtype(step: Step) -> Any:
    """A dtype that a broken rank may put in instead; None where the call takes none, or no other."""
    if step.dtype is None:
        return None
    return dtypes.float32 if step.dtype != dtypes.float32 else dtypes.float64

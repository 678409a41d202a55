"""What to say when ranks disagree: a table of the first entry that differs, and the likely cause. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_ROWS = 12


@dataclass(frozen=True)
class Row:
    """What one rank has at the place where the ranks differ.

    Args:
        rank: Its rank in the communicator.
        digest: Of its entry there.
        text: Its entry in words.
        kind: The collective; `facts` and `shape` and `dtype` are its arguments.
        line: Where the script built it.
        asked: Where the script asked for a value that needs it.
        following: Digests of the entries after it in the same plan.
        unasked: Collectives that this rank built but did not run: digest and line of each.
    """

    rank: int
    digest: int
    text: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    facts: tuple[tuple[str, Any], ...] = ()
    line: str = ""
    asked: str = ""
    following: tuple[int, ...] = ()
    unasked: tuple[tuple[int, str], ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the rank has no further collective since its script ended."""
        return self.kind == "end of the script"


def describe(name: str, number: int, rows: Sequence[Row]) -> str:
    """The message: which collective of which communicator, what each rank has there, why that may be."""
    table = []
    groups = list(_alike(rows))
    width = max(len(_text(group[0])) for group in groups)
    ranks = [in_words([row.rank for row in group]) for group in groups]
    for who, group in list(zip(ranks, groups, strict=True))[:_MOST_ROWS]:
        first = group[0]
        asked = f", asked for at {first.asked}" if first.asked and first.asked != first.line else ""
        table.append(f"  {who:<{max(map(len, ranks))}}  {_text(first):<{width}}  {first.line}{asked}".rstrip())
    if len(groups) > _MOST_ROWS:
        table.append(f"  … and {len(groups) - _MOST_ROWS} more")
    head = f"the ranks are about to run different collectives (number {number + 1} of communicator '{name}')"
    return "\n".join([head, *table, f"  Likely cause: {likely_cause(rows)}"])


def likely_cause(rows: Sequence[Row]) -> str:
    """The first explanation that fits, with its remedy."""
    for explain in (_other_order, _asked_by_some, _ended, _one_more, _same_kind):
        if cause := explain(rows):
            return cause
    return "the ranks took different ways through the script: an `if` on the rank, or a layer that some ranks leave out"


def _asked_by_some(rows: Sequence[Row]) -> str:
    for row in rows:
        for other in rows:
            place = dict(other.unasked).get(row.digest)
            if place is not None and other.digest != row.digest:
                return (
                    f"a value that only {in_words([r.rank for r in rows if r.digest == row.digest])} asked for"
                    f"{f' ({row.asked})' if row.asked else ''}; rank {other.rank} built the same collective ({place}) "
                    "but did not ask for its value. All ranks must, before any of them prints it: call fp.realize(x) "
                    "or x.item() outside of `if rank == 0`"
                )
    return ""


def _ended(rows: Sequence[Row]) -> str:
    ended = [row.rank for row in rows if row.ended]
    if not ended:
        return ""
    return (
        f"{in_words(ended)} ended the script while others go on: a different number of steps or batches, "
        "an early sys.exit, or collectives under `if rank == …`"
    )


def _one_more(rows: Sequence[Row]) -> str:
    for row in rows:
        others = [other for other in rows if other.digest != row.digest]
        if row.following[:1] and all(o.digest == row.following[0] and row.digest not in o.following for o in others):
            alike = [r.rank for r in rows if r.digest == row.digest]
            return (
                f"{in_words(alike)} {'has' if len(alike) == 1 else 'have'} one collective more: an `if rank == …` "
                "around it, or a layer that the others leave out. All ranks must take part"
            )
    return ""


def _other_order(rows: Sequence[Row]) -> str:
    first, other = rows[0], next(row for row in rows if row.digest != rows[0].digest)
    if first.digest in other.following and other.digest in first.following:
        return (
            "the same collectives in another order: build them in an order that does not depend on the rank "
            "(a set or a list of files has no fixed one)"
        )
    return ""


def _same_kind(rows: Sequence[Row]) -> str:
    if len({row.kind for row in rows}) > 1:
        return ""
    if len({row.dtype for row in rows}) > 1:
        return "data or parameters of another dtype on some ranks; cast with astype before the collective"
    if len({row.shape for row in rows}) > 1 and len({row.facts for row in rows}) == 1:
        return (
            "batches of different shapes, such as a short last batch on some ranks: leave it out, pad it, or take "
            "fp.data_parallel.shard_rows"
        )
    names = {name for row in rows for name, _ in row.facts}
    differing = sorted(name for name in names if len({dict(row.facts).get(name) for row in rows}) > 1)
    if "device" in differing:
        return "tensors on a GPU on some ranks and on the CPU, or another kind of GPU, on others; move them (to_device)"
    if "rows" in differing:
        return "shards of different extents; give the size of the whole (size=) if they are the parts of fp.partition"
    return f"{' and '.join(differing)} computed from the rank" if differing else ""


def _alike(rows: Sequence[Row]) -> Iterator[list[Row]]:
    key: Callable[[Row], Any] = lambda row: (row.digest, row.text, row.line, row.asked)  # noqa: E731
    seen: dict[Any, list[Row]] = {}
    for row in rows:
        seen.setdefault(key(row), []).append(row)
    yield from seen.values()


def _text(row: Row) -> str:
    return "(its script has ended)" if row.ended else row.text


def in_words(ranks: Sequence[int]) -> str:
    """In words: "rank 2", "ranks 0, 1, 3-7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(parts)}"

r"""Many names in one word: `n[001-032]/cuda:[0-7]`, as SLURM and pdsh write lists of hosts.

Names are counted before any is made, and keep the order in which they are written. ClusterShell has neither: it sorts,
and counts what it has made. A comma separates, `*` stands for whatever fits, and a backslash takes the meaning from
`[ ] , * \` and from white space at the ends.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from fuel_parallel.errors import DataError

LONGEST = 1 << 20
"""Letters of an expression."""
MOST_NUMBERS = 8
"""Of a name, that are folded; a name with more is written as it is."""


def expand(text: str, most: int) -> list[str]:
    """The names, in the order of the text. Raises `DataError` when it is no expression, or stands for more than `most`.

    >>> expand("n[08-10]/cuda:[0,2]", most=6)
    ['n08/cuda:0', 'n08/cuda:2', 'n09/cuda:0', 'n09/cuda:2', 'n10/cuda:0', 'n10/cuda:2']
    """
    pieces = _parse(text)
    count(text, most)
    return ["".join(words) for piece in pieces for words in itertools.product(*map(_alternatives, piece))]


def count(text: str, most: int) -> int:
    """How many names there are. Raises `DataError` like `expand`."""
    total = 0
    for piece in _parse(text):
        product = 1
        for segment in piece:
            product *= sum(r.size for r in segment) if isinstance(segment, tuple) else 1
            if total + product > most:
                raise DataError(f"{text[:60]!r} stands for more than {most} names, and a topology has no more")
        total += product
    return total


def matcher(text: str) -> Callable[[str], bool] | None:
    """Whether a name fits, for an expression with `*`, which stands for anything but `/`; None for one without.

    >>> matcher("n*/cuda:*")("n7/cuda:0"), matcher("n*")("n7/cuda:0"), matcher("n7")
    (True, False, None)
    """
    pieces = _parse(text)
    if not any(segment is ANY for piece in pieces for segment in piece):
        return None
    if any(isinstance(segment, tuple) for piece in pieces for segment in piece):
        raise DataError(f"{text[:60]!r} has both '*' and '[...]'; expected one of the two")
    words = ["".join("\0" if segment is ANY else str(segment) for segment in piece) for piece in pieces]
    patterns = [[step.split("\0") for step in word.split("/")] for word in words]
    return partial(_fits_any, patterns)


def fold(names: Sequence[str]) -> str:
    """An expression of exactly these names in this order, short where they count up.

    >>> fold(["cuda:0", "cuda:1", "cuda:2"]), fold(["a1", "a3", "b"]), fold(["n09", "n10"])
    ('cuda:[0-2]', 'a[1,3],b', 'n[09-10]')
    """
    pieces: list[str] = []
    for _, group in itertools.groupby(names, key=skeleton):
        mine = list(group)
        pieces += short if expand(",".join(short := _fold_all(mine)), len(mine)) == mine else map(escape, mine)
    return ",".join(pieces)


def fold_set(names: Iterable[str]) -> str:
    """An expression of these names, in whatever order makes it short.

    >>> fold_set(["n2/cuda:1", "n1/cuda:0", "n1/cuda:1", "n2/cuda:0"])
    'n[1-2]/cuda:[0-1]'
    """
    groups = itertools.groupby(sorted(names, key=natural), key=skeleton)
    return ",".join(piece for _, group in groups for piece in _fold_all(list(group)))


def natural(name: str) -> tuple[tuple[str, ...], tuple[int, ...], str]:
    """A key to sort by: numbers by what they are worth."""
    return skeleton(name), tuple(int(number) for number in _numbers(name)), name


def escape(name: str) -> str:
    r"""The name as an expression of itself. Raises `DataError` when it is empty.

    >>> print(escape("rack[1], row 2"))
    rack\[1\]\, row 2
    """
    if not name:
        raise DataError("a part has no id; ids have at least one letter")
    return re.sub(r"[\\\[\],*]|^\s+|\s+$", lambda found: "".join(f"\\{c}" for c in found[0]), name)


def _fits_any(patterns: list[list[list[str]]], name: str) -> bool:
    steps = name.split("/")
    return any(len(p) == len(steps) and all(map(_fits, p, steps)) for p in patterns)


def _fits(pattern: list[str], step: str) -> bool:
    """Whether what stands between the stars is in the step one after the other; no regular expression is as quick."""
    if len(pattern) == 1:
        return step == pattern[0]
    first, *middle, last = pattern
    at, end = len(first), len(step) - len(last)
    if at > end or not (step.startswith(first) and step.endswith(last)):
        return False
    for word in middle:
        found = step.find(word, at, end)
        if found < 0:
            return False
        at = found + len(word)
    return True


# Parsing.


class _Any:
    """What `*` stands for."""


ANY = _Any()


@dataclass(frozen=True)
class Range:
    """`first-last`; as wide as it is written, `08-10` gives 08, 09, 10."""

    first: int
    last: int
    width: int

    @property
    def size(self) -> int:
        """How many numbers."""
        return self.last - self.first + 1

    def words(self) -> list[str]:
        """Each number."""
        return [str(n).zfill(self.width) for n in range(self.first, self.last + 1)]


Segment = str | tuple[Range, ...] | _Any
_TOKEN = re.compile(
    r"(?P<comma>,\s*)|(?P<space>\s+)|\\(?P<escaped>.)|\[(?P<ranges>[^\[\]]*)\]|(?P<any>\*)|(?P<plain>[^\\\[\],*\s]+)",
    re.DOTALL,
)
_RANGE = re.compile(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?")


def _parse(text: str) -> list[list[Segment]]:
    if len(text) > LONGEST:
        raise DataError(f"{text[:60]!r}... has {len(text)} letters; expected at most {LONGEST}")
    pieces: list[list[Segment]] = [[]]
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise DataError(f"{text[:60]!r} has a {text[at]!r} that is not closed; ranges are such as 'n[001-032]'")
        at = found.end()
        if found["comma"] is not None:
            pieces.append([])
        elif found["ranges"] is not None:
            pieces[-1].append(_ranges(found["ranges"], text))
        elif found["space"] is None or text[at : at + 1] != ",":
            pieces[-1].append(ANY if found["any"] else found["space"] or found["escaped"] or found["plain"])
    if not all(pieces):
        raise DataError(f"{text[:60]!r} has an empty name; expected such as 'cuda:0' or 'n[001-032]'")
    return pieces


def _ranges(inner: str, text: str) -> tuple[Range, ...]:
    found = []
    for word in inner.split(","):
        match = _RANGE.fullmatch(word)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first):
            raise DataError(f"{text[:60]!r}: {word[:20]!r} is no range; expected such as '0-7' or '001-032'")
        found.append(Range(int(first), int(last), len(first)))
    return tuple(found)


def _alternatives(segment: Segment) -> list[str]:
    if isinstance(segment, tuple):
        return [word for one in segment for word in one.words()]
    return ["*" if segment is ANY else str(segment)]


# Folding.

_NUMBER = re.compile(r"([0-9]{1,18})")


def skeleton(name: str) -> tuple[str, ...]:
    """What stands between the numbers."""
    return tuple(_NUMBER.split(name)[::2])


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(_NUMBER.split(name)[1::2])


def _fold_all(names: list[str]) -> list[str]:
    """Expressions of names with one skeleton: what differs in one number only is joined, from the last number on."""
    between = skeleton(names[0])
    places = len(between) - 1
    if not 0 < places <= MOST_NUMBERS or len(names) == 1:
        return [escape(name) for name in names]
    rows: list[tuple[tuple[str, ...], ...]] = [tuple((n,) for n in _numbers(name)) for name in names]
    for place in reversed(range(places)):
        joined: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for row in rows:
            joined.setdefault((*row[:place], *row[place + 1 :]), []).extend(row[place])
        rows = [(*rest[:place], tuple(numbers), *rest[place:]) for rest, numbers in joined.items()]
    return [_written(between, row) for row in rows]


def _written(between: tuple[str, ...], row: tuple[tuple[str, ...], ...]) -> str:
    # Numbers are put in after escaping, which cares for white space at the ends of the whole name.
    marks = [escape(f"0{text}0")[1:-1] for text in between]
    marks[0], marks[-1] = escape(f"{between[0]}0")[:-1], escape(f"0{between[-1]}")[1:]
    words = [numbers[0] if len(numbers) == 1 else f"[{_joined(numbers)}]" for numbers in row]
    return "".join(itertools.chain.from_iterable(itertools.zip_longest(marks, words, fillvalue="")))


def _joined(numbers: tuple[str, ...]) -> str:
    """`0-2,8` for 0, 1, 2, 8."""
    runs: list[list[str]] = []
    for number in numbers:
        if runs and str(int(runs[-1][1]) + 1).zfill(len(runs[-1][0])) == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(first if first == last else f"{first}-{last}" for first, last in runs)

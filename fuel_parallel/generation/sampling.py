"""Choosing tokens from logits, the same ones on any number of ranks and in any batch.

The random number of a token depends on the request's seed, on which of its samples it is, and on the token's position
in the text, and on nothing else. So a text does not change with the other requests of a step, when a sequence was taken
out and computed again, or with how ranks are arranged; but for the rounding of logits, which ranks do change.

Under tensor parallelism each rank has the logits of its part of the vocabulary. Ranks send each other no more than can
decide: the largest logit for a greedy choice, the k largest for top-k, all of them otherwise. What is decided is what
would be decided from the whole, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.generation.requests import SamplingParameters
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.random import philox_words
from fuel_parallel.partitioning import partition

if TYPE_CHECKING:
    from fuel_parallel.comm.communicator import Communicator

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


class Draw(msgspec.Struct, frozen=True):
    """A token that is to be chosen: how, for which sample of the request, and at which position of its text."""

    sampling: SamplingParameters
    sample: int
    position: int

    def uniform(self) -> float:
        """The random number of [0, 1): a word of a Philox stream (`lazy.random`) with the key (seed, sample).

        >>> draw = Draw(SamplingParameters(1.0, seed=7), sample=0, position=12)
        >>> draw.uniform() == Draw(SamplingParameters(0.5, seed=7), sample=0, position=12).uniform()
        True
        """
        key = np.array([self.sampling.seed, self.sample], np.uint64)
        return float(int(philox_words(key, self.position, 1)[0]) >> 11) * 2.0**-53


def likeliest(logits: Floats, count: int) -> Integers:
    """The numbers, ascending, of the `count` largest logits; of equal ones the lower numbers.

    >>> likeliest(np.array([1.0, 3.0, 2.0, 3.0, 2.0]), 3).tolist()
    [1, 2, 3]
    """
    if count >= len(logits):
        return np.arange(len(logits))
    if count == 0:
        return np.arange(0)
    least = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > least)
    equal = np.flatnonzero(logits == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def distribution(logits: Floats, sampling: SamplingParameters) -> tuple[Integers, Floats]:
    """The numbers, ascending, of the logits that can be chosen, and their probabilities.

    >>> numbers, probabilities = distribution(np.log([0.5, 0.1, 0.3, 0.1]), SamplingParameters(1.0, top_p=0.7))
    >>> numbers.tolist(), probabilities.round(3).tolist()
    ([0, 2], [0.625, 0.375])
    """
    if sampling.is_greedy:
        return likeliest(logits, 1), np.ones(1)
    numbers = likeliest(logits, sampling.top_k or len(logits))
    kept = logits[numbers]
    with np.errstate(over="ignore"):  # a very small temperature makes all but the largest impossible
        weights = np.exp((kept - kept.max()) / sampling.temperature)
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        sums = np.cumsum(weights[order])
        count = int(np.searchsorted(sums, sampling.top_p * sums[-1])) + 1
        chosen = np.sort(order[:count])
        numbers, weights = numbers[chosen], weights[chosen]
    return numbers, weights / weights.sum()


def choose(logits: Floats, draw: Draw) -> int:
    """The number of the logit that is chosen."""
    numbers, probabilities = distribution(logits, draw.sampling)
    if len(numbers) == 1:
        return int(numbers[0])
    sums = np.cumsum(probabilities)
    # No number is drawn whose probability is 0: the sum stops growing there, and the first one that reaches it counts.
    return int(numbers[np.searchsorted(sums, draw.uniform() * sums[-1], side="right")])


def sample(logits: Any, draws: Sequence[Sequence[Draw]], vocabulary: int, comm: Communicator) -> list[list[int]]:
    """The tokens that are drawn from each row, the same on all ranks: a collective call.

    Args:
        logits: An array [rows, the rank's part of the vocabulary], as `partition(vocabulary, comm.world_size)` cuts it.
        draws: For each row what to draw from it.
        vocabulary: How many tokens there are.
        comm: The ranks that share the vocabulary.

    Raises:
        ShapeError: Another number of columns than the rank's, or of rows than there are draws.
        ArgumentError: Logits that are not numbers.

    >>> from fuel_parallel import IdentityComm
    >>> draw = Draw(SamplingParameters(), sample=0, position=5)
    >>> sample(np.array([[0.1, 0.7, 0.2]]), [[draw]], 3, IdentityComm())
    [[1]]
    """
    mine = partition(vocabulary, comm.world_size)[comm.rank]
    rows = np.asarray(logits).astype(np.float64)
    if rows.shape != (len(draws), len(mine)):
        raise ShapeError(
            f"sample: expected logits of {len(draws)} rows, as there are draws, and {len(mine)} of {vocabulary} "
            f"columns as rank {comm.rank} of {comm.world_size} has; got shape {rows.shape}"
        )
    nan = np.isnan(rows).any(axis=1) | (rows == np.inf).any(axis=1)
    counts = [max((_needed(draw.sampling, vocabulary) for draw in row), default=0) for row in draws]
    if comm.world_size == 1:
        columns = [None] * len(draws)
        values = list(rows)
    else:
        columns, values, nan = _gathered(rows, counts, nan, vocabulary, mine.start, comm)
    nan = nan | np.array([len(kept) > 0 and kept.max() == -np.inf for kept in values], np.bool_)
    if nan.any():
        raise ArgumentError(
            f"sample: row {int(nan.argmax())} of the logits has values that are not numbers or infinite; a weight that "
            "is not finite, or a dtype too small for the model, does that"
        )
    chosen = []
    for row, numbers, kept in zip(draws, columns, values, strict=True):
        found = [choose(kept, draw) for draw in row]
        chosen.append(found if numbers is None else [int(numbers[one]) for one in found])
    return chosen


class _Part(msgspec.Struct, array_like=True):
    """What a rank tells of the rows of which not all logits are needed: int32 tokens and float64 logits, row by row."""

    tokens: bytes
    logits: bytes
    nan: tuple[bool, ...]


def _needed(sampling: SamplingParameters, vocabulary: int) -> int:
    if sampling.is_greedy:
        return 1
    return min(sampling.top_k or vocabulary, vocabulary)


def _gathered(
    rows: Floats, counts: list[int], nan: Any, vocabulary: int, start: int, comm: Communicator
) -> tuple[list[Any], list[Floats], Any]:
    """For each row, the tokens (None: all of them) and logits of all ranks that can decide, by token."""
    whole = [row for row, count in enumerate(counts) if count == vocabulary]
    found = [likeliest(row, min(count, len(row))) for row, count in zip(rows, counts, strict=True)]
    few = [row for row in range(len(rows)) if counts[row] < vocabulary]
    tokens = np.concatenate([np.empty(0, np.int32), *(found[row] + start for row in few)]).astype("<i4")
    logits = np.concatenate([np.empty(0), *(rows[row][found[row]] for row in few)]).astype("<f8")
    parts = comm.all_gather_object(_Part(tokens.tobytes(), logits.tobytes(), tuple(nan.tolist())), type=_Part)
    columns: list[Any] = [None] * len(rows)
    values: list[Floats] = [np.empty(0)] * len(rows)
    sizes = [len(part) for part in partition(vocabulary, comm.world_size)]
    ends = [0] * len(parts)
    for row in few:
        of_row = [min(counts[row], size) for size in sizes]
        slices = [slice(end, end + size) for end, size in zip(ends, of_row, strict=True)]
        ends = [one.stop for one in slices]
        columns[row], values[row] = (
            np.concatenate([np.frombuffer(data, kind)[one] for data, one in zip(datas, slices, strict=True)])
            for datas, kind in (([p.tokens for p in parts], "<i4"), ([p.logits for p in parts], "<f8"))
        )
    if whole:
        joined = comm.all_gather(creation.asarray(rows[whole]), dim=1, size=vocabulary).numpy()
        for row, logit in zip(whole, joined, strict=True):
            values[row] = logit
    return columns, values, np.any([part.nan for part in parts], axis=0)

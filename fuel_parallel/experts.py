"""Mixtures of experts: of many feed-forward networks each token passes through the few that a router chooses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from fuel_parallel.arguments import checked
from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.lazy.ops import binary, creation, elementwise, indexing, manipulation, neural, ordering, reductions
from fuel_parallel.lazy.ops.grouped import grouped_matmul
from fuel_parallel.lazy.random import Generator
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module, Parameter, Shard

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": elementwise.silu,
    "gelu": elementwise.gelu,
    "relu": elementwise.relu,
    "silu": elementwise.silu,
}


class Mixed(NamedTuple):
    """What a mixture gives."""

    value: Tensor
    """[..., dim], like x."""
    balance_loss: Tensor
    """1 if all experts are chosen equally often, more if not (arXiv:2101.03961, section 2.2)."""
    z_loss: Tensor
    """The mean squared logarithm of the router's sum of exponentials (arXiv:2202.08906, section 3)."""
    counts: Tensor
    """[experts]: how many tokens of this rank chose each, before any were dropped."""


class ExpertParameter(Parameter):
    """A parameter of an expert that other ranks do not hold: its gradient comes from the tokens of all ranks."""

    __slots__ = ()


class Experts(Module):
    """Feed-forward networks of one shape, without biases, each for its own rows.

    `swiglu` is (silu(x @ gate) * (x @ up)) @ down (Shazeer, 2020, arXiv:2002.05202); the others, such as `gelu`, are
    gelu(x @ up) @ down. Weights are [experts, in, out], and start uniform within 1 / sqrt(in).

    Args:
        dim: Extent of the last dimension of x and of the result.
        hidden: Extent between the two layers.
        count: How many.
        generator: Draws the weights.
        activation: 'swiglu', 'gelu', 'relu' or 'silu'.
        held: Which of the experts are on this rank, if others are elsewhere; the generator in one state on all ranks.
        dtype: Of the weights; None for the default.

    >>> Experts(2, 8, 3, Generator(0))(creation.ones((5, 2)), creation.asarray([1, 1, 5])).shape
    (5, 2)
    """

    @checked
    def __init__(
        self,
        dim: int,
        hidden: int,
        count: int,
        generator: Generator,
        *,
        activation: str = "swiglu",
        held: range | None = None,
        dtype: Any = None,
    ) -> None:
        if activation not in _ACTIVATIONS:
            raise ArgumentError(
                f"Experts: activation is one of {', '.join(map(repr, _ACTIVATIONS))}, not {activation!r}"
            )
        self.activation = activation
        self.gate = None
        if activation == "swiglu":
            self.gate = _expert_weight((count, dim, hidden), held, generator, dtype)
        self.up = _expert_weight((count, dim, hidden), held, generator, dtype)
        self.down = _expert_weight((count, hidden, dim), held, generator, dtype)

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """[rows, dim] to the same; expert e has the rows from `ends[e - 1]` up to `ends[e]`."""
        activate = _ACTIVATIONS[self.activation]
        inner = grouped_matmul(rows, self.up, ends)
        if self.gate is None:
            return grouped_matmul(activate(inner), self.down, ends)
        return grouped_matmul(activate(grouped_matmul(rows, self.gate, ends)) * inner, self.down, ends)


class MixtureOfExperts(Module):
    """A router and experts: the sum of what the `top_k` chosen experts give, each times its probability.

    Without a capacity no token is dropped, and no more is computed than was chosen. With one, each expert takes
    ceil(capacity_factor * top_k * tokens / experts) tokens at most (GShard, arXiv:2006.16668): first choices come
    before second ones, and early tokens before late ones; a choice that is dropped adds nothing.

    Args:
        dim, hidden, experts: The shape and number of `Experts`.
        generator: Draws the weights.
        top_k: How many experts each token passes through.
        renormalise: The probabilities of the chosen experts are made to sum to 1, as in Mixtral (arXiv:2401.04088).
        capacity_factor: None for no limit.
        activation: As in `Experts`.
        dtype: Of the weights; None for the default. The router computes in float32 at least.

    Raises `ArgumentError` for a `top_k` or capacity that cannot be.

    >>> mixture = MixtureOfExperts(4, 16, 8, Generator(0), top_k=2)
    >>> y, balance_loss, z_loss, counts = mixture(creation.ones((2, 3, 4)))
    >>> y.shape, counts.shape
    ((2, 3, 4), (8,))
    """

    @checked
    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        generator: Generator,
        *,
        top_k: int = 2,
        renormalise: bool = True,
        capacity_factor: float | None = None,
        activation: str = "swiglu",
        dtype: Any = None,
    ) -> None:
        if not 1 <= top_k <= experts:
            raise ArgumentError(f"{type(self).__name__}: top_k lies between 1 and {experts} experts, but is {top_k}")
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ArgumentError(
                f"{type(self).__name__}: capacity_factor is a positive number or None, not {capacity_factor}"
            )
        self.dim, self.count, self.top_k = dim, experts, top_k
        self.renormalise, self.capacity_factor = renormalise, capacity_factor
        bound = 1 / math.sqrt(dim) if dim else 0.0
        self.router = Parameter(generator.uniform((dim, experts), -bound, bound, dtype=dtype))
        self.experts = Experts(dim, hidden, experts, generator, activation=activation, held=self._held(), dtype=dtype)

    def __call__(self, x: Tensor) -> Mixed:
        """[..., dim] to `Mixed`."""
        if x.ndim < 1 or x.shape[-1] != self.dim:
            raise ShapeError(
                f"{type(self).__name__}: the last dimension of x must be {self.dim}, but x has shape {x.shape}"
            )
        tokens = manipulation.reshape(x, (math.prod(x.shape[:-1]), self.dim))
        wide = creation.result_type(tokens, "float32")
        logits = creation.astype(tokens, wide) @ creation.astype(self.router, wide)
        probabilities = neural.softmax(logits)
        gates, chosen = ordering.topk(probabilities, self.top_k)
        if self.renormalise:
            gates = gates / reductions.sum(gates, axis=-1, keepdims=True)
        choices = _Choices.of(chosen, self.count)
        pass_through = self._without_limit if self.capacity_factor is None else self._within_capacity
        found = manipulation.reshape(pass_through(tokens, choices), (self.top_k, *tokens.shape))
        weights = manipulation.expand_dims(creation.astype(gates.mT, tokens.dtype), axis=-1)
        value = manipulation.reshape(reductions.sum(found * weights, axis=0), x.shape)
        return Mixed(value, self._balance_loss(probabilities, choices), _z_loss(logits), choices.ends - choices.starts)

    def _without_limit(self, tokens: Tensor, choices: _Choices) -> Tensor:
        """What each choice gives, [choices, dim]: all of them sorted by expert, then back in their order."""
        rows = indexing.take(tokens, choices.token_at(choices.order), axis=0)
        return indexing.take(self._through_rows(rows, choices.ends), choices.place, axis=0)

    def _within_capacity(self, tokens: Tensor, choices: _Choices) -> Tensor:
        """The same through a table of [experts, capacity] slots, of which some stay empty."""
        capacity = self.capacity(tokens.shape[0])
        place = manipulation.expand_dims(choices.starts, axis=-1) + creation.arange(capacity)
        filled = place < manipulation.expand_dims(choices.ends, axis=-1)
        last = max(choices.total - 1, 0)
        token = choices.token_at(indexing.take(choices.order, manipulation.reshape(binary.minimum(place, last), (-1,))))
        slots = manipulation.reshape(indexing.take(tokens, token, axis=0), (self.count, capacity, self.dim))
        results = self._through_slots(binary.where(manipulation.expand_dims(filled, axis=-1), slots, 0.0))
        rank = choices.place - indexing.take(choices.starts, choices.expert)
        slot = choices.expert * capacity + binary.minimum(rank, max(capacity - 1, 0))
        found = indexing.take(manipulation.reshape(results, (self.count * capacity, self.dim)), slot, axis=0)
        return binary.where(manipulation.expand_dims(rank < capacity, axis=-1), found, 0.0)

    def capacity(self, tokens: int) -> int:
        """How many of so many tokens an expert takes at most."""
        if self.capacity_factor is None:
            return tokens
        return min(tokens, math.ceil(self.capacity_factor * self.top_k * tokens / self.count))

    def _balance_loss(self, probabilities: Tensor, choices: _Choices) -> Tensor:
        counts = creation.astype(choices.ends - choices.starts, probabilities.dtype)
        share = self._over_ranks(counts * (1 / max(choices.total, 1)))
        mean = reductions.sum(probabilities, axis=0) * (1 / max(probabilities.shape[0], 1))
        return reductions.sum(share * mean) * self.count

    # What differs where the experts are on several ranks.

    def _held(self) -> range | None:
        return None

    def _through_rows(self, rows: Tensor, ends: Tensor) -> Tensor:
        """[rows, dim], sorted by expert."""
        return self.experts(rows, ends)

    def _through_slots(self, slots: Tensor) -> Tensor:
        """[experts, capacity, dim] to the same."""
        return through_slots(self.experts, slots)

    def _over_ranks(self, share: Tensor) -> Tensor:
        return share


class _Choices(NamedTuple):
    """Which tokens go to which expert: choice c * tokens + t is the c-th of token t."""

    expert: Tensor
    """Of each choice."""
    order: Tensor
    """The choices sorted by expert."""
    place: Tensor
    """Of each choice in that order."""
    starts: Tensor
    """Of each expert in that order."""
    ends: Tensor
    tokens: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> _Choices:
        """From the experts [tokens, top k] that were chosen."""
        expert = manipulation.reshape(chosen.mT, (-1,) if chosen.size else (0,))
        order = ordering.argsort(expert)
        in_order, numbers = indexing.take(expert, order), creation.arange(experts)
        starts, ends = (ordering.searchsorted(in_order, numbers, side=side) for side in ("left", "right"))
        return cls(expert, order, ordering.argsort(order), starts, ends, chosen.shape[0])

    @property
    def total(self) -> int:
        """How many choices."""
        return self.expert.size

    def token_at(self, choice: Tensor) -> Tensor:
        """The token of each of these choices."""
        return choice % max(self.tokens, 1)


def through_slots(experts: Experts, slots: Tensor) -> Tensor:
    """[experts, slots, dim] to the same: every expert has as many rows."""
    count, each, dim = slots.shape
    ends = creation.arange(1, count + 1) * each
    return manipulation.reshape(experts(manipulation.reshape(slots, (count * each, dim)), ends), slots.shape)


def _z_loss(logits: Tensor) -> Tensor:
    squares = elementwise.square(reductions.logsumexp(logits, axis=-1))
    return reductions.sum(squares) * (1 / max(logits.shape[0], 1))


def _expert_weight(whole: tuple[int, int, int], held: range | None, generator: Generator, dtype: Any) -> Parameter:
    bound = 1 / math.sqrt(whole[1]) if whole[1] else 0.0
    if held is None:
        return Parameter(generator.uniform(whole, -bound, bound, dtype=dtype))
    shape, start = (len(held), *whole[1:]), (held.start, 0, 0)
    drawn = generator.uniform(shape, -bound, bound, dtype=dtype, global_shape=whole, start=start)
    return ExpertParameter(drawn, shard=Shard(whole, start) if shape != whole else None)

"""Attention as models use it: projections to heads, rotary positions, and the product of the heads back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fuel_parallel.arguments import checked
from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.layers import Linear
from fuel_parallel.lazy.ops import creation, elementwise, manipulation
from fuel_parallel.lazy.ops.attention import scaled_dot_product_attention
from fuel_parallel.lazy.random import Generator
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Module


class Rotary:
    """Positions as rotations of pairs of features, i with i + size / 2 (Su et al., 2021, arXiv:2104.09864).

    Args:
        size: Features of a head, an even number.
        theta: Base of the frequencies.
        scaling: How frequencies are stretched for contexts longer than the trained one, as Hugging Face writes it:
            `{"rope_type": "linear", "factor": 2.0}`, or "llama3" with factor, low_freq_factor, high_freq_factor and
            original_max_position_embeddings. None or "default" for not at all.

    >>> rotary = Rotary(4)
    >>> rotary(creation.ones((1, 2, 3, 4))).shape
    (1, 2, 3, 4)
    """

    @checked
    def __init__(self, size: int, *, theta: float = 10_000.0, scaling: Mapping[str, Any] | None = None) -> None:
        if size < 2 or size % 2:
            raise ArgumentError(f"Rotary: size is an even number of features, not {size}")
        self.size, self.theta = size, theta
        self.frequencies = _scaled(theta ** (-np.arange(0, size, 2) / size), dict(scaling or {}))

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[..., length, size], rotated by the positions [length], which are 0, 1, 2 ... by default."""
        if x.shape[-1] != self.size:
            raise ShapeError(f"Rotary: the last dimension of x must be {self.size}, but x has shape {x.shape}")
        # Angles in the thousands need more digits than 16 bits have.
        wide = creation.result_type(x.dtype, "float32")
        places = creation.arange(x.shape[-2]) if positions is None else positions
        angles = manipulation.expand_dims(creation.astype(places, wide), axis=-1) * creation.asarray(
            self.frequencies, dtype=wide
        )
        cos, sin = (creation.astype(f(angles), x.dtype) for f in (elementwise.cos, elementwise.sin))
        left, right = x[..., : self.size // 2], x[..., self.size // 2 :]
        return manipulation.concat([left * cos - right * sin, right * cos + left * sin], axis=-1)


class AttentionCache(Protocol):
    """Keys and values of earlier tokens, of one layer; `distributed_cache.KVPool.layer` gives one."""

    @property
    def positions(self) -> Tensor:
        """[tokens], of each token in its sequence."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, groups: Sequence[int] | None = None) -> Tensor:
        """Keeps keys and values [kv heads, tokens, size]; the attention of query [heads, tokens, size] to all it has.

        `groups`: how many neighbouring query heads each key head serves; None for equally many.
        """


class Attention(Module):
    """Multi-head attention with a layer for queries, keys, values and the result each.

    Args:
        dim: Extent of the last dimension of x and of the result.
        heads: Query heads.
        generator: Draws the weights.
        kv_heads: Heads of keys and values, of which each serves heads / kv_heads neighbouring query heads (Ainslie et
            al., 2023, arXiv:2305.13245); None for as many as query heads.
        head_size: Features of a head; None for dim / heads.
        bias: Add one to queries, keys and values.
        out_bias: Add one to the result; None for as `bias` says.
        causal: Every position sees itself and those before it.
        rotary: Rotates queries and keys by their positions.
        dtype: Of the weights; None for the default.

    >>> Attention(8, 4, Generator(0), kv_heads=2, causal=True)(creation.ones((2, 3, 8))).shape
    (2, 3, 8)
    """

    @checked
    def __init__(
        self,
        dim: int,
        heads: int,
        generator: Generator,
        *,
        kv_heads: int | None = None,
        head_size: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        causal: bool = False,
        rotary: Rotary | None = None,
        dtype: Any = None,
    ) -> None:
        self.heads, self.kv_heads, self.head_size = check_heads(dim, heads, kv_heads, head_size)
        self.causal, self.rotary = causal, rotary
        width, kv_width = heads * self.head_size, self.kv_heads * self.head_size
        self.query = Linear(dim, width, generator, bias=bias, dtype=dtype)
        self.key = Linear(dim, kv_width, generator, bias=bias, dtype=dtype)
        self.value = Linear(dim, kv_width, generator, bias=bias, dtype=dtype)
        self.out = Linear(width, dim, generator, bias=bias if out_bias is None else out_bias, dtype=dtype)

    @property
    def cached_heads(self) -> int:
        """Heads of keys and values that a cache keeps of this layer."""
        return self.kv_heads

    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """[..., length, dim] to [..., length, dim].

        `mask` broadcasts to [..., heads, length, length]: bool (True is seen) or floating (added). `positions`
        [length] are those of the rotation. With a `cache`, x is [tokens, dim], of the sequences of its batch, and the
        positions are its.
        """
        query, key, value = (split_heads(layer(x), self.head_size) for layer in (self.query, self.key, self.value))
        positions = check_cache(cache, x, mask, positions, self.causal)
        if self.rotary is not None:
            query, key = self.rotary(query, positions), self.rotary(key, positions)
        if cache is not None:
            return self.out(join_heads(cache.attend(query, key, value)))
        return self.out(join_heads(scaled_dot_product_attention(query, key, value, mask=mask, causal=self.causal)))


def check_heads(dim: int, heads: int, kv_heads: int | None, head_size: int | None) -> tuple[int, int, int]:
    """Heads, heads of keys and values, and features of a head. Raises `ArgumentError` for what does not go together."""
    kv_heads = heads if kv_heads is None else kv_heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ArgumentError(f"Attention: heads must be a multiple of kv_heads, but there are {heads} and {kv_heads}")
    if head_size is None and dim % heads:
        raise ArgumentError(f"Attention: dim {dim} is not a multiple of {heads} heads; give head_size=")
    return heads, kv_heads, dim // heads if head_size is None else head_size


def check_cache(
    cache: AttentionCache | None, x: Tensor, mask: Tensor | None, positions: Tensor | None, causal: bool
) -> Tensor | None:
    """The positions of x. Raises the user's error where attention cannot use the cache that it is given."""
    if cache is None:
        return positions
    if mask is not None or positions is not None or not causal:
        raise ArgumentError(
            "Attention: with a cache, attention is causal and without mask, and the cache gives the positions; got "
            f"causal={causal}, mask {'given' if mask is not None else 'None'}, "
            f"positions {'given' if positions is not None else 'None'}"
        )
    if x.shape[:-1] != cache.positions.shape:
        raise ShapeError(
            f"Attention: the cache's batch has {cache.positions.shape[0]} tokens, but x has shape {x.shape}"
        )
    return cache.positions


def split_heads(x: Tensor, head_size: int) -> Tensor:
    """[..., length, heads * size] to [..., heads, length, size]."""
    x = manipulation.reshape(x, (*x.shape[:-1], x.shape[-1] // head_size, head_size))
    return _swap_heads(x)


def join_heads(x: Tensor) -> Tensor:
    """[..., heads, length, size] to [..., length, heads * size]."""
    x = _swap_heads(x)
    return manipulation.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def _swap_heads(x: Tensor) -> Tensor:
    order = [*range(x.ndim - 3), x.ndim - 2, x.ndim - 3, x.ndim - 1]
    return manipulation.permute_dims(x, order)


def _scaled(frequencies: np.ndarray[Any, Any], scaling: dict[str, Any]) -> np.ndarray[Any, Any]:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    try:
        factor = float(scaling["factor"])
        if kind == "linear":
            return frequencies / factor
        if kind == "llama3":
            return _llama3(
                frequencies,
                factor,
                float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]),
                float(scaling["original_max_position_embeddings"]),
            )
    except KeyError as missing:
        raise ArgumentError(f"Rotary: scaling of type {kind!r} needs {missing}; got {scaling}") from None
    raise ArgumentError(f"Rotary: scaling of type {kind!r} is not known; there are default, linear and llama3")


def _llama3(
    frequencies: np.ndarray[Any, Any], factor: float, low: float, high: float, trained: float
) -> np.ndarray[Any, Any]:
    """Waves that fit into the trained context less than `low` times are stretched, those more than `high` times not.

    Between the two the stretch fades linearly with the number of times (Llama team, 2024, arXiv:2407.21783).
    """
    times = trained * frequencies / (2 * math.pi)
    kept = np.clip((times - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / factor)

"""What is asked of a model, and what it answers."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from fuel_parallel.errors import ArgumentError

FinishReason = Literal["stop", "length"]
"""A stop token, a stop string, or the end of a text: stop. As many tokens as were asked for: length."""


class SamplingParameters(msgspec.Struct, frozen=True):
    """How the next token is chosen from its logits.

    Args:
        temperature: Logits are divided by it; 0 takes the likeliest token.
        top_k: Only so many of the likeliest tokens can come; 0 for all of them.
        top_p: Of those, only the smallest number of the likeliest that together have this probability (nucleus
            sampling: Holtzman et al., 2020, arXiv:1904.09751). Among tokens that are equally likely the lower numbers
            are taken first.
        seed: Of the random numbers.

    Raises:
        ArgumentError: A value outside of these.

    >>> SamplingParameters(temperature=0.8, top_p=0.95).is_greedy
    False
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ArgumentError(f"SamplingParameters: temperature is 0 or a positive number, not {self.temperature}")
        if self.top_k < 0:
            raise ArgumentError(f"SamplingParameters: top_k is 0 for all tokens, or how many; not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ArgumentError(f"SamplingParameters: top_p lies above 0 and is 1 at most, not {self.top_p}")
        if not 0 <= self.seed < 1 << 64:
            raise ArgumentError(f"SamplingParameters: seed is a number from 0 to 2**64 - 1, not {self.seed}")

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, and how it is to be continued.

    Args:
        prompt: Its tokens, one or more.
        max_tokens: How many tokens are added at most.
        sampling: How each is chosen.
        samples: How many continuations; they share the pages of the prompt.
        stop_tokens: Tokens after which a continuation ends, such as the model's end of text. They are the last of its
            tokens, and no part of its text.
        stop_strings: Texts before which a continuation ends. Needs an engine that can decode.
        tenant: Whose request it is: only prompts of the same tenant share pages.

    Raises:
        ArgumentError: A prompt without tokens, counts below 1, a stop string that is empty.

    >>> GenerationRequest(prompt=(5, 6, 7), max_tokens=4).samples
    1
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParameters = SamplingParameters()
    samples: int = 1
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    tenant: str = ""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ArgumentError("GenerationRequest: the prompt has no tokens; it needs one, such as a begin of text")
        if self.max_tokens < 1 or self.samples < 1:
            raise ArgumentError(
                f"GenerationRequest: max_tokens and samples are 1 or more, not {self.max_tokens} and {self.samples}"
            )
        if "" in self.stop_strings:
            raise ArgumentError("GenerationRequest: a stop string is empty; leave it out")


class Completion(msgspec.Struct, frozen=True):
    """A continuation that has ended.

    Args:
        tokens: All that were added, a stop token with them.
        text: What they say, up to a stop string; empty where the engine cannot decode.
        finish_reason: Why it ended.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason


class Update(msgspec.Struct, frozen=True):
    """What a step added to a continuation.

    Args:
        request: The number that `submit` gave.
        sample: Which continuation of it, from 0.
        tokens: Those that are new.
        text: What can be said for sure: whole characters, and nothing that may be the beginning of a stop string.
        completion: The whole, once it has ended.
    """

    request: int
    sample: int
    tokens: tuple[int, ...]
    text: str
    completion: Completion | None = None

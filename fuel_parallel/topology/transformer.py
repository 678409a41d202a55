"""The shape of a transformer that is to be trained: what a planner needs to know of a model, and no more."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import msgspec

from fuel_parallel.errors import ArgumentError, DataError


class Precision(Enum):
    """Of weights and activations; the optimizer keeps float32."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Optimizer(Enum):
    """Each with the bytes of state that it keeps for a parameter, in float32."""

    ADAMW = "adamw"
    MOMENTUM = "momentum"
    SGD = "sgd"


STATE_BYTES = {Optimizer.ADAMW: 8, Optimizer.MOMENTUM: 4, Optimizer.SGD: 0}


class TransformerModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder such as GPT, and how it is trained.

    Args:
        layers: Transformer layers.
        hidden: Width of the residual stream.
        heads: Attention heads.
        sequence: Tokens in a sequence.
        global_batch: Sequences in a step, all ranks together.
        vocabulary: Tokens that there are.
        kv_heads: Heads of keys and values; if None, as many as `heads`.
        ffn: Width of the MLP; if None, four times `hidden`.
        gated: Whether the MLP has a gate (SwiGLU): three matrices instead of two.
        tied: Whether the output layer uses the embedding's weights.
        dtype: Of weights and activations.
        optimizer: What keeps state for each parameter.
        flash_attention: Whether attention keeps no scores for the backward pass, whatever is recomputed.
        dropout: Whether there is dropout, whose masks are kept.

    >>> gpt3 = TransformerModel(layers=96, hidden=12288, heads=96, sequence=2048, global_batch=1536, vocabulary=51200)
    >>> round(gpt3.parameters() / 1e9, 1)
    174.6
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    global_batch: int
    vocabulary: int
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    tied: bool = True
    dtype: Precision = Precision.BFLOAT16
    optimizer: Optimizer = Optimizer.ADAMW
    flash_attention: bool = False
    dropout: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "global_batch", "vocabulary", "kv_heads", "ffn"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 1 << 40:
                raise ArgumentError(f"a model's {name} is 1 or more, got {value}")
        if self.hidden % self.heads or self.heads % (self.kv_heads or self.heads):
            raise ArgumentError(
                f"hidden {self.hidden} must be a multiple of heads {self.heads}, and that of kv_heads {self.kv_heads}"
            )

    def width(self) -> int:
        """Bytes of a weight, and of an activation."""
        return 4 if self.dtype is Precision.FLOAT32 else 2

    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    def ffn_width(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.hidden

    def layer_matrices(self) -> int:
        """Elements of the matrices of one layer: four of attention, two or three of the MLP."""
        h = self.hidden
        return 2 * h * h + 2 * h * self.kv_width() + (3 if self.gated else 2) * h * self.ffn_width()

    def layer_parameters(self) -> int:
        """Of one layer: its matrices, biases and norms."""
        h, kv, f = self.hidden, self.kv_width(), self.ffn_width()
        return self.layer_matrices() + 2 * h + 2 * kv + f + h + 4 * h

    def embedding_parameters(self) -> int:
        """Of the token embedding; the output layer has as many."""
        return self.vocabulary * self.hidden

    def parameters(self) -> int:
        """All of them; those of a table of positions are left out."""
        ends = self.embedding_parameters() * (1 if self.tied else 2)
        return self.layers * self.layer_parameters() + ends + 2 * self.hidden

    def layer_flops(self, sequences: int) -> float:
        """Of the matrix products of a layer's forward pass, a multiplication and an addition counting as two."""
        s = self.sequence
        return sequences * s * (2.0 * self.layer_matrices() + 4.0 * s * self.hidden)

    def attention_flops(self, sequences: int) -> float:
        """Those of scores and their product with the values, which selective recomputation does again."""
        return 4.0 * sequences * self.sequence**2 * self.hidden

    def output_flops(self, sequences: int) -> float:
        """Of the output layer's forward pass."""
        return 2.0 * sequences * self.sequence * self.hidden * self.vocabulary

    def step_flops(self) -> float:
        """Of a step, forward and backward, without recomputation: equation 7 of Korthikanti et al. 2022."""
        return 3 * (self.layers * self.layer_flops(self.global_batch) + self.output_flops(self.global_batch))


def read_model(path: str | Path) -> TransformerModel:
    """A model from a TOML file with the fields of `TransformerModel`. Raises `DataError` that names what is wrong."""
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=TransformerModel)
    except (msgspec.DecodeError, OSError, UnicodeDecodeError, ArgumentError) as error:
        raise DataError(f"{path} describes no model: {error}") from None

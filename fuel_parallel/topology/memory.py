"""Bytes that a rank needs to train a transformer, by what they are for.

Activations after Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022,
arXiv:2205.05198), table 2, with grouped keys and gated MLPs worked out the same way; weights, gradients and optimizer
as Megatron-LM's distributed optimizer counts them (18 bytes a parameter, or 6 + 12/d if sharded over d ranks), after
Rajbhandari et al., "ZeRO" (2020, arXiv:1910.02054).
"""

from __future__ import annotations

import math
from enum import Enum

import msgspec

from fuel_parallel.topology.transformer import STATE_BYTES, TransformerModel


class Recompute(Enum):
    """What of a layer the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"  # the attention's scores
    FULL = "full"  # all but the layer's input


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is split.

    Args:
        dp: Replicas of the model.
        pp: Stages of the pipeline.
        tp: Parts of each matrix.
        micro_batch: Sequences that go through the pipeline together.
        chunks: Stages that a rank has in an interleaved schedule; 1 is plain 1F1B.
        recompute: What is computed again.
        sequence_parallel: Whether what tp does not split is split along the sequence.
        sharded_optimizer: Whether the optimizer's state is split over dp.
    """

    dp: int
    pp: int
    tp: int
    micro_batch: int
    chunks: int = 1
    recompute: Recompute = Recompute.NONE
    sequence_parallel: bool = False
    sharded_optimizer: bool = False

    def micro_batches(self, model: TransformerModel) -> int:
        """How many go through each replica's pipeline in a step."""
        return model.global_batch // (self.dp * self.micro_batch)


class Memory(msgspec.Struct, frozen=True):
    """Bytes on the rank that needs most: one of the first stage."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    def model_state(self) -> int:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    def total(self) -> int:
        """All of it."""
        return self.model_state() + self.activations


def memory_of(model: TransformerModel, strategy: Strategy) -> Memory:
    """What a rank of the first stage needs, in bytes.

    >>> gpt3 = TransformerModel(layers=96, hidden=12288, heads=96, sequence=2048, global_batch=64, vocabulary=51200)
    >>> split = Strategy(dp=1, pp=8, tp=8, micro_batch=1, sequence_parallel=True, recompute=Recompute.SELECTIVE)
    >>> round(memory_of(gpt3, split).activations / 2**30, 1)
    9.6
    """
    count = stage_parameters(model, strategy)
    width = model.width()
    state = STATE_BYTES[model.optimizer] + (4 if width == 2 else 0)  # and the weights in float32
    shards = strategy.dp if strategy.sharded_optimizer else 1
    return Memory(
        parameters=count,
        weights=count * width,
        gradients=count * 4,
        optimizer=-(-count * state // shards),
        activations=math.ceil(_activations(model, strategy)),
    )


def stage_parameters(model: TransformerModel, strategy: Strategy) -> int:
    """Parameters of a rank of the first stage: its layers and the embedding, split over tp."""
    layers = -(-model.layers // strategy.pp)
    ends = 1 if strategy.pp > 1 or model.tied else 2
    return -(-(layers * model.layer_parameters() + ends * model.embedding_parameters()) // strategy.tp)


def layer_activations(model: TransformerModel, strategy: Strategy) -> float:
    """Bytes that one layer keeps of one micro-batch for its backward pass.

    With 16 bits, dropout, an MLP of 4h, and as many heads of keys as of queries this is table 2 of Korthikanti et al.:
    sbh(34 + 5as/h) on one device, sbh(10 + 24/t + 5as/(ht)) with tensor parallelism, sbh(34/t + 5as/(ht)) with sequence
    parallelism, the last terms gone with selective recomputation, and 2sbh with full recomputation.
    """
    s, b, h, a = model.sequence, strategy.micro_batch, model.hidden, model.heads
    t, width, mask = strategy.tp, model.width(), int(model.dropout)
    along = t if strategy.sequence_parallel else 1
    if strategy.recompute is Recompute.FULL:
        return s * b * h * width / along
    # Inputs of two norms, of attention and of the MLP; masks of two dropouts.
    whole = h * (4 * width + 2 * mask) / along
    # Queries and the output of attention, keys and values, and the MLP: before and after its activation, and the gate.
    split = (2 * h + 2 * model.kv_width() + (3 if model.gated else 2) * model.ffn_width()) * width / t
    scores = 0.0
    if strategy.recompute is Recompute.NONE and not model.flash_attention:
        scores = a * s * (width * (1 + mask) + mask) / t  # softmax, and dropout's result and mask
    return s * b * (whole + split + scores)


def _activations(model: TransformerModel, strategy: Strategy) -> float:
    """On the first stage: 1F1B holds pp micro-batches, interleaving (1 + (p-1)/(pm)) times as much (section 4.2.3)."""
    s, b, h, t, p = model.sequence, strategy.micro_batch, model.hidden, strategy.tp, strategy.pp
    width = model.width()
    waiting = min(1.0, strategy.micro_batches(model) / p)
    more = 1 + (p - 1) / (p * strategy.chunks) if strategy.chunks > 1 else 1.0
    layers = -(-model.layers // p) * p
    total = layer_activations(model, strategy) * layers * more * waiting
    if strategy.recompute is Recompute.FULL:
        # The layer that is being computed again holds all that it needs.
        total += layer_activations(model, msgspec.structs.replace(strategy, recompute=Recompute.NONE))
    if model.dropout:
        total += s * b * h * p * waiting / (t if strategy.sequence_parallel else 1)  # of the embedding
    if p == 1:  # the output layer's norm, its input and the logits in float32
        total += s * b * h * 2 * width / t + 4 * s * b * model.vocabulary / t
    return total

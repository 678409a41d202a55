"""Figures of Korthikanti et al., "Reducing activation recomputation in large transformer models", arXiv:2205.05198."""

from __future__ import annotations

from typing import NamedTuple

from fuel_parallel.topology.memory import Recompute, Strategy
from fuel_parallel.topology.transformer import TransformerModel


class Published(NamedTuple):
    """A row of table 3 (tp 8, sequences of 2048 tokens, vocabulary of 51200, m chunks) and of table 5 (seconds)."""

    model: TransformerModel
    pp: int
    micro_batch: int
    chunks: int
    full_recompute_seconds: float
    present_work_seconds: float

    def strategy(self, recompute: Recompute, sequence_parallel: bool) -> Strategy:
        return Strategy(
            dp=1,
            pp=self.pp,
            tp=8,
            micro_batch=self.micro_batch,
            chunks=self.chunks,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
        )


def gpt(layers: int, hidden: int, heads: int, global_batch: int) -> TransformerModel:
    return TransformerModel(
        layers=layers, hidden=hidden, heads=heads, sequence=2048, global_batch=global_batch, vocabulary=51200
    )


PUBLISHED = {
    "22B": Published(gpt(48, 6144, 64, 4), 1, 4, 1, 1.42, 1.10),
    "175B": Published(gpt(96, 12288, 96, 64), 8, 1, 3, 18.13, 13.75),
    "530B": Published(gpt(105, 20480, 128, 280), 35, 1, 3, 49.05, 37.83),
    "1T": Published(gpt(128, 25600, 160, 512), 64, 1, 1, 94.42, 71.49),
}

"""Layers whose weights are cut over the ranks of a communicator, as in Megatron-LM (Shoeybi et al., 2019,
arXiv:1909.08053): each rank computes its part of a matrix product, and two such layers need one all-reduce.

All ranks hold the same activations and compute one and the same loss; gradients are those of the dense model.
"""

from fuel_parallel.lazy.parts import part_of
from fuel_parallel.tensor_parallel.attention import ParallelAttention
from fuel_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from fuel_parallel.tensor_parallel.embedding import VocabParallelEmbedding
from fuel_parallel.tensor_parallel.linear import ColumnParallel, RowParallel
from fuel_parallel.tensor_parallel.mappings import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_from_ranks,
    scatter_sum,
    scatter_to_ranks,
)
from fuel_parallel.tensor_parallel.parallelize import STYLES, describe, parallelize, register_style
from fuel_parallel.tensor_parallel.plan import LayerParallelPlan, LayerRule
from fuel_parallel.tensor_parallel.sequence import LayerNorm, RMSNorm, dropout
from fuel_parallel.tensor_parallel.shards import ShardDim, TensorParallelConfig, TensorShard, make_shard

__all__ = [
    "STYLES",
    "ColumnParallel",
    "LayerNorm",
    "LayerParallelPlan",
    "LayerRule",
    "ParallelAttention",
    "RMSNorm",
    "RowParallel",
    "ShardDim",
    "TensorParallelConfig",
    "TensorShard",
    "VocabParallelEmbedding",
    "copy_to_ranks",
    "describe",
    "dropout",
    "gather_from_ranks",
    "gather_sequence",
    "make_shard",
    "parallelize",
    "part_of",
    "reduce_from_ranks",
    "register_style",
    "scatter_sum",
    "scatter_to_ranks",
    "vocab_parallel_cross_entropy",
]

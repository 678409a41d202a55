"""Data parallelism: every rank computes its share of the batch with the whole model.

How much of the model a rank also holds is for it to choose: all, with `average_gradients`; all but the optimizer's
state and the gradients, with `ShardedOptimizer`; its rows of everything, with `shard_parameters`.
"""

from fuel_parallel.data_parallel.accumulation import GradientAccumulator
from fuel_parallel.data_parallel.gradients import average_gradients, shard_rows
from fuel_parallel.data_parallel.replicas import check_replicas
from fuel_parallel.data_parallel.sharded_optimizer import ShardedOptimizer
from fuel_parallel.data_parallel.sharded_parameters import ShardedParameter, shard_parameters

__all__ = [
    "GradientAccumulator",
    "ShardedOptimizer",
    "ShardedParameter",
    "average_gradients",
    "check_replicas",
    "shard_parameters",
    "shard_rows",
]

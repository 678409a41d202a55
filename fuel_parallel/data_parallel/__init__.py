"""Data parallelism: every rank has the whole model and its share of the batch."""

from fuel_parallel.data_parallel.accumulation import GradientAccumulator
from fuel_parallel.data_parallel.gradients import average_gradients, shard_rows
from fuel_parallel.data_parallel.replicas import check_replicas

__all__ = ["GradientAccumulator", "average_gradients", "check_replicas", "shard_rows"]

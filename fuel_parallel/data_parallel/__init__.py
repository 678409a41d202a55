"""Data parallelism: every rank has the whole model and its share of the batch."""

from fuel_parallel.data_parallel.gradients import average_gradients, shard_rows

__all__ = ["average_gradients", "shard_rows"]
